"""Health of a GPU before and after a run, and what of it speaks against the run's results.

A signal that cannot be read is "unread" with the reason, never good. Limits: any new memory error counts, because a GPU in
order has none for weeks; a power cap is how a busy GPU works and only told; heat and the hardware's own slowdown are warned of.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..device import Device
from .management import Opened, Unread, attempt, opened
from .report import Check, Severity, Signal, Status
from .sensors import NONE, SAMPLES, THROTTLE_SAMPLES, THROTTLED, sensors

UNDER_LOAD = ("sm_clock", "memory_clock", "temperature", "power", "throttle_reasons")  # cheap enough to read often
THERMAL_REASONS = (
    "software thermal slowdown", "hardware thermal slowdown", "hardware power brake",
    "processor hot", "socket thermal", "regulator thermal", "memory thermal",
)  # fmt: skip
PASSING_REASON = "hardware slowdown"  # NVML also reports it while clocks change, so that it counts only when it stays
UNREAD_HINT = "an unread signal says nothing: make it readable, or look at it in another way"
NO_RISE = "none during the run"


@dataclass(frozen=True, slots=True)
class Reading:
    """One signal. value None: unread, and `reason` says why."""

    name: str
    unit: str
    value: float | str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """All signals of a device at one moment. reason: why there are none; empty when there are."""

    vendor: str
    values: tuple[Reading, ...] = ()
    reason: str = ""

    def get(self, name: str) -> Reading:
        missing = Reading(name, "", None, self.reason or "this GPU has no such signal")
        return next((reading for reading in self.values if reading.name == name), missing)

    def number(self, name: str) -> float | None:
        value = self.get(name).value
        return None if value is None or isinstance(value, str) else float(value)


def read(device: Device) -> Readings:
    """All signals now, in some milliseconds. Never raises."""
    if device.index is None:
        return Readings(device.vendor, (), "the CPU has no such signals")
    try:
        with opened(device) as library:
            return Readings(device.vendor, tuple(_read(library, device.vendor)))
    except Unread as error:
        return Readings(device.vendor, (), str(error))
    except Exception as error:  # a broken library is this signal's problem, not that of the checks
        return Readings(device.vendor, (), f"{type(error).__name__}: {error}")


def _read(library: Opened, vendor: str, names: tuple[str, ...] | None = None) -> list[Reading]:
    found = []
    for name, unit, how in sensors(library, vendor):
        if names is not None and name not in names:
            continue
        try:
            value = attempt(how)
            found.append(Reading(name, unit, value if isinstance(value, str) else float(value)))
        except (Unread, TypeError, ValueError) as error:
            found.append(Reading(name, unit, None, str(error)))
    return found


def reasons_of(reading: Reading) -> set[str]:
    """The reasons for throttling that a reading names."""
    return set(reading.value.split(", ")) - {NONE} if isinstance(reading.value, str) else set()


# ------------------------------------------------------------------ under load
@dataclass
class Load:
    """What a Sampler has seen; empty where nothing can be read, and `reason` says why."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)  # throttle reason -> samples that had it
    count: int = 0
    reason: str = ""

    def summary(self) -> dict[str, str | int | float | bool | None | list[int]]:
        """Plain values for a check's data: lowest and median clock, highest temperature and power, reasons for throttling."""
        pick: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
            ("sm_clock_min", "sm_clock", min), ("sm_clock_median", "sm_clock", statistics.median),
            ("temperature_max", "temperature", max), ("power_max", "power", max),
        )  # fmt: skip
        found = {label: combine(self.samples[name]) for label, name, combine in pick if self.samples.get(name)}
        if self.count:
            found["throttle_reasons"] = ", ".join(sorted(self.reasons)) or NONE
        return found


class Sampler:
    """Reads clocks, temperature, power and throttle reasons in a thread while the block runs: `with Sampler(device) as load:`.

    The library is opened once. On the CPU, or without a library, nothing is read.
    """

    def __init__(self, device: Device, period_s: float = 0.2):
        self.device, self.period_s = device, period_s
        self.load = Load()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        if self.device.index is None:
            self.load.reason = "the CPU has no such signals"
        else:
            self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
            self._thread.start()
        return self.load

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)  # a driver that hangs must not hang the validation

    def _run(self) -> None:
        try:
            with opened(self.device) as library:
                while True:
                    self._take(_read(library, self.device.vendor, UNDER_LOAD))
                    if self._stop.wait(self.period_s):
                        return
        except Exception as error:  # a thread has nobody to raise to
            self.load.reason = str(error)

    def _take(self, readings: list[Reading]) -> None:
        self.load.count += 1
        for reading in readings:
            if isinstance(reading.value, float):
                self.load.samples.setdefault(reading.name, []).append(reading.value)
            else:
                for reason in reasons_of(reading):
                    self.load.reasons[reason] = self.load.reasons.get(reason, 0) + 1


