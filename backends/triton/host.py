"""Host side of the Triton kernels: outputs, launches, and what is known before a launch."""

from __future__ import annotations

import math

import torch

from ...device import Device
from ...problem import Problem
from ...tiling import Tiling, padded_head_dim
from .. import Gradients, Inputs, Needs, Plan
from ..shared import (
    DELTA_ROWS,
    addressable,
    alignment,
    blocks,
    broadcast_strides,
    contiguous_strides,
    dkv_passes,
    empty_outputs,
    grad_lse_strides,
    guard,
    head_strides,
    heads_per_group,
    key_bytes,
    lse_strides,
    new_gradients,
    on_device,
    query_bytes,
    row_major,
    sink_gradient,
    strides_key,
    window,
)
from .backward_kernels import backward_dbias_kernel, backward_delta_kernel, backward_dkv_kernel, backward_dq_kernel
from .forward_kernels import forward_kernel
from .launch import Launch, describable, descriptor, fix_cache_keys

# before any of them is launched or compiled
fix_cache_keys(forward_kernel, backward_delta_kernel, backward_dkv_kernel, backward_dq_kernel, backward_dbias_kernel)

_DELTA_TILING = Tiling(DELTA_ROWS, 16, num_warps=4)
_LAUNCHES: dict[tuple, tuple] = {}
_MAX_LAUNCHES = 8192  # distinct calls remembered; beyond that the memory starts again from nothing


def _planned(key: tuple, plan: Plan, prepare, *arguments) -> tuple[Launch, bool]:
    """The Launch for this key and whether it takes descriptors, prepared at the first call."""
    found = _LAUNCHES.get(key)
    if found is None:
        if len(_LAUNCHES) >= _MAX_LAUNCHES:
            _LAUNCHES.clear()
        found = _LAUNCHES[key] = (prepare(*arguments), plan)  # the plan is kept alive: its id is in the key
    return found[0]


# ---------------------------------------------------------------- what is decided before a launch
def features(problem: Problem) -> dict[str, bool | float]:
    """Constexprs that say what the call uses, common to all kernels."""
    return {
        "HAS_LEFT": problem.window_left is not None,
        "HAS_RIGHT": problem.window_right is not None,
        "TOP_LEFT": problem.top_left,
        "UNSEEN": problem.varlen or unseen_slots(problem),
        "VARLEN": problem.varlen,
        "HAS_BIAS": problem.bias,
        "HAS_MASK": problem.mask,
        "HAS_ALIBI": problem.alibi,
        "HAS_SOFTCAP": problem.softcap,
        "UNIT": 1.0 if problem.dtype == torch.float32 else math.log2(math.e),
    }


def widths(problem: Problem) -> dict[str, int]:
    return {
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
    }


def compile_options(tiling: Tiling, device: Device) -> dict:
    """What Triton's compiler is told. Fusion of multiply and add stays off: see `common`."""
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, "enable_fp_fusion": False}
    if device.vendor == "nvidia" and tiling.maxnreg:
        options["maxnreg"] = tiling.maxnreg
    if device.vendor == "amd":
        if tiling.waves_per_eu:
            options["waves_per_eu"] = tiling.waves_per_eu
        if tiling.matrix_instr_nonkdim:
            options["matrix_instr_nonkdim"] = tiling.matrix_instr_nonkdim
    return options


def precision(problem: Problem, device: Device) -> str:
    """float32 products stay float32 unless torch's own switch allows TF32."""
    if problem.dtype != torch.float32 or device.vendor != "nvidia":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def unseen_slots(problem: Problem) -> bool:
    """Whether position alone leaves keys that no query sees or queries that see no key; they may hold NaN."""
    diagonal = 0 if problem.top_left else problem.seqlen_k - problem.seqlen_q
    left, right = problem.window_left, problem.window_right
    keys = (right is not None and problem.seqlen_q + diagonal + right < problem.seqlen_k) or (left is not None and diagonal - left > 0)
    queries = (right is not None and diagonal + right < 0) or (left is not None and problem.seqlen_q + diagonal - left > problem.seqlen_k)
    return keys or queries


