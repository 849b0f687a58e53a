"""Digests that identical devices with identical software must share: fixed inputs at pinned tilings, compared byte for byte."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType

import torch


from ...backends import KernelPlan, Plan
from ...tuning import rule
from .. import golden
from ..cases import TENSORS, Call, Case, fixed_cases, run
from ..context import Context, fingerprint
from ..inputs import sha256
from ..report import Check, DeviceReport, Digest

RUNS = 3
FIXED_SEED = 0  # whatever the seed of the run
HINT = (
    "One device computes other bits than its twins from the same numbers: suspect the hardware of the minority. Run "
    "`validate --level standard` on each device that is named, alone."
)


def tasks(context: Context) -> list:
    from . import Task

    chosen = [case for case in fixed_cases(context.sizes) if case.quick or context.level != "quick"]
    asks = "does a fixed call give one digest each time, to be compared with identical devices"
    return [Task((f"agreement/digest/{case.name}",), asks, partial(digests, case=case)) for case in chosen]


def pinned(context: Context, call: Call) -> Plan:
    """A plan whose tilings come from sizes and limits alone, so that a user's own files do not set devices apart."""
    plan = context.plan(call)
    kernels = {name: KernelPlan(rule(name, call.problem, context.device, (), plan.backend), "pinned") for name in plan.kernels}
    plan = Plan(call.problem, context.device, plan.backend, MappingProxyType(kernels))
    context.enter(plan, call.case.name)
    return plan


def digests(context: Context, case: Case) -> Iterator[Check]:
    began = time.monotonic()
    call = context.draw(case, FIXED_SEED)
    plan, there = pinned(context, call), call.on(context.where)
    with one_thread(context):
        found = [{name: sha256(tensor) for name, tensor in run(context.runner, there, plan).items()} for _ in range(RUNS)]
    key = key_of(context, plan)
    context.digests += [
        Digest(case=case.name, tensor=name, backend=plan.backend, key=key, sha256=found[0][name]) for name in TENSORS if name in found[0]
    ]
    differing = sorted({name for one in found for name in one if one[name] != found[0][name]})
    yield Check(
        id=f"agreement/digest/{case.name}", status="fail" if differing else "pass", measured=len({tuple(f.items()) for f in found}),
        limit=1, unit=f"digests of {RUNS} runs, at most", seconds=time.monotonic() - began,
        detail=f"{', '.join(differing)} differ from run to run" if differing else "", hint=HINT if differing else "",
        data={"backend": plan.backend, "key": key} | {f"{name}_sha256": found[0][name] for name in found[0]},
    )  # fmt: skip


@contextlib.contextmanager
def one_thread(context: Context) -> Iterator[None]:
    """On the CPU how a product is split follows the number of threads, and so do its roundings."""
    threads = torch.get_num_threads()
    if context.where.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def key_of(context: Context, plan: Plan) -> str:
    names = sorted(plan.kernels) or ["operations"]
    prints = " ".join(f"{name}:{fingerprint(plan.backend, name)}" for name in names)
    tilings = "; ".join(f"{name}: {plan.kernels[name].tiling}" for name in sorted(plan.kernels))
    return golden.key(context.identity, context.software, context.driver, prints, tilings, plan.backend)


def compare_node(reports: Sequence[DeviceReport]) -> dict[int, list[Check]]:
    """For each report by its place: do the devices of this node that must agree, agree. One check a case that it has digests of."""
    groups: dict[tuple[str, str], dict[int, dict[str, str]]] = defaultdict(dict)
    for place, report in enumerate(reports):
        for digest in report.digests:
            groups[digest.case, digest.key].setdefault(place, {})[digest.tensor] = digest.sha256
    found: dict[int, list[Check]] = {place: [] for place in range(len(reports))}
    for (case, _), digests_of in groups.items():
        votes = Counter(tuple(sorted(own.items())) for own in digests_of.values())
        (majority, count), *others = votes.most_common()
        tie = bool(others) and others[0][1] == count
        for place, own in digests_of.items():
            found[place].append(_vote(case, reports, place, own, digests_of, dict(majority), count, tie))
    return found


def _vote(case: str, reports, place: int, own: dict, digests_of: dict, majority: dict, count: int, tie: bool) -> Check:
    name, total = f"agreement/node/{case}", len(digests_of)
    common = dict(id=name, unit=f"of {total} identical devices agree, at least", limit=total // 2 + 1)
    with_me = sum(1 for other in digests_of.values() if other == own)
    if total == 1:
        return Check(id=name, status="skipped", detail="no other device of this model and software in this machine")
    if own == majority and not tie:
        names = [str(reports[p].identity.index) for p, other in digests_of.items() if other != majority]
        detail = f"differs on device {', '.join(names)}" if names else ""
        return Check(**common, status="pass", measured=with_me, detail=detail)
    other = next(d for d in digests_of.values() if d != own) if tie else majority
    tensors = [t for t in own if own[t] != other.get(t)]
    if tie:
        detail = f"{', '.join(tensors)}: as many devices say one thing as another, so that none is known to be right"
        return Check(**common, status="inconclusive", measured=with_me, detail=detail, hint=HINT)
    detail = f"{', '.join(tensors)}: this device disagrees with {count} of the {total} that are identical"
    return Check(**common, status="fail", measured=with_me, detail=detail, hint=HINT, data={t: own[t] for t in tensors})


