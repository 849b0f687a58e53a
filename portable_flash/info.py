"""What this machine is, as data: versions, devices, the file each one matched, and what can run on it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from . import backends
from .device import Device, all_devices, catalogue
from .tuning import SITE_VARIABLE, triton_version, user_folder


def info() -> dict[str, Any]:
    """Facts that a bug report needs, ready for JSON. Imports the backends, but not Triton unless one of them does.

    Keys: portable_flash, python, platform, torch, torch_runtime, triton, hip_python (versions, None where absent),
    user_tuning, site_tuning (paths), devices: for each the fields of Device (bytes), `file` (None where no file of
    tuning_db matches) and `backends`, name -> reason why it cannot run there or None when it can.
    """
    return {
        "portable_flash": _version("portable-flash"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_runtime": _runtime(),
        "triton": triton_version(),
        "hip_python": _version("hip-python"),
        "user_tuning": str(user_folder()),
        "site_tuning": os.environ.get(SITE_VARIABLE) or None,
        "devices": [_device(device) for device in all_devices()],
    }


def _device(device: Device) -> dict[str, Any]:
    record = catalogue().get(device.slug)
    return {
        **asdict(device),
        "file": record.file if record else None,
        "backends": {name: _unavailable(name, device) for name in backends.NAMES},
    }


def _unavailable(name: str, device: Device) -> str | None:
    try:
        return backends.load(name).unavailable(device)
    except Exception as error:  # a report of the machine must not die of one broken installation; it says so instead
        return f"failed: {type(error).__name__}: {error}"


def _runtime() -> str | None:
    """What torch was built for: "cuda 13.0", "rocm 7.1", None for a CPU build."""
    if torch.version.hip is not None:
        return f"rocm {torch.version.hip}"
    return f"cuda {torch.version.cuda}" if torch.version.cuda is not None else None


def _version(distribution: str) -> str | None:
    from importlib import metadata  # here, because importing the package must stay light

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def render(facts: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"portable_flash {facts['portable_flash'] or '(not installed)'}",
        f"  python {facts['python']}, {facts['platform']}",
        f"  torch {facts['torch']} ({facts['torch_runtime'] or 'built for the CPU only'})",
        f"  triton {facts['triton'] or 'not installed'}, hip-python {facts['hip_python'] or 'not installed'}",
        f"  tuning: user files in {facts['user_tuning']}, {_site(facts['site_tuning'])}",
    ]
    if all(device["index"] is None for device in facts["devices"]):
        why = "torch is built for the CPU only" if facts["torch_runtime"] is None else "none is visible to torch"
        lines.append(f"No GPU: {why}.")
    for device in facts["devices"]:
        lines += ["", *_render_device(device)]
    return "\n".join(lines)


def _site(place: str | None) -> str:
    if place is None:
        return f"site none ({SITE_VARIABLE} is not set)"
    return f"site {place}" + ("" if os.path.exists(place) else f" (does not exist: {SITE_VARIABLE} must name a file or a folder)")


def _render_device(device: dict[str, Any]) -> list[str]:
    if device["vendor"] == "cpu":
        lines = [f"CPU, {device['compute_units']} threads"]
    else:
        lines = [
            f"GPU {device['index']}: {device['name']} ({device['arch']}, PCI id {device['pci_id'] or 'not readable'})",
            f"  file {device['file'] or 'none: tilings come from the nearest GPU of this arch, else from the rule'}",
            f"  {device['compute_units']} compute units of {device['wave_size']} lanes, {device['memory_bytes'] / 2**30:.1f} GiB, "
            f"last cache {device['l2_bytes'] / 2**20:.0f} MiB, shared memory {device['shared_memory_bytes'] / 2**10:.0f} KiB a program"
            + (f", {device['xcds']} chiplets" if device["xcds"] > 1 else ""),
        ]
    return lines + [f"  backend {name}: {reason or 'available'}" for name, reason in device["backends"].items()]
