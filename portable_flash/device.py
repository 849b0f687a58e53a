"""Where a call runs: devices as data, found through torch or named from the catalogue in tuning_db."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .database import DeviceRecord

_SYSFS = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Device:
    """Facts about one GPU (or the CPU) that kernels are chosen by. Sizes in bytes."""

    slug: str  # name of its file in tuning_db, or its arch ("sm_90") when no file matches
    vendor: str  # "nvidia", "amd" or "cpu"
    arch: str  # "sm_90", "gfx942", "cpu"
    name: str  # what the driver calls it
    compute_units: int  # NVIDIA SMs, AMD CUs (RDNA: work-group processors as the driver counts them)
    wave_size: int = 32
    shared_memory_bytes: int = 0  # most that one program can use (AMD: LDS)
    registers_per_thread: int = 255
    l2_bytes: int = 0  # last cache before HBM that all units share
    memory_bytes: int = 0
    xcds: int = 1  # chiplets that workgroups are dealt to in turn, each with its own L2
    pci_id: str | None = None  # "10de:2335"
    index: int | None = None  # torch device index; None for the CPU and for catalogue entries

    @property
    def has_tma(self) -> bool:
        """The tensor memory accelerator (cp.async.bulk.tensor), NVIDIA compute capability 9.0 and newer."""
        return self.vendor == "nvidia" and int(self.arch.removeprefix("sm_")) >= 90

    @property
    def has_wgmma(self) -> bool:
        """Warpgroup matrix instructions, compute capability 9.0 only."""
        return self.arch == "sm_90"

    @property
    def is_cdna(self) -> bool:
        """AMD data-centre parts: wave64, MFMA, accumulation registers."""
        return self.vendor == "amd" and self.arch in ("gfx908", "gfx90a", "gfx942", "gfx950")

    @property
    def present(self) -> bool:
        return self.vendor == "cpu" or self.index is not None


@dataclass(frozen=True, slots=True)
class _ArchFacts:
    """What neither torch nor a file tells."""

    registers_per_thread: int
    shared_memory_bytes: int
    units_per_xcd: int | None = None  # None: one die


def _arch_facts(arch: str) -> _ArchFacts:
    """Defaults by arch. CDNA counts VGPRs and accumulation VGPRs together, which MFMA operands may use alike (gfx90a on)."""
    known = {
        "gfx908": _ArchFacts(512, 65536),
        "gfx90a": _ArchFacts(512, 65536),
        "gfx942": _ArchFacts(512, 65536, units_per_xcd=38),
        "gfx950": _ArchFacts(512, 163840, units_per_xcd=32),
    }
    return known.get(arch, _ArchFacts(255, 49152) if arch.startswith("sm_") else _ArchFacts(256, 65536))


# ------------------------------------------------------------------ catalogue
@functools.cache
def catalogue() -> Mapping[str, DeviceRecord]:
    """Every GPU model with a file in tuning_db, by slug. Read at the first call, not at import."""
    from importlib import resources

    from .database import DatabaseError, read

    records: dict[str, DeviceRecord] = {}
    for vendor in ("nvidia", "amd"):
        folder = resources.files(f"{__package__}.tuning_db") / vendor
        for file in sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name):
            record = read(file, f"{vendor}/{file.name}", kernels_later=True)
            if record.vendor != vendor or f"{record.slug}.yaml" != file.name:
                raise DatabaseError(f"{vendor}/{file.name}: slug {record.slug!r} and vendor {record.vendor!r} disagree with the path")
            records[record.slug] = record
    for record in records.values():
        seen, at = {record.slug}, record
        while at.inherits is not None:
            if at.inherits not in records or at.inherits in seen:
                raise DatabaseError(f"{at.file}: device.inherits {at.inherits!r}: must name another file, without a cycle")
            seen.add(at.inherits)
            at = records[at.inherits]
    return MappingProxyType(records)


def _key(name: str) -> str:
    """Aliases compare without case, spaces, dashes, underscores and the vendor's words."""
    key = re.sub(r"[\s_\-]+", "", name.lower())
    return re.sub(r"^(nvidia|amd)?(geforce|instinct|radeon)?", "", key) or key


def named(alias: str) -> Device:
    """The Device of a catalogue entry, for cross-compiling and predictions: "h200", "NVIDIA H200", "MI300X", "RX 7900 XTX".

    Raises ValueError for a name that no file has.
    """
    if _key(alias) == "cpu":
        return cpu()
    for record in catalogue().values():
        if _key(alias) in {_key(a) for a in (record.slug, *record.aliases)}:
            return _from_record(record)
    raise ValueError(f"device {alias!r}: known are cpu, {', '.join(catalogue())}")


