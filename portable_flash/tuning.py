"""Which tiling a kernel runs with: the look-up ladder over the tuning database, and the rule below it.

Rungs, best first: override (`with tuning(...)`), user file, site file, exact device, the files that it inherits from,
same arch with the nearest unit count, analytic rule. An entry that does not fit the device falls through to the next
rung, so that an untuned GPU runs, perhaps slower; every result says where it came from.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from . import backends
from .backends import KernelPlan
from .candidates import candidates
from .device import Device, catalogue
from .problem import Problem
from .tiling import KERNELS, Tiling, next_power_of_2

if TYPE_CHECKING:  # the reader is imported at the first look-up
    from .database import Blocked, DeviceRecord

SITE_VARIABLE = "PORTABLE_FLASH_TUNING"  # a file, or a folder laid out like tuning_db

_overrides: contextvars.ContextVar[Mapping[str, Tiling]] = contextvars.ContextVar("portable_flash_tuning", default={})


# ------------------------------------------------------------------ override
@contextlib.contextmanager
def tuning(tilings: Mapping[str, Tiling | dict] | None = None, /, **kernels: Tiling | dict) -> Iterator[None]:
    """Use these tilings inside the block: `with tuning(forward=Tiling(64, 64))`; a dict of its fields will do.

    They are used as given: the resource model is not asked, so that the compiler has the last word. Blocks nest;
    the inner one wins kernel by kernel. Raises ValueError for a kernel or a field that does not exist.
    """
    given = {**(tilings or {}), **kernels}
    for name, value in given.items():
        if name not in KERNELS:
            raise ValueError(f"tuning: kernel {name!r}: allowed are {', '.join(KERNELS)}")
        if not isinstance(value, Tiling):
            try:
                given[name] = Tiling(**value)
            except TypeError as error:
                allowed = ", ".join(f.name for f in fields(Tiling))
                raise ValueError(f"tuning: {name}={value!r}: must be a Tiling or a dict of {allowed}") from error
    token = _overrides.set({**_overrides.get(), **given})
    try:
        yield
    finally:
        _overrides.reset(token)


def override() -> tuple[tuple[str, Tiling], ...]:
    """What `tuning` blocks have set here, hashable: part of the key of whatever remembers a look-up."""
    tilings = _overrides.get()
    return tuple(sorted(tilings.items(), key=lambda item: item[0])) if tilings else ()


# ------------------------------------------------------------------ look-up
def lookup(kernel: str, problem: Problem, device: Device, space: str | None = None, backend: str = "triton") -> KernelPlan:
    """The tiling of a kernel for a problem on a device, and its source.

    Files hold tilings by backend; an override is for whichever backend runs. `space` is the backend's current
    `space_hash` of this kernel; files made for another one are skipped with a warning.
    Costs one dictionary hit once a (kernel, problem, device) has been seen. Never raises for a GPU without a file;
    a user or site file that cannot be read raises DatabaseError.
    """
    overrides = _overrides.get()
    if overrides and kernel in overrides:
        return KernelPlan(overrides[kernel], "argument")
    return _lookup(kernel, problem, device, space, backend)


@functools.lru_cache(maxsize=4096)  # bounded: a server sees ever new sequence lengths
def _lookup(kernel: str, problem: Problem, device: Device, space: str | None, backend: str) -> KernelPlan:
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r}: allowed are {', '.join(KERNELS)}")
    unfit = getattr(backends.load(backend), "unfit", Tiling.unfit)
    blocked: list[Blocked] = []
    for record, source, own in _rungs(device):
        found = record.kernels.get(backend, {}).get(kernel)
        if found is None or _void(record.file, backend, kernel, found.space, space):
            continue
        if own:
            blocked += found.blocked
        use = next((entry.use for entry in found.entries if entry.when(problem)), None)
        if use is not None and unfit(use, kernel, problem, device) is None and not any(b(use) for b in (*blocked, *found.blocked)):
            return KernelPlan(use, source + (_stale(record) if backend == "triton" else ""))
    return KernelPlan(rule(kernel, problem, device, tuple(blocked), backend), "rule")


def _rungs(device: Device) -> Iterator[tuple[DeviceRecord, str, bool]]:
    """(file, what to call it, whether it speaks of this very device), best first."""
    if device.vendor == "cpu":
        return
    for label, record in (("user file", _user_record(device.vendor, device.slug)), ("site file", _site_record(device.vendor, device.slug))):
        if record is not None:
            yield record, f"{label} {record.file}", True
    records, seen = catalogue(), {device.slug}
    if (record := records.get(device.slug)) is not None:
        yield record, f"{record.slug}.yaml", True
        while record.inherits is not None:
            record = records[record.inherits]
            seen.add(record.slug)
            yield record, f"{record.slug}.yaml (inherited by {device.slug})", False
    kin = [r for r in records.values() if r.arch == device.arch and r.slug not in seen]
    for record in sorted(kin, key=lambda r: abs(r.compute_units - device.compute_units)):
        yield record, f"{record.slug}.yaml (same arch, {record.compute_units} units for {device.compute_units})", False


def user_folder() -> Path:
    """Where `tune` writes a user's own results: <configuration folder>/portable_flash/tuning/<vendor>/<slug>.yaml."""
    if os.name == "nt":
        base = os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "portable_flash" / "tuning"


@functools.cache
def _user_record(vendor: str, slug: str) -> DeviceRecord | None:
    return _read_for(user_folder() / vendor / f"{slug}.yaml", vendor, slug)


