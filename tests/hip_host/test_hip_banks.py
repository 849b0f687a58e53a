"""Where rows lie in LDS: no two lanes that are served together need different words of the same bank."""

from __future__ import annotations

import itertools
import subprocess

import pytest
import simt
import torch
from tools import require

from portable_flash.backends import KernelPlan
from portable_flash.backends.hip import host
from portable_flash.backends.hip.specialise import Kernel
from portable_flash.device import named
from portable_flash.problem import Problem
from portable_flash.tiling import Tiling

BANKS, WORD = 32, 4
# Lanes that 16-byte accesses are served in together: eight in a row, and the groups that reads of CDNA are known to form
# (composable_kernel's note on LDS bank conflicts).
NEIGHBOURS = [tuple(range(first, first + 8)) for first in range(0, 64, 8)]
CDNA_READS = [
    (*range(first, first + 4), *range(second, second + 4))
    for half in (0, 32) for first, second in ((half, half + 20), (half + 4, half + 16), (half + 8, half + 28), (half + 12, half + 24))
]  # fmt: skip
SOURCE = """
#include "config.h"
#include "matrix.h"
#include <cstdio>
template <int WIDTH> void table() {
    for (int row = 0; row < 64; ++row)
        for (int piece = 0; piece < Tile<WIDTH>::PIECES; ++piece) std::printf("%d %d %d %u\\n", WIDTH, row, piece, Tile<WIDTH>::offset(row, piece));
}
int main() { table<32>(); table<64>(); table<96>(); table<128>(); table<160>(); table<192>(); table<224>(); table<256>(); }
"""


def a_kernel() -> Kernel:
    problem = Problem(torch.float16, 1, 1, 1, 64, 64, 64, 64)
    plan = KernelPlan(Tiling(64, 32, 4), "test")
    return host.kernels_of(problem, named("mi300x"), {"forward": plan})["forward"]


@pytest.fixture(scope="module")
def offsets(tmp_path_factory) -> dict[int, dict[tuple[int, int], int]]:
    """By width in 16-bit elements: the byte offset of (row, piece of 16 bytes), from the kernels' own header."""
    folder = tmp_path_factory.mktemp("banks")
    (folder / "banks.cpp").write_text(SOURCE)
    macros = [f"-D{name}={value}" for name, value in a_kernel().macros]
    include = [f"-I{simt.KERNELS}", f"-I{simt.HERE}"]
    command = [require("clang++-22", "g++"), "-std=c++20", "-w", "-O1", "-DPF_HOST", *macros, *include, folder / "banks.cpp", "-o", folder / "banks"]
    subprocess.run(command, check=True)
    found: dict[int, dict[tuple[int, int], int]] = {}
    for line in subprocess.run([folder / "banks"], check=True, capture_output=True, text=True).stdout.splitlines():
        width, row, piece, offset = map(int, line.split())
        found.setdefault(width, {})[row, piece] = offset
    return found


def conflicts(accesses: list[tuple[int, int]]) -> int:
    """Words beyond the first that the busiest bank has to serve; accesses are (byte offset, bytes) of lanes served together."""
    words = {offset // WORD + i for offset, size in accesses for i in range(size // WORD)}
    return max(len([w for w in words if w % BANKS == bank]) for bank in range(BANKS)) - 1


def test_every_piece_has_a_place_of_its_own(offsets):
    for width, table in offsets.items():
        assert sorted(table.values()) == [16 * i for i in range(64 * width * 2 // 16)]


@pytest.mark.parametrize("groups", [NEIGHBOURS, CDNA_READS], ids=["neighbours", "cdna"])
@pytest.mark.parametrize("lanes_of_a_column", [16, 32])
def test_rows_are_read_without_conflicts(offsets, groups, lanes_of_a_column):
    """A lane reads 16 bytes of its own row: row lane % 16 (32), piece lane / 16 (32) of each chunk."""
    for width, table in offsets.items():
        split = 64 // lanes_of_a_column
        for chunk, group in itertools.product(range(width // 8 // split), groups):
            lanes = [(lane % lanes_of_a_column, chunk * split + lane // lanes_of_a_column) for lane in group]
            assert conflicts([(table[at], 16) for at in lanes]) == 0, (width, chunk, group)


def test_rows_are_written_without_conflicts(offsets):
    """Work-items write neighbouring pieces of a row."""
    for width, table in offsets.items():
        pieces = sorted(table)[: 64 * (width // 8) // 64 * 64]
        for first in range(0, len(pieces), 8):
            assert conflicts([(table[at], 16) for at in pieces[first : first + 8]]) == 0, (width, first)


@pytest.mark.parametrize("features", [2, 4])
def test_columns_are_read_without_conflicts(offsets, features):
    """16 lanes read neighbouring features of one row, 4 (8) bytes each; a bank serves 128 bytes at a time.

    But for widths that are odd multiples of 32 (head dims like 96): their rows take half of the banks, and two lanes share one.
    """
    size = 2 * features
    together = 128 // size
    for width, table in offsets.items():
        if width % (16 * features):
            continue
        for row, group in itertools.product(range(8), range(width // (16 * features))):
            lanes = []
            for lane in range(min(together, 32)):
                byte = (group * 16 + lane % 16) * size
                at = row + 4 * (lane // 16)  # the next group of lanes reads rows 4 further on
                lanes.append((table[at, byte // 16] + byte % 16, size))
            assert conflicts(lanes) == (width // 32 % 2), (width, row, group)


def test_rows_laid_out_plainly_would_conflict():
    """A negative control: eight rows of 128 bytes, first piece of each."""
    assert conflicts([(row * 128, 16) for row in range(8)]) == 7
