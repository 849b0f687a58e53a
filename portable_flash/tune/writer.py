"""The database file as text, and how results get into it: merged under a lock, checked, and put in place by one rename.

Whoever reads the file sees the old one or the new one. Entries of other keys, other kernels and `blocked` stay; the device
section stays as it was written.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import filelock
import torch

from ..database import Blocked, DatabaseError, DeviceRecord, Entry, KernelRecord, When, parse
from ..device import Device
from ..problem import Problem
from ..tiling import Tiling
from ..tuning import rule
from .merge import Cell, cells_of, compress, is_key

LOCK_TIMEOUT_S = 120.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO}  # what file systems without locks answer
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")  # that YAML reads as something else than text
COMMENT = (
    "# Made by `tune`. The first entry that matches is used. A proof's figures are of its `problem`; where the entry stands for several\n"
    "# keys, `keys` says how many, and `least_speedup` the least default_us / median_us among them, each measured on its own.\n"
    "# `default_us` is what the analytic rule's tiling took in the same rounds.\n"
)


class WriteError(OSError):
    """The database file cannot be written: names the path and why."""


@dataclass(frozen=True)
class Update:
    """What a run adds to one kernel of one backend. `space` is the hash that the entries were made for."""

    backend: str
    kernel: str
    space: str
    entries: tuple[Entry, ...] = ()  # each replaces that of the same `when`
    cells: tuple[Cell, ...] = ()  # keys, which share entries with each other and with those of the file
    blocked: tuple[Blocked, ...] = ()


# ------------------------------------------------------------------ files
def path_of(out: Path, device: Device) -> Path:
    return out / device.vendor / f"{device.slug}.yaml"


def ensure_writable(path: Path) -> None:
    """Find out before the first measurement whether the result can be kept. Raises WriteError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tune-"):
            pass
    except OSError as error:
        raise WriteError(f"{path.parent}: cannot be written ({error.strerror or error}); choose another folder with --out") from error


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock beside a file. File systems that know no locks (some NFS) get a lock file made exclusively. Raises WriteError."""
    name = path.with_name(path.name + ".lock")
    for kind in (filelock.FileLock, filelock.SoftFileLock):
        lock = kind(name, timeout=timeout_s)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise WriteError(f"{name}: another process holds this lock for more than {timeout_s:.0f} s") from error
        except (OSError, NotImplementedError) as error:
            unsupported = isinstance(error, NotImplementedError) or error.errno in _NO_LOCKS
            if unsupported and kind is filelock.FileLock:
                name = path.with_name(path.name + ".softlock")
                continue
            raise WriteError(f"{name}: cannot be locked: {error}") from error
        try:
            yield
        finally:
            lock.release()
        return


def replace_file(path: Path, text: str) -> None:
    """Atomically; on disk before this returns. Raises WriteError, and the old file stays."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from error


def update_file(
    path: Path, device: Device, shipped: str | None, updates: list[Update], measured_with: Mapping[str, Any] | None
) -> None:
    """Merge `updates` into a file, under its lock.

    shipped: text of the device's file in the catalogue, which a new file starts from so that it hides nothing of it; None
        where there is none. measured_with: versions, kept as they are when None. Raises WriteError and DatabaseError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{path.parent}: cannot be made: {error.strerror or error}") from error
    with locked(path):
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else shipped or skeleton(device)
        except (OSError, UnicodeDecodeError) as error:
            raise WriteError(f"{path}: cannot be read: {error}") from error
        new = merged_text(text, str(path), device, updates, measured_with)
        parse(new, str(path))  # what is put in place can be read
        replace_file(path, new)


# ------------------------------------------------------------------ merge
def merged_text(text: str, label: str, device: Device, updates: list[Update], measured_with: Mapping[str, Any] | None) -> str:
    """The file with the updates in it. Raises DatabaseError for a text that is no file of this device."""
    record = parse(text, label)
    if (record.vendor, record.slug) != (device.vendor, device.slug):
        raise DatabaseError(f"{label}: is of {record.vendor}/{record.slug}, the results are of {device.vendor}/{device.slug}")
    kernels = {backend: dict(by_kernel) for backend, by_kernel in record.kernels.items()}
    for update in updates:
        by_kernel = kernels.setdefault(update.backend, {})
        by_kernel[update.kernel] = merged(by_kernel.get(update.kernel), update, device)
    head = re.split(r"^(?:measured_with:|kernels:|# Made by `tune`).*", text, maxsplit=1, flags=re.MULTILINE | re.DOTALL)[0]
    return head.rstrip("\n") + "\n" + _tail(measured_with or record.measured_with, kernels)


def merged(old: KernelRecord | None, update: Update, device: Device) -> KernelRecord:
    """Same `when`: the new entry replaces the old one; keys are merged anew. Entries of an older kernel are void and go."""
    entries = old.entries if old is not None and old.space in (None, update.space) else ()
    if update.cells:
        keys = compress((*update.cells, *cells_of(entries, update.backend, update.kernel, update.cells)))
        entries = (*keys, *(e for e in entries if not is_key(e.when)))
    by_when = {entry.when: entry for entry in entries} | {entry.when: entry for entry in update.entries}
    if When() not in by_when:
        by_when = {entry.when: entry for entry in general_entries(update.backend, update.kernel, device)} | by_when
    place = {entry.when: i for i, entry in enumerate(entries)}
    ordered = sorted(by_when.values(), key=lambda entry: _order(entry.when, place))
    blocked = {_block_name(b): b for b in (*(old.blocked if old is not None else ()), *update.blocked)}
    return KernelRecord(tuple(ordered), tuple(blocked.values()), update.space)


def _block_name(blocked: Blocked) -> tuple:
    return tuple(sorted(blocked.use.items()))


def _order(when: When, place: Mapping[When, int]) -> tuple:
    """First match wins: keys' entries from small to large, then general ones as they stood, the catch-all last."""
    bound = lambda value: 1 << 62 if value is None else value
    if when == When():
        return (3,)
    if is_key(when):
        specific = (len(when.dtype), when.causal is None)  # of one dtype and mask before those of several
        return (0, bound(when.head_dim_le), bound(when.seqlen_q_le), *specific, when.dtype, bool(when.causal))
    return (1, place[when]) if when in place else (2, bound(when.head_dim_le), str(when.dtype), str(when))