# ------------------------------------------------------------------ before and after
def signals(before: Readings, after: Readings) -> list[Signal]:
    """Every signal of either reading, for the report."""
    names = dict.fromkeys(reading.name for reading in (*before.values, *after.values))
    if not names and before.vendor != "cpu":  # nothing can be read: the report says so of each
        names = dict.fromkeys(name for _, needed, _ in CHECKS for name in needed)
    found = []
    for name in names:
        first, last = before.get(name), after.get(name)
        reason = last.reason or first.reason
        found.append(Signal(name=name, unit=last.unit or first.unit, before=first.value, after=last.value, reason=reason))
    return found


def checks(before: Readings, after: Readings) -> list[Check]:
    """What the signals say of the run between the two readings. Group "signals"."""
    if before.vendor == "cpu":
        return [Check(id="signals/device", status="skipped", severity="info", detail="the CPU has no such signals")]
    found = []
    for name, needed, judge in CHECKS:
        if unread := _unread(before, after, needed):
            severity: Severity = "info" if name in ("clocks", "temperature", "power") else "minor"
            found.append(Check(id=f"signals/{name}", status="unread", severity=severity, detail=unread, hint=UNREAD_HINT))
        else:
            found.append(judge(f"signals/{name}", before, after))
    return found


def _unread(before: Readings, after: Readings, names: tuple[str, ...]) -> str:
    reasons = {name: after.get(name).reason or before.get(name).reason for name in names}
    bad = [name for name in names if before.get(name).value is None or after.get(name).value is None]
    together = dict.fromkeys(reasons[name] for name in bad)
    return "; ".join(f"{', '.join(n for n in bad if reasons[n] == reason)}: {reason}" for reason in together)


def _rise(before: Readings, after: Readings, name: str) -> float:
    """Growth of a counter; 0 where the GPU does not have it."""
    first, last = before.number(name), after.number(name)
    return 0.0 if first is None or last is None else last - first


