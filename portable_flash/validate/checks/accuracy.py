"""Is the kernel right here: every result of a call against the float64 oracle, as a multiple of PyTorch's own error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...backends import Gradients, Plan
from ...reference import GRADIENT, GRADIENTS, OUTPUT, Verdict, compare_call
from ..cases import Call, Case, accuracy_cases, run
from ..context import Context
from ..guard import guarded_allocations
from ..report import Check

UNIT = "x PyTorch's largest error, at most"
RMS_UNIT = "x PyTorch's RMS error in a tile, at most"
HINT = (
    "Run `validate --level standard` on this device alone. If only this machine fails, suspect its hardware; if all machines with "
    "this software do, the kernel or the compiler is wrong: report it with this document."
)
OPEN = "PyTorch's own result is too far off to judge by: not a fault of the device by itself. Run with another --seed."


def tasks(context: Context) -> list:
    from . import Task

    chosen = [case for case in accuracy_cases(context.sizes) if case.quick or context.level != "quick"]
    asks = "are all results within the multiple of PyTorch's own error that portable_flash.reference allows"
    return [Task(ids("accuracy", case), asks, partial(check_case, case=case)) for case in chosen]


def ids(group: str, case: Case) -> tuple[str, ...]:
    return tuple(f"{group}/{case.name}/{name}" for name in case.results)


def check_case(context: Context, case: Case) -> Iterator[Check]:
    call = context.draw(case)
    plan = context.plan(call)
    found = computed(context, call, plan)
    for verdict in judge(call, found):
        yield as_check(f"accuracy/{case.name}/{verdict.name}", verdict, plan.backend)


def computed(context: Context, call: Call, plan: Plan) -> dict[str, Tensor]:
    """Results on the CPU. They were full of NaN before the launch, so that what no program wrote is wrong."""
    with guarded_allocations():
        found = run(context.runner, call.on(context.where), plan)
    return {name: tensor.cpu() for name, tensor in found.items()}


def judge(call: Call, found: dict[str, Tensor]) -> list[Verdict]:
    """Verdicts in the order of TENSORS. The oracle runs on the CPU: a device is no judge of itself."""
    grads = Gradients(**{name: found.get(f"grad_{name}") for name in GRADIENTS})
    return compare_call(call.inputs, call.problem, found["out"], found["lse"], grads, call.grad_out, call.grad_lse, torch.device("cpu"))


def as_check(name: str, verdict: Verdict, backend: str, **data) -> Check:
    """measured and limit are of the largest error, unless the RMS of a tile alone is beyond its limit."""
    limits = GRADIENT if verdict.name.startswith("grad") else OUTPUT
    measured, limit, unit = verdict.ratio, None, UNIT
    if verdict.reference_error:
        limit = verdict.max_limit / verdict.reference_error
    if verdict.status == "fail" and verdict.max_error <= verdict.max_limit and verdict.rms_limit:
        measured, limit, unit = limits.rms_ratio * verdict.rms_error / verdict.rms_limit, limits.rms_ratio, RMS_UNIT
    hint = {"fail": HINT, "inconclusive": OPEN}.get(verdict.status, "")
    numbers = dict(
        max_error=verdict.max_error, max_limit=verdict.max_limit, rms_error=verdict.rms_error, rms_limit=verdict.rms_limit,
        pytorch_error=verdict.reference_error, actual=verdict.actual, expected=verdict.expected, cosine=verdict.cosine,
    )  # fmt: skip
    details = {name: finite(value) for name, value in numbers.items()} | {"worst": list(verdict.worst), "backend": backend} | data
    detail = str(verdict).partition(": ")[2] if verdict.status != "pass" else ""
    return Check(
        id=name, status=verdict.status, measured=finite(measured), limit=finite(limit), unit=unit, detail=detail, hint=hint, data=details
    )


def finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None


def worst(verdicts: list[Verdict]) -> Verdict:
    """The one furthest beyond its limit, or nearest to it; failures before what is open before passes."""
    order = {"pass": 0, "inconclusive": 1, "fail": 2}
    share = lambda v: max(v.max_error / v.max_limit if v.max_limit else 0.0, v.rms_error / v.rms_limit if v.rms_limit else 0.0)
    return max(verdicts, key=lambda v: (order[v.status], share(v)))