def use_tma(tiling: Tiling, problem: Problem, *streamed: torch.Tensor) -> bool:
    """The descriptors load whole boxes: what must not be read (packed neighbours, hidden slots) needs pointers."""
    if not tiling.tma or problem.varlen or problem.bias or problem.mask or unseen_slots(problem):
        return False
    return all(describable(t) for t in streamed)


def _extras(inputs: Inputs) -> tuple:
    """Optional tensors in the order that every kernel takes them, booleans as bytes."""
    mask = inputs.mask
    return inputs.bias, None if mask is None else mask.view(torch.uint8), inputs.alibi_slopes


def _extra_strides(inputs: Inputs) -> tuple[int, ...]:
    alibi = inputs.alibi_slopes
    return (*broadcast_strides(inputs.bias), *broadcast_strides(inputs.mask), *((0, 0) if alibi is None else alibi.stride()))


def _sizes(problem: Problem) -> tuple[int, ...]:
    return (problem.group, problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k, *window(problem))


def _io_strides(inputs: Inputs) -> tuple[int, ...]:
    return (
        *head_strides(inputs.query, inputs.layout),
        *head_strides(inputs.key, inputs.layout),
        *head_strides(inputs.value, inputs.layout),
    )


def _strides_key(inputs: Inputs) -> tuple:
    """All that decides the compiled variant and its integers beyond the plan."""
    tf32 = inputs.query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return (tf32, *strides_key(inputs))


# ---------------------------------------------------------------- forward
@on_device
def forward(inputs: Inputs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    problem = plan.problem
    query, key, value = inputs.query, inputs.key, inputs.value
    out, lse = empty_outputs(query, problem.head_dim_v, inputs.layout, problem.varlen)
    name = ("forward", id(plan), *_strides_key(inputs), *alignment(query, key, value, inputs.bias))
    launch, tma = _planned(name, plan, plan_forward, inputs, plan)
    if tma:
        query, key, value = _forward_descriptors(inputs, plan)
    launch(
        query, key, value, out, lse, *_extras(inputs), inputs.sinks, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
        inputs.scale, inputs.softcap,
    )  # fmt: skip
    return out, lse


def _forward_descriptors(inputs: Inputs, plan: Plan):
    problem, tiling = plan.problem, plan.kernels["forward"].tiling
    d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    return (
        descriptor(inputs.query, inputs.layout, tiling.block_m, d),
        descriptor(inputs.key, inputs.layout, tiling.block_n, d),
        descriptor(inputs.value, inputs.layout, tiling.block_n, dv),
    )


def plan_forward(inputs: Inputs, plan: Plan) -> tuple[Launch, bool]:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["forward"].tiling
    tma = use_tma(tiling, problem, inputs.query, inputs.key, inputs.value)
    heads = problem.batch * problem.heads_q
    num_blocks = blocks(problem.seqlen_q, tiling.block_m)
    grouped = heads_per_group(device, key_bytes(problem), heads, problem.group)
    integers = (
        *_io_strides(inputs), *_output_strides(inputs, problem), *lse_strides(problem), *_extra_strides(inputs),
        num_blocks, heads, grouped, problem.heads_q, *_sizes(problem),
    )  # fmt: skip
    constexprs = {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem), **features(problem),
        "HAS_SINKS": problem.sinks, "EVEN_K": _even_keys(problem, tiling), **_common(tiling, problem, device, tma),
    }  # fmt: skip
    return Launch(forward_kernel, guard(num_blocks * heads), integers, constexprs, compile_options(tiling, device)), tma


def _output_strides(inputs: Inputs, problem: Problem) -> tuple[int, int, int]:
    """Strides of batch, head and row of the (contiguous) output."""
    heads, rows, d = problem.heads_q, problem.seqlen_q, problem.head_dim_v
    if problem.varlen:
        return 0, d, heads * d
    return (heads * rows * d, rows * d, d) if inputs.layout == "bhsd" else (heads * rows * d, d, heads * d)


