"""Code objects on disk: those that were compiled here, and folders of prebuilt ones for machines without a compiler.

A file holds a line that names the format, a line of JSON that describes the object, and the object. Files are written
beside their place and moved there, so that any number of processes may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import compiler

if TYPE_CHECKING:
    from .specialise import Kernel

FOLDER_VARIABLE = "PORTABLE_FLASH_CACHE"  # in place of <cache folder of the platform>/portable_flash
LIMIT_VARIABLE = "PORTABLE_FLASH_CACHE_MB"
OBJECTS_VARIABLE = "PORTABLE_FLASH_HIP_OBJECTS"  # folders of prebuilt objects, separated like those of PATH
DEFAULT_LIMIT_MB = 512
_FORMAT = b"portable_flash hip code object 1\n"
_SUFFIX = ".co"
_STALE_SECONDS = 86400  # age at which a temporary file can only be that of a process that died
_WARNED: set[tuple[str, ...]] = set()


class CorruptError(ValueError):
    """A file that is no code object of this format, or not all of one."""


@dataclass(frozen=True)
class Facts:
    """What a file says about its object."""

    kernel: str
    arch: str
    compiler: str
    macros: str  # "A=1 B=2"
    created: float  # seconds since 1970
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A file of the cache. Size in bytes, of the whole file; used is when it was last read or written, in seconds since 1970."""

    path: Path
    facts: Facts | None  # None: the file is damaged
    size: int
    used: float


@dataclass(frozen=True)
class CodeObject:
    code: bytes
    origin: str  # "prebuilt: <file>", "cache: <file>", "compiled by <compiler>"


# ------------------------------------------------------------------ places and keys
def cache_folder() -> Path:
    """<cache folder>/portable_flash/hip, the cache folder being the platform's unless the environment names one."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser() / "hip"
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "portable_flash" / "hip"


def limit_bytes() -> int:
    """Size that the cache is kept under. Raises ValueError for a variable that is no number of megabytes."""
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_MB)
    if not text.isdecimal():
        raise ValueError(f"{LIMIT_VARIABLE}={text!r}: must be a whole number of megabytes")
    return int(text) * 10**6


def prebuilt_folders() -> tuple[Path, ...]:
    """Where prebuilt objects are looked for: the folders that the environment names, then the package's own."""
    named = [Path(p).expanduser() for p in os.environ.get(OBJECTS_VARIABLE, "").split(os.pathsep) if p]
    return (*named, Path(__file__).parent / "objects")


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def object_key(kernel: Kernel) -> str:
    """Digest of all that the compiler is given: source text, options with macros and arch. Not of the compiler."""
    text = compiler.source(kernel.name)
    return _digest(text.name, text.text, text.headers, compiler.options(kernel))


def object_name(kernel: Kernel) -> str:
    """File name of a prebuilt object."""
    return f"{kernel.name}-{kernel.arch}-{object_key(kernel)[:32]}{_SUFFIX}"


def _cache_name(kernel: Kernel, version: str) -> str:
    return f"{kernel.name}-{kernel.arch}-{_digest(object_key(kernel), version)[:32]}{_SUFFIX}"


# ------------------------------------------------------------------ files
def read(path: Path) -> tuple[Facts, bytes]:
    """Description and object. Raises CorruptError, and OSError for a file that cannot be read."""
    content = path.read_bytes()
    if not content.startswith(_FORMAT):
        raise CorruptError(f"{path} is no code object of this version of portable_flash")
    line, _, code = content[len(_FORMAT) :].partition(b"\n")
    try:
        facts = Facts(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise CorruptError(f"{path}: its description cannot be read: {error}") from None
    if hashlib.sha256(code).hexdigest() != facts.sha256:
        raise CorruptError(f"{path}: its checksum is another than that of its {len(code)} bytes")
    return facts, code


def write(path: Path, kernel: Kernel, code: bytes, version: str) -> None:
    """Write an object, whole or not at all. Raises OSError."""
    macros = " ".join(f"{name}={value}" for name, value in kernel.macros)
    facts = Facts(kernel.name, kernel.arch, version, macros, time.time(), hashlib.sha256(code).hexdigest())
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_FORMAT + json.dumps(asdict(facts)).encode() + b"\n" + code)
        os.chmod(temporary, 0o644)  # temporary files are made for their owner alone; a folder of objects may be shared
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _warn_once(key: tuple[str, ...], message: str) -> None:
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _take(path: Path) -> bytes | None:
    """The object of a file of the cache, None when there is none. A damaged file is removed."""
    try:
        code = read(path)[1]
    except CorruptError as error:
        _warn_once(("corrupt",), f"a cached kernel was damaged and is compiled again: {error}")
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the objects used longest ago are evicted first
    return code


