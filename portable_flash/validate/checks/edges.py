"""Calls at the edge of what is meant: each is judged by the oracle, and by what its edge promises beyond that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...backends import Plan
from ...reference import Verdict
from ..cases import TENSORS, Call, Case, run
from ..context import Context
from ..guard import guarded_allocations
from ..report import Check
from . import accuracy

HINT = "An edge case is wrong: the kernel or the compiler is at fault if all machines with this software show it. " + accuracy.HINT
FAR = 2**31  # elements between sequences of a batch: an offset of 32 bits would wrap around


@dataclass(frozen=True)
class Edge:
    """name, what it asks, a case, and a change to its tensors.

    same: its results must be those of the unchanged call, bit for bit. forward: out and lse are judged, while gradients must be
    finite, because PyTorch's own are too far off to judge by.
    """

    name: str
    asks: str
    case: Callable[[Context], Case]
    change: Callable[[Call], Call] | None = None
    same: bool = False
    forward: bool = False
    quick: bool = True


def tasks(context: Context) -> list:
    from . import Task

    chosen = [edge for edge in EDGES if edge.quick or context.level != "quick"]
    listed = [Task((f"edges/{edge.name}",), edge.asks, partial(check, edge=edge)) for edge in chosen]
    listed.append(Task(("edges/subnormals",), "do subnormal inputs count, or does this device flush them to 0", subnormals))
    if context.level != "quick":
        listed.append(Task(("edges/far-offsets",), "are tensors right that lie more than 2**31 elements apart", far_offsets))
    return listed


def sized(context: Context, **options) -> Case:
    return Case(**{"name": "edge", "batch": 1, "heads_k": 2, "group": 1, "scale": 0.12} | options).sized(context.sizes)


# ---------------------------------------------------------------- the edges
def _hidden_keys(call: Call, number: float) -> Call:
    """The number in keys and values that the mask hides from every query."""
    seen = call.inputs.mask.expand(call.problem.batch, *call.inputs.mask.shape[1:]).any(dim=(1, 2))
    fill = lambda t: t.masked_fill(~seen[:, None, :, None], number)
    return call.replaced(key=fill(call.inputs.key), value=fill(call.inputs.value))


def _hidden(call: Call, dim: int) -> Call:
    """Hide every third row (dim 2) or key (dim 3), and only those."""
    mask = torch.ones_like(call.inputs.mask)
    mask[(..., slice(None, None, 3)) if dim == 3 else (..., slice(None, None, 3), slice(None))] = False
    return call.replaced(mask=mask)


def _strided(call: Call) -> Call:
    """The same numbers in rows and columns of larger buffers, whose rest is NaN."""

    def inside(tensor: Tensor) -> Tensor:
        view = tensor.new_full([n + 8 for n in tensor.shape], torch.nan)[tuple(slice(4, n + 4) for n in tensor.shape)]
        return view.copy_(tensor)

    return call.replaced(**{name: inside(call.tensors()[name]) for name in ("query", "key", "value", "grad_out")})


def _other_layout(call: Call) -> Call:
    """The same numbers as (batch, sequence, heads, head_dim)."""
    turn = lambda t: t.transpose(1, 2).contiguous()
    names = ("query", "key", "value", "grad_out")
    turned = call.replaced(**{name: turn(call.tensors()[name]) for name in names})
    return replace(turned, inputs=replace(turned.inputs, layout="bshd"))


EDGES = (
    Edge("masked-rows", "rows that see no key give 0, lse -inf and gradients 0",
         lambda c: sized(c, causal=True, seqlen_q=c.sizes.seqlen_k, seqlen_k=c.sizes.seqlen_q)),
    Edge("sink-rows", "rows that see only a sink give 0 and its logit as lse",
         lambda c: sized(c, sinks=True, heads_k=8, group=8, seqlen_q=61, seqlen_k=83, mask="q"), lambda call: _hidden(call, 2)),
    Edge("no-keys", "a call without keys gives 0 and lse -inf", lambda c: sized(c, seqlen_k=0)),
    Edge("no-queries", "a call without queries gives empty results and gradients 0", lambda c: sized(c, seqlen_q=0)),
    Edge("zero-lengths", "packed sequences without rows or keys, and rows of no sequence",
         lambda c: sized(c, lengths=((0, 9), (21, 0), (0, 0), (17, 33)), unused=7)),
    Edge("one-query", "a single query", lambda c: sized(c, seqlen_q=1, group=8, causal=True)),
    Edge("one-key", "a single key", lambda c: sized(c, seqlen_k=1), quick=False),
    Edge("odd-head-dim", "a head_dim 8 short of a power of two", lambda c: sized(c, dtype="fp16", head_dim=120)),
    Edge("small-head-dim", "a head_dim of 8", lambda c: sized(c, dtype="fp16", head_dim=8), quick=False),
    Edge("gqa-7", "7 query heads to a key head", lambda c: sized(c, heads_k=1, group=7, causal=True)),
    Edge("mqa-16", "16 query heads to one key head", lambda c: sized(c, heads_k=1, group=16), quick=False),
    Edge("nan-in-hidden-keys", "NaN in keys and values that nothing sees changes no bit",
         lambda c: sized(c, mask="k"), lambda call: _hidden_keys(call, torch.nan), same=True),
    Edge("strides", "views into larger buffers give the bits of contiguous tensors", lambda c: sized(c, causal=True), _strided, same=True),
    Edge("layouts", "bshd gives the same bits as bhsd", lambda c: sized(c, causal=True), _other_layout, same=True),
    Edge("large-logits", "logits beyond a thousand stay finite and exact",
         lambda c: sized(c, dtype="fp16", heads_k=8, scale=33.1), forward=True),
    Edge("zero-scale", "scale 0 gives the mean of the values", lambda c: sized(c, scale=0.0), quick=False),
    Edge("negative-scale", "a negative scale", lambda c: sized(c, scale=-0.25, causal=True), quick=False),
)  # fmt: skip


def check(context: Context, edge: Edge) -> Iterator[Check]:
    began = time.monotonic()
    case = replace(edge.case(context), name=f"edge-{edge.name}")
    plain = context.draw(case)
    if edge.same and case.mask is not None:
        plain = _hidden(plain, 3)
    change = edge.change or (lambda call: call)
    call, there = change(plain), change(plain.on(context.where))  # there again, so that NaN around views is in the device's memory
    plan = context.plan(call)
    found = results(context, there, plan)
    verdicts = accuracy.judge(call, found)
    verdict = accuracy.worst([v for v in verdicts if not (edge.forward and v.name.startswith("grad"))])
    judged = accuracy.as_check(f"edges/{edge.name}", verdict, plan.backend, tensor=verdict.name)
    detail = f"{verdict.name}: {judged.detail}" if judged.detail else ""
    status, hint = judged.status, HINT if judged.status == "fail" else judged.hint
    if edge.forward and status == "pass" and (infinite := [name for name in found if name != "lse" and not found[name].isfinite().all()]):
        status, detail, hint = "fail", f"{', '.join(infinite)}: not finite", HINT
    if edge.same and status == "pass":
        twin = results(context, plain.on(context.where), context.plan(plain))
        other = found if call.inputs.layout == plain.inputs.layout else {n: _turned(n, t) for n, t in found.items()}
        differ = [name for name in TENSORS if name in twin and not _same(other[name], twin[name])]
        if differ:
            status, detail, hint = "fail", f"{', '.join(differ)}: other bits than those of the plain call", HINT
    yield Check(
        id=judged.id, status=status, severity="critical" if verdict.status == "fail" else "major" if edge.same else "critical",
        measured=judged.measured, limit=judged.limit, unit=judged.unit, detail=detail, hint=hint, data=judged.data,
        seconds=time.monotonic() - began,
    )  # fmt: skip


def results(context: Context, call: Call, plan: Plan) -> dict[str, Tensor]:
    """Of a call on the device, brought to the CPU; they were full of NaN before the launch."""
    with guarded_allocations():
        found = run(context.runner, call, plan)
    return {name: tensor.cpu() for name, tensor in found.items()}


def _turned(name: str, tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2) if name in ("out", "grad_query", "grad_key", "grad_value") else tensor


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


# ---------------------------------------------------------------- two with rules of their own
def subnormals(context: Context) -> Iterator[Check]:
    """Values so small that float16 has no leading bit for them: matrix units of some devices take them for 0 (CDNA2 does)."""
    began = time.monotonic()
    plain = context.draw(replace(sized(context, dtype="fp16"), name="edge-subnormals"))
    small = plain.replaced(value=(plain.inputs.value.float() * 2.0**-17).to(plain.inputs.value.dtype))
    plan = context.plan(small)
    found = results(context, small.on(context.where), plan)
    verdicts: dict[str, Verdict] = {v.name: v for v in accuracy.judge(small, found)}
    flushed = not bool(found["out"].any())
    judged = accuracy.as_check("edges/subnormals", verdicts["out"], plan.backend, flushed=flushed)
    status = "warn" if flushed else judged.status
    detail = "this device takes subnormal float16 inputs for 0" if flushed else judged.detail
    hint = "A property of the device: results of inputs below 6.1e-5 differ from those of other vendors." if flushed else judged.hint
    yield Check(
        id=judged.id, status=status, severity="info" if flushed else "critical", measured=judged.measured, limit=judged.limit,
        unit=judged.unit, detail=detail, hint=hint, data=judged.data, seconds=time.monotonic() - began,
    )  # fmt: skip


def far_offsets(context: Context) -> Iterator[Check]:
    """Keys and values of the second sequence lie 2**31 elements after the first's, in memory that is reserved and not touched."""
    began = time.monotonic()
    name = "edges/far-offsets"
    call = context.draw(replace(sized(context, batch=2, causal=True), name="edge-far-offsets"))
    key = call.inputs.key
    needed = (FAR + key[0].numel()) * key.element_size()
    free = torch.cuda.mem_get_info(context.where)[0] if context.where.type == "cuda" else _free_memory()
    if free < 2 * needed:
        yield Check(id=name, status="skipped", detail=f"needs {2 * needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")
        return
    room = torch.empty(FAR + key[0].numel(), dtype=key.dtype, device=context.where)
    there = call.on(context.where)
    far = room.as_strided(key.shape, (FAR, *key.stride()[1:]))
    far.copy_(there.inputs.key)
    plan = context.plan(call)
    verdict = accuracy.worst(accuracy.judge(call, results(context, there.replaced(key=far), plan)))
    judged = accuracy.as_check(name, verdict, plan.backend, tensor=verdict.name)
    yield replace(judged, seconds=time.monotonic() - began)


def _free_memory() -> int:
    """Bytes that the kernel thinks are available; 0 where it does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 0