def _from_record(record: DeviceRecord) -> Device:
    facts, limits = _arch_facts(record.arch), record.limits
    return Device(
        slug=record.slug,
        vendor=record.vendor,
        arch=record.arch,
        name=record.aliases[0] if record.aliases else record.slug,
        compute_units=record.compute_units,
        wave_size=limits["wave_size"],
        shared_memory_bytes=limits["shared_memory_bytes"],
        registers_per_thread=limits.get("registers_per_thread", facts.registers_per_thread),
        l2_bytes=limits["l2_bytes"],
        memory_bytes=int(limits["memory_gb"] * 2**30),
        xcds=limits.get("xcds", 1),
        pci_id=record.pci_ids[0] if record.pci_ids else None,
    )


def match(vendor: str, arch: str, compute_units: int, memory_bytes: int, name: str, pci_id: str | None) -> DeviceRecord | None:
    """The file of a detected GPU: its PCI id, else arch and unit count; among several, nearest memory, then name."""
    same_arch = [r for r in catalogue().values() if r.vendor == vendor and r.arch == arch]
    found = [r for r in same_arch if pci_id is not None and pci_id in r.pci_ids]
    found = found or [r for r in same_arch if r.compute_units == compute_units]

    def distance(record: DeviceRecord) -> tuple[float, bool]:
        ratio = abs(math.log(max(1, memory_bytes) / (record.limits["memory_gb"] * 2**30)))
        alias = any(_key(a) in _key(name) for a in (record.slug, *record.aliases))
        return (round(ratio, 1), not alias)  # 10%: drivers reserve some memory and vendors count it in different units

    return min(found, key=distance, default=None)


# ------------------------------------------------------------------ detection
@functools.cache
def cpu() -> Device:
    return Device(slug="cpu", vendor="cpu", arch="cpu", name="CPU", compute_units=os.cpu_count() or 1)


def detect(device: torch.device | str | int) -> Device:
    """Facts about a torch device, cached by index. Raises ValueError for a type other than "cpu" and "cuda" (ROCm's is "cuda" too)."""
    if not isinstance(device, torch.device):
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        return _detect(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return cpu()
    raise ValueError(f"device type {device.type!r}: allowed are 'cpu' and 'cuda'")


def all_devices() -> tuple[Device, ...]:
    """Every GPU that torch sees, then the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (*(_detect(index) for index in range(count)), cpu())


@functools.cache
def _detect(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    vendor = "amd" if amd else "nvidia"
    arch = properties.gcnArchName.split(":")[0] if amd else f"sm_{properties.major}{properties.minor}"
    units, memory = properties.multi_processor_count, properties.total_memory
    pci_id = _pci_id(properties)
    record = match(vendor, arch, units, memory, properties.name, pci_id)
    facts = _arch_facts(arch)
    known = record.limits if record else {}
    # ROCm leaves some of these 0, and its L2 is that of one chiplet without the Infinity Cache behind it
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(properties, "shared_memory_per_block", 0)
    l2 = getattr(properties, "L2_cache_size", 0)
    if amd:
        shared, l2 = known.get("shared_memory_bytes") or shared, known.get("l2_bytes") or l2
    return Device(
        slug=record.slug if record else arch,
        vendor=vendor,
        arch=arch,
        name=properties.name,
        compute_units=units,
        wave_size=getattr(properties, "warp_size", None) or known.get("wave_size", 32),
        shared_memory_bytes=shared or facts.shared_memory_bytes,
        registers_per_thread=known.get("registers_per_thread", facts.registers_per_thread),
        l2_bytes=l2,
        memory_bytes=memory,
        xcds=_xcds(record, facts, units),
        pci_id=pci_id,
        index=index,
    )


def _xcds(record: DeviceRecord | None, facts: _ArchFacts, units: int) -> int:
    """A partition (AMD CPX, DPX) shows a share of the chiplets, so the count scales with the units that are visible."""
    if record is not None:
        return max(1, round(record.limits.get("xcds", 1) * units / record.compute_units))
    return max(1, math.ceil(units / facts.units_per_xcd)) if facts.units_per_xcd else 1


def _pci_id(properties: Any) -> str | None:
    """vendor:device from sysfs; None where torch does not tell the address or sysfs is not readable (containers, Windows)."""
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return None
    folder = _SYSFS / f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        vendor, device = ((folder / name).read_text().strip().removeprefix("0x").lower() for name in ("vendor", "device"))
    except (OSError, UnicodeDecodeError):
        return None
    return f"{vendor}:{device}" if vendor in ("10de", "1002") else None
