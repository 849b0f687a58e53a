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

from .backends import KernelPlan
from .device import Device, catalogue
from .problem import Problem
from .tiling import KERNELS, Tiling, next_power_of_2, padded_head_dim

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
def lookup(kernel: str, problem: Problem, device: Device, space: str | None = None) -> KernelPlan:
    """The tiling of a kernel for a problem on a device, and its source.

    `space` is the backend's current `space_hash` of this kernel; files made for another one are skipped with a warning.
    Costs one dictionary hit once a (kernel, problem, device) has been seen. Never raises for a GPU without a file;
    a user or site file that cannot be read raises DatabaseError.
    """
    overrides = _overrides.get()
    if overrides and kernel in overrides:
        return KernelPlan(overrides[kernel], "argument")
    return _lookup(kernel, problem, device, space)


@functools.lru_cache(maxsize=4096)  # bounded: a server sees ever new sequence lengths
def _lookup(kernel: str, problem: Problem, device: Device, space: str | None) -> KernelPlan:
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r}: allowed are {', '.join(KERNELS)}")
    blocked: list[Blocked] = []
    for record, source, own in _rungs(device):
        found = record.kernels.get(kernel)
        if found is None or _void(record.file, kernel, found.space, space):
            continue
        if own:
            blocked += found.blocked
        use = next((entry.use for entry in found.entries if entry.when(problem)), None)
        if use is not None and use.unfit(kernel, problem, device) is None and not any(b(use) for b in (*blocked, *found.blocked)):
            return KernelPlan(use, source + _stale(record))
    return KernelPlan(rule(kernel, problem, device, tuple(blocked)), "rule")


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
def _void(file: str, kernel: str, recorded: str | None, current: str | None) -> bool:
    if recorded is None or current is None or recorded == current:
        return False
    what = f"tilings of {kernel} are of an older kernel (space {recorded}, now {current}) and are skipped; tune again"
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
# Candidates by kind of matrix unit and what else decides how many registers are left, best first. The first that fits
# with room to spare is taken. Where operands of matrix instructions come from registers, each width of a row has a list
# of its own; "masked" are calls with a mask or a bias, whose scores also need addresses and predicates.
_CANDIDATES: dict[str, dict[str, tuple[Tiling, ...]]] = {
    "warpgroup": {  # sm_90: operands come from shared memory
        "forward": (Tiling(64, 64, 4, 3, tma=True), Tiling(128, 64, 8, 2, tma=True), Tiling(64, 32, 4, 2, tma=True)),
        "backward_dkv": (Tiling(64, 64, 4, 2, tma=True), Tiling(32, 128, 8, 2, split_dkv=True, tma=True), Tiling(32, 64, 8, 2)),
        "backward_dq": (Tiling(64, 64, 4, 2, tma=True), Tiling(128, 32, 8, 3, tma=True), Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 1)),
    },
    "warpgroup pointers": {  # the same where descriptors cannot be used: addresses take registers
        "forward": (Tiling(64, 64, 4, 3), Tiling(128, 32, 8, 3), Tiling(64, 32, 4, 2)),
        "backward_dkv": (Tiling(32, 64, 4, 3), Tiling(32, 64, 4, 2, split_dkv=True), Tiling(32, 64, 8, 2)),
        "backward_dq": (Tiling(64, 64, 4, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 1)),
    },
    "float32": {  # NVIDIA at full float32 precision: no matrix unit, so that blocks and code a thread stay small
        "forward": (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1)),
        "backward_dkv": (Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1)),
        "backward_dq": (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1)),
    },
    "blackwell 64": {  # sm_100: accumulators in tensor memory, which tiles of 128 rows fill
        "forward": (Tiling(128, 128, 8, 2, tma=True), Tiling(128, 64, 8, 2, tma=True)),
        "backward_dkv": (Tiling(64, 128, 8, 2, tma=True), Tiling(64, 64, 8, 2, split_dkv=True, tma=True)),
        "backward_dq": (Tiling(128, 64, 8, 2, tma=True), Tiling(64, 64, 4, 2, tma=True)),
    },
    "blackwell 128": {
        "forward": (Tiling(128, 128, 8, 2, tma=True), Tiling(128, 64, 8, 2, tma=True)),
        "backward_dkv": (Tiling(32, 64, 8, 2, tma=True), Tiling(32, 64, 8, 1, tma=True)),
        "backward_dq": (Tiling(128, 64, 8, 2, tma=True), Tiling(64, 64, 4, 2, tma=True)),
    },
    "blackwell 256": {
        "forward": (Tiling(128, 64, 8, 2, tma=True), Tiling(64, 64, 4, 2, tma=True)),
        "backward_dkv": (Tiling(32, 64, 8, 1, split_dkv=True, tma=True),),
        "backward_dq": (Tiling(128, 32, 8, 2, tma=True), Tiling(64, 32, 8, 2, tma=True)),
    },
    "blackwell masked": {  # packed calls too, which cannot use descriptors
        "forward": (Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 1), Tiling(32, 32, 8, 1)),
        "backward_dq": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
    },
    "ampere 64": {  # sm_80: 163 KB of shared memory, operands in registers
        "forward": (Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2)),
        "backward_dkv": (Tiling(16, 64, 4, 2), Tiling(16, 64, 4, 1)),
        "backward_dq": (Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    },
    "ampere 128": {
        "forward": (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 1)),
        "backward_dq": (Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2)),
    },
    "ampere 256": {
        "forward": (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 2, split_dkv=True), Tiling(32, 64, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
    },
    "ampere masked": {
        "forward": (Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(16, 64, 8, 1), Tiling(16, 32, 8, 1)),
        "backward_dq": (Tiling(64, 32, 8, 1), Tiling(32, 32, 8, 1)),
    },
    "consumer 64": {  # sm_75, sm_86, sm_89, sm_120: 64 to 99 KB of shared memory
        "forward": (Tiling(128, 64, 8, 2), Tiling(64, 64, 4, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 1), Tiling(16, 64, 4, 1)),
        "backward_dq": (Tiling(64, 64, 8, 2), Tiling(64, 32, 4, 2)),
    },
    "consumer 128": {
        "forward": (Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 1)),
        "backward_dq": (Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 1)),
    },
    "consumer 256": {
        "forward": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
        "backward_dkv": (Tiling(32, 64, 8, 1, split_dkv=True), Tiling(16, 64, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 8, 1), Tiling(64, 16, 8, 1)),
    },
    "consumer masked": {
        "forward": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
        "backward_dkv": (Tiling(16, 64, 8, 1), Tiling(16, 32, 8, 1)),
        "backward_dq": (Tiling(32, 32, 8, 1), Tiling(32, 16, 8, 1)),
    },
    "cdna 64": {  # wave64, 64 or 160 KB of LDS, 512 registers; at most 256 leave room for two waves a SIMD, which hide loads
        "forward": (Tiling(128, 64, 4, 1, waves_per_eu=2), Tiling(64, 32, 4, 1, waves_per_eu=2)),
        "backward_dkv": (Tiling(32, 128, 4, 1), Tiling(32, 64, 4, 1)),
        "backward_dq": (Tiling(128, 64, 4, 1), Tiling(64, 32, 4, 1)),
    },
    "cdna 128": {
        "forward": (Tiling(128, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16), Tiling(64, 32, 4, 1, waves_per_eu=2)),
        "backward_dkv": (Tiling(32, 64, 4, 1, matrix_instr_nonkdim=16), Tiling(16, 64, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dq": (Tiling(128, 32, 4, 1), Tiling(64, 32, 4, 1, matrix_instr_nonkdim=16)),
    },
    "cdna 256": {
        "forward": (Tiling(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16), Tiling(32, 32, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dkv": (Tiling(32, 64, 4, 1, matrix_instr_nonkdim=16), Tiling(16, 64, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dq": (Tiling(64, 32, 4, 1, matrix_instr_nonkdim=16), Tiling(32, 32, 4, 1, matrix_instr_nonkdim=16)),
    },
    "cdna masked": {  # the predicate of a score is a pair of scalar registers, of which a wave has a hundred
        "forward": (Tiling(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16), Tiling(32, 32, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dkv": (Tiling(16, 64, 4, 1, matrix_instr_nonkdim=16), Tiling(16, 32, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dq": (Tiling(64, 16, 4, 1, matrix_instr_nonkdim=16), Tiling(32, 16, 4, 1, matrix_instr_nonkdim=16)),
    },
    "rdna4 64": {  # gfx12: wave32, 64 KB of LDS, 256 registers
        "forward": (Tiling(64, 64, 4, 1), Tiling(64, 32, 4, 1)),
        "backward_dkv": (Tiling(32, 64, 4, 1), Tiling(16, 64, 4, 1)),
        "backward_dq": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
    },
    "rdna4 128": {
        "forward": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 64, 4, 1, split_dkv=True), Tiling(16, 32, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
    },
    "rdna4 256": {
        "forward": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 8, 1, split_dkv=True), Tiling(16, 16, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(16, 16, 4, 1),),
    },
    "rdna4 masked": {
        "forward": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 4, 1, split_dkv=True), Tiling(16, 16, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
    },
    "rdna3 64": {  # gfx11: the same, but both halves of a wave hold a copy of the operands of a matrix instruction
        "forward": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 64, 4, 1, split_dkv=True), Tiling(16, 32, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
    },
    "rdna3 128": {
        "forward": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 64, 4, 1, split_dkv=True), Tiling(16, 32, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
    "rdna3 256": {
        "forward": (Tiling(32, 16, 8, 1), Tiling(16, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 8, 1, split_dkv=True), Tiling(16, 16, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(16, 16, 8, 1),),
    },
    "rdna3 masked": {
        "forward": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 4, 1, split_dkv=True), Tiling(16, 16, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
    "rdna float32": {  # no matrix instruction: a thread holds whole rows of its operands
        "forward": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 16, 8, 1),),
        "backward_dq": (Tiling(16, 16, 8, 1),),
    },
    "cdna float32": {  # matrix instructions as for 16 bits, with operands of twice the size
        "forward": (Tiling(64, 32, 4, 1, waves_per_eu=2), Tiling(32, 16, 4, 1, waves_per_eu=2)),
        "backward_dkv": (Tiling(32, 64, 4, 1), Tiling(16, 32, 4, 1), Tiling(16, 16, 4, 1)),
        "backward_dq": (Tiling(64, 32, 4, 1), Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
}
_ROOM = {"warpgroup": 0.8, "warpgroup pointers": 0.8}  # share of the registers that accumulators may take; the rest holds operands and addresses
_ROOM_DEFAULT = 0.65


def _kind(device: Device, problem: Problem) -> str:
    """Key of _CANDIDATES: family of devices, then the width of a tile's row or what else decides how many registers are left."""
    if device.vendor == "amd":
        family = "cdna" if device.wave_size == 64 else "rdna4" if device.arch.startswith("gfx12") else "rdna3"
        if problem.dtype.itemsize > 2:
            return f"{family.rstrip('34')} float32"
    elif problem.dtype.itemsize > 2:
        return "float32"
    elif device.arch == "sm_90":
        return "warpgroup pointers" if problem.varlen or problem.mask or problem.bias else "warpgroup"
    else:
        family = {"sm_80": "ampere", "sm_100": "blackwell", "sm_103": "blackwell"}.get(device.arch, "consumer")
    if problem.mask or problem.bias or (family == "blackwell" and problem.varlen):
        return f"{family} masked"
    width = padded_head_dim(max(problem.head_dim, problem.head_dim_v))
    return f"{family} {64 if width <= 64 else 128 if width <= 128 else 256}"


def rule(kernel: str, problem: Problem, device: Device, blocked: tuple[Blocked, ...] = ()) -> Tiling:
    """A tiling that can be launched, from sizes and limits alone. Never fails: the smallest tiling is the last resort.

    Launchable anywhere rather than fastest somewhere. On the CPU (Triton's interpreter) it is small, so that short
    sequences still have several blocks.
    """
    if device.vendor == "cpu":
        return Tiling(32, 32)
    kind = _kind(device, problem)
    limit = _ROOM.get(kind, _ROOM_DEFAULT) * device.registers_per_thread

    def registers(tiling: Tiling) -> int:
        return tiling.accumulator_registers(kernel, problem, device.wave_size)

    def spread(tiling: Tiling) -> Tiling:  # more warps hold the same accumulators in fewer registers each
        while registers(tiling) > limit and tiling.num_warps < 8:
            tiling = tiling.replace(num_warps=2 * tiling.num_warps)
        return tiling

    tilings = [_clip(t, problem) for t in _CANDIDATES[kind][kernel]]
    tilings = [spread(t) for t in (*tilings, *_shrink(tilings[-1], kernel))]
    tilings = [t for t in tilings if not any(b(t) for b in blocked)] or tilings[-1:]
    fitting = [t for t in tilings if t.unfit(kernel, problem, device) is None]
    return next((t for t in fitting if registers(t) <= limit), None) or (fitting or tilings)[-1]


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
