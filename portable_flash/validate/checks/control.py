"""Would a fault be seen: corrupted copies of this device's own results, handed to the very judges that the other checks use.

A corruption that goes unnoticed leaves the device without a verdict: what cannot fail proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..cases import Case, Call, run
from ..context import Context
from ..guard import GUARD_BYTES, Guarded
from ..inputs import sha256
from ..report import Check, DeviceReport, Digest, Identity
from . import accuracy, agreement
from .repeatability import Repeats

HINT = "The validator did not notice a fault that it made itself: do not trust its other answers; report this."
CASE = Case(name="control-bf16-d64-causal", causal=True, batch=1, heads_k=2, group=2, seqlen_q=61, seqlen_k=83)
CORRUPTIONS = ("tile-scaled", "wrong-head", "nan-row", "lse-shifted", "gradient-tile-scaled")


def tasks(context: Context) -> list:
    from . import Task

    names = (*(f"control/accuracy/{name}" for name in CORRUPTIONS), "control/repeatability/one-bit", "control/agreement/one-bit",
             "control/memory/stray-write")  # fmt: skip
    return [Task(names, "is a fault noticed that is put into a copy of the results", check)]


def corrupted(how: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy with one fault of those that CORRUPTIONS names."""
    new = {name: tensor.clone() for name, tensor in found.items()}
    rows = slice(0, max(16, min(64, new["out"].shape[2])))
    if how == "tile-scaled":
        new["out"][0, 0, rows] *= 1.01
    elif how == "wrong-head":
        new["out"][0, 0] = found["out"][0, -1]
    elif how == "nan-row":
        new["out"][0, 0, 1] = torch.nan
    elif how == "lse-shifted":
        new["lse"][0, 0, rows] += 0.01
    elif how == "gradient-tile-scaled":
        new["grad_key"][0, 0, rows] *= 1.03
    else:
        raise ValueError(f"corruption {how!r}: allowed are {', '.join(CORRUPTIONS)}")
    return new


def check(context: Context) -> Iterator[Check]:
    began = time.monotonic()
    call = context.draw(CASE)
    found = {name: tensor.cpu() for name, tensor in run(context.runner, call.on(context.where), context.plan(call)).items()}
    noticed = {f"accuracy/{how}": _accuracy_notices(call, corrupted(how, found)) for how in CORRUPTIONS}
    noticed |= {"repeatability/one-bit": _repeats_notice(found["out"]), "agreement/one-bit": _votes_notice(found["out"])}
    noticed["memory/stray-write"] = _guards_notice(context)
    seconds = (time.monotonic() - began) / len(noticed)
    for name, seen in noticed.items():
        yield Check(
            id=f"control/{name}", status="pass" if seen else "inconclusive", measured=int(seen), limit=1, unit="faults noticed, at least",
            detail="" if seen else "a fault made on purpose was not noticed", hint="" if seen else HINT, seconds=seconds,
        )  # fmt: skip


def _accuracy_notices(call: Call, found: dict[str, Tensor]) -> bool:
    return any(verdict.status == "fail" for verdict in accuracy.judge(call, found))


def _flipped(tensor: Tensor) -> Tensor:
    """A copy with the lowest bit of one element in its middle flipped."""
    copy = tensor.clone()
    copy.view(torch.int16).view(-1)[tensor.numel() // 2] ^= 1
    return copy


def _repeats_notice(out: Tensor) -> bool:
    repeats = Repeats(out)
    repeats.add(out.clone())
    repeats.add(_flipped(out))
    return repeats.runs() == 1


def _votes_notice(out: Tensor) -> bool:
    digest = Digest(case="control", tensor="out", backend="", key="", sha256=sha256(out))
    someone = Identity(index=0, name="", slug="", vendor="", arch="", compute_units=0, memory_bytes=0)
    twin = DeviceReport(identity=someone, verdict="no_verdict", digests=[digest])
    outsider = replace(twin, digests=[replace(digest, sha256=sha256(_flipped(out)))])
    votes = agreement.compare_node([twin, outsider, twin])
    return [checks[0].status for checks in votes.values()] == ["pass", "fail", "pass"]


def _guards_notice(context: Context) -> bool:
    guarded = Guarded()
    guarded.like(torch.empty(100, dtype=torch.bfloat16, device=context.where), "control")
    clean = not guarded.disturbed()
    guarded.buffers[0][0][GUARD_BYTES // 2 + 100] = 0  # the word after the tensor's last
    return clean and bool(guarded.disturbed())
