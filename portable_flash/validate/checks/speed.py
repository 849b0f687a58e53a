"""Is each kernel as fast as it has been here, and as on the node's other GPUs of this model.

What is timed is what the tuner timed for the record: the same call through the same backend, back to back, on copies of the
tensors that together exceed the last cache. A backward kernel's time includes that of the delta kernel before it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ...backends import Inputs, Needs
from ...bench.suite import Case, make_inputs
from ...bench.timing import Run, Samples, interleave
from ...dispatch import NoBackendError
from ...tune.measure import NEEDS, input_sets
from .. import golden, identity
from ..context import Context, fingerprint
from ..proofs import Record, Timing, timings
from ..report import Check, DeviceReport, Status
from ..sensors import NONE
from ..signals import THERMAL_REASONS, Sampler, read
from .agreement import one_thread

RATIO = "x the recorded time, at most"
NODE_RATIO = "x the median of this model's GPUs in this node, at most"


@dataclass(frozen=True, slots=True)
class SpeedLimits:
    """Ratios of times; above `fail` a failure, above `warn` a warning.

    GPU: clocks, heat and power caps move a healthy GPU's figures: a healthy H200 at its power cap runs at 1785 of 1980 MHz, 11%
    slower. 20% is beyond that; 35% slower is a lost memory stack, link, cooling or power supply. Within a node the conditions are
    the same, so that less is enough; for a median it takes three devices. CPU: other processes share it, so that one thread is
    timed and its fastest round counts.
    """

    warn: float = 1.20
    fail: float = 1.35
    node_warn: float = 1.10
    node_fail: float = 1.25
    cpu_warn: float = 1.5
    cpu_fail: float = 2.5


LIMITS = SpeedLimits()
ROUNDS = 9, 27  # at least, at most; between them what the level's speed_seconds allow
CPU_ROUNDS = 25  # of which the fastest counts: one that nothing else had a part in
ROUND_S = 0.02  # device time of a round: some calls, as in the tuner's last rung
SAMPLE_S = 0.05  # between readings of clocks and temperature
LOWER_CAP = 0.97  # of the recorded power cap; less is named as a reason


def run(context: Context, folder: Path | None = None) -> Iterator[Check]:
    """Time the level's calls. folder: of recorded results, for the times of devices that the tuning database does not know."""
    folder = folder or context.golden or golden.default_folder()
    try:
        calls = timings(context.device, context.level, lambda p: context.runner.plan(p, context.backend), context.small)
    except NoBackendError as error:
        yield Check(id="speed/device", status="skipped", severity="info", detail=str(error))
        return
    names = [f"speed/{one.name}" for one in calls]
    try:
        known = golden.load(folder, context.device.vendor, context.device.slug)
    except golden.GoldenError as error:  # its check is in group agreement; here it is no record
        known, calls = {}, [replace(c, reason=f"{c.reason}; {error}") if c.record is None else c for c in calls]
    for name, one in zip(names, calls, strict=True):
        if context.deadline is not None and time.monotonic() > context.deadline:
            yield Check(id=name, status="skipped", severity="info", detail="the time was over")
            continue
        started = time.perf_counter()
        try:
            check = _check(context, name, one, known, rounds_of(context, len(calls)))
        except torch.cuda.OutOfMemoryError as error:
            check = Check(id=name, status="skipped", severity="info", detail=f"does not fit into the memory that is free: {error}")
        yield replace(check, seconds=time.perf_counter() - started)


# ------------------------------------------------------------------ one call
def rounds_of(context: Context, calls: int) -> int:
    if context.device.vendor == "cpu":
        return CPU_ROUNDS
    return max(ROUNDS[0], min(ROUNDS[1], int(context.settings.speed_seconds / calls / ROUND_S)))


