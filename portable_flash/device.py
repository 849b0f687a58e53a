"""Where a call runs: devices as data, found through torch or named from the catalogue in tuning_db."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """Facts about one GPU (or the CPU) that kernels are chosen by. Sizes in bytes."""

    slug: str  # name of its file in tuning_db, or a made-up one ("sm_90") when no file matches
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
    def present(self) -> bool:
        return self.vendor == "cpu" or self.index is not None
