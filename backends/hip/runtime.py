"""HIP as this process has it: which library hip-python calls, and kernels loaded and launched through it.

A process must use one HIP library. torch's wheels for ROCm bring their own libamdhip64, and a second copy would know
neither torch's streams nor its memory. hip-python opens the library by a name of its own at its first call, so before that
it is told the file that torch has loaded:

  hip-python 6 and 7   the names are the variables `DLL` of the modules hip.chip and hip.chiprtc
  hip-python 10        (packages rocm.bindings.*) asks rocm.bindings.util.paths.get_library_path for the file

Which library it then really calls is checked (`_check`): it may have been called earlier in the process.

HIP does not survive fork(): functions loaded before one are of no use in the child, where torch refuses its devices too.
Processes that use a GPU are spawned. `unavailable` and everything that only compiles do not initialise HIP.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .specialise import Kernel

MAX_WORK_ITEMS = 2**32 - 1  # of a launch: HIP counts them in 32 bits
_VERSIONS = ("", ".7", ".6", ".5")  # endings of the names that installations without development files have
_MAPS = Path("/proc/self/maps")
_FUNCTIONS: dict[tuple[Kernel, int], Function] = {}  # loaded modules, kept for the life of the process
_LOADING = threading.Lock()


class UnavailableError(RuntimeError):
    """HIP cannot be used in this process; the message says what was looked for and where."""


class HipError(RuntimeError):
    """A call of the HIP library failed; names the call, the error and its text."""


@dataclass(frozen=True)
class Library:
    """A HIP library: its file, HIP's version ("6.4.43484") and how it was found."""

    path: str
    version: str
    origin: str


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel in a device's memory."""

    kernel: Kernel
    device_index: int
    handle: Any  # hipFunction_t
    module: Any  # hipModule_t
    code: bytes  # the code object: HIP may go on reading it


