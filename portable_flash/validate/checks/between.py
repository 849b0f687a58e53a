"""Which backend runs here, and do all that can run agree with the oracle: compared by their errors, never bit by bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from ... import backends
from ...dispatch import NoBackendError, order
from ..cases import Case
from ..context import Context
from ..report import Check
from . import accuracy

CASES = (
    Case(name="fp16-d64-causal", dtype="fp16", causal=True, quick=True),
    Case(name="bf16-d128-gqa", head_dim=128, group=4, quick=False),
    Case(name="fp16-d64-window-bias-sinks", dtype="fp16", window=(20, 3), bias="hqk", sinks=True, quick=False),
)


def tasks(context: Context) -> list:
    from . import Task

    listed = [Task(("backends/chosen",), "does a plain call run on the backend meant for this device", chosen)]
    cases = [case for case in CASES if case.quick or context.level != "quick"]
    for one, other in pairs(context):
        asks = f"are {one} and {other} equally near to the oracle"
        listed += [Task((f"backends/{c.name}/{one}-{other}",), asks, partial(compare, case=c, names=(one, other))) for c in cases]
    return listed


def pairs(context: Context) -> list[tuple[str, str]]:
    names = [name for name in order(context.device) if backends.load(name).unavailable(context.device) is None]
    return [(one, other) for i, one in enumerate(names) for other in names[i + 1 :]]


def chosen(context: Context) -> Iterator[Check]:
    """A kernel backend that is here and fails its probe makes calls run elsewhere: right, slow, and a fault of this machine."""
    call = context.draw(CASES[0])
    expected = order(context.device)[0] if context.backend is None else context.backend
    name = "backends/chosen"
    try:
        plan = context.plan(call)
    except NoBackendError as error:
        hint = "Install a backend for this device; see `portable-flash info`."
        yield Check(id=name, status="fail" if "probe" in str(error) else "inconclusive", detail=str(error), hint=hint)
        return
    refused = "; ".join(f"{other}: {reason}" for other, reason in plan.rejected)
    broken = any("probe" in reason for _, reason in plan.rejected)
    operations = plan.backend == "cpu" and context.device.vendor != "cpu"
    status = "fail" if broken else "warn" if operations else "pass"
    hint = "" if status == "pass" else "Calls run on a slower path; the reasons say what to install or, after a failed probe, to distrust."
    yield Check(
        id=name, status=status, severity="critical" if broken else "major", hint=hint,
        detail=f"{plan.backend}; {refused}" if refused else plan.backend,
        data={"backend": plan.backend, "expected": expected},
    )  # fmt: skip


def compare(context: Context, case: Case, names: tuple[str, str]) -> Iterator[Check]:
    """Both against the oracle; the check is as bad as the worse of the two."""
    began = time.monotonic()
    call, name = context.draw(case), f"backends/{case.name}/{'-'.join(names)}"
    verdicts = {}
    for backend in names:
        try:
            plan = context.plan(call, backend)
        except NoBackendError as error:
            reason = str(error).partition("\n")[2].strip()
            status = "fail" if "probe" in reason else "skipped"
            yield Check(id=name, status=status, detail=reason, hint="See backends/chosen." if status == "fail" else "")
            return
        verdicts[backend] = accuracy.worst(accuracy.judge(call, accuracy.computed(context, call, plan)))
    worse = accuracy.worst(list(verdicts.values()))
    blamed = next(backend for backend in reversed(names) if verdicts[backend] is worse)
    ratios = {f"{backend}_ratio": accuracy.finite(verdict.ratio) for backend, verdict in verdicts.items()}
    check = accuracy.as_check(name, worse, blamed, tensor=worse.name, **ratios)
    detail = f"{blamed}, {worse.name}: {check.detail}" if check.detail else ""
    yield Check(
        id=name, status=check.status, measured=check.measured, limit=check.limit, unit=check.unit, detail=detail, hint=check.hint,
        data=check.data, seconds=time.monotonic() - began,
    )  # fmt: skip