def _store(path: Path, kernel: Kernel, code: bytes, version: str) -> None:
    try:
        write(path, kernel, code, version)
        evict(limit_bytes(), keep=path)
    except OSError as error:
        _warn_once(("store",), f"compiled kernels are not kept in {path.parent}, each process compiles them: {error}")


def _prebuilt(kernel: Kernel) -> CodeObject | None:
    name = object_name(kernel)
    for path in (folder / name for folder in prebuilt_folders()):
        try:
            return CodeObject(read(path)[1], f"prebuilt: {path}")
        except CorruptError as error:
            _warn_once(("prebuilt", str(path)), f"a prebuilt kernel is damaged and not used: {error}")
        except OSError:
            continue
    return None


# ------------------------------------------------------------------ what the backend calls
def code_object(kernel: Kernel, wanted: str | None = None) -> CodeObject:
    """A kernel's code object: prebuilt, else from the cache, else compiled and cached. A compiler asked for makes prebuilt ones no choice.

    Raises what `compiler.compile_kernel` raises.
    """
    found = None if wanted else _prebuilt(kernel)
    if found is not None:
        return found
    name = compiler.choose(wanted)
    version = compiler.compiler_version(name)
    path = cache_folder() / _cache_name(kernel, version)
    code = _take(path)
    if code is not None:
        return CodeObject(code, f"cache: {path}")
    code = compiler.compile_kernel(kernel, name)
    _store(path, kernel, code, version)
    return CodeObject(code, f"compiled by {version}")


def unavailable() -> str | None:
    """Why no kernel can be had here: no compiler and no folder of prebuilt objects. None when some may."""
    if any(_files(folder, _SUFFIX) for folder in prebuilt_folders()):
        return None
    try:
        compiler.choose()
    except compiler.NoCompilerError as error:
        return f"{error}\n  nor prebuilt kernels in {', '.join(map(str, prebuilt_folders()))} (made by portable-flash build)"
    return None


# ------------------------------------------------------------------ housekeeping
def _files(folder: Path, suffix: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if entry.name.endswith(suffix)]
    except OSError:
        return []


def _stats(suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in _files(cache_folder(), suffix):
        with contextlib.suppress(OSError):  # another process may have removed it
            yield Path(entry.path), os.stat(entry.path)


def entries() -> list[Entry]:
    """Every object of the cache, the one used last first."""
    found = []
    for path, stat in _stats(_SUFFIX):
        try:
            facts = read(path)[0]
        except CorruptError:
            facts = None
        except OSError:
            continue
        found.append(Entry(path, facts, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def evict(limit: int, keep: Path | None = None) -> int:
    """Remove the objects used longest ago, but not `keep`, until the cache takes at most `limit` bytes; how many went."""
    for path, stat in _stats(".tmp"):
        if time.time() - stat.st_mtime > _STALE_SECONDS:
            path.unlink(missing_ok=True)
    files = sorted(_stats(_SUFFIX), key=lambda file: file[1].st_mtime)
    total = sum(stat.st_size for _, stat in files)
    removed = 0
    for path, stat in files:
        if total <= limit:
            break
        if path != keep:
            path.unlink(missing_ok=True)
            total -= stat.st_size
            removed += 1
    return removed


def clear() -> int:
    """Remove every object of the cache, but nothing that a process is writing; how many went. Raises OSError."""
    return evict(-1)