def _show(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


# ------------------------------------------------------------------ judgements
def _corrected(identifier: str, before: Readings, after: Readings) -> Check:
    return _counter(
        identifier, before, after, "ecc_corrected", "warn", "minor",
        "a few are ordinary; if they keep coming on this GPU, run the vendor's memory test",
    )  # fmt: skip


def _uncorrected(identifier: str, before: Readings, after: Readings) -> Check:
    check = _counter(
        identifier, before, after, "ecc_uncorrected", "fail", "critical",
        "take the GPU out of use, look in the kernel's log, reset it and run the vendor's memory test",
    )  # fmt: skip
    if check.status == "pass" and (earlier := after.number("ecc_uncorrected")):
        detail = f"{earlier:g} since the driver was loaded, {NO_RISE}"
        hint = "look in the kernel's log when; a reset of the GPU retires the memory"
        return replace(check, status="warn", severity="major", detail=detail, hint=hint)
    return check


def _counter(
    identifier: str, before: Readings, after: Readings, name: str, status: Status, severity: Severity, hint: str
) -> Check:
    rise, unit = _rise(before, after, name), "new errors, at most"
    if rise < 0:
        detail = f"{name} {before.number(name):g} -> {after.number(name):g}: the driver or the GPU was reset during the run"
        return Check(id=identifier, status="warn", severity=severity, measured=rise, limit=0.0, unit=unit, detail=detail, hint="run again")
    deferred = _rise(before, after, "ecc_deferred") if name == "ecc_uncorrected" else 0.0
    rise += max(0.0, deferred)
    if rise:
        return Check(id=identifier, status=status, severity=severity, measured=rise, limit=0.0, unit=unit,
                     detail=f"{rise:g} new during the run", hint=hint)  # fmt: skip
    return Check(id=identifier, status="pass", severity=severity, measured=0.0, limit=0.0, unit=unit, detail=NO_RISE)


def _repair(identifier: str, before: Readings, after: Readings) -> Check:
    """Memory that was taken out of use: rows remapped, pages retired."""
    names = [r.name for r in after.values if r.unit in ("rows", "pages") and r.value is not None]
    grown = {name: rise for name in names if (rise := _rise(before, after, name)) > 0}
    data = {name: after.number(name) for name in names}
    if after.number("repair_failed"):
        return Check(id=identifier, status="fail", severity="major", detail="memory that failed could not be replaced", data=data,
                     hint="the GPU qualifies for replacement by the vendor's rules: take it out of use")  # fmt: skip
    if after.number("repair_pending") or grown:
        pending = ["a repair waits for a reset"] if after.number("repair_pending") else []
        detail = "; ".join([*pending, *([f"new: {_show(grown)}"] if grown else [])])
        return Check(id=identifier, status="warn", severity="major", detail=detail, data=data, hint="reset the GPU, then validate again")
    detail = f"no repair pending; {_show(data) or 'none made'}"
    return Check(id=identifier, status="pass", severity="major", detail=detail, data=data)


def _throttle(identifier: str, before: Readings, after: Readings) -> Check:
    shares = _shares(before, after)
    if shares:
        unit, measured = "% of the time under a thermal limit, at most", max(v for k, v in shares.items() if k != "power cap")
    else:
        unit, measured = "ms of thermal slowdown, at most", _rise(before, after, "throttle_thermal")
    first, last = (reasons_of(reading.get("throttle_reasons")) for reading in (before, after))
    now = first | last
    hot = now & {*THERMAL_REASONS, THROTTLED} | first & last & {PASSING_REASON}
    power = _rise(before, after, "throttle_power") or shares.get("power cap", 0.0)
    told = [f"reasons before or after: {', '.join(sorted(now)) or NONE}"]
    if power:
        told.append(f"held by the power cap for {power:.0f} {'%' if shares else 'ms'}")
    if measured > 0 or hot:
        told.insert(0, f"{measured:g} {unit.rpartition(',')[0]}")
        return Check(id=identifier, status="warn", severity="minor", measured=measured, limit=0.0, unit=unit, detail="; ".join(told),
                     hint="look at cooling and power supply: numbers of speed from this run are those of a slowed GPU")  # fmt: skip
    counter = SAMPLES if before.vendor == "amd" else "throttle_thermal"
    uncounted = _unread(before, after, (counter,)) or (f"{counter} stood still" if before.vendor == "amd" and not shares else "")
    if uncounted:
        told.append(f"what was between them is not counted: {uncounted}")
        return Check(id=identifier, status="unread", severity="minor", detail="; ".join(told), hint=UNREAD_HINT)
    return Check(id=identifier, status="pass", severity="minor", measured=measured, limit=0.0, unit=unit, detail="; ".join(told))


def _shares(before: Readings, after: Readings) -> dict[str, float]:
    """AMD: share of the firmware's samples during the run in which each limit held, in per cent; empty where it is not counted."""
    samples = _rise(before, after, SAMPLES)
    if samples <= 0:
        return {}
    return {label: 100.0 * max(0.0, _rise(before, after, name)) / samples for label, name in THROTTLE_SAMPLES.items()}


def _sensor(identifier: str, before: Readings, after: Readings, name: str, against: str = "", hint: str = "") -> Check:
    """A reading that is told, and warned of from a limit of the GPU's own on."""
    value, limit = after.number(name), after.number(against) if against else None
    reading = after.get(name)
    detail = f"{before.number(name):g} -> {value:g} {reading.unit}"
    high = bool(hint) and value is not None and limit is not None and limit > 0 and value >= limit
    return Check(
        id=identifier, status="warn" if high else "pass", severity="minor" if high else "info", measured=value, limit=limit,
        unit=reading.unit, detail=detail, hint=hint if high else "",
    )  # fmt: skip


def _clocks(identifier: str, before: Readings, after: Readings) -> Check:
    return _sensor(identifier, before, after, "sm_clock", "sm_clock_max")


def _temperature(identifier: str, before: Readings, after: Readings) -> Check:
    return _sensor(identifier, before, after, "temperature", "temperature_slowdown", "at its slowdown temperature: look at the cooling")


def _power(identifier: str, before: Readings, after: Readings) -> Check:
    return _sensor(identifier, before, after, "power", "power_limit")


CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[str, Readings, Readings], Check]], ...] = (
    ("ecc-uncorrected", ("ecc_uncorrected",), _uncorrected),
    ("ecc-corrected", ("ecc_corrected",), _corrected),
    ("memory-repair", ("repair_pending",), _repair),
    ("throttle", ("throttle_reasons",), _throttle),
    ("clocks", ("sm_clock", "memory_clock"), _clocks),
    ("temperature", ("temperature",), _temperature),
    ("power", ("power",), _power),
)
