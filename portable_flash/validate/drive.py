"""One device's run as seen from the process that asks: its tasks one by one, whatever becomes of the worker that does them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..device import Device
from ..worker import CONTINUES, HANG, WorkerError
from . import signals
from .checks import wanted
from .inputs import MAX_SEED
from .levels import LEVELS
from .report import Check, DeviceReport, Digest, Identity, Software, Used

SHUFFLED = ("accuracy", "repeatability", "agreement")  # what a soak does again and again
FAULT_HINT = "Read the device's error log (NVIDIA: Xid in dmesg; AMD: RAS, dmesg) and take it out of service if it repeats."
LISTING_TIMEOUT_S = 300.0
ORDER = ("pass", "skipped", "unread", "warn", "inconclusive", "fail")  # of statuses, worst last


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of a validation. Everything a worker process needs is in here."""

    level: str = "quick"
    seed: int = 0
    hours: float = 0.0
    strict: bool = False
    timeout_s: float | None = None
    backend: str | None = None
    only: tuple[str, ...] = ()
    small: bool = False
    runner: str = "portable_flash.validate.context:Runner"  # module:class, for tests of the validator
    golden: str | None = None  # folder of recorded digests


@dataclass(frozen=True)
class Done:
    """What one task found."""

    checks: list[Check] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)


class Caller(Protocol):
    """Asks a DeviceValidator: a Worker, or in tests the object itself."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any: ...

    def close(self) -> None: ...


def label(device: Device) -> str:
    return "cpu" if device.index is None else f"gpu {device.index}"


class Stop(threading.Event):
    """Set when the run is to end early; `why` is for the reports."""

    why = ""


Tell = Callable[[str, str, int, int], None]  # device, task, tasks done, tasks in all


def run_device(device: Device, facts: tuple[Identity, Software, str | None], options: Options, worker: Caller, stop: Stop,
               deadline: float | None, tell: Tell) -> DeviceReport:  # fmt: skip
    """Every task of the device's level, and the signals before and after."""
    began = time.monotonic()
    found: dict[str, Check] = {}
    used: dict[tuple, Used] = {}
    digests: dict[tuple, Digest] = {}
    inputs: dict[str, str] = {}
    reason, before = "", signals.read(device)
    name, left = label(device), []

    def enter(check: Check, rounds: bool) -> None:
        known = found.get(check.id)
        if rounds and known is not None:
            worse = check if ORDER.index(check.status) > ORDER.index(known.status) else known
            if worse.status == "pass" and (check.measured or 0) > (known.measured or 0):
                worse = check
            rounds_done = {"rounds": int(known.data.get("rounds", 1)) + 1}
            check = replace(worse, seconds=known.seconds + check.seconds, data=worse.data | rounds_done)
        found[check.id] = check

    try:
        listed = worker.call("listed", timeout_s=LISTING_TIMEOUT_S)
    except WorkerError as error:
        listed, reason = [], f"its worker did not start: {error.reason}"
    for turn, number in _rounds(listed, options, began):
        task, ids, _ = listed[number]
        seconds = None if deadline is None else deadline - time.monotonic()
        if stop.is_set() or (seconds is not None and seconds <= 0):
            left = _undone(listed, found)
            break
        tell(name, task, number, len(listed))
        limit = LEVELS[options.level].task_seconds
        try:
            seed = (options.seed + turn) % (MAX_SEED + 1)
            done: Done = worker.call("run", number, seconds, seed, timeout_s=limit if seconds is None else min(limit, seconds + 1.0))
        except WorkerError as error:
            ended = stop.is_set() or (error.kind == HANG and seconds is not None and seconds < limit)
            if ended:
                left = _undone(listed, found)
                break
            for check in _broken(ids, found, error):
                enter(check, False)
            if error.kind != CONTINUES:
                reason = f"{task}: {error.reason}"
                left = _undone(listed, found)
                break
            continue
        for check in done.checks:
            enter(check, turn > 0)
        used |= {(u.backend, u.kernel, u.tiling): u for u in done.used if (u.backend, u.kernel, u.tiling) not in used}
        if turn == 0:
            digests |= {(d.case, d.tensor): d for d in done.digests}
            inputs |= done.inputs
    after = signals.read(device)
    for check in signals.checks(before, after):
        if wanted(check.id, options.only):
            enter(check, False)
    why = stop.why or reason or "the time of --timeout was over"
    for name_ in left:
        found.setdefault(name_, Check(id=name_, status="skipped", detail=f"not done: {why}"))
    if left and not reason:
        reason = f"{len(left)} checks were not done: {why}"
    tell(name, "done", len(listed), len(listed))
    return DeviceReport(
        identity=facts[0], verdict="no_verdict", reason=reason, driver=facts[2], checks=list(found.values()),
        signals=signals.signals(before, after), kernels=list(used.values()), digests=list(digests.values()),
        inputs_sha256=_together(inputs), seconds=time.monotonic() - began,
    )  # fmt: skip


def _undone(listed: list, found: dict[str, Check]) -> list[str]:
    return [name for _, ids, _ in listed for name in ids if name not in found and not name.endswith("*")]


def _rounds(listed: list, options: Options, began: float) -> Iterable[tuple[int, int]]:
    """(round, task number): everything once, and in a soak the shuffled groups again with other seeds until its hours are over."""
    yield from ((0, number) for number in range(len(listed)))
    again = [n for n, (name, _, _) in enumerate(listed) if name.partition("/")[0] in SHUFFLED]
    turn = 1
    while again and options.level == "soak" and time.monotonic() - began < options.hours * 3600:
        for number in again:
            yield turn, number
            if time.monotonic() - began >= options.hours * 3600:
                return
        turn += 1


def _broken(ids: tuple[str, ...], found: dict[str, Check], error: WorkerError) -> list[Check]:
    """A task that raised, faulted or hung: its own checks say so. A hang proves nothing about the numbers, but it ends the device."""
    status = "inconclusive" if error.kind == HANG else "fail"
    what = {"hang": "hung", "fault": "faulted"}.get(error.kind, "raised an error")
    names = [name.rstrip("/*") for name in ids if name not in found]
    return [Check(id=name, status=status, detail=f"{what}: {error.reason}", hint=FAULT_HINT) for name in names]


def _together(inputs: dict[str, str]) -> str:
    """One hash of all inputs, whatever the order in which they were drawn."""
    return hashlib.sha256("".join(f"{name} {sha}\n" for name, sha in sorted(inputs.items())).encode()).hexdigest() if inputs else ""
