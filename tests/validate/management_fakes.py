"""A machine with GPUs but without their drivers: torch's properties, NVML behind the real pynvml's names, and an AMD SMI."""

from __future__ import annotations

import enum
import types
from types import SimpleNamespace

import pynvml
import torch

from portable_flash.device import Device

H200 = Device(
    slug="h200", vendor="nvidia", arch="sm_90", name="NVIDIA H200", compute_units=132, shared_memory_bytes=232448, l2_bytes=60 << 20,
    memory_bytes=141 << 30, pci_id="10de:2335", index=0,
)  # fmt: skip
MI300X = Device(
    slug="mi300x", vendor="amd", arch="gfx942", name="AMD Instinct MI300X", compute_units=304, wave_size=64, shared_memory_bytes=65536,
    l2_bytes=256 << 20, memory_bytes=192 << 30, pci_id="1002:74a1", index=0,
)  # fmt: skip
UUIDS = ("11111111-2222-3333-4444-555555555555", "99999999-8888-7777-6666-555555555555")
MIG_UUID = "abcdef01-2345-6789-abcd-ef0123456789"


def properties(bus: int = 0x18, uuid: str | None = UUIDS[0], address: bool = True, **more) -> SimpleNamespace:
    where = {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0} if address else {}
    return SimpleNamespace(uuid=uuid, **where, **more)


def torch_sees(monkeypatch, *found: SimpleNamespace) -> None:
    """These GPUs, in torch's order."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])


class Nvml:
    """State of one card that a test changes. values: what calls return; errors: NVML error codes that they raise instead."""

    def __init__(self, address: str = "0000:18:00.0", uuid: str = UUIDS[0]):
        self.address, self.uuid = address, uuid
        self.mig: list[tuple[str, str] | None] = []  # (uuid, name) of instances; None is an empty place
        self.reasons = 0
        self.thermal_ns = self.power_ns = 0
        self.ecc: dict[tuple[int, int], int] = {}
        self.ecc_on = True
        self.rows = (0, 0, 0, 0)
        self.retired: dict[int, list[int]] = {}
        self.retirement_pending = 0
        self.temperature, self.clock, self.watts = 40, 1980, 120_000
        self.errors: dict[str, int] = {}

    def check(self, name: str) -> None:
        if name in self.errors:
            raise pynvml.NVMLError(self.errors[name])


def nvml_module(*cards: Nvml, broken: int | None = None, without: tuple[str, ...] = ()) -> types.ModuleType:
    """Like pynvml with these cards. broken: what nvmlInit raises; without: names that this version lacks."""
    module = types.ModuleType("pynvml")
    for name in dir(pynvml):  # constants and errors are the real ones
        if name.startswith(("NVML", "nvmlClocks")):
            setattr(module, name, getattr(pynvml, name))
    module.open = 0

    def init() -> None:
        if broken is not None:
            raise pynvml.NVMLError(broken)
        module.open += 1

    def shutdown() -> None:
        module.open -= 1

    def by(attribute: str):
        def find(value: bytes) -> Nvml:
            for card in cards:
                if getattr(card, attribute).encode() == value.removeprefix(b"GPU-"):
                    return card
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

        return find

    def mig_handle(card: Nvml, index: int) -> tuple[str, str]:
        if card.mig[index] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.mig[index]

    def mig_mode(card: Nvml) -> list[int]:
        card.check("nvmlDeviceGetMigMode")
        mode = pynvml.NVML_DEVICE_MIG_ENABLE if card.mig else pynvml.NVML_DEVICE_MIG_DISABLE
        return [mode, mode]

    def ecc(card: Nvml, kind: int, since: int) -> int:
        if not card.ecc_on:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return card.ecc.get((kind, since), 0)

    def fields(card: Nvml, ids: list[int]) -> list[SimpleNamespace]:
        assert ids == [pynvml.NVML_FI_DEV_MEMORY_TEMP]
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=card.temperature + 5))]

    def violation(card: Nvml, policy: int) -> SimpleNamespace:
        return SimpleNamespace(violationTime=card.thermal_ns if policy == pynvml.NVML_PERF_POLICY_THERMAL else card.power_ns)

    calls = {
        "nvmlDeviceGetClockInfo": lambda c, kind: c.clock if kind == pynvml.NVML_CLOCK_SM else 3201,
        "nvmlDeviceGetMaxClockInfo": lambda c, kind: 1980,
        "nvmlDeviceGetTemperature": lambda c, sensor: c.temperature,
        "nvmlDeviceGetTemperatureThreshold": lambda c, which: 87,
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetPowerUsage": lambda c: c.watts,
        "nvmlDeviceGetEnforcedPowerLimit": lambda c: 700_000,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda c: c.reasons,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda c: c.reasons,
        "nvmlDeviceGetViolationStatus": violation,
        "nvmlDeviceGetTotalEccErrors": ecc,
        "nvmlDeviceGetEccMode": lambda c: [int(c.ecc_on), int(c.ecc_on)],
        "nvmlDeviceGetRemappedRows": lambda c: c.rows,
        "nvmlDeviceGetRetiredPages": lambda c, cause: c.retired.get(cause, []),
        "nvmlDeviceGetRetiredPagesPendingStatus": lambda c: c.retirement_pending,
        "nvmlDeviceGetSerial": lambda c: "1650000000001",
        "nvmlDeviceGetPciInfo": lambda c: SimpleNamespace(busId=f"0000{c.address.upper()}"),
        "nvmlDeviceGetVbiosVersion": lambda c: "96.00.A5.00.01",
    }

    def checked(name: str, call):
        assert hasattr(pynvml, name), f"pynvml has no {name}"

        def checking(card: Nvml, *arguments):
            card.check(name)
            return call(card, *arguments)

        return checking

    for name, call in calls.items():
        setattr(module, name, checked(name, call))
    module.nvmlInit, module.nvmlShutdown = init, shutdown
    module.nvmlSystemGetDriverVersion = lambda: "580.159.04"
    module.nvmlDeviceGetHandleByPciBusId, module.nvmlDeviceGetHandleByUUID = by("address"), by("uuid")
    module.nvmlDeviceGetMigMode, module.nvmlDeviceGetMaxMigDeviceCount = mig_mode, lambda card: len(card.mig)
    module.nvmlDeviceGetMigDeviceHandleByIndex = mig_handle
    module.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle.uuid}" if isinstance(handle, Nvml) else f"MIG-{handle[0]}"
    module.nvmlDeviceGetName = lambda handle: handle[1]
    for name in without:
        delattr(module, name)
    return module


class Amd:
    """State of one AMD processor that a test changes; `missing`: names of calls that raise as an older library or GPU does."""

    def __init__(self, bdf: str = "0000:18:00.0"):
        self.bdf = bdf
        self.ecc = {"correctable_count": 0, "uncorrectable_count": 0, "deferred_count": 0}
        self.pages: list[dict] | str = []
        self.acc = {"acc_counter": 1000, "acc_ppt_pwr": 10}
        self.acc |= dict.fromkeys(("acc_prochot_thrm", "acc_socket_thrm", "acc_vr_thrm", "acc_hbm_thrm"), 0)
        self.active: dict[str, bool | str] = {}
        self.throttle_status: bool | str = "N/A"
        self.hotspot = 55
        self.missing: set[str] = set()


class AmdSmiLibraryException(Exception):
    """Named as amdsmi's, with its text on two lines."""


