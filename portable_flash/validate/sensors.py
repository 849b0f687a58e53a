"""The signals of a GPU, by name: what each vendor's management library tells. Every one is read on its own.

Names that both vendors have mean the same. Counters count since the driver was loaded ("lifetime": since the board was made),
so that it is their growth during a run that says something about the run. Background: NVML reference, "Device Queries" and
"NvmlClocksEventReasons"; NVIDIA GPU memory error management; AMD SMI documentation, "GPU violations".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .management import Opened, Unread, attempt

Sensor = tuple[str, str, Callable[[], Any]]  # name, unit, how to read it
MILLISECOND_NS = 1e-6
NO_XID = "NVML tells XIDs only to a process that listens when they occur: see the kernel's log"
COUNTERS = "errors"  # unit of counters of memory errors
SHARE = "samples"  # unit of AMD's counters of throttling: the firmware's samples in which a limit held
THROTTLED = "throttled"  # of an AMD GPU that does not tell why
NONE = "none"  # no reason for throttling
SAMPLES = "throttle_samples"  # all samples, for the share

# names of NVML's bits, without the prefix that changed from nvmlClocksThrottleReason to nvmlClocksEventReason
REASONS = {
    "GpuIdle": "idle", "ApplicationsClocksSetting": "application clocks", "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown",
    "SyncBoost": "sync boost", "SwThermalSlowdown": "software thermal slowdown", "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "hardware power brake", "DisplayClockSetting": "display clocks",
    "BoardLimit": "board limit", "Reliability": "reliability limit",
}  # fmt: skip
VIOLATIONS = {  # AMD's accumulated counters
    "processor hot": "acc_prochot_thrm", "socket thermal": "acc_socket_thrm", "regulator thermal": "acc_vr_thrm",
    "memory thermal": "acc_hbm_thrm", "power cap": "acc_ppt_pwr",
}  # fmt: skip
THROTTLE_SAMPLES = {label: f"throttle_{label.replace(' ', '_')}" for label in VIOLATIONS}


def sensors(opened: Opened, vendor: str) -> tuple[Sensor, ...]:
    return nvidia(opened) if vendor == "nvidia" else amd(opened)


# ------------------------------------------------------------------ NVIDIA
def nvidia(opened: Opened) -> tuple[Sensor, ...]:
    n, gpu = opened.library, opened.gpu
    thermal, power = (lambda p=policy: _violation_ms(n, gpu, p) for policy in ("NVML_PERF_POLICY_THERMAL", "NVML_PERF_POLICY_POWER"))
    return (
        ("sm_clock", "MHz", lambda: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM)),
        ("sm_clock_max", "MHz", lambda: n.nvmlDeviceGetMaxClockInfo(gpu, n.NVML_CLOCK_SM)),
        ("memory_clock", "MHz", lambda: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM)),
        ("temperature", "°C", lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU)),
        ("temperature_slowdown", "°C", lambda: n.nvmlDeviceGetTemperatureThreshold(gpu, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)),
        ("memory_temperature", "°C", lambda: _field(n, gpu, "NVML_FI_DEV_MEMORY_TEMP")),
        ("power", "W", lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1000),
        ("power_limit", "W", lambda: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
        ("throttle_reasons", "", lambda: _reasons(n, gpu)),
        ("throttle_thermal", "ms", thermal),
        ("throttle_power", "ms", power),
        ("ecc_corrected", COUNTERS, lambda: _ecc(n, gpu, "CORRECTED", "VOLATILE")),
        ("ecc_uncorrected", COUNTERS, lambda: _ecc(n, gpu, "UNCORRECTED", "VOLATILE")),
        ("ecc_corrected_lifetime", COUNTERS, lambda: _ecc(n, gpu, "CORRECTED", "AGGREGATE")),
        ("ecc_uncorrected_lifetime", COUNTERS, lambda: _ecc(n, gpu, "UNCORRECTED", "AGGREGATE")),
        *_repairs(n, gpu),
        ("xid", "", _xid),
    )


def _violation_ms(n: Any, gpu: Any, policy: str) -> float:
    """How long this limit has held the clocks down."""
    return n.nvmlDeviceGetViolationStatus(gpu, getattr(n, policy)).violationTime * MILLISECOND_NS


def _field(n: Any, gpu: Any, name: str) -> int:
    value = n.nvmlDeviceGetFieldValues(gpu, [getattr(n, name)])[0]
    if value.nvmlReturn != n.NVML_SUCCESS:
        raise n.NVMLError(value.nvmlReturn)
    return value.value.uiVal


def _reasons(n: Any, gpu: Any) -> str:
    """The reasons that hold the clocks down now, by name and comma-separated."""
    read = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", None) or n.nvmlDeviceGetCurrentClocksThrottleReasons
    try:
        bits = read(gpu)
    except n.NVMLError as error:
        if error.value != n.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        bits = n.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)  # of drivers before 535
    found, left = [], bits
    for name, words in REASONS.items():
        bit = getattr(n, f"nvmlClocksThrottleReason{name}", None) or getattr(n, f"nvmlClocksEventReason{name}", 0)
        if bits & bit:
            found.append(words)
            left &= ~bit
    return ", ".join([*found, *([f"others (0x{left:x})"] if left else [])]) or NONE


def _ecc(n: Any, gpu: Any, kind: str, since: str) -> int:
    try:
        return n.nvmlDeviceGetTotalEccErrors(gpu, getattr(n, f"NVML_MEMORY_ERROR_TYPE_{kind}"), getattr(n, f"NVML_{since}_ECC"))
    except n.NVMLError as error:
        if attempt(lambda: n.nvmlDeviceGetEccMode(gpu)[0]) != n.NVML_FEATURE_ENABLED:
            raise Unread("ECC is off, so nobody counts memory errors") from error
        raise


def _repairs(n: Any, gpu: Any) -> tuple[Sensor, ...]:
    """Rows remapped in memory (Ampere and newer), else pages retired."""
    try:
        rows = attempt(lambda: n.nvmlDeviceGetRemappedRows(gpu))
    except Unread as error:
        reason = f"remapped rows: {error}"
    else:
        names = ("remapped_rows_corrected", "remapped_rows_uncorrected", "repair_pending", "repair_failed")
        units = ("rows", "rows", "", "")
        return tuple((name, unit, lambda v=value: v) for name, unit, value in zip(names, units, rows, strict=True))

    def pages(cause: str) -> int:
        try:
            return len(n.nvmlDeviceGetRetiredPages(gpu, getattr(n, f"NVML_PAGE_RETIREMENT_CAUSE_{cause}")))
        except n.NVMLError as error:
            raise Unread(f"{reason}; retired pages: {error}") from error

    def pending() -> int:
        try:
            return n.nvmlDeviceGetRetiredPagesPendingStatus(gpu)
        except n.NVMLError as error:
            raise Unread(f"{reason}; pages pending retirement: {error}") from error

    return (
        ("retired_pages_corrected", "pages", lambda: pages("MULTIPLE_SINGLE_BIT_ECC_ERRORS")),
        ("retired_pages_uncorrected", "pages", lambda: pages("DOUBLE_BIT_ECC_ERROR")),
        ("repair_pending", "", pending),
    )


def _xid() -> None:
    raise Unread(NO_XID)


# ------------------------------------------------------------------ AMD
def amd(opened: Opened) -> tuple[Sensor, ...]:
    s, gpu = opened.library, opened.gpu
    return (
        ("sm_clock", "MHz", lambda: _clock(s, gpu, "GFX", "clk", "cur_clk")),
        ("sm_clock_max", "MHz", lambda: _clock(s, gpu, "GFX", "max_clk")),
        ("memory_clock", "MHz", lambda: _clock(s, gpu, "MEM", "clk", "cur_clk")),
        ("temperature", "°C", lambda: _temperature(s, gpu, "HOTSPOT", "CURRENT")),
        ("temperature_slowdown", "°C", lambda: _temperature(s, gpu, "HOTSPOT", "CRITICAL")),
        ("memory_temperature", "°C", lambda: _temperature(s, gpu, "VRAM", "CURRENT")),
        ("power", "W", lambda: _first(s.amdsmi_get_power_info(gpu), "current_socket_power", "average_socket_power", "socket_power")),
        ("power_limit", "W", lambda: _power_limit(s, gpu)),
        ("throttle_reasons", "", lambda: _throttled(s, gpu)),
        *((name, SHARE, lambda n=VIOLATIONS[label]: _violations(s, gpu)[n]) for label, name in THROTTLE_SAMPLES.items()),
        (SAMPLES, SHARE, lambda: _violations(s, gpu)["acc_counter"]),
        ("ecc_corrected", COUNTERS, lambda: s.amdsmi_get_gpu_total_ecc_count(gpu)["correctable_count"]),
        ("ecc_uncorrected", COUNTERS, lambda: s.amdsmi_get_gpu_total_ecc_count(gpu)["uncorrectable_count"]),
        ("ecc_deferred", COUNTERS, lambda: _first(s.amdsmi_get_gpu_total_ecc_count(gpu), "deferred_count")),
        ("bad_pages", "pages", lambda: len(_bad_pages(s, gpu))),
        ("repair_pending", "", lambda: int(_any_page(s, gpu, "PENDING"))),
        ("repair_failed", "", lambda: int(_any_page(s, gpu, "UNRESERVABLE"))),
    )


def _first(values: dict[str, Any], *names: str) -> Any:
    """The first that this version of the library has and this GPU tells."""
    return next((values[name] for name in names if values.get(name) not in (None, "N/A")), None)


def _clock(s: Any, gpu: Any, kind: str, *names: str) -> Any:
    return _first(s.amdsmi_get_clock_info(gpu, getattr(s.AmdSmiClkType, kind)), *names)


def _temperature(s: Any, gpu: Any, place: str, metric: str) -> Any:
    return s.amdsmi_get_temp_metric(gpu, getattr(s.AmdSmiTemperatureType, place), getattr(s.AmdSmiTemperatureMetric, metric))


def _power_limit(s: Any, gpu: Any) -> Any:
    limit = _first(s.amdsmi_get_power_info(gpu), "power_limit")
    return limit / 1e6 if isinstance(limit, int) and limit > 100_000 else limit  # microwatts in some versions


def _violations(s: Any, gpu: Any) -> dict[str, Any]:
    return s.amdsmi_get_violation_status(gpu)


def _throttled(s: Any, gpu: Any) -> str:
    """MI300 and newer tell the limits that hold now; older GPUs only whether one does."""
    try:
        status = attempt(lambda: _violations(s, gpu))
        active = {label: status.get(name.replace("acc_", "active_")) for label, name in VIOLATIONS.items()}
        if any(value not in (None, "N/A") for value in active.values()):
            return ", ".join(label for label, value in active.items() if value is True or value == 1) or NONE
    except Unread:
        pass
    whether = attempt(lambda: s.amdsmi_get_gpu_metrics_info(gpu)["throttle_status"])
    return THROTTLED if whether else NONE


def _bad_pages(s: Any, gpu: Any) -> list[dict[str, Any]]:
    pages = s.amdsmi_get_gpu_bad_page_info(gpu)
    return pages if isinstance(pages, list) else []  # older versions answer with a text where there are none


def _any_page(s: Any, gpu: Any, status: str) -> bool:
    wanted = int(getattr(s.AmdSmiMemoryPageStatus, status))
    return any(int(page["status"]) == wanted for page in _bad_pages(s, gpu))
