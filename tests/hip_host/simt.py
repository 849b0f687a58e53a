"""Kernels compiled for the CPU and run there work-item by work-item: see harness.cpp."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from portable_flash import backends
from portable_flash.backends.hip.arguments import POINTERS
from portable_flash.backends.hip.specialise import Kernel

HERE = Path(__file__).parent
KERNELS = Path(backends.__file__).parent / "hip" / "kernels"
WRITTEN = ("out", "lse", "delta", "dquery", "dkey", "dvalue", "dbias")
SECONDS = 120  # a launch that takes longer hangs

# Uninitialised variables hold a pattern. No contraction: as on GPUs.
COMMON = ("-std=c++20", "-g1", "-gdwarf-4", "-fno-pie", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-w", "-DPF_HOST")
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")


@dataclass(frozen=True)
class Build:
    """How kernels are compiled: by the first of these compilers that is there."""

    compilers: tuple[str, ...]
    compile: tuple[str, ...]
    link: tuple[str, ...]

    def compiler(self) -> str:
        found = next(filter(None, map(shutil.which, self.compilers)), None)
        return found or pytest.skip(f"none of these compilers is here: {', '.join(self.compilers)}")


# WATCHED: every access is checked by harness.cpp, bounds to the byte, and races; most kernels run once, so nothing is optimised.
# ADDRESS: AddressSanitizer, another compiler, optimised code.
WATCHED = Build(("clang++-22", "clang++", "g++"), ("-O0", "-fsanitize=thread", *UNDEFINED), UNDEFINED)
ADDRESS = Build(("g++", "clang++-22", "clang++"), ("-O1", "-fsanitize=address", *UNDEFINED), ("-fsanitize=address", *UNDEFINED))


class Fault(Exception):
    """What the harness or a sanitizer has to say about a launch."""


def build(kernel: Kernel, how: Build = WATCHED, folder: Path = KERNELS, faults: Sequence[str] = ()) -> Path:
    """The executable of one kernel, compiled unless it is there. `faults` are macros of platform_host.h for negative controls."""
    compiler = how.compiler()
    clang = "clang" in compiler
    runtime = _compile("harness.o", compiler, ("-O2", "-g0", "-fno-strict-aliasing", str(HERE / "harness.cpp")), KERNELS)
    macros = [f"-D{name}={value}" for name, value in kernel.macros] + [f"-D{fault}" for fault in faults]
    if kernel.arch == "gfx90a":  # what the compiler for this GPU defines; the kernels ask
        macros.append("-D__gfx90a__")
    bounds = "-fstrict-flex-arrays=3" if clang else "-fsanitize=bounds-strict"  # of the last array of a structure too
    source = (f'-DSIMT_SOURCE="{kernel.name}.hip"', f"-DSIMT_KERNEL={kernel.name}", str(HERE / "kernel.cpp"))
    faster = ["-fuse-ld=lld"] if clang and shutil.which(compiler.replace("clang++", "ld.lld")) else []
    link = ("-no-pie", *faster, *how.link, str(runtime))
    return _compile(kernel.name, compiler, (*how.compile, bounds, *macros, *source), folder, link)


def cache() -> Path:
    return Path(os.environ["PF_SIMT_CACHE"])


def _sources(folder: Path) -> str:
    return "".join(f"{path.name}\n{path.read_text()}" for f in (folder, KERNELS, HERE) for path in sorted(f.glob("*.[hc]*")))


@functools.cache
def _compile(name: str, compiler: str, arguments: tuple[str, ...], folder: Path, link: tuple[str, ...] = ()) -> Path:
    """An object, or with `link` an executable."""
    compile = [compiler, *COMMON, *(f"-I{path}" for path in (folder, KERNELS, HERE)), *arguments]
    key = hashlib.sha256("\0".join([*compile, *link, _sources(folder)]).encode()).hexdigest()[:24]
    target = cache() / f"{key}-{name}"
    if not target.exists():
        made = target.with_name(f"{key}.{os.getpid()}.o")
        steps = [[*compile, "-c", "-o", made]] + ([[compiler, made, *link, "-o", f"{made}ut"]] if link else [])
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise Fault(f"{name} does not compile:\n{done.stderr[:4000]}")
        Path(steps[-1][-1]).replace(target)  # another process may have made the same
        made.unlink(missing_ok=True)
    target.touch()
    return target


def run(
    executable: Path, kernel: Kernel, programs: int, call: bytes, tensors: Mapping[str, torch.Tensor | None], schedule: int = 0
) -> None:
    """One launch. Each tensor is copied to where nothing lies beside it, and those that kernels write are copied back."""
    request = [struct.pack("=4i", programs, kernel.threads, kernel.lds_bytes, schedule), bytes(call)]
    spans = {name: _span(tensor) for name, tensor in tensors.items() if tensor is not None}
    for name in POINTERS:
        if name in spans:
            span = spans[name]
            request += [struct.pack("=3q", span.numel(), span.data_ptr() % 16, name in WRITTEN), span.numpy().tobytes()]
        else:
            request.append(struct.pack("=3q", -1, 0, 0))
    try:
        done = subprocess.run([executable], input=b"".join(request), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Fault(f"{kernel.name} does not end") from None
    if done.returncode or done.stderr:
        raise Fault(f"exit status {done.returncode}: {_with_lines(executable, done.stderr.decode(errors='replace'))}")
    results = [spans[name] for name in POINTERS if name in WRITTEN and name in spans]
    written = torch.frombuffer(bytearray(done.stdout + b"\0"), dtype=torch.uint8)[:-1].split([span.numel() for span in results])
    for span, bytes_written in zip(results, written, strict=True):
        span.copy_(bytes_written)


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first element to the last."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if not tensor.numel():
        return storage[:0]
    size, start = tensor.element_size(), tensor.storage_offset()
    end = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1
    return storage[start * size : end * size]


def _with_lines(executable: Path, text: str) -> str:
    """With source lines after the addresses of code."""

    def line(match: re.Match) -> str:
        command = ["addr2line", "-i", "-s", "-e", executable, match[1]]
        return f"{match[0]} ({' in '.join(subprocess.run(command, capture_output=True, text=True).stdout.split())})"

    return re.sub(r"\bpc (0x[0-9a-f]+)", line, text) if shutil.which("addr2line") else text