@functools.cache
def _site_record(vendor: str, slug: str) -> DeviceRecord | None:
    place = os.environ.get(SITE_VARIABLE)
    if not place:
        return None
    from .database import DatabaseError, read

    path = Path(place)
    if path.is_dir():
        return _read_for(path / vendor / f"{slug}.yaml", vendor, slug)
    if not path.is_file():
        raise DatabaseError(f"{SITE_VARIABLE}={place}: no such file or folder")
    record = read(path)
    return record if (record.vendor, record.slug) == (vendor, slug) else None


def _read_for(path: Path, vendor: str, slug: str) -> DeviceRecord | None:
    if not path.is_file():
        return None
    from .database import DatabaseError, read

    record = read(path)
    if (record.vendor, record.slug) != (vendor, slug):
        raise DatabaseError(f"{path}: is of {record.vendor}/{record.slug}, its path says {vendor}/{slug}")
    return record


def clear_caches() -> None:
    """Forget what was read and chosen: after a user or site file changed, and between tests."""
    for cached in (_lookup, _user_record, _site_record, _void, triton_version):
        cached.cache_clear()


# ------------------------------------------------------------------ staleness
def space_hash(kernel_sources: str) -> str:
    """Identity of a kernel's tuning space: the fields of Tiling and the text of the modules that define the kernel."""
    names = ",".join(f.name for f in fields(Tiling))
    return hashlib.sha256(f"{names}\n{kernel_sources}".encode()).hexdigest()[:8]


@functools.cache  # so that each mismatch warns once
def _void(file: str, backend: str, kernel: str, recorded: str | None, current: str | None) -> bool:
    if recorded is None or current is None or recorded == current:
        return False
    what = f"tilings of {backend}'s {kernel} are of an older kernel (space {recorded}, now {current}) and are skipped; tune again"
    warnings.warn(f"{file}: {what}", stacklevel=2)
    return True


def _stale(record: DeviceRecord) -> str:
    measured, current = record.measured_with.get("triton"), triton_version()
    if measured is None or current is None or _minor(measured) == _minor(current):
        return ""
    return f" (stale: measured with triton {_minor(measured)})"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@functools.cache
def triton_version() -> str | None:
    """Version of the installed Triton without importing it; None when there is none."""
    if (module := sys.modules.get("triton")) is not None:
        return module.__version__
    from importlib import metadata  # here, because it costs more than the rest of this module

    for name in ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "triton-windows"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


# ------------------------------------------------------------------ rule
def rule(kernel: str, problem: Problem, device: Device, blocked: tuple[Blocked, ...] = (), backend: str = "triton") -> Tiling:
    """A tiling that the backend can launch, from sizes and limits alone. Never fails: the smallest tiling is the last resort.

    Launchable anywhere rather than fastest somewhere. On the CPU (Triton's interpreter) it is small, so that short
    sequences still have several blocks.
    """
    if device.vendor == "cpu":
        return Tiling(32, 32)
    module = backends.load(backend)
    unfit = getattr(module, "unfit", Tiling.unfit)
    registers_of = getattr(module, "registers", _accumulator_registers)
    settle = getattr(module, "settle", lambda tiling, *_: tiling)
    listed, room = candidates(backend, kernel, problem, device)
    limit = room * device.registers_per_thread

    def registers(tiling: Tiling) -> int:
        return registers_of(tiling, kernel, problem, device)

    def spread(tiling: Tiling) -> Tiling:  # more warps hold the same accumulators in fewer registers each
        while registers(tiling) > limit and tiling.num_warps < 8:
            wider = settle(tiling.replace(num_warps=2 * tiling.num_warps), kernel, problem, device)
            if wider == tiling:
                break
            tiling = wider
        return tiling

    tilings = [_clip(t, problem) for t in listed]
    tilings = [spread(settle(t, kernel, problem, device)) for t in (*tilings, *_shrink(tilings[-1], kernel))]
    tilings = [t for t in tilings if not any(b(t) for b in blocked)] or tilings[-1:]
    fitting = [t for t in tilings if unfit(t, kernel, problem, device) is None]
    return next((t for t in fitting if registers(t) <= limit), None) or min(reversed(fitting or tilings[-1:]), key=registers)


def _accumulator_registers(tiling: Tiling, kernel: str, problem: Problem, device: Device) -> int:
    return tiling.accumulator_registers(kernel, problem, device.wave_size)


def _clip(tiling: Tiling, problem: Problem) -> Tiling:
    """Blocks no longer than the sequences; in blocks made shorter, no warp without 16 rows."""
    m = min(tiling.block_m, max(16, next_power_of_2(problem.seqlen_q)))
    n = min(tiling.block_n, max(16, next_power_of_2(problem.seqlen_k)))
    if (m, n) == (tiling.block_m, tiling.block_n):
        return tiling
    return tiling.replace(block_m=m, block_n=n, num_warps=min(tiling.num_warps, max(1, max(m, n) // 16)))


def _shrink(tiling: Tiling, kernel: str) -> Iterator[Tiling]:
    """Ever smaller tilings: fewer stages, a shorter streamed block, a shorter stationary block, down to 16 by 16."""
    streams, stays = ("block_m", "block_n") if kernel == "backward_dkv" else ("block_n", "block_m")
    while True:
        if tiling.num_stages > 1:
            tiling = tiling.replace(num_stages=tiling.num_stages - 1)
        elif getattr(tiling, streams) > 16:
            tiling = tiling.replace(**{streams: getattr(tiling, streams) // 2})
        elif getattr(tiling, stays) > 16:
            tiling = tiling.replace(**{stays: getattr(tiling, stays) // 2})
        else:
            return
        yield tiling
