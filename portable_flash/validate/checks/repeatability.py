"""Is this hardware right: the same call again and again must give the same bits, idle and under load, on every unit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...backends import Plan
from ..cases import TENSORS, Call, Case, accuracy_cases, large_case, run
from ..context import Context
from ..levels import busy_heads
from ..report import Check
from . import accuracy

UNIT = "runs that differ, at most"
HINT = (
    "The same instructions on the same numbers gave other bits: suspect this device's hardware (or its clocks, power and cooling). "
    "Take it out of service, read its ECC and error logs, and run `validate --level standard` and the vendor's diagnostics on it."
)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LISTED = 16  # tiles and positions that a report lists


def tasks(context: Context) -> list:
    from . import Task

    cases = loaded_cases(context)
    listed = [
        Task(accuracy.ids("repeatability/cold", cases[0]), "does one call give the same bits when the device is idle before it", cold),
        Task(
            tuple(name for case in cases for name in accuracy.ids("repeatability/load", case)),
            "does a call give the same bits again and again with all units busy",
            load,
        ),
    ]
    for case in large_cases(context):
        asks = "does every unit compute the same bits of the same head, and are they right"
        names = (*accuracy.ids("repeatability/units", case), *accuracy.ids("accuracy", case))
        listed.append(Task(names, asks, partial(units, case=case)))
    return listed


def large_cases(context: Context) -> list[Case]:
    heads = busy_heads(context.device, context.sizes)
    return [large_case(context.sizes, heads, dtype) for dtype in ("bf16", "fp16")[: 1 if context.level == "quick" else 2]]


def loaded_cases(context: Context) -> list[Case]:
    """A plain call at quick, also calls with options at the other levels. The CPU leaves out the one of many heads, for its time."""
    cases = [case for case in accuracy_cases(context.sizes) if case.quick and (context.where.type != "cpu" or case.heads_k is None)]
    return cases[:1] if context.level == "quick" else cases


# ---------------------------------------------------------------- comparing bits
@dataclass
class Repeats:
    """What repeats of one result had in common with the first: which runs differ, and every bit that ever did."""

    first: Tensor
    differ: list[Tensor] = field(default_factory=list)  # one boolean a run, still on the device
    bits: Tensor | None = None  # like `first`, as integers: the bits that differed in any run

    def add(self, tensor: Tensor) -> None:
        words = WORDS[tensor.element_size()]
        changed = tensor.contiguous().view(words) ^ self.first.view(words)
        self.differ.append(changed.any())
        self.bits = changed if self.bits is None else self.bits.bitwise_or_(changed)

    def runs(self) -> int:
        return int(torch.stack(self.differ).sum()) if self.differ else 0


def repeated(
    context: Context, call: Call, plan: Plan, results: dict[str, Repeats], runs: int, until: float = float("inf"), least: int = 0
) -> int:
    """Run again `runs` times, or until a time after at least `least`, and enter what differs; returns the number of runs."""
    for done in range(runs):
        if done >= least and time.monotonic() > until:
            return done
        for name, tensor in run(context.runner, call, plan).items():
            results[name].add(tensor)
        if context.where.type == "cuda" and done % 16 == 15:
            torch.cuda.synchronize(context.where)  # what is queued stays bounded, and so does time
    return runs


def start(context: Context, call: Call, plan: Plan) -> dict[str, Repeats]:
    return {name: Repeats(tensor.contiguous()) for name, tensor in run(context.runner, call, plan).items()}


def as_check(name: str, repeats: Repeats, runs: int, seconds: float) -> Check:
    differ = repeats.runs()
    data: dict = {"runs": runs}
    if not differ:
        return Check(id=name, status="pass", measured=0, limit=0, unit=UNIT, seconds=seconds, data=data)
    data |= anatomy(repeats.bits)
    who = "the first run stands alone: it is the one that is wrong" if differ == runs and runs > 1 else f"{differ} of {runs} runs differ"
    detail = f"{who}; {data['elements']} elements, first at {tuple(data['first_index'])}, bits {data['bits']}"
    return Check(id=name, status="fail", measured=differ, limit=0, unit=UNIT, detail=detail, hint=HINT, seconds=seconds, data=data)


def anatomy(bits: Tensor) -> dict:
    """Where and how results differed: bits (0 is the lowest), tiles of 64 rows by matrix, positions modulo a warp's 32 lanes."""
    bits = bits.cpu()
    wide = bits.to(torch.int64) & ((1 << (8 * bits.element_size())) - 1 if bits.element_size() < 8 else -1)
    where = wide.nonzero()
    flat = wide.flatten().nonzero()[:, 0]
    found = [bit for bit in range(8 * bits.element_size()) if bool((wide >> bit & 1).any())]
    rows = where[:, -2] if bits.dim() > 2 else where[:, -1]
    matrices = flat // max(1, bits.shape[-1] * (bits.shape[-2] if bits.dim() > 2 else 1))
    tiles = sorted({(int(m), int(r) // 64) for m, r in zip(matrices.tolist(), rows.tolist(), strict=True)})
    together = next(m for m in (128, 64, 32, 16, 8, 4, 2, 1) if len((flat % m).unique()) == 1)
    return {
        "elements": len(flat), "first_index": where[0].tolist(), "bits": found, "tiles": [row for _, row in tiles[:LISTED]],
        "matrices": [matrix for matrix, _ in tiles[:LISTED]], "tile_count": len(tiles), "lanes": (flat % 32).unique().tolist(),
        "same_position_modulo": together,
    }  # fmt: skip


# ---------------------------------------------------------------- the checks
def cold(context: Context) -> Iterator[Check]:
    """With a pause before each run, in which the device falls idle."""
    case = loaded_cases(context)[0]
    began = time.monotonic()
    call = context.draw(case).on(context.where)
    plan = context.plan(call)
    results, runs = start(context, call, plan), 0
    for _ in range(context.settings.cold):
        if context.where.type == "cuda":
            torch.cuda.synchronize(context.where)
        time.sleep(0.005 if context.small else 0.05)
        runs += repeated(context, call, plan, results, 1)
    seconds = (time.monotonic() - began) / len(results)
    yield from (as_check(f"repeatability/cold/{case.name}/{name}", results[name], runs, seconds) for name in TENSORS if name in results)


def load(context: Context) -> Iterator[Check]:
    """One run after another, the cases in turn, so that the device stays hot; a copy of a case fills every unit."""
    settings, cases = context.settings, loaded_cases(context)
    for index, case in enumerate(cases):
        began = time.monotonic()
        call = busy(context, context.draw(case)).on(context.where)
        plan = context.plan(call)
        results = start(context, call, plan)
        left = context.seconds_left() * 0.8 / (len(cases) - index)
        until = began + min(settings.loaded_seconds / len(cases), left)
        least = 0 if left < settings.loaded_seconds else -(-settings.loaded_least // len(cases))
        most = settings.loaded_least if context.small else settings.loaded
        runs = repeated(context, call, plan, results, -(-most // len(cases)), until, least)
        seconds = (time.monotonic() - began) / len(results)
        for name in TENSORS:
            if name in results:
                yield as_check(f"repeatability/load/{case.name}/{name}", results[name], runs, seconds)


def busy(context: Context, call: Call) -> Call:
    """The call with its batch repeated until every unit of a GPU has blocks; others, and packed calls, as they are."""
    problem = call.problem
    if context.where.type != "cuda" or problem.varlen or problem.batch == 1:
        return call
    blocks = problem.batch * problem.heads_q * -(-problem.seqlen_q // 128)
    return call.repeated(-(-4 * context.device.compute_units // blocks))


def units(context: Context, case: Case) -> Iterator[Check]:
    """All heads hold the same numbers: those of one are judged by the oracle, and all others must be its copies."""
    began = time.monotonic()
    whole = context.draw(case)
    call = whole.on(context.where)
    plan = context.plan(call)
    one = whole.first_head()
    results: dict[str, Repeats] = {}
    alone: dict[str, Tensor] = {}
    for done in range(context.settings.units_runs):
        if done and time.monotonic() > began + min(context.settings.units_seconds, context.seconds_left() / 2):
            break
        for name, tensor in run(context.runner, call, plan).items():
            first = alone.setdefault(name, tensor[:, :1].contiguous())
            results.setdefault(name, Repeats(first.expand_as(tensor).contiguous())).add(tensor)
    seconds = (time.monotonic() - began) / len(results)
    for name in TENSORS:
        if name in results:
            check = as_check(f"repeatability/units/{case.name}/{name}", results[name], len(results[name].differ), seconds)
            yield check
    for verdict in accuracy.judge(one, {name: tensor.cpu() for name, tensor in alone.items()}):
        yield accuracy.as_check(f"accuracy/{case.name}/{verdict.name}", verdict, plan.backend)
