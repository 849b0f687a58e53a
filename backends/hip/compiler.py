"""Kernels to code objects, by whichever compiler there is: hiprtc, hipcc, or clang without any ROCm.

The kernels use compiler builtins only, so all three compile the same text with the same options.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import runtime

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from .specialise import Kernel

COMPILERS = ("hiprtc", "hipcc", "clang")  # in the order tried
VARIABLE = "PORTABLE_FLASH_HIP_COMPILER"  # names one of them
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off")
# Of the two that are run as commands: one code object, no bundle, nothing of ROCm's headers and device libraries. clang's own
# default code object version may be newer than what the machine's ROCm loads; hiprtc's and hipcc's are their ROCm's.
_COMMAND_FLAGS = {
    "hipcc": ("--genco", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    "clang": ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-mcode-object-version=5"),
}
_CLANGS = (*(f"clang++-{version}" for version in range(22, 16, -1)), "clang++")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class CompileError(RuntimeError):
    """A kernel did not compile: the compiler, its options and its log."""


class NoCompilerError(RuntimeError):
    """No compiler is there; says what was looked for."""


@dataclass(frozen=True)
class Source:
    """A kernel's text and the headers that it includes, directly or not: (name, text), sorted by name."""

    name: str  # "forward.hip"
    text: str
    headers: tuple[tuple[str, str], ...]


def folder() -> Traversable:
    return resources.files(__package__) / "kernels"


def source(kernel: str) -> Source:
    """The source of a kernel. Headers that are not in the folder (other machines' platform headers) are left out."""
    where = folder()
    name = f"{kernel}.hip"
    if not (where / name).is_file():
        known = ", ".join(sorted(f.name.removesuffix(".hip") for f in where.iterdir() if f.name.endswith(".hip")))
        raise ValueError(f"kernel {kernel!r}: there is no {name}, known are {known}")
    text = (where / name).read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        header = pending.pop()
        if header not in headers and (where / header).is_file():
            headers[header] = (where / header).read_text(encoding="utf-8")
            pending += _INCLUDE.findall(headers[header])
    return Source(name, text, tuple(sorted(headers.items())))


def options(kernel: Kernel) -> tuple[str, ...]:
    """What every compiler is told."""
    return (f"--offload-arch={kernel.arch}", *FLAGS, *(f"-D{name}={value}" for name, value in kernel.macros))


# ------------------------------------------------------------------ which compiler
def _command(name: str) -> str:
    """Path of hipcc or clang. Raises NoCompilerError."""
    roots = tuple(dict.fromkeys(filter(None, (os.environ.get("ROCM_PATH"), "/opt/rocm"))))
    names, folders = {
        "hipcc": (("hipcc",), [os.path.join(root, "bin") for root in roots]),
        "clang": (_CLANGS, [os.path.join(root, "llvm", "bin") for root in roots]),
    }[name]
    for path in (None, *folders):
        for executable in names:
            found = shutil.which(executable, path=path)
            if found:
                return found
    raise NoCompilerError(f"no {' or '.join(names)} on PATH or in {', '.join(folders)}")


def _missing(name: str) -> str | None:
    """Why a compiler cannot be used; None when it is there."""
    try:
        runtime.hiprtc() if name == "hiprtc" else _command(name)
    except (NoCompilerError, runtime.UnavailableError, OSError) as error:
        return str(error)
    return None


def choose(wanted: str | None = None) -> str:
    """The compiler to use: the one asked for, else the one that the environment names, else the first that is there.

    Raises ValueError for a name that is none of `COMPILERS` and NoCompilerError.
    """
    what, asked = ("compiler", wanted) if wanted else (VARIABLE, os.environ.get(VARIABLE))
    if asked and asked not in COMPILERS:
        raise ValueError(f"{what}={asked!r}: allowed are {', '.join(map(repr, COMPILERS))}")
    names = (asked,) if asked else COMPILERS
    missing = {}
    for name in names:
        reason = _missing(name)
        if reason is None:
            return name
        missing[name] = reason
    raise NoCompilerError("no compiler for HIP kernels:" + "".join(f"\n  {name}: {reason}" for name, reason in missing.items()))


