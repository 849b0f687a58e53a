"""A validation of some devices of this machine: one worker process for each, so that what one breaks costs no other its verdict.

Devices run at the same time, because a node of eight would otherwise take eight times as long. The oracle and the inputs of each
are computed on the CPU by its worker with an equal share of the cores; GPU work of one device waits for its own oracle only.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import dispatch
from ..device import Device, all_devices, detect
from ..worker import Worker
from . import golden, identity
from .ahead import Ahead
from .checks import GROUPS, Task, agreement, speed, tasks, wanted
from .context import Context, Runner
from .drive import Caller, Done, Options, Stop, Tell, label, run_device
from .report import Check, DeviceReport, Report, together, verdict_of

INTERRUPTED = "interrupted"
ENDING_S = 20.0  # in which a device's last answer arrives after an interruption


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
    software, threads = identity.software(), max(1, cores() // max(1, len(devices)))
    facts = [(identity.identify(device), software, identity.driver(device)) for device in devices]
    workers = [worker(device, options, threads, fact) for device, fact in zip(devices, facts, strict=True)]

    def drive(place: int, stop: Stop) -> DeviceReport:
        try:
            return run_device(devices[place], facts[place], options, workers[place], stop, deadline, tell)
        except Exception as error:  # a fault of the validator itself is no verdict on the device
            return DeviceReport(identity=facts[place][0], verdict="no_verdict", reason=f"{type(error).__name__}: {error}")

    with Ahead(devices, options, cores()) if worker is make_worker else contextlib.nullcontext():
        found = _side_by_side(drive, workers)
    missing = [DeviceReport(identity=fact[0], verdict="no_verdict", reason=INTERRUPTED) for fact in facts]
    reports = [found.get(place, nothing) for place, nothing in enumerate(missing)]
    reports = [finished(report, options) for report in compared(reports, options)]
    return Report(
        host=platform.node(), verdict=together(report.verdict for report in reports), level=options.level, seed=options.seed,
        started=started.isoformat(timespec="seconds"), seconds=time.monotonic() - began, strict=options.strict, command=list(command),
        software=software, devices=reports,
    )  # fmt: skip


def _side_by_side(drive: Callable[[int, Stop], DeviceReport], workers: Sequence[Caller]) -> dict[int, DeviceReport]:
    """drive(place, stop) for every worker, each in a thread of its own; what there is when they are done, or soon after Ctrl-C."""
    stop, found = Stop(), {}
    ended: queue.Queue[tuple[int, DeviceReport]] = queue.Queue()  # not Thread.join, which Ctrl-C leaves believing that the thread is over
    try:
        for place in range(len(workers)):
            threading.Thread(target=lambda place=place: ended.put((place, drive(place, stop))), daemon=True).start()
        while len(found) < len(workers):
            with contextlib.suppress(queue.Empty):
                found.update([ended.get(timeout=0.2)])
    except KeyboardInterrupt:
        stop.why = INTERRUPTED
        stop.set()
        for one in workers:
            if isinstance(one, Worker):
                one.kill()
        with contextlib.suppress(queue.Empty):
            while len(found) < len(workers):
                found.update([ended.get(timeout=ENDING_S)])
    finally:
        for one in workers:
            one.close()
    return found


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


