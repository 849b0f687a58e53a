"""The vendors' management libraries: NVML through nvidia-ml-py, AMD SMI through amdsmi. Both are optional.

A GPU is found by its PCI address or UUID, never by its index: torch counts what CUDA_VISIBLE_DEVICES and the like leave
visible, the libraries count what the machine has.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..device import Device


AMD_WAIT_S = 30.0
_AMD_IN_USE = threading.Lock()  # AMD SMI is closed for all of a process at once, NVML counts its users


class Unread(Exception):
    """What was asked for cannot be read; the text says why."""


@dataclass(frozen=True)
class Opened:
    """A library in use. gpu: its handle of the whole card; part: NVML's handle of the MIG instance that torch sees, if it is one."""

    library: Any
    gpu: Any
    part: Any = None
    is_part: bool = False  # the card is divided (MIG) even if the instance was not found


def attempt(read: Callable[[], Any]) -> Any:
    """What read() returns. Raises Unread for whatever it raises: each library has errors of its own, and versions lack functions."""
    try:
        value = read()
    except Unread:
        raise
    except AttributeError as error:
        raise Unread(f"this version of the library does not have it ({error})") from error
    except Exception as error:
        raise Unread(text_of(error)) from error
    if value is None or value == "N/A":  # AMD SMI's word for what a GPU does not tell
        raise Unread("the GPU does not tell")
    return value


def text_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def opened(device: Device) -> Iterator[Opened]:
    """The library that knows this GPU, initialised, and its handles. Raises Unread."""
    if device.index is None:
        raise Unread("the CPU has no management library")
    properties = attempt(lambda: torch.cuda.get_device_properties(device.index))
    library, close = _nvml() if device.vendor == "nvidia" else _amdsmi()
    try:
        yield (_nvidia if device.vendor == "nvidia" else _amd)(library, properties)
    finally:
        with contextlib.suppress(Exception):  # what was read is no worse for a library that does not close
            close()


# ------------------------------------------------------------------ NVIDIA
def _nvml() -> tuple[Any, Callable[[], Any]]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise Unread("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from error
    try:
        nvml.nvmlInit()
    except Exception as error:
        raise Unread(f"NVML does not start: {text_of(error)}") from error
    return nvml, nvml.nvmlShutdown


def nvidia_driver() -> str:
    """Of the host; needs no GPU context. Raises Unread."""
    nvml, close = _nvml()
    try:
        return attempt(nvml.nvmlSystemGetDriverVersion)
    finally:
        close()


def _nvidia(nvml: Any, properties: Any) -> Opened:
    address, uuid = pci_address(properties), uuid_of(properties)
    try:
        if address is not None:
            gpu = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        elif uuid is not None:  # torch before 2.8 does not tell the address
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        else:
            raise Unread("torch tells neither PCI address nor UUID of this GPU")
    except nvml.NVMLError as error:
        raise Unread(f"NVML does not know the GPU that torch calls {address or uuid}: {text_of(error)}") from error
    divided = _is(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0], nvml.NVML_DEVICE_MIG_ENABLE)
    return Opened(nvml, gpu, _mig_instance(nvml, gpu, uuid) if divided else None, divided)


def _is(read: Callable[[], Any], value: Any) -> bool:
    try:
        return attempt(read) == value
    except Unread:
        return False


def _mig_instance(nvml: Any, gpu: Any, uuid: str | None) -> Any:
    """The instance that torch sees: by UUID, else as CUDA_VISIBLE_DEVICES names it, else the only one. None when in doubt."""
    found: dict[str, Any] = {}
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(nvml.NVMLError):  # places without an instance
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
                found[nvml.nvmlDeviceGetUUID(handle)] = handle
    except nvml.NVMLError:
        return None
    asked = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = [f"MIG-{uuid}", *(asked if len(asked) == 1 else [])]
    only = next(iter(found.values())) if len(found) == 1 else None
    return next((found[name] for name in names if name in found), only)


# ------------------------------------------------------------------ AMD
def _amdsmi() -> tuple[Any, Callable[[], Any]]:
    if not _AMD_IN_USE.acquire(timeout=AMD_WAIT_S):
        raise Unread(f"another reading of AMD SMI in this process has not ended for {AMD_WAIT_S:.0f} s")
    try:
        return _start_amdsmi()
    except BaseException:
        _AMD_IN_USE.release()
        raise


def _start_amdsmi() -> tuple[Any, Callable[[], Any]]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the module prints when it finds no library
            smi = importlib.import_module("amdsmi")
    except Exception as error:  # an import without the library ends in whatever its first look-up raises
        raise Unread(f"amdsmi cannot be imported ({type(error).__name__}: {text_of(error)}); it comes with ROCm") from error
    try:
        smi.amdsmi_init()
    except Exception as error:
        raise Unread(f"AMD SMI does not start: {text_of(error)}") from error

    def close() -> None:
        try:
            smi.amdsmi_shut_down()
        finally:
            _AMD_IN_USE.release()

    return smi, close


def amd_driver() -> str:
    """Of the host. Raises Unread."""
    smi, close = _amdsmi()
    try:
        handles = attempt(smi.amdsmi_get_processor_handles)
        if not handles:
            raise Unread("AMD SMI sees no GPU")
        return attempt(lambda: smi.amdsmi_get_gpu_driver_info(handles[0])["driver_version"])
    finally:
        close()


def _amd(smi: Any, properties: Any) -> Opened:
    """A partition's handle if AMD SMI tells it apart, else the first of its card, which has the sensors."""
    address = pci_address(properties)
    if address is None:
        raise Unread("torch does not tell the PCI address of this GPU")
    card = address.rpartition(".")[0]
    handles = []
    for handle in attempt(smi.amdsmi_get_processor_handles):
        with contextlib.suppress(Unread):
            if attempt(lambda one=handle: smi.amdsmi_get_gpu_device_bdf(one)).lower().rpartition(".")[0] == card:
                handles.append(handle)
    if not handles:
        raise Unread(f"AMD SMI does not know the GPU at {address}")
    return Opened(smi, handles[0], None, len(handles) > 1)


# ------------------------------------------------------------------ what torch tells
def pci_address(properties: Any) -> str | None:
    """domain:bus:device.function; the function is always 0, torch does not tell it. None from torch before 2.8."""
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def uuid_of(properties: Any) -> str | None:
    """Without the prefix GPU- or MIG-. ROCm's is text in the place of the 16 bytes; None where torch does not tell it."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None or not str(uuid).strip("0-"):
        return None
    text = str(uuid)
    with contextlib.suppress(ValueError):
        letters = bytes.fromhex(text.replace("-", "")).decode("ascii")
        int(letters, 16)
        return letters
    return text
