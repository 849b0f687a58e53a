"""Which device and which software a report is about. What this machine's libraries do not tell is None, never an error."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..device import Device
from ..info import _runtime, _version
from ..tuning import triton_version
from . import management
from .management import Opened, Unread, attempt
from .report import Identity, Software

_MODULES = Path("/sys/module")
_CPU_FACTS = Path("/proc/cpuinfo")


def identify(device: Device) -> Identity:
    """Facts of torch, completed by the vendor's management library where it is installed. Never raises."""
    if device.index is None:
        return _cpu(device)
    facts: dict[str, str | None] = dict.fromkeys(("pci_address", "uuid", "serial", "partition", "vbios"))
    with contextlib.suppress(Unread):
        properties = attempt(lambda: torch.cuda.get_device_properties(device.index))
        uuid = management.uuid_of(properties)
        facts.update(pci_address=management.pci_address(properties), uuid=f"GPU-{uuid}" if uuid else None)
    with contextlib.suppress(Unread), management.opened(device) as library:
        for name, read in (_nvidia if device.vendor == "nvidia" else _amd)(library).items():
            if name == "uuid" and facts[name] and device.vendor == "amd":
                continue  # AMD SMI writes it in another form: a device keeps one name, whether the library is there or not
            with contextlib.suppress(Unread):
                facts[name] = str(attempt(read)).strip() or facts[name]
    return Identity(
        index=device.index, name=device.name, slug=device.slug, vendor=device.vendor, arch=device.arch,
        compute_units=device.compute_units, memory_bytes=device.memory_bytes, pci_id=device.pci_id, **facts,
    )  # fmt: skip


def _nvidia(opened: Opened) -> dict[str, Callable[[], Any]]:
    nvml, gpu, part = opened.library, opened.gpu, opened.part
    found: dict[str, Callable[[], Any]] = {
        "serial": lambda: nvml.nvmlDeviceGetSerial(gpu),
        "vbios": lambda: nvml.nvmlDeviceGetVbiosVersion(gpu),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(gpu if part is None else part),
        "pci_address": lambda: _address(nvml.nvmlDeviceGetPciInfo(gpu).busId),
    }
    if opened.is_part:
        found["partition"] = lambda: "MIG" if part is None else _profile(nvml.nvmlDeviceGetName(part))
    return found


def _address(bus_id: str | bytes) -> str:
    """As the kernel writes it: "00000000:18:00.0" -> "0000:18:00.0"."""
    domain, _, rest = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _profile(name: str) -> str:
    """ "NVIDIA H200 MIG 1g.18gb" -> "MIG 1g.18gb"."""
    return "MIG" + name.rpartition(" MIG")[2]


def _amd(opened: Opened) -> dict[str, Callable[[], Any]]:
    smi, gpu = opened.library, opened.gpu
    return {
        "serial": lambda: smi.amdsmi_get_gpu_board_info(gpu)["product_serial"],
        "vbios": lambda: smi.amdsmi_get_gpu_vbios_info(gpu)["version"],
        "partition": lambda: smi.amdsmi_get_gpu_compute_partition(gpu),
        "pci_address": lambda: smi.amdsmi_get_gpu_device_bdf(gpu),
        **({} if opened.is_part else {"uuid": lambda: smi.amdsmi_get_gpu_device_uuid(gpu)}),  # of the card, not of its part
    }


# ------------------------------------------------------------------ CPU
def _cpu(device: Device) -> Identity:
    """The model and which of its instructions torch uses: both decide how its sums are ordered."""
    return Identity(
        index=None, name=_cpu_model(), slug=device.slug, vendor="cpu", arch=device.arch, compute_units=device.compute_units,
        memory_bytes=_memory(), partition=torch.backends.cpu.get_cpu_capability(),
    )  # fmt: skip


@functools.cache
def _cpu_model() -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in _CPU_FACTS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _memory() -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Windows has no sysconf
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


# ------------------------------------------------------------------ software
def software() -> Software:
    """Versions on this host. The driver is that of the vendor that torch is built for; None on a host without it."""
    vendor = "amd" if torch.version.hip is not None else "nvidia" if torch.version.cuda is not None else "cpu"
    return Software(
        portable_flash=_version("portable-flash"), python=platform.python_version(), torch=torch.__version__, runtime=_runtime(),
        triton=triton_version(), hip_python=_version("hip-python"), driver=_driver(vendor), platform=platform.platform(),
    )  # fmt: skip


def driver(device: Device) -> str | None:
    """Version of the GPU's kernel driver, as the kernel tells it, else the vendor's library. None for the CPU."""
    return _driver(device.vendor)


def _driver(vendor: str) -> str | None:
    module, ask = {"nvidia": ("nvidia", management.nvidia_driver), "amd": ("amdgpu", management.amd_driver)}.get(vendor, (None, None))
    if module is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):  # first, so that hosts with and without the library agree
        if version := (_MODULES / module / "version").read_text().strip():
            return version
    if vendor == "amd" and (_MODULES / module).is_dir():  # the kernel's own driver has no version but the kernel's
        return f"kernel {platform.release()}"
    with contextlib.suppress(Unread):
        return str(ask())
    return None
