"""A validation of some devices of this machine: one worker process for each, so that what one breaks costs no other its verdict.

Devices run at the same time, because a node of eight would otherwise take eight times as long. The oracle and the inputs of each
are computed on the CPU by its worker with an equal share of the cores; GPU work of one device waits for its own oracle only.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import dispatch
from ..device import Device, all_devices, detect
from ..worker import CONTINUES, HANG, Worker, WorkerError
from . import golden, identity, signals
from .checks import GROUPS, Task, agreement, speed, tasks, wanted
from .context import Context, Runner
from .inputs import MAX_SEED
from .levels import LEVELS
from .report import Check, DeviceReport, Digest, Identity, Report, Software, Used, together, verdict_of

SHUFFLED = ("accuracy", "repeatability", "agreement")  # what a soak does again and again
FAULT_HINT = "Read the device's error log (NVIDIA: Xid in dmesg; AMD: RAS, dmesg) and take it out of service if it repeats."
LISTING_TIMEOUT_S = 300.0
ENDING_S = 20.0  # in which a device's last answer arrives after an interruption
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


def context_of(runner: Runner, options: Options, facts: tuple = (None, None, None)) -> Context:
    """facts: Identity, Software and driver, for the keys of digests."""
    known = dict(zip(("identity", "software", "driver"), facts, strict=True))
    folder = None if options.golden is None else Path(options.golden)
    return Context(runner, options.level, options.seed, options.small, options.hours, backend=options.backend, golden=folder, **known)


def chosen_tasks(context: Context, options: Options) -> list[Task]:
    return [task for task in tasks(context) if any(wanted(name, options.only) for name in task.ids)]


def listing(devices: Iterable[Device], options: Options) -> dict[str, list[tuple[tuple[str, ...], str]]]:
    """For each device (ids, what they ask) of every task, without running anything."""
    found = {}
    for device in devices:
        listed = chosen_tasks(context_of(Runner(device), options), options)
        found[f"{label(device)} ({device.name})"] = [(tuple(n for n in t.ids if wanted(n, options.only)), t.asks) for t in listed]
    return found


# ---------------------------------------------------------------- in the worker process
class DeviceValidator:
    """Runs the tasks of one device. Every method may hang or end the process: the caller is another one."""

    def __init__(self, index: int | None, options: Options, threads: int | None = None, facts: tuple = (None, None, None)):
        """index: of the GPU in torch's count, None for the CPU. facts: Identity, Software and driver, for the keys of digests."""
        if threads is not None:
            torch.set_num_threads(threads)
        if index is not None:
            torch.cuda.set_device(index)
        module, _, name = options.runner.partition(":")
        device = detect(torch.device("cpu") if index is None else torch.device("cuda", index))
        self.options = options
        self.context = context_of(getattr(importlib.import_module(module), name)(device), options, facts)
        self.tasks = chosen_tasks(self.context, options)

    def listed(self) -> list[tuple[str, tuple[str, ...], str]]:
        """(name, ids, what it asks) of every task."""
        return [(task.name, tuple(n for n in task.ids if wanted(n, self.options.only)), task.asks) for task in self.tasks]

    def run(self, number: int, seconds: float | None, seed: int) -> Done:
        """One task, within about `seconds`."""
        task, context = self.tasks[number], self.context
        context.seed, context.deadline = seed, None if seconds is None else time.monotonic() + seconds
        context.used, context.digests, context.inputs = {}, [], {}
        found: list[Check] = []
        began = time.monotonic()
        try:
            found += (check for check in task.run(context) if wanted(check.id, self.options.only))
            self._settle()
        except dispatch.NoBackendError as error:
            found += _rest(task, found, "inconclusive", str(error), "Install a backend for this device; see `portable-flash info`.")
        except Exception as error:
            if _out_of_memory(error):
                found += _rest(task, found, "inconclusive", str(error), "Free the device's memory and run again.")
            else:
                raise
        spent = time.monotonic() - began - sum(check.seconds for check in found)
        if found and spent > 0:
            found = [check if check.seconds else replace(check, seconds=spent / len(found)) for check in found]
        return Done(found, list(context.used.values()), context.digests, context.inputs)

    def _settle(self) -> None:
        """A fault belongs to the task that caused it; and memory goes back, for the next may need all of it."""
        if self.context.where.type == "cuda":
            torch.cuda.synchronize(self.context.where)
            torch.cuda.empty_cache()


def _rest(task, found: list[Check], status: str, detail: str, hint: str) -> list[Check]:
    """The checks that a task did not come to."""
    known = {check.id for check in found}
    return [Check(id=name.rstrip("/*"), status=status, detail=detail, hint=hint) for name in task.ids if name not in known]


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower()


