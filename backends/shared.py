"""What the host sides of the kernel backends share: outputs, strides, the order and number of programs.

Nothing here depends on how a kernel is compiled or launched. Tensors may be on the meta device, except in `sink_gradient`.
"""

from __future__ import annotations

import functools

import torch

from ..device import Device
from ..problem import MAX_ROW_STRIDE, Problem
from . import Gradients, Inputs, Needs, Plan

MAX_PROGRAMS = 2**31 - 1  # of grid axis x, on both vendors; the only axis used here
DELTA_ROWS = 64  # rows a program of the delta kernel, which only streams
_HEADS_PER_GROUP = 4
_UNBOUNDED = 2**31 - 1  # extent of a broadcast dimension


# ---------------------------------------------------------------- programs
def blocks(n: int, block: int) -> int:
    return -(-n // block)


def guard(programs: int, most: int = MAX_PROGRAMS) -> int:
    """The number of programs, if a launch can have as many."""
    if programs > most:
        raise ValueError(f"the call needs {programs} programs, a launch has at most {most}: split the batch")
    return programs


def heads_per_group(device: Device, streamed_bytes: int, heads: int, sharing: int) -> int:
    """Consecutive heads that a group of programs works on, a multiple of those `sharing` one streamed operand.

    A few heads are enough for short programs to fill the gaps that long ones leave; more would only compete for the
    cache, of which a quarter is counted on (large L2s are two halves that each keep a copy).
    """
    fit = device.l2_bytes // 4 // max(1, streamed_bytes)
    operands = max(1, min(fit, _HEADS_PER_GROUP // sharing))
    return max(1, min(heads, operands * sharing))


def key_bytes(problem: Problem) -> int:
    """Bytes of K and V of one head, which a program of forward or dQ streams."""
    return problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


def query_bytes(problem: Problem) -> int:
    """Bytes of Q and dO of the heads that share a key, which a program of dK/dV streams."""
    return problem.group * problem.seqlen_q * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


def dkv_passes(plan: Plan, needs: Needs) -> list[tuple[bool, bool]]:
    """(dK, dV) of each launch of the dK/dV kernel."""
    if needs.key and needs.value and plan.kernels["backward_dkv"].tiling.split_dkv:
        return [(True, False), (False, True)]
    return [(needs.key, needs.value)]


def window(problem: Problem) -> tuple[int, int]:
    return problem.window_left or 0, problem.window_right or 0


# ---------------------------------------------------------------- strides
def head_strides(tensor: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of batch, head and row; packed tensors (total, H, D) have none for the batch."""
    if tensor.dim() == 3:
        return 0, tensor.stride(1), tensor.stride(0)
    b, x, y, _ = tensor.stride()
    return (b, x, y) if layout == "bhsd" else (b, y, x)


def contiguous_strides(tensor: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """What head_strides says of a contiguous tensor of this shape."""
    if tensor.dim() == 3:
        return 0, tensor.shape[2], tensor.shape[1] * tensor.shape[2]
    _, x, y, d = tensor.shape
    return (x * y * d, y * d, d) if layout == "bhsd" else (x * y * d, d, y * d)


def broadcast_strides(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of a 4-D tensor, 0 along dimensions of size 1, then the bounds of its last two; zeros for None."""
    if tensor is None:
        return (0,) * 6
    strides = tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride()))
    return (*strides, *(_UNBOUNDED if n == 1 else n for n in tensor.shape[2:]))


def lse_strides(problem: Problem) -> tuple[int, int]:
    """Strides of batch and head of lse and delta, whose rows are contiguous."""
    return (0, problem.total_q) if problem.varlen else (problem.heads_q * problem.seqlen_q, problem.seqlen_q)


def grad_lse_strides(grad_lse: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of batch, head and row; packed (Hq, total_q) has none for the batch."""
    if grad_lse is None:
        return 0, 0, 0
    return (0, *grad_lse.stride()) if grad_lse.dim() == 2 else grad_lse.stride()


def row_major(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return strides


def alignment(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Which pointers are multiples of 16 bytes: those that are not need another compiled variant."""
    return tuple([t is None or t.data_ptr() % 16 == 0 for t in tensors])


def strides_key(inputs: Inputs) -> tuple:
    """All of the tensors that decides integers and compiled variant of a launch beyond the plan, pointer alignment aside."""
    key = (inputs.query.stride(), inputs.key.stride(), inputs.value.stride(), inputs.layout)
    if inputs.bias is None and inputs.mask is None and inputs.alibi_slopes is None and inputs.cu_seqlens_q is None:
        return key
    optional = (inputs.bias, inputs.mask, inputs.alibi_slopes, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return (*key, *[None if t is None else (t.shape, t.stride(), t.dtype) for t in optional])


# ---------------------------------------------------------------- tensors
def empty_outputs(query: torch.Tensor, head_dim_v: int, layout: str, varlen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse; packed ones start as rows that see no key, since no program owns rows past the last sequence."""
    if varlen:
        total, heads, _ = query.shape
        return query.new_zeros(total, heads, head_dim_v), query.new_full((heads, total), float("-inf"), dtype=torch.float32)
    b, x, y, _ = query.shape
    heads, rows = (x, y) if layout == "bhsd" else (y, x)
    return query.new_empty(b, x, y, head_dim_v), query.new_empty(b, heads, rows, dtype=torch.float32)


def new_gradient(tensor: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Contiguous, in the tensor's shape; packed ones start at 0, since no program owns rows past the last sequence."""
    new = torch.zeros if problem.varlen else torch.empty
    return new(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def new_gradients(inputs: Inputs, problem: Problem, needs: Needs) -> Gradients:
    """What the kernels write: query, key, value as `new_gradient`, bias in float32 and 0. Not sinks: see `sink_gradient`."""
    new = lambda tensor, needed: new_gradient(tensor, problem) if needed else None
    bias = torch.zeros(inputs.bias.shape, dtype=torch.float32, device=inputs.bias.device) if needs.bias else None
    return Gradients(new(inputs.query, needs.query), new(inputs.key, needs.key), new(inputs.value, needs.value), bias)


def addressable(grad_out: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor, or a copy where its last dimension is not contiguous or its rows are too far apart."""
    rows_apart = head_strides(grad_out, layout)[2]
    if (grad_out.stride(-1) != 1 and grad_out.shape[-1] != 1) or rows_apart >= MAX_ROW_STRIDE:
        return grad_out.contiguous()
    return grad_out


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, varlen: bool) -> torch.Tensor:
    """dsink_h = - sum over batch and rows of exp(sink_h - lse) * delta: a sink is a key whose value is 0."""
    heads = (slice(None), None) if varlen else (None, slice(None), None)
    share = torch.exp(sinks[heads] - lse).masked_fill_(lse == float("-inf"), 0.0)  # no sink and no key, or in no sequence
    return -(share * delta).sum(-1 if varlen else (0, 2))


def meta_call(problem: Problem, layout: str = "bhsd") -> tuple[Inputs, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, output, lse and output gradient of a problem, with shapes and strides but no memory."""
    p = problem
    new = lambda *shape, dtype=p.dtype: torch.empty(*shape, dtype=dtype, device="meta")
    if p.varlen:
        shape = lambda heads, rows, width: (rows, heads, width)
        rows_q, rows_k = p.total_q, p.total_k
    else:
        shape = lambda heads, rows, width: (p.batch, heads, rows, width) if layout == "bhsd" else (p.batch, rows, heads, width)
        rows_q, rows_k = p.seqlen_q, p.seqlen_k
    inputs = Inputs(
        new(*shape(p.heads_q, rows_q, p.head_dim)),
        new(*shape(p.heads_k, rows_k, p.head_dim)),
        new(*shape(p.heads_k, rows_k, p.head_dim_v)),
        scale=p.head_dim**-0.5, softcap=30.0 if p.softcap else 0.0, layout=layout,
        bias=new(1, p.heads_q, p.seqlen_q, p.seqlen_k) if p.bias else None,
        alibi_slopes=new(p.batch, p.heads_q, dtype=torch.float32) if p.alibi else None,
        sinks=new(p.heads_q, dtype=torch.float32) if p.sinks else None,
        mask=new(p.batch, 1, p.seqlen_q, p.seqlen_k, dtype=torch.bool) if p.mask else None,
        cu_seqlens_q=new(p.batch + 1, dtype=torch.int32) if p.varlen else None,
        cu_seqlens_k=new(p.batch + 1, dtype=torch.int32) if p.varlen else None,
    )  # fmt: skip
    out = new(*shape(p.heads_q, rows_q, p.head_dim_v))
    lse = new(*((p.heads_q, rows_q) if p.varlen else (p.batch, p.heads_q, rows_q)), dtype=torch.float32)
    return inputs, out, lse, torch.empty_like(out)


def on_device(function):
    """Run with the tensors' device current: kernels are launched on the current one."""

    @functools.wraps(function)
    def run(inputs: Inputs, plan: Plan, *rest, **options):
        index = plan.device.index
        if index is None or index == torch._C._cuda_getDevice():
            return function(inputs, plan, *rest, **options)
        with torch.cuda.device(index):
            return function(inputs, plan, *rest, **options)

    return run