def amdsmi_module(*processors: Amd, clock_name: str = "clk") -> types.ModuleType:
    module = types.ModuleType("amdsmi")
    module.open = 0
    module.AmdSmiClkType = enum.IntEnum("AmdSmiClkType", {"GFX": 0, "MEM": 4})
    module.AmdSmiTemperatureType = enum.IntEnum("AmdSmiTemperatureType", {"HOTSPOT": 1, "VRAM": 2})
    module.AmdSmiTemperatureMetric = enum.IntEnum("AmdSmiTemperatureMetric", {"CURRENT": 0, "CRITICAL": 5})
    module.AmdSmiMemoryPageStatus = enum.IntEnum("AmdSmiMemoryPageStatus", {"RESERVED": 0, "PENDING": 1, "UNRESERVABLE": 2})

    def temperature(one: Amd, place, metric) -> int:
        if metric == module.AmdSmiTemperatureMetric.CRITICAL:
            return 105
        return one.hotspot if place == module.AmdSmiTemperatureType.HOTSPOT else 40

    def violations(one: Amd) -> dict:
        names = [name.replace("acc_", "active_") for name in one.acc if name != "acc_counter"]
        return one.acc | {name: one.active.get(name, False) for name in names}

    calls = {
        "amdsmi_get_gpu_device_bdf": lambda one: one.bdf,
        "amdsmi_get_gpu_device_uuid": lambda one: "a4ff74a1-0000-1000-8012-345678abcdef",
        "amdsmi_get_gpu_board_info": lambda one: {"product_serial": "692251001124"},
        "amdsmi_get_gpu_vbios_info": lambda one: {"version": "022.040.003.043.000001"},
        "amdsmi_get_gpu_compute_partition": lambda one: "SPX",
        "amdsmi_get_gpu_driver_info": lambda one: {"driver_version": "6.16.6"},
        "amdsmi_get_clock_info": lambda one, kind: {clock_name: 2100 if kind == 0 else 1300, "max_clk": 2100},
        "amdsmi_get_temp_metric": temperature,
        "amdsmi_get_power_info": lambda one: {"current_socket_power": 300, "average_socket_power": "N/A", "power_limit": 750_000_000},
        "amdsmi_get_violation_status": violations,
        "amdsmi_get_gpu_metrics_info": lambda one: {"throttle_status": one.throttle_status},
        "amdsmi_get_gpu_total_ecc_count": lambda one: dict(one.ecc),
        "amdsmi_get_gpu_bad_page_info": lambda one: one.pages,
    }

    def checked(name: str, call):
        def checking(one: Amd, *arguments):
            if name in one.missing:
                raise AmdSmiLibraryException("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
            return call(one, *arguments)

        return checking

    for name, call in calls.items():
        setattr(module, name, checked(name, call))

    def init() -> None:
        module.open += 1

    def shut_down() -> None:
        module.open -= 1

    module.amdsmi_init, module.amdsmi_shut_down = init, shut_down
    module.amdsmi_get_processor_handles = lambda: list(processors)
    return module
