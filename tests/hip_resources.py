"""What the HIP kernels' machine code takes and holds, read from clang's assembly: for the tests, and as a table.

    python tests/hip_resources.py --out FOLDER      # what the tests compile: hip_resources.json and hip_resources.md
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from portable_flash.backends.hip import compiler, host
from portable_flash.backends.hip.specialise import Kernel
from portable_flash.device import Device, named
from portable_flash.problem import Problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MCA_MODELS = ("gfx90a", "gfx942")  # whose matrix unit llvm-mca knows
_INSTRUCTION = re.compile(r"^\s+([vsdgb](?:lobal|uffer|s)?_[a-z0-9_]+)\b", re.MULTILINE)
_MIX = {
    "matrix": r"v_s?mfma|v_wmma", "dot": r"v_dot", "fma": r"v_(pk_)?(fma|fmac|mad|mac)", "exp": r"v_exp", "permute": r"v_perm|ds_(bpermute|swizzle)",
    "lds_read": r"ds_(read|load)", "lds_write": r"ds_(write|store)", "load": r"(global|buffer|flat)_load", "store": r"(global|buffer|flat)_store",
    "scratch": r"scratch_", "barrier": r"s_barrier",
}  # fmt: skip


def call(dtype, head_dim, head_dim_v=None, heads_k=16, seqlen=2048, **options) -> Problem:
    return Problem(dtype, 2, 16, heads_k, seqlen, seqlen, head_dim, head_dim_v or head_dim, **options)


PACKED = {"varlen": True, "total_q": 4000, "total_k": 4000}
EVERYTHING = {"window_left": 512, "window_right": 0, "softcap": True, "sinks": True, "alibi": True, "mask": True, "bias": True}
PROBLEMS = {
    "bf16 64 causal": call(BF16, 64, window_right=0),
    "bf16 128 causal": call(BF16, 128, window_right=0),
    "fp16 128": call(FP16, 128, heads_k=4),
    "fp16 256": call(FP16, 256),
    "bf16 256 causal": call(BF16, 256, window_right=0),
    "fp16 80 window softcap sinks": call(FP16, 80, heads_k=4, seqlen=2001, window_left=512, window_right=0, softcap=True, sinks=True),
    "bf16 128 causal packed": call(BF16, 128, heads_k=4, window_right=0, **PACKED),
    "bf16 192/128 causal": call(BF16, 192, 128, window_right=0),
    "bf16 64 everything": call(BF16, 64, **EVERYTHING),
    "fp16 128 everything": call(FP16, 128, heads_k=4, **EVERYTHING),
    "fp32 64 causal": call(FP32, 64, window_right=0),
    "fp32 128": call(FP32, 128),
    "fp32 256": call(FP32, 256),
    "bf16 128 one query": Problem(BF16, 2, 16, 4, 1, 4096, 128, 128, window_right=0, needs_grad=False),
}
GPUS = {
    "gfx906": "mi50", "gfx908": "mi100", "gfx90a": "mi250x", "gfx942": "mi300x", "gfx950": "mi355x", "gfx1030": "rx6900xt",
    "gfx1100": "rx7900xtx", "gfx1151": "strix-halo", "gfx1200": "rx9070xt", "gfx1201": "rx9070xt",
}  # fmt: skip

FEW = ("bf16 128 causal", "bf16 64 everything", "fp32 64 causal")  # enough for an arch whose code is nearly that of another
LIKE_ANOTHER = ("gfx908", "gfx90a", "gfx950", "gfx1151", "gfx1200")
ONCE = ("fp16 128", "bf16 256 causal", "bf16 128 causal packed", "fp32 128")  # differ little from others: on CDNA 3 only
COVERED = [
    (arch, name) for arch in GPUS for name in PROBLEMS
    if (name in FEW if arch in LIKE_ANOTHER else name not in ONCE or arch == "gfx942")
]  # fmt: skip


def gpu(arch: str) -> Device:
    return replace(named(GPUS[arch]), arch=arch)


@dataclass(frozen=True)
class Resources:
    """Of one kernel. Registers a lane; scratch in bytes a lane; busy: share of the main loop's cycles that the matrix unit works."""

    kernel: str
    registers: int
    accumulation_registers: int
    scalar_registers: int
    spilled: int
    scalar_spills: int
    lds_bytes: int
    waves_per_simd: int
    matrix: tuple[str, ...]
    wide_loads: int
    mix: dict[str, int]
    busy: float | None


def kernels(problem: Problem, arch: str) -> dict[str, Kernel]:
    return host.kernels_of(problem, gpu(arch))