def _common(tiling: Tiling, problem: Problem, device: Device, tma: bool) -> dict:
    return {"TMA": tma, "PRECISION": precision(problem, device), "NUM_XCDS": device.xcds, "NUM_STAGES": tiling.num_stages}


def _even_keys(problem: Problem, tiling: Tiling) -> bool:
    return not problem.varlen and problem.seqlen_k % tiling.block_n == 0


# ---------------------------------------------------------------- backward
@on_device
def backward(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs
) -> Gradients:
    problem = plan.problem
    grad_out = addressable(grad_out, inputs.layout)
    key = (id(plan), *_strides_key(inputs), grad_out.stride(), *alignment(inputs.query, inputs.key, inputs.value, grad_out, inputs.bias))
    grads = new_gradients(inputs, problem, needs)
    delta = torch.empty_like(lse)
    lse_stride = None if grad_lse is None else grad_lse.stride()
    launch, _ = _planned(("delta", *key, lse_stride), plan, plan_delta, inputs, plan, out, grad_out, grad_lse)
    launch(out, grad_out, lse, grad_lse, delta)
    tail = (*_extras(inputs), inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.softcap)
    if needs.key or needs.value:
        for dk, dv in dkv_passes(plan, needs):
            launch, tma = _planned(("dkv", dk, dv, *key), plan, plan_dkv, inputs, plan, grad_out, dk, dv)
            streamed = _dkv_descriptors(inputs, plan, grad_out) if tma else (inputs.query, grad_out)
            launch(streamed[0], inputs.key, inputs.value, streamed[1], lse, delta, grads.key, grads.value, *tail)
    if needs.query:
        launch, tma = _planned(("dq", *key), plan, plan_dq, inputs, plan, grad_out)
        streamed = _dq_descriptors(inputs, plan) if tma else (inputs.key, inputs.value)
        launch(inputs.query, *streamed, grad_out, lse, delta, grads.query, *tail)
    if needs.bias:
        launch, _ = _planned(("dbias", *key), plan, plan_dbias, inputs, plan, grad_out)
        launch(inputs.query, inputs.key, inputs.value, grad_out, lse, delta, grads.bias, *tail)
        grads.bias = grads.bias.to(inputs.bias.dtype)
    if needs.sinks:
        grads.sinks = sink_gradient(inputs.sinks, lse, delta, problem.varlen)
    return grads


def _dkv_descriptors(inputs: Inputs, plan: Plan, grad_out: torch.Tensor):
    problem, rows = plan.problem, plan.kernels["backward_dkv"].tiling.block_m
    return (
        descriptor(inputs.query, inputs.layout, rows, padded_head_dim(problem.head_dim)),
        descriptor(grad_out, inputs.layout, rows, padded_head_dim(problem.head_dim_v)),
    )


def _dq_descriptors(inputs: Inputs, plan: Plan):
    problem, rows = plan.problem, plan.kernels["backward_dq"].tiling.block_n
    return (
        descriptor(inputs.key, inputs.layout, rows, padded_head_dim(problem.head_dim)),
        descriptor(inputs.value, inputs.layout, rows, padded_head_dim(problem.head_dim_v)),
    )


def plan_delta(inputs: Inputs, plan: Plan, out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Launch, bool]:
    problem = plan.problem
    rows, sequences = (problem.total_q, 1) if problem.varlen else (problem.seqlen_q, problem.batch)
    num_blocks = blocks(rows, DELTA_ROWS)
    integers = (
        *head_strides(out, inputs.layout), *head_strides(grad_out, inputs.layout), *grad_lse_strides(grad_lse), *lse_strides(problem),
        num_blocks, problem.heads_q, rows,
    )  # fmt: skip
    constexprs = {
        "BLOCK_M": DELTA_ROWS, "BLOCK_DV": padded_head_dim(problem.head_dim_v), "HEAD_DIM_V": problem.head_dim_v,
        "HAS_DLSE": grad_lse is not None,
    }  # fmt: skip
    programs = guard(num_blocks * problem.heads_q * sequences)
    return Launch(backward_delta_kernel, programs, integers, constexprs, compile_options(_DELTA_TILING, plan.device)), False