def _check(context: Context, name: str, one: Timing, known: Mapping[str, golden.Golden], rounds: int) -> Check:
    place = _key(context, one)
    record = one.record
    if record is None and place in known and one.name in known[place].speed_us:
        record = Record(known[place].speed_us[one.name], golden.RECORDED)
    context.enter(_only(one), one.name)
    step = _step(context, one)
    step(0)  # compiles: the first call of a timing must not be hundreds of times as long as the others
    with Sampler(context.device, SAMPLE_S) as load:
        samples = _time(context, step, rounds)
        warn, fail = (LIMITS.cpu_warn, LIMITS.cpu_fail) if context.device.vendor == "cpu" else (LIMITS.warn, LIMITS.fail)
        if record is not None and _microseconds(context, samples) > warn * record.median_us:
            again = _time(context, step, rounds)  # what was in the way once is gone; a slow device is as slow again
            samples = min(samples, again, key=lambda s: _microseconds(context, s))
    measured = _microseconds(context, samples)
    data = {
        "timed": one.name, "key": place, "backend": one.plan.backend, "kernel": one.kernel, "tiling": _tiling(one),
        "measured_us": round(measured, 2), "p20_us": round(1e6 * samples.percentile(20), 2),
        "p80_us": round(1e6 * samples.percentile(80), 2), "calls": samples.calls, **load.summary(),
    }  # fmt: skip
    if record is None:
        detail = f"{measured:.1f} us; no record: {one.reason}; --record makes one"
        return Check(id=name, status="skipped", severity="info", unit=RATIO, detail=detail, data=data)
    data |= {"record_us": record.median_us, "record": record.origin}
    ratio = measured / record.median_us
    status: Status = "fail" if ratio > fail else "warn" if ratio > warn else "pass"
    return Check(
        id=name, status=status, severity="minor", measured=round(ratio, 4), limit=fail if status == "fail" else warn, unit=RATIO,
        detail=f"{measured:.1f} us, {record.origin} has {record.median_us:.1f} us",
        hint="" if status == "pass" else _hint(record, data, context), data=data,
    )  # fmt: skip


def _hint(record: Record, data: Mapping[str, object], context: Context) -> str:
    """What is known of this run that makes a GPU slow, then what to do."""
    told = []
    reasons = str(data.get("throttle_reasons") or NONE)
    if reasons != NONE:
        told.append(f"clocks were held down by {reasons}")
    now = read(context.device)
    if isinstance(clock := data.get("sm_clock_median"), float):
        top = now.number("sm_clock_max")
        told.append(f"the clock was {clock:g} MHz" + (f" of {top:g}" if top else ""))
    cap = now.number("power_limit")
    if cap is not None and record.power_cap_w and cap < LOWER_CAP * record.power_cap_w:
        told.append(f"the power cap is {cap:g} W, the record was made at {record.power_cap_w:g} W")
    if any(reason in reasons for reason in THERMAL_REASONS):
        told.append("look at the cooling")
    told.append("see that nothing else runs on the device, then compare with others of its model")
    return "; ".join(told)


def _time(context: Context, step: Callable[[int], object], rounds: int) -> Samples:
    budget = ROUND_S / 20 if context.small else ROUND_S
    with one_thread(context):  # on the CPU: threads that wait for one another on busy cores tell of the others' work
        return interleave({"call": Run(step)}, context.runner, rounds, budget)["call"]


def _microseconds(context: Context, samples: Samples) -> float:
    return 1e6 * (min(samples.seconds) if context.device.vendor == "cpu" else samples.median)


def _only(one: Timing):
    """The plan with this kernel alone, as the tuner's: its backward pass then launches no other but delta."""
    if one.kernel not in one.plan.kernels:
        return one.plan
    return replace(one.plan, kernels=MappingProxyType({one.kernel: one.plan.kernels[one.kernel]}))


def _tiling(one: Timing) -> str:
    return str(one.plan.kernels[one.kernel].tiling) if one.kernel in one.plan.kernels else ""


def _key(context: Context, one: Timing) -> str:
    who = context.identity or identity.identify(context.device)
    software = context.software or identity.software()
    driver = context.driver if context.identity is not None else identity.driver(context.device)
    kernel = one.kernel if one.kernel in one.plan.kernels else "operations"
    return golden.key(who, software, driver, fingerprint(one.plan.backend, kernel), _tiling(one), one.plan.backend)