def general_entries(backend: str, kernel: str, device: Device) -> list[Entry]:
    """For calls that no key stands for (packed, masked, float32): what the rule chooses, written down; the last matches everything."""
    half = ("bf16", "fp16")
    wide = lambda d, **more: When(head_dim_le=d, head_dim_v_le=d, **more)
    kinds = [(wide(d, dtype=half, mask_or_bias=m), torch.bfloat16, d, m) for m in (False, True) for d in (64, 128, 256)]
    kinds += [(wide(d, mask_or_bias=False), torch.float32, d, False) for d in (64, 128)]
    entries = []
    for when, dtype, d, masked in (*kinds, (When(), torch.float32, 256, True)):
        rows = 0 if masked else 4096
        problem = Problem(dtype, 4, 16, 16, 1024, 1024, d, d, varlen=not masked, total_q=rows, total_k=rows, mask=masked)
        entries.append(Entry(when, rule(kernel, problem, device, (), backend), {"source": "static"}))
    return entries


# ------------------------------------------------------------------ text
def skeleton(device: Device) -> str:
    """The device section of a GPU that no file of the catalogue describes."""
    ids = f'"{device.pci_id}"' if device.pci_id else ""
    gib = round(device.memory_bytes / 2**30, 1)
    return (
        f"schema: 1\ndevice:\n  slug: {device.slug}\n  vendor: {device.vendor}\n  arch: {device.arch}\n"
        f"  aliases: [{_scalar(device.name)}]\n  match: {{pci_ids: [{ids}], compute_units: {device.compute_units}}}\n"
        f"  limits: {{wave_size: {device.wave_size}, shared_memory_bytes: {device.shared_memory_bytes}, memory_gb: {gib or 1}, "
        f"l2_bytes: {max(1, device.l2_bytes)}, xcds: {device.xcds}, registers_per_thread: {device.registers_per_thread}}}\n"
        "  inherits: null\n"
    )


def _tail(measured_with: Mapping[str, Any], kernels: Mapping[str, Mapping[str, KernelRecord]]) -> str:
    lines = [f"measured_with: {_flow(measured_with)}\n"] if measured_with else []
    lines += [COMMENT, "kernels:\n"] if any(kernels.values()) else ["kernels: {}\n"]
    for backend, by_kernel in kernels.items():
        if not by_kernel:
            continue
        lines.append(f"  {backend}:\n")
        for kernel, record in by_kernel.items():
            lines.append(f"    {kernel}:\n")
            if record.space is not None:
                lines.append(f'      space: "{record.space}"\n')
            if record.entries:
                lines.append("      entries:\n")
            for entry in record.entries:
                lines.append(f"        - when: {_flow(_when(entry.when))}\n          use: {_flow(entry.use.as_dict())}\n")
                if entry.proof:
                    lines.append(f"          proof: {_flow(entry.proof)}\n")
            if record.blocked:
                lines.append("      blocked:\n")
            for blocked in record.blocked:
                issue = f", issue: {_scalar(blocked.issue)}" if blocked.issue else ""
                lines.append(f"        - {{use: {_flow(blocked.use)}, reason: {_scalar(blocked.reason)}{issue}}}\n")
            if not record.entries and not record.blocked and record.space is None:
                lines[-1] = f"    {kernel}: {{}}\n"
    return "".join(lines)


def _when(when: When) -> dict[str, Any]:
    given = {f.name: getattr(when, f.name) for f in fields(When)}
    return {name: value for name, value in given.items() if value is not None}


def _flow(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in values.items()) + "}"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_scalar(v) for v in value) + "]"
    if isinstance(value, (int, float, datetime.date)):
        return str(value)
    text = "".join(c if c.isprintable() else " " for c in str(value))
    if re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", text) and text.lower() not in _WORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def tiling_entry(when: When, tiling: Tiling, **proof: Any) -> Entry:
    """An entry with the evidence that is not None."""
    return Entry(when, tiling, {k: v for k, v in proof.items() if v is not None})
