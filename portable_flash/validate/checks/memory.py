"""Do kernels write all of their outputs and nothing else, and do numbers reach the device as they were."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from ..cases import Case, accuracy_cases, run
from ..context import Context
from ..guard import GUARD_BYTES, Guarded, guarded_allocations, unwritten
from ..inputs import sha256
from ..report import Check

HINT = "A kernel wrote where it must not, or not where it must: report it with this document; on one machine only, suspect its hardware."


def tasks(context: Context) -> list:
    from . import Task

    cases = [case for case in accuracy_cases(context.sizes) if case.quick]
    cases = [case for case in cases if context.level != "quick" or case.lengths or case.name == "bf16-d128-causal"]
    asks = f"are outputs written whole, and the {GUARD_BYTES // 1024} KiB before and after every tensor and the inputs left alone"
    what = ("guards", "unwritten", "inputs")
    listed = [Task(tuple(f"memory/{w}/{case.name}" for w in what), asks, partial(guards, case=case)) for case in cases]
    if context.where.type != "cpu":
        listed.insert(0, Task(("memory/transfer",), "do numbers come back from the device as they went there", transfer))
    return listed


def guards(context: Context, case: Case) -> Iterator[Check]:
    """Inputs and everything that the backend allocates lie between guards; guards and outputs hold NaN before the launch."""
    began = time.monotonic()
    call = context.draw(case)
    plan, inputs = context.plan(call), Guarded()
    there = call.replaced(**{name: inputs.copy(tensor, name, context.where) for name, tensor in call.tensors().items()})
    with guarded_allocations() as made:
        found = run(context.runner, there, plan)
    disturbed = inputs.disturbed() | made.disturbed()
    missing = {name: count for name, tensor in found.items() if (count := unwritten(tensor))}
    changed = [name for name, tensor in there.tensors().items() if sha256(tensor) != sha256(call.tensors()[name])]
    seconds = (time.monotonic() - began) / 3
    for what, unit, bad in (
        ("guards", "16-bit words of guards overwritten, at most", disturbed),
        ("unwritten", "elements of results that nobody wrote, at most", missing),
        ("inputs", "inputs that changed, at most", dict.fromkeys(changed, 1)),
    ):
        detail = ", ".join(f"{name}: {count}" for name, count in bad.items())
        yield Check(
            id=f"memory/{what}/{case.name}", status="fail" if bad else "pass", measured=sum(bad.values()), limit=0, unit=unit,
            detail=detail, hint=HINT if bad else "", seconds=seconds,
            data={"tensors": len(inputs.buffers) + len(made.buffers), "backend": plan.backend},
        )  # fmt: skip


def transfer(context: Context) -> Iterator[Check]:
    """A checksum of a round trip: 64 MiB of changing bits."""
    began = time.monotonic()
    words = 1 << (20 if context.small else 24)
    counter = torch.arange(words, dtype=torch.int64)
    sent = ((counter * 0x01000193) ^ (counter >> 7)).to(torch.int32)
    back = sent.to(context.where).clone().cpu()
    wrong = int((back != sent).sum())
    yield Check(
        id="memory/transfer", status="fail" if wrong else "pass", measured=wrong, limit=0, unit="words of 32 bits that changed, at most",
        detail=f"first at {int((back != sent).nonzero()[0])}" if wrong else "", seconds=time.monotonic() - began,
        hint="Suspect the bus, the device's memory or its ECC: read its error logs." if wrong else "",
    )  # fmt: skip