def plan_dkv(inputs: Inputs, plan: Plan, grad_out: torch.Tensor, need_dk: bool, need_dv: bool) -> tuple[Launch, bool]:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["backward_dkv"].tiling
    tma = use_tma(tiling, problem, inputs.query, grad_out)
    heads = problem.batch * problem.heads_k
    num_blocks = blocks(problem.seqlen_k, tiling.block_n)
    integers = (
        *_io_strides(inputs), *head_strides(grad_out, inputs.layout), *lse_strides(problem),
        *contiguous_strides(inputs.key, inputs.layout), *contiguous_strides(inputs.value, inputs.layout), *_extra_strides(inputs),
        num_blocks, heads, heads_per_group(device, query_bytes(problem), heads, 1), problem.heads_k, *_sizes(problem),
    )  # fmt: skip
    constexprs = {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem), **features(problem),
        **_common(tiling, problem, device, tma),
        "EVEN_Q": not problem.varlen and problem.seqlen_q % tiling.block_m == 0, "NEED_DK": need_dk, "NEED_DV": need_dv,
    }  # fmt: skip
    return Launch(backward_dkv_kernel, guard(num_blocks * heads), integers, constexprs, compile_options(tiling, device)), tma


def plan_dq(inputs: Inputs, plan: Plan, grad_out: torch.Tensor) -> tuple[Launch, bool]:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["backward_dq"].tiling
    tma = use_tma(tiling, problem, inputs.key, inputs.value)
    heads = problem.batch * problem.heads_q
    num_blocks = blocks(problem.seqlen_q, tiling.block_m)
    integers = (
        *_io_strides(inputs), *head_strides(grad_out, inputs.layout), *lse_strides(problem),
        *contiguous_strides(inputs.query, inputs.layout), *_extra_strides(inputs),
        num_blocks, heads, heads_per_group(device, key_bytes(problem), heads, problem.group), problem.heads_q, *_sizes(problem),
    )  # fmt: skip
    constexprs = {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem), **features(problem),
        "EVEN_K": _even_keys(problem, tiling), **_common(tiling, problem, device, tma),
    }  # fmt: skip
    return Launch(backward_dq_kernel, guard(num_blocks * heads), integers, constexprs, compile_options(tiling, device)), tma


def plan_dbias(inputs: Inputs, plan: Plan, grad_out: torch.Tensor) -> tuple[Launch, bool]:
    """One program a tile of bias's own shape; tiles as in dQ, whose products these are."""
    problem, device, bias = plan.problem, plan.device, inputs.bias
    tiling = plan.kernels["backward_dq"].tiling.replace(num_stages=1)
    full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    summed = [n == 1 and m != 1 for n, m in zip(bias.shape, full)]
    m_tiles = 1 if summed[2] else blocks(bias.shape[2], tiling.block_m)
    n_tiles = 1 if summed[3] else blocks(bias.shape[3], tiling.block_n)
    dbias_strides = [0 if n == 1 else stride for n, stride in zip(bias.shape, row_major(bias.shape))]
    integers = (
        *_io_strides(inputs), *head_strides(grad_out, inputs.layout), *lse_strides(problem), *dbias_strides,
        *_extra_strides(inputs), m_tiles, n_tiles, bias.shape[1], problem.batch, problem.heads_q, *_sizes(problem),
    )  # fmt: skip
    constexprs = {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem),
        **{k: v for k, v in features(problem).items() if k != "HAS_BIAS"},
        "SUM_B": summed[0], "SUM_H": summed[1], "SUM_M": summed[2], "SUM_N": summed[3], "PRECISION": precision(problem, device),
    }  # fmt: skip
    programs = bias.shape[0] * bias.shape[1] * m_tiles * n_tiles
    return Launch(backward_dbias_kernel, guard(programs), integers, constexprs, compile_options(tiling, device)), False