def assembly(kernel: Kernel) -> str:
    """clang's assembly of a kernel."""
    clang = next(c for c in ("clang++-22", "clang++") if shutil.which(c))
    flags = compiler._COMMAND_FLAGS["clang"]
    command = [clang, *flags, *compiler.options(kernel), "-Werror", "-S", "-o", "-", compiler.folder() / f"{kernel.name}.hip"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{kernel.name} for {kernel.arch}: {result.stderr}")
    return result.stdout


def resources(kernel: Kernel) -> Resources:
    text, macros = assembly(kernel), dict(kernel.macros)
    masked = "1" in (macros["PF_HAS_BIAS"], macros["PF_HAS_MASK"])  # branches by score: llvm-mca takes minutes for what is no straight line
    field = lambda name: int(re.search(rf"^\s+\.{name}:\s+(\d+)", text, re.MULTILINE).group(1))
    occupancy = re.search(r"^; Occupancy: (\d+)", text, re.MULTILINE)
    counts = collections.Counter(_INSTRUCTION.findall(text))
    mix = {kind: sum(n for name, n in counts.items() if re.match(pattern, name)) for kind, pattern in _MIX.items()}
    accumulation = re.search(r"^\s+\.agpr_count:\s+(\d+)", text, re.MULTILINE)
    return Resources(
        kernel.name, field("vgpr_count"), int(accumulation.group(1)) if accumulation else 0, field("sgpr_count"),
        max(field("private_segment_fixed_size"), 4 * field("vgpr_spill_count")), field("sgpr_spill_count"),
        field("group_segment_fixed_size"), int(occupancy.group(1)) if occupancy else 0,
        tuple(sorted(name for name in counts if re.match(r"v_s?mfma|v_wmma|v_dot2", name))),
        sum(n for name, n in counts.items() if re.match(r"(global|buffer)_load_(dwordx4|b128)", name)),
        {kind: n for kind, n in mix.items() if n}, None if masked else busy_share(text, kernel.arch),
    )  # fmt: skip


def main_loop(text: str) -> list[str]:
    """Lines of the loop with the most matrix instructions: from a label to the last branch back to it."""
    lines = text.splitlines()
    labels = {match.group(1): i for i, line in enumerate(lines) if (match := re.match(r"(\.LBB\w+):", line))}
    loops = []
    for i, line in enumerate(lines):
        match = re.match(r"\s+s_c?branch\w*\s+(\.LBB\w+)", line)
        if match and labels.get(match.group(1), i) < i:
            loops.append((labels[match.group(1)], i))
    matrix = lambda loop: sum("v_mfma" in line for line in lines[loop[0] : loop[1]])
    best = max(loops, key=lambda loop: (matrix(loop), loop[0] - loop[1]), default=None)
    return lines[best[0] : best[1]] if best and matrix(best) else []


def busy_share(text: str, arch: str) -> float | None:
    """llvm-mca's cycles of the matrix unit over its cycles of the main loop, of one wave alone; None where it has no model.

    The loop is taken as one straight line: the comparisons at the edge of a mask and both ways of loading the next tile count,
    though an inner iteration runs only one of them. Waits and barriers do not count. So it is an estimate for the arithmetic.
    """
    mca = next((m for m in ("llvm-mca-22", "llvm-mca") if shutil.which(m)), None)
    if arch not in MCA_MODELS or mca is None:
        return None
    left_out = re.compile(r"\s+s_(c?branch|barrier|waitcnt|nop|endpgm|setprio|and_saveexec|sleep)")
    code = [line.split(";")[0] for line in main_loop(text) if _INSTRUCTION.match(line) and not left_out.match(line)]
    if not code:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write("\n".join(code) + "\n")
        file.flush()
        command = [mca, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-iterations=4", "-instruction-info=0", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    cycles = int(re.search(r"Total Cycles:\s+(\d+)", report).group(1)) / 4
    names = re.findall(r"^\[(\d+)\]\s+- (\w+)", report, re.MULTILINE)
    unit = next(int(i) for i, name in names if name == "HWXDL")
    pressure = re.search(r"Resource pressure per iteration:\n.*\n(.*)", report).group(1).split()
    return round(float(pressure[unit].replace("-", "0")) / cycles, 3)


# ------------------------------------------------------------------ the table
def _rows(job: tuple[str, str]) -> list[dict]:
    arch, name = job
    found = kernels(PROBLEMS[name], arch)
    return [{"arch": arch, "problem": name, "launch": launch, **asdict(resources(kernel)), "macros": dict(kernel.macros)}
            for launch, kernel in found.items()]  # fmt: skip


def table(rows: list[dict]) -> str:
    head = ["arch", "problem", "kernel", "block", "registers", "scratch", "LDS", "waves/SIMD", "matrix unit busy", "instructions (whole kernel)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        macros, mix = row["macros"], ", ".join(f"{kind} {n}" for kind, n in row["mix"].items())
        block = f"{macros['PF_BLOCK_M']}x{macros['PF_BLOCK_N']}, {macros['PF_WAVES']} waves"
        busy = "" if row["busy"] is None else f"{row['busy']:.2f}"
        cells = (row["arch"], row["problem"], row["launch"], block, row["registers"], row["spilled"], row["lds_bytes"], row["waves_per_simd"], busy, mix)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(_rows, COVERED):
            rows += found
            for row in found:
                busy = "" if row["busy"] is None else f", matrix unit busy {row['busy']}"
                spilled = f"{row['spilled']} bytes of scratch, {row['scalar_spills']} scalar"
                print(f"{row['arch']} {row['problem']}: {row['launch']}: {row['registers']} registers, {spilled}{busy}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f" {json.dumps(row)}" for row in rows)  # one a kernel, to read in a diff
    (arguments.out / "hip_resources.json").write_text(f"[\n{lines}\n]\n")
    (arguments.out / "hip_resources.md").write_text(table(rows))
    sys.exit(any(row["spilled"] for row in rows))


if __name__ == "__main__":
    main()