# ---------------------------------------------------------------- one device, from this process
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
            check = replace(worse, seconds=known.seconds + check.seconds, data=worse.data | {"rounds": int(known.data.get("rounds", 1)) + 1})
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
    why = stop.why or ("the time of --timeout was over" if not reason else reason)
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


def label(device: Device) -> str:
    return "cpu" if device.index is None else f"gpu {device.index}"


# ---------------------------------------------------------------- all devices
def visible() -> list[Device]:
    """The GPUs that torch sees; the CPU where there is none."""
    gpus = [device for device in all_devices() if device.vendor != "cpu"]
    return gpus or [detect("cpu")]


def make_worker(device: Device, options: Options, threads: int, facts: tuple) -> Worker:
    chosen = {"index": device.index, "options": options, "threads": threads, "facts": facts}
    return Worker("portable_flash.validate.session:DeviceValidator", chosen)


def validate(
    devices: Sequence[Device] | None = None, options: Options = Options(), command: Sequence[str] = (), tell: Tell = lambda *_: None,
    worker: Callable[[Device, Options, int, tuple], Caller] = make_worker,
) -> Report:  # fmt: skip
    """Validate devices of this machine, by default every visible one, all at the same time.

    Returns the report; what goes wrong on a device is in its part. On KeyboardInterrupt the report holds what was done.
    tell(device, task, done, total) is called as tasks begin, from several threads.
    """
    started, began = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    devices = visible() if devices is None else list(devices)
    deadline = None if options.timeout_s is None else began + options.timeout_s
    software, stop = identity.software(), Stop()
    threads = max(1, cores() // max(1, len(devices)))
    facts = [(identity.identify(device), software, identity.driver(device)) for device in devices]
    workers = [worker(device, options, threads, fact) for device, fact in zip(devices, facts, strict=True)]
    reports: list[DeviceReport | None] = [None] * len(devices)
    ended: queue.Queue[int] = queue.Queue()  # not Thread.join, which an interruption leaves believing that the thread is over

    def drive(place: int) -> None:
        try:
            reports[place] = run_device(devices[place], facts[place], options, workers[place], stop, deadline, tell)
        except Exception as error:  # a fault of the validator itself is no verdict on the device
            reports[place] = DeviceReport(identity=facts[place][0], verdict="no_verdict", reason=f"{type(error).__name__}: {error}")
        ended.put(place)

    running = len(devices)
    try:
        for place in range(len(devices)):
            threading.Thread(target=drive, args=(place,), daemon=True).start()
        while running:
            with contextlib.suppress(queue.Empty):
                ended.get(timeout=0.2)
                running -= 1
    except KeyboardInterrupt:
        stop.why = "interrupted"
        stop.set()
        for one in workers:
            if isinstance(one, Worker):
                one.kill()
        with contextlib.suppress(queue.Empty):
            for _ in range(running):
                ended.get(timeout=ENDING_S)
    finally:
        for one in workers:
            one.close()
    done = [report or DeviceReport(identity=fact[0], verdict="no_verdict", reason="interrupted") for report, fact in zip(reports, facts)]
    done = [finished(report, options) for report in compared(done, options)]
    return Report(
        host=platform.node(), verdict=together(report.verdict for report in done), level=options.level, seed=options.seed,
        started=started.isoformat(timespec="seconds"), seconds=time.monotonic() - began, strict=options.strict, command=list(command),
        software=software, devices=done,
    )  # fmt: skip


def compared(reports: list[DeviceReport], options: Options) -> list[DeviceReport]:
    """With the checks that take several devices of this node, or records of earlier runs."""
    votes, speeds = agreement.compare_node(reports), speed.compare_node(reports)
    new, folder = [], Path(options.golden) if options.golden else golden.default_folder()
    for place, report in enumerate(reports):
        recorded = golden.checks(report.digests, folder, report.identity.vendor, report.identity.slug) if report.digests else []
        more = [*votes.get(place, []), *recorded, *speeds.get(place, [])]
        new.append(replace(report, checks=[*report.checks, *(check for check in more if wanted(check.id, options.only))]))
    return new


def finished(report: DeviceReport, options: Options) -> DeviceReport:
    """With its checks in the order of groups, and its verdict. What was not done leaves no room for a pass."""
    ordered = sorted(report.checks, key=lambda check: GROUPS.index(check.group) if check.group in GROUPS else len(GROUPS))
    verdict = verdict_of(ordered, options.strict)
    if verdict == "pass" and report.reason:
        verdict = "no_verdict"
    reason = report.reason
    if verdict == "no_verdict" and not reason:
        open_ = [check.id for check in ordered if check.severity == "critical" and check.status in ("inconclusive", "unread")]
        reason = f"{', '.join(open_[:3])}{' and others' if len(open_) > 3 else ''} proved nothing" if open_ else "no check could pass"
    return replace(report, checks=ordered, verdict=verdict, reason=reason)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