def compiler_version(name: str) -> str:
    """Tells one build of a compiler from another: hiprtc's version and a digest of its files, or a command's first line."""
    if name == "hiprtc":
        return _hiprtc_version()
    return _command_version(_command(name))


@functools.cache
def _hiprtc_version() -> str:
    """hiprtc says 9.0 whatever its release is, and the compiler is another library beside it: sizes and dates of both are counted."""
    binding, path = runtime.hiprtc()
    files = [Path(path), *sorted(Path(path).parent.glob("libamd_comgr.so*"))] if path else []
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    major, minor = _checked(binding, "hiprtcVersion")
    return f"hiprtc {major}.{minor} ({hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]})"


@functools.cache
def _command_version(path: str) -> str:
    result = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace")
    lines = [line.strip() for line in result.stdout.splitlines() if "version" in line]
    if result.returncode or not lines:
        raise NoCompilerError(f"{path} --version does not tell a version (exit code {result.returncode}): {result.stderr.strip()}")
    return "; ".join(lines[:2])  # hipcc: HIP's version, then clang's


# ------------------------------------------------------------------ compiling
def compile_kernel(kernel: Kernel, compiler: str | None = None) -> bytes:
    """The code object of a kernel for its arch. Raises CompileError, NoCompilerError and ValueError (a compiler's unknown name)."""
    name = choose(compiler)
    return _hiprtc(kernel) if name == "hiprtc" else _run(kernel, name)


def _error(kernel: Kernel, compiler: str, command: list[str], log: str) -> CompileError:
    told = f"options: {' '.join(command)}"
    return CompileError(f"{kernel.name}.hip does not compile for {kernel.arch} with {compiler}\n{told}\n{log.strip()}")


def _run(kernel: Kernel, name: str) -> bytes:
    command = [_command(name), *_COMMAND_FLAGS[name], *options(kernel)]
    text = source(kernel.name)
    with tempfile.TemporaryDirectory(prefix="portable_flash_") as place:
        for file, content in ((text.name, text.text), *text.headers):
            Path(place, file).write_text(content, encoding="utf-8")
        result = subprocess.run(
            [*command, "-o", "kernel.co", text.name], cwd=place, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        out = Path(place, "kernel.co")
        if result.returncode or not out.is_file():
            log = f"{result.stdout}{result.stderr}\nexit code {result.returncode}"
            raise _error(kernel, f"{name} ({compiler_version(name)})", command, log)
        return out.read_bytes()


def _checked(binding: Any, call: str, *arguments: Any) -> list[Any]:
    """What a call of hiprtc returns beside its status; raises HipError."""
    status, *results = getattr(binding, call)(*arguments)
    if status != binding.hiprtcResult.HIPRTC_SUCCESS:
        raise runtime.HipError(f"{call} failed: {binding.hiprtcGetErrorString(status)[-1]} ({int(status)})")
    return results


def _strings(values: list[str]) -> ctypes.Array:
    return (ctypes.c_char_p * max(1, len(values)))(*(value.encode() for value in values))


def _hiprtc(kernel: Kernel) -> bytes:
    """By hiprtc. All arguments are buffers held here: hip-python frees or keeps for ever what it converts itself."""
    binding = runtime.hiprtc()[0]
    call: Callable[..., list[Any]] = functools.partial(_checked, binding)
    text = source(kernel.name)
    given = list(options(kernel))
    main, name, flags = ctypes.create_string_buffer(text.text.encode()), ctypes.create_string_buffer(text.name.encode()), _strings(given)
    headers, names = _strings([content for _, content in text.headers]), _strings([header for header, _ in text.headers])
    program = call("hiprtcCreateProgram", main, name, len(text.headers), headers, names)[0]
    try:
        try:
            call("hiprtcCompileProgram", program, len(given), flags)
        except runtime.HipError as error:
            log = bytearray(call("hiprtcGetProgramLogSize", program)[0] + 1)
            call("hiprtcGetProgramLog", program, log)
            log_text = log.split(b"\0", 1)[0].decode(errors="replace")
            raise _error(kernel, compiler_version("hiprtc"), given, f"{error}\n{log_text}") from None
        code = bytearray(call("hiprtcGetCodeSize", program)[0])
        call("hiprtcGetCode", program, code)
        return bytes(code)
    finally:
        call("hiprtcDestroyProgram", program.createRef())