def _step(context: Context, one: Timing) -> Callable[[int], object]:
    """A call on rotating copies of its tensors."""
    p, runner, plan = one.problem, context.runner, _only(one)
    case = Case(p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v, p.causal)
    sets = [tuple(t.detach() for t in make_inputs(case, p.dtype, context.where, seed)) for seed in range(input_sets(p, context.device))]
    calls = [(Inputs(*tensors[:3], scale=p.head_dim**-0.5), tensors[3]) for tensors in sets]
    if one.kernel == "forward":

        def step(i: int) -> object:
            with torch.no_grad():
                return runner.forward(calls[i % len(calls)][0], plan)

        return step
    with torch.no_grad():
        forwards: list[tuple[Tensor, Tensor]] = [runner.forward(inputs, one.plan) for inputs, _ in calls]
    needs = NEEDS.get(one.kernel, Needs())

    def backward(i: int) -> object:
        at = i % len(calls)
        with torch.no_grad():
            return runner.backward(calls[at][0], plan, *forwards[at], calls[at][1], None, needs)

    return backward


# ------------------------------------------------------------------ the node
def compare_node(reports: Sequence[DeviceReport]) -> dict[int, list[Check]]:
    """For each report by its place, its times against those of its model's devices in this node; empty for a device alone.

    Of three and more the slow one is known by the median; of two that differ nobody knows which is wrong, so both are warned of.
    """
    found: dict[int, list[Check]] = {place: [] for place in range(len(reports))}
    groups: dict[tuple, dict[int, float]] = defaultdict(dict)
    for place, report in enumerate(reports):
        who = report.identity
        for check in report.checks:
            microseconds = check.data.get("measured_us")
            if check.group == "speed" and isinstance(microseconds, (int, float)) and microseconds > 0 and who.vendor != "cpu":
                model = (who.vendor, who.slug, who.compute_units, who.partition)
                groups[model, check.data.get("timed"), check.data.get("tiling")][place] = float(microseconds)
    for (_, timed, _), times in groups.items():
        for place, microseconds in times.items() if len(times) > 1 else ():
            names = {p: f"GPU {reports[p].identity.index}" for p in times}
            judge = _of_two if len(times) == 2 else _of_several
            found[place].append(judge(f"speed/node/{timed}", names, place, microseconds, times))
    return found


def _of_two(name: str, names: Mapping[int, str], place: int, microseconds: float, times: Mapping[int, float]) -> Check:
    fast, slow = sorted(times, key=lambda p: times[p])
    ratio = times[slow] / times[fast]
    status: Status = "warn" if ratio > LIMITS.node_warn else "pass"
    hint = f"of two nobody knows which is out of order: compare {names[slow]} and {names[fast]} with a third of their model"
    return Check(
        id=name, status=status, severity="minor", measured=round(ratio, 4), limit=LIMITS.node_warn,
        unit="x the other GPU of this model in this node, at most", hint=hint if status == "warn" else "",
        detail=f"{names[slow]} takes {times[slow]:.1f} us, {names[fast]} {times[fast]:.1f} us",
        data={"node_us": round(microseconds, 2), "devices": 2},
    )  # fmt: skip


def _of_several(name: str, names: Mapping[int, str], place: int, microseconds: float, times: Mapping[int, float]) -> Check:
    middle = statistics.median(times.values())
    ratio = microseconds / middle
    status: Status = "fail" if ratio > LIMITS.node_fail else "warn" if ratio > LIMITS.node_warn else "pass"
    hint = f"{names[place]} is slower than its neighbours under the same load: compare their clocks, temperatures and power"
    return Check(
        id=name, status=status, severity="minor", measured=round(ratio, 4), unit=NODE_RATIO,
        limit=LIMITS.node_fail if status == "fail" else LIMITS.node_warn, hint=hint if status != "pass" else "",
        detail=f"{microseconds:.1f} us, the median of {len(times)} GPUs is {middle:.1f} us",
        data={"node_us": round(microseconds, 2), "devices": len(times)},
    )  # fmt: skip