class _Packet(ctypes.Structure):
    """What a launch takes as `extra`: pairs of a tag (HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE) and an address, then _END; and the size."""

    _fields_ = (
        ("buffer_tag", ctypes.c_size_t),
        ("buffer", ctypes.c_char_p),
        ("size_tag", ctypes.c_size_t),
        ("size_address", ctypes.c_void_p),
        ("end_tag", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
    )


# ------------------------------------------------------------------ the libraries of this process
def _mappings() -> Iterator[tuple[int, int, str]]:
    """(first address, end, file) of what is mapped into this process; nothing where the system does not tell (not Linux)."""
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            first, end = fields[0].split("-")
            yield int(first, 16), int(end, 16), fields[5]


def loaded(stem: str) -> tuple[str, ...]:
    """Files of the libraries lib<stem>.so[.version] in this process, in the order of their addresses."""
    pattern = re.compile(rf"lib{re.escape(stem)}\.so[.\d]*")
    return tuple(dict.fromkeys(path for _, _, path in _mappings() if pattern.fullmatch(os.path.basename(path))))


def _file_at(address: int) -> str | None:
    return next((path for first, end, path in _mappings() if first <= address < end), None)


def _exports(path: str, symbol: str) -> bool:
    return hasattr(ctypes.CDLL(path), symbol)


def _torchs() -> str | None:
    """The HIP library that torch's own code is bound to."""
    for path in (*loaded("c10_hip"), *loaded("torch_hip")):
        library = ctypes.CDLL(path)  # loaded already: this only names it
        if hasattr(library, "hipGetDevice"):  # looked up in the library and in those it depends on, as the linker did
            return _file_at(ctypes.cast(library.hipGetDevice, ctypes.c_void_p).value or 0)
    return None


def _roots() -> tuple[Path, ...]:
    named = [Path(os.environ[name]) for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    return tuple(dict.fromkeys([*named, Path("/opt/rocm")]))


def _names(stem: str, folders: tuple[Path, ...]) -> tuple[str, ...]:
    """What to ask the dynamic linker for: files of these folders, then names in its own search path."""
    files = [str(path) for folder in folders for path in sorted(folder.glob(f"lib{stem}.so*"))]
    return (*files, *(f"lib{stem}.so{ending}" for ending in _VERSIONS))


def _open(stem: str, folders: tuple[Path, ...]) -> str | None:
    """Load the first of the installed libraries that can be loaded; its file."""
    for name in _names(stem, folders):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        found = loaded(stem)
        return found[0] if found else name
    return None


@functools.cache
def _find_hip() -> tuple[str, str]:
    """File and origin of the HIP library to use. Raises UnavailableError."""
    path = _torchs()
    if path is not None:
        return path, "loaded by torch"
    copies = loaded("amdhip64")
    if len(copies) > 1:
        raise UnavailableError(f"several HIP libraries are loaded in this process, and torch uses none: {', '.join(copies)}")
    if copies:
        return copies[0], "loaded in this process"
    folders = tuple(root / "lib" for root in _roots())
    path = _open("amdhip64", folders)
    if path is None:
        where = f"in {', '.join(map(str, folders))} and, by the names {', '.join(_names('amdhip64', ()))}, in the linker's search path"
        raise UnavailableError(f"no HIP library: torch has loaded none (a torch for ROCm brings its own), and none is {where}")
    return path, "installed"


def _find_hiprtc() -> str:
    """File of hiprtc: the one beside the HIP library, else the loaded one, else the HIP library (ROCm 5 has it inside), else installed."""
    try:
        hip = _find_hip()[0]
    except UnavailableError as error:
        hip, reason = None, str(error)
    else:
        reason = f"none is beside {hip}"
        beside = sorted(Path(hip).parent.glob("libhiprtc.so*"))
        if beside:
            return str(beside[0])
    copies = loaded("hiprtc")
    if copies:
        return copies[0]
    if hip is not None and _exports(hip, "hiprtcCreateProgram"):
        return hip
    folders = tuple(root / "lib" for root in _roots())
    path = _open("hiprtc", folders)
    if path is None:
        where = f"in {', '.join(map(str, folders))} and, by the names {', '.join(_names('hiprtc', ()))}, in the linker's search path"
        raise UnavailableError(f"no hiprtc library: {reason}, and none is {where}")
    return path


# ------------------------------------------------------------------ hip-python
def _bindings(name: str) -> ModuleType:
    try:
        return getattr(importlib.import_module("hip"), name)
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"hip-python is not installed (pip install portable-flash[hip]): {error}") from None


def _direct(binding: ModuleType, stem: str, path: str) -> None:
    """Tell hip-python to open this file as lib<stem>; without effect once it has opened another."""
    if binding.__name__.startswith("rocm."):
        paths = importlib.import_module("rocm.bindings.util.paths")
        known = {**getattr(paths.get_library_path, "files", {}), stem: os.fsencode(path)}
        original = getattr(paths.get_library_path, "original", paths.get_library_path)

        def get_library_path(shortname: str, *arguments: Any, **options: Any) -> bytes:
            return known.get(shortname) or original(shortname, *arguments, **options)

        get_library_path.files, get_library_path.original = known, original
        paths.get_library_path = get_library_path
    else:
        importlib.import_module({"amdhip64": "hip.chip", "hiprtc": "hip.chiprtc"}[stem]).DLL = os.fsencode(path)


def _check(text: Any, path: str, what: str) -> None:
    """Raise unless this C string, a constant of the library that hip-python calls, lies in the file that it was given."""
    used = _file_at(text.as_c_void_p().value)
    if used is not None and not os.path.samefile(used, path):
        raise UnavailableError(
            f"hip-python already calls {used} as {what} while {path} is to be used: a process needs one HIP library; "
            "call portable_flash before other users of hip-python"
        )


@functools.cache
def _hip() -> tuple[ModuleType, str, str]:
    """hip-python's module, the file it calls and where that was found. Does not initialise HIP."""
    binding = _bindings("hip")
    if sys.platform != "linux":  # hip-python finds the library, and loaded libraries cannot be listed the same way
        return binding, "", "found by hip-python"
    path, origin = _find_hip()
    if not _exports(path, "hipModuleLaunchKernel"):
        raise UnavailableError(f"{path} is no HIP library: it has no hipModuleLaunchKernel")
    _direct(binding, "amdhip64", path)
    _check(binding.hipGetErrorName(binding.hipError_t.hipSuccess)[-1], path, "libamdhip64")
    return binding, path, origin


@functools.cache
def hiprtc() -> tuple[ModuleType, str]:
    """hip-python's module for hiprtc and the file that it calls. Raises UnavailableError."""
    binding = _bindings("hiprtc")
    if sys.platform != "linux":
        return binding, ""
    path = _find_hiprtc()
    if not _exports(path, "hiprtcCreateProgram"):
        raise UnavailableError(f"{path} is no hiprtc library: it has no hiprtcCreateProgram")
    _direct(binding, "hiprtc", path)
    text = binding.hiprtcGetErrorString(binding.hiprtcResult.HIPRTC_SUCCESS)[-1]
    return binding, _file_at(text.as_c_void_p().value) or path  # any hiprtc will do, also one opened earlier


def unavailable() -> str | None:
    """Why nothing can be launched through HIP here; None when something may. Neither initialises HIP nor needs a GPU."""
    try:
        _hip()
    except (UnavailableError, OSError) as error:
        return str(error)
    return None


def library_in_use() -> Library:
    """The HIP library that kernels are launched through. Initialises HIP; raises UnavailableError and HipError."""
    _, path, origin = _hip()
    number = _call("hipRuntimeGetVersion")[0]
    return Library(path, f"{number // 10**7}.{number // 10**5 % 100}.{number % 10**5}", origin)


# ------------------------------------------------------------------ calls
def _call(name: str, *arguments: Any, doing: str = "") -> list[Any]:
    """What the call returns beside its status. Raises HipError."""
    binding = _hip()[0]
    try:
        status, *results = getattr(binding, name)(*arguments)
    except ValueError as error:  # a status that this hip-python does not know
        _forget_error(binding)
        raise HipError(f"{name}{doing} failed with an error of its own: {error}") from None
    if status != binding.hipError_t.hipSuccess:
        error_name, text = (str(getattr(binding, get)(status)[-1]) for get in ("hipGetErrorName", "hipGetErrorString"))
        _forget_error(binding)
        raise HipError(f"{name}{doing} failed: {error_name} ({int(status)}), {text}")
    return results


def _forget_error(binding: ModuleType) -> None:
    """HIP keeps the last error for whoever asks next: torch would report it at its next launch."""
    with contextlib.suppress(ValueError):
        binding.hipGetLastError()


def function(kernel: Kernel, device_index: int) -> Function:
    """The kernel on this device: compiled or taken from the cache and loaded at the first call, then remembered.

    Loading does not wait for the device and is allowed while a stream is captured. Raises HipError, and what
    `cache.code_object` raises.
    """
    found = _FUNCTIONS.get((kernel, device_index))
    if found is None:
        with _LOADING:
            found = _FUNCTIONS.get((kernel, device_index))
            if found is None:
                from .cache import code_object

                found = _FUNCTIONS[kernel, device_index] = load(kernel, device_index, code_object(kernel).code)
    return found


def load(kernel: Kernel, device_index: int, code: bytes) -> Function:
    """Load a code object on a device, which is the current one afterwards only if it was before."""
    doing = f" of {kernel.name} for {kernel.arch} on device {device_index}"
    current = _call("hipGetDevice")[0]
    if current != device_index:
        _call("hipSetDevice", device_index)
    try:
        module = _call("hipModuleLoadData", code, doing=doing)[0]
        handle = _call("hipModuleGetFunction", module, kernel.name.encode(), doing=doing)[0]
    finally:
        if current != device_index:
            _call("hipSetDevice", current)
    return Function(kernel, device_index, handle, module, code)


def max_programs(threads: int) -> int:
    """Most workgroups of this many work-items that one launch may have."""
    return MAX_WORK_ITEMS // threads


def launch(function: Function, programs: int, arguments: bytes, stream: int) -> None:
    """Run workgroups 0 .. programs - 1 on a stream (a hipStream_t as an integer) of the function's device, the current one.

    `arguments` are the kernel's, in its own layout; they are copied before the call returns. Does not wait for the kernel.
    Raises ValueError for too many programs, HipError for what HIP refuses.
    """
    if programs == 0:
        return
    kernel = function.kernel
    if not 0 < programs <= max_programs(kernel.threads):
        raise ValueError(
            f"programs={programs!r}: {kernel.name} has {kernel.threads} work-items a program, so a launch takes at most "
            f"{max_programs(kernel.threads)}: split the batch"
        )
    packet = _Packet(1, arguments, 2, None, 3, len(arguments))
    packet.size_address = ctypes.addressof(packet) + _Packet.size.offset
    _call("hipModuleLaunchKernel", function.handle, programs, 1, 1, kernel.threads, 1, 1, 0, stream, None, packet)
