"""The commands `portable-flash cache` and `portable-flash build`: compiled HIP kernels on disk, and kernels compiled ahead of time."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...device import Device, catalogue, named
from ...problem import DTYPE_NAMES, Problem
from . import DTYPES, MAX_HEAD_DIM, cache, compiler, host
from .runtime import HipError, UnavailableError
from .specialise import ARCHES, Kernel

_DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in DTYPES}
_SEQLEN = 4096  # of the calls that are built for, as long as a tiling's choice depends on it


# ------------------------------------------------------------------ cache
def cache_main(argv: Sequence[str]) -> int:
    """`portable-flash cache`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="portable-flash cache", description="Compiled HIP kernels on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("list", help="what is there, last used first")
    commands.add_parser("clear", help="remove all of it")
    commands.add_parser("path", help="the folder")
    command = parser.parse_args(argv).command
    folder = cache.cache_folder()
    try:
        if command == "path":
            print(folder)
        elif command == "clear":
            print(f"removed {cache.clear()} compiled kernels from {folder}")
        else:
            print("\n".join(_listing(cache.entries(), time.time())))
            print(f"in {folder}, kept under {cache.limit_bytes() // 10**6} MB")
    except (OSError, ValueError) as error:
        print(f"portable-flash cache: {error}", file=sys.stderr)
        return 1
    return 0


def _listing(entries: Sequence[cache.Entry], now: float) -> list[str]:
    lines = [f"{'kernel':<16} {'arch':<8} {'kB':>7} {'last used':>10}  compiler; macros"]
    for entry in entries:
        facts = entry.facts
        name, arch, rest = (facts.kernel, facts.arch, f"{facts.compiler}; {facts.macros}") if facts else ("damaged", "", entry.path.name)
        lines.append(f"{name:<16} {arch:<8} {entry.size / 1000:>7.1f} {_age(now - entry.used):>10}  {rest}")
    return [*lines, f"{len(entries)} kernels, {sum(entry.size for entry in entries) / 1e6:.1f} MB"]


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"


# ------------------------------------------------------------------ build
def devices_of(arch: str) -> tuple[Device, ...]:
    """The GPU models of the catalogue with this arch, or one that stands for those of an arch without any."""
    known = tuple(named(slug) for slug, record in catalogue().items() if record.arch == arch)
    limits = {"wave_size": ARCHES[arch].wave, "shared_memory_bytes": 65536, "registers_per_thread": 256}
    return known or (Device(arch, "amd", arch, arch, compute_units=64, **limits),)


def kernels_for(arch: str, head_dims: Iterable[int], dtypes: Iterable[torch.dtype]) -> tuple[Kernel, ...]:
    """The kernels of ordinary calls, forward and backward: causal or not, padded or packed, as tensors of whole rows make them."""
    found: dict[Kernel, None] = {}
    for device, head_dim, dtype, right, varlen in itertools.product(devices_of(arch), head_dims, dtypes, (None, 0), (False, True)):
        rows = 4 * _SEQLEN if varlen else 0
        problem = Problem(
            dtype, 4, 16, 16, _SEQLEN, _SEQLEN, head_dim, head_dim, window_right=right, varlen=varlen, total_q=rows, total_k=rows
        )
        found.update(dict.fromkeys(host.kernels_of(problem, device).values()))
    return tuple(found)


def build_main(argv: Sequence[str]) -> int:
    """`portable-flash build`; returns the exit code, 1 if any kernel could not be built."""
    parser = argparse.ArgumentParser(
        prog="portable-flash build",
        description="Compile HIP kernels ahead of time, for machines without a compiler. They are found there through "
        f"{cache.OBJECTS_VARIABLE}, which names folders.",
    )
    parser.add_argument("--arch", action="append", required=True, choices=sorted(ARCHES), help="may be repeated", metavar="gfx942")
    parser.add_argument("--out", type=Path, default=Path("hip_objects"), help="folder (default: %(default)s)")
    parser.add_argument("--compiler", choices=compiler.COMPILERS, help="default: the first that is there")
    parser.add_argument("--head-dim", type=_head_dim, action="append", help="may be repeated (default: 64 and 128)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), action="append", help="may be repeated (default: fp16 and bf16)")
    arguments = parser.parse_args(argv)
    try:
        name = compiler.choose(arguments.compiler)
        version = compiler.compiler_version(name)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (compiler.NoCompilerError, HipError, UnavailableError, ValueError, OSError) as error:
        print(f"portable-flash build: {error}", file=sys.stderr)
        return 1
    dtypes = [_DTYPES[dtype] for dtype in dict.fromkeys(arguments.dtype or ("fp16", "bf16"))]
    head_dims = dict.fromkeys(arguments.head_dim or (64, 128))
    kernels = [kernel for arch in dict.fromkeys(arguments.arch) for kernel in kernels_for(arch, head_dims, dtypes)]
    print(f"{len(kernels)} kernels with {version}, into {arguments.out}", flush=True)
    return _build(kernels, name, version, arguments.out)


def _head_dim(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1 to {MAX_HEAD_DIM}")
    return int(text)


def _build(kernels: Sequence[Kernel], name: str, version: str, out: Path) -> int:
    """Compile and write each kernel, whole or not at all; goes on after one that fails. The exit code."""

    def one(kernel: Kernel) -> int | Exception:
        path = out / cache.object_name(kernel)
        try:
            code = compiler.compile_kernel(kernel, name)
            cache.write(path, kernel, code, version)
        except (compiler.CompileError, HipError, OSError) as error:
            return error
        return len(code)

    failed = 0
    workers = 1 if name == "hiprtc" else os.cpu_count() or 1  # the others are processes of their own
    with ThreadPoolExecutor(workers) as pool:
        for number, (kernel, result) in enumerate(zip(kernels, pool.map(one, kernels)), start=1):
            progress = f"[{number}/{len(kernels)}] {kernel.name} {kernel.arch}"
            if isinstance(result, Exception):
                failed += 1
                print(f"{progress}: FAILED: {result}", file=sys.stderr, flush=True)
            else:
                print(f"{progress}: {result / 1000:.1f} kB, {cache.object_name(kernel)}", flush=True)
    if failed:
        print(f"{failed} of {len(kernels)} kernels could not be built", file=sys.stderr)
    else:
        print(f"use them with {cache.OBJECTS_VARIABLE}={out.resolve()}")
    return 1 if failed else 0
