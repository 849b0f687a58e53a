"""Which machine, software and command a results file comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
from dataclasses import asdict
from typing import Any

import torch

from ..device import detect


def identity(device: torch.device, argv: list[str]) -> dict[str, Any]:
    """Machine, versions, command line and UTC time, all JSON types."""
    return {
        "device": asdict(detect(device)),
        "cpu_threads": torch.get_num_threads(),
        "versions": versions(device),
        "command": shlex.join(["portable-flash", "bench", *argv]),
        "time_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("portable-flash", "triton", "flash-attn", "flash-attn-4"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # absent packages have no version to report
    if device.type == "cuda":
        found["runtime"] = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
    return found
