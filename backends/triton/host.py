"""Host side of the Triton kernels: outputs, launches, and what is known before a launch."""

from __future__ import annotations

import functools

import torch

from ...device import Device
from ...problem import Problem
from ...tiling import Tiling, padded_head_dim
from .. import Gradients, Inputs, Needs, Plan
from .backward_kernels import backward_dbias_kernel, backward_delta_kernel, backward_dkv_kernel, backward_dq_kernel
from .forward_kernels import forward_kernel
from .launch import INTERPRETED, MAX_PROGRAMS, Launch, alignment, broadcast_strides, describable, descriptor, head_strides

_DELTA_ROWS = 64  # rows a program of the delta kernel, which only streams
_LAUNCHES: dict[tuple, tuple] = {}
_MAX_LAUNCHES = 8192  # distinct calls remembered; beyond that the memory starts again from nothing


def _remember(key: tuple, value):
    if len(_LAUNCHES) >= _MAX_LAUNCHES:
        _LAUNCHES.clear()
    _LAUNCHES[key] = value
    return value


# ---------------------------------------------------------------- what is decided before a launch
def features(problem: Problem) -> dict[str, bool]:
    """Constexprs that say what the call uses, common to all kernels."""
    return {
        "HAS_LEFT": problem.window_left is not None,
        "HAS_RIGHT": problem.window_right is not None,
        "TOP_LEFT": problem.top_left,
        "VARLEN": problem.varlen,
        "HAS_BIAS": problem.bias,
        "HAS_MASK": problem.mask,
        "HAS_ALIBI": problem.alibi,
        "HAS_SOFTCAP": problem.softcap,
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
    queries = (right is not None and diagonal + right < 0) or (left is not None and problem.seqlen_q - 1 + diagonal - left > problem.seqlen_k - 1)
    return keys or queries


def use_tma(tiling: Tiling, problem: Problem, *streamed: torch.Tensor) -> bool:
    """The descriptors load whole boxes: what must not be read (packed neighbours, hidden slots) needs pointers."""
    if not tiling.tma or problem.varlen or problem.bias or problem.mask or unseen_slots(problem):
        return False
    return all(describable(t) for t in streamed)


def blocks(n: int, block: int) -> int:
    return -(-n // block)


def heads_per_group(problem: Problem, device: Device, streamed_bytes: int, heads: int, sharing: int) -> int:
    """Consecutive heads whose streamed operands (bytes of `sharing` heads together) fit in half of the last cache."""
    fit = max(1, device.l2_bytes // 2 // max(1, streamed_bytes))
    return max(1, min(heads, fit * sharing))


def _window(problem: Problem) -> tuple[int, int]:
    return problem.window_left or 0, problem.window_right or 0


def _guard(programs: int) -> int:
    if programs > MAX_PROGRAMS:
        raise ValueError(f"the call needs {programs} programs, a launch has at most {MAX_PROGRAMS}: split the batch")
    return programs


def _extras(inputs: Inputs) -> tuple:
    """Optional tensors in the order that every kernel takes them, booleans as bytes."""
    mask = inputs.mask
    return inputs.bias, None if mask is None else mask.view(torch.uint8), inputs.alibi_slopes


def _extra_strides(inputs: Inputs) -> tuple[int, ...]:
    alibi = inputs.alibi_slopes
    return (*broadcast_strides(inputs.bias), *broadcast_strides(inputs.mask), *((0, 0) if alibi is None else alibi.stride()))


def _sizes(problem: Problem) -> tuple[int, ...]:
    return (problem.group, problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k, *_window(problem))


def _io_strides(inputs: Inputs) -> tuple[int, ...]:
    return (
        *head_strides(inputs.query, inputs.layout),
        *head_strides(inputs.key, inputs.layout),
        *head_strides(inputs.value, inputs.layout),
    )


def _optional_key(inputs: Inputs) -> tuple:
    return tuple(
        [None if t is None else (t.shape, t.stride(), t.dtype) for t in (inputs.bias, inputs.mask, inputs.alibi_slopes)]
    )


def _on_device(function):
    """Run with the tensors' device current: Triton launches on the current one."""

    @functools.wraps(function)
    def run(inputs: Inputs, plan: Plan, *rest):
        index = plan.device.index
        if index is None or index == torch.cuda.current_device():
            return function(inputs, plan, *rest)
        with torch.cuda.device(index):
            return function(inputs, plan, *rest)

    return run


# ---------------------------------------------------------------- forward
def empty_outputs(query: torch.Tensor, head_dim_v: int, layout: str, varlen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse; packed ones start as rows that see no key, since no program owns rows past the last sequence."""
    if varlen:
        total, heads, _ = query.shape
        return query.new_zeros(total, heads, head_dim_v), query.new_full((heads, total), float("-inf"), dtype=torch.float32)
    b, x, y, _ = query.shape
    heads, rows = (x, y) if layout == "bhsd" else (y, x)
    return query.new_empty(b, x, y, head_dim_v), query.new_empty(b, heads, rows, dtype=torch.float32)


def _lse_strides(problem: Problem) -> tuple[int, int]:
    return (0, problem.total_q) if problem.varlen else (problem.heads_q * problem.seqlen_q, problem.seqlen_q)


@_on_device
def forward(inputs: Inputs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    problem, device = plan.problem, plan.device
    query, key, value = inputs.query, inputs.key, inputs.value
    out, lse = empty_outputs(query, problem.head_dim_v, inputs.layout, problem.varlen)
    name = ("forward", id(plan), query.stride(), key.stride(), value.stride(), *alignment(query, key, value, inputs.bias), *_optional_key(inputs))
    found = _LAUNCHES.get(name)
    if found is None:
        found = _remember(name, (*_plan_forward(inputs, plan, out), plan))  # plan kept alive: its id is in the key
    launch, tma = found[0], found[1]
    if tma:
        tiling, d, dv = plan.kernels["forward"].tiling, padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        query = descriptor(query, inputs.layout, tiling.block_m, d)
        key = descriptor(key, inputs.layout, tiling.block_n, d)
        value = descriptor(value, inputs.layout, tiling.block_n, dv)
    launch(query, key, value, out, lse, *_extras(inputs), inputs.sinks, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.softcap)
    return out, lse


def _plan_forward(inputs: Inputs, plan: Plan, out: torch.Tensor) -> tuple[Launch, bool]:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["forward"].tiling
    tma = use_tma(tiling, problem, inputs.query, inputs.key, inputs.value)
    heads = problem.batch * problem.heads_q
    num_blocks = blocks(problem.seqlen_q, tiling.block_m)
    grouped = heads_per_group(problem, device, _key_bytes(problem), heads, problem.group)
    integers = (
        *_io_strides(inputs), *head_strides(out, inputs.layout), *_lse_strides(problem), *_extra_strides(inputs),
        num_blocks, heads, grouped, problem.heads_q, *_sizes(problem),
    )  # fmt: skip
    constexprs = {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem), **features(problem),
        "HAS_SINKS": problem.sinks, "EVEN_K": _even_keys(problem, tiling),
        "TMA": tma, "PRECISION": precision(problem, device), "NUM_XCDS": device.xcds, "NUM_STAGES": tiling.num_stages,
    }  # fmt: skip
    return Launch(forward_kernel, _guard(num_blocks * heads), integers, constexprs, compile_options(tiling, device)), tma


def _even_keys(problem: Problem, tiling: Tiling) -> bool:
    return not problem.varlen and problem.seqlen_k % tiling.block_n == 0


def _key_bytes(problem: Problem) -> int:
    return problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


# ---------------------------------------------------------------- backward
@_on_device
def backward(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs
) -> Gradients:
    problem = plan.problem
    if grad_out.stride(-1) != 1 and grad_out.shape[-1] != 1:
        grad_out = grad_out.contiguous()
    delta = _delta(inputs, plan, out, lse, grad_out, grad_lse)
    grads = Gradients()
    common = (lse, delta)
    if needs.key or needs.value:
        grads.key, grads.value = _dkv(inputs, plan, grad_out, *common)
    if needs.query:
        grads.query = _dq(inputs, plan, grad_out, *common)
    if needs.bias:
        grads.bias = _dbias(inputs, plan, grad_out, *common)
    if needs.sinks:
        grads.sinks = sink_gradient(inputs.sinks, lse, delta, problem.varlen)
    return grads


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, varlen: bool) -> torch.Tensor:
    """dsink_h = - sum over batch and rows of exp(sink_h - lse) * delta: a sink is a key whose value is 0."""
    heads = (slice(None), None) if varlen else (None, slice(None), None)
    share = torch.exp(sinks[heads] - lse).nan_to_num_(0.0)  # -inf - -inf: no sink and no key
    return -(share * delta).sum(-1 if varlen else (0, 2))


def _delta(inputs: Inputs, plan: Plan, out, lse, grad_out, grad_lse) -> torch.Tensor:
    problem = plan.problem
    delta = torch.empty_like(lse)
    name = ("delta", id(plan), out.stride(), grad_out.stride(), None if grad_lse is None else grad_lse.stride(), *alignment(out, grad_out))
    found = _LAUNCHES.get(name)
    if found is None:
        dlse = (0, 0, 0)
        if grad_lse is not None:
            dlse = (0, *grad_lse.stride()) if problem.varlen else grad_lse.stride()
        rows, sequences = (problem.total_q, 1) if problem.varlen else (problem.seqlen_q, problem.batch)
        num_blocks = blocks(rows, _DELTA_ROWS)
        integers = (
            *head_strides(out, inputs.layout), *head_strides(grad_out, inputs.layout), *dlse, *_lse_strides(problem),
            num_blocks, problem.heads_q, rows,
        )  # fmt: skip
        constexprs = {
            "BLOCK_M": _DELTA_ROWS, "BLOCK_DV": padded_head_dim(problem.head_dim_v), "HEAD_DIM_V": problem.head_dim_v,
            "HAS_DLSE": grad_lse is not None,
        }  # fmt: skip
        launch = Launch(backward_delta_kernel, _guard(num_blocks * problem.heads_q * sequences), integers, constexprs, {"num_warps": 4})
        found = _remember(name, (launch, plan))
    found[0](out, grad_out, grad_lse, delta)
    return delta


def _dkv(inputs: Inputs, plan: Plan, grad_out, lse, delta) -> tuple[torch.Tensor, torch.Tensor]:
    problem, tiling = plan.problem, plan.kernels["backward_dkv"].tiling
    query, key, value = inputs.query, inputs.key, inputs.value
    # rows past the last packed sequence belong to no program
    new = torch.zeros if problem.varlen else torch.empty
    dk = new(key.shape, dtype=key.dtype, device=key.device)
    dv = new(value.shape, dtype=value.dtype, device=value.device)
    name = (
        "dkv", id(plan), query.stride(), key.stride(), value.stride(), grad_out.stride(),
        *alignment(query, key, value, grad_out, inputs.bias), *_optional_key(inputs),
    )  # fmt: skip
    found = _LAUNCHES.get(name)
    if found is None:
        device = plan.device
        tma = use_tma(tiling, problem, query, grad_out)
        heads = problem.batch * problem.heads_k
        num_blocks = blocks(problem.seqlen_k, tiling.block_n)
        streamed = problem.group * problem.seqlen_q * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        integers = (
            *_io_strides(inputs), *head_strides(grad_out, inputs.layout), *_lse_strides(problem),
            *head_strides(dk, inputs.layout), *head_strides(dv, inputs.layout), *_extra_strides(inputs),
            num_blocks, heads, heads_per_group(problem, device, streamed, heads, 1), problem.heads_k, *_sizes(problem),
        )  # fmt: skip
        constexprs = {
            "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem), **features(problem),
            "TMA": tma, "PRECISION": precision(problem, device), "NUM_XCDS": device.xcds, "NUM_STAGES": tiling.num_stages,
        }  # fmt: skip
        launch = Launch(backward_dkv_kernel, _guard(num_blocks * heads), integers, constexprs, compile_options(tiling, device))
        found = _remember(name, (launch, tma, plan))
    if found[1]:
        query = descriptor(query, inputs.layout, tiling.block_m, padded_head_dim(problem.head_dim))
        grad_out = descriptor(grad_out, inputs.layout, tiling.block_m, padded_head_dim(problem.head_dim_v))
    found[0](
        query, key, value, grad_out, lse, delta, dk, dv, *_extras(inputs), inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.softcap
    )
    return dk, dv


def _dq(inputs: Inputs, plan: Plan, grad_out, lse, delta) -> torch.Tensor:
    problem, tiling = plan.problem, plan.kernels["backward_dq"].tiling
    query, key, value = inputs.query, inputs.key, inputs.value
    new = torch.zeros if problem.varlen else torch.empty
    dq = new(query.shape, dtype=query.dtype, device=query.device)
    name = (
        "dq", id(plan), query.stride(), key.stride(), value.stride(), grad_out.stride(),
        *alignment(query, key, value, grad_out, inputs.bias), *_optional_key(inputs),
    )  # fmt: skip
    found = _LAUNCHES.get(name)
    if found is None:
        device = plan.device
        tma = use_tma(tiling, problem, key, value)
        heads = problem.batch * problem.heads_q
        num_blocks = blocks(problem.seqlen_q, tiling.block_m)
        integers = (
            *_io_strides(inputs), *head_strides(grad_out, inputs.layout), *_lse_strides(problem),
            *head_strides(dq, inputs.layout), *_extra_strides(inputs),
            num_blocks, heads, heads_per_group(problem, device, _key_bytes(problem), heads, problem.group), problem.heads_q, *_sizes(problem),
        )  # fmt: skip
        constexprs = {
            "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem), **features(problem), "EVEN_K": _even_keys(problem, tiling),
            "TMA": tma, "PRECISION": precision(problem, device), "NUM_XCDS": device.xcds, "NUM_STAGES": tiling.num_stages,
        }  # fmt: skip
        launch = Launch(backward_dq_kernel, _guard(num_blocks * heads), integers, constexprs, compile_options(tiling, device))
        found = _remember(name, (launch, tma, plan))
    if found[1]:
        key = descriptor(key, inputs.layout, tiling.block_n, padded_head_dim(problem.head_dim))
        value = descriptor(value, inputs.layout, tiling.block_n, padded_head_dim(problem.head_dim_v))
    found[0](query, key, value, grad_out, lse, delta, dq, *_extras(inputs), inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.softcap)
    return dq


def _dbias(inputs: Inputs, plan: Plan, grad_out, lse, delta) -> torch.Tensor:
    problem, device = plan.problem, plan.device
    tiling = plan.kernels["backward_dq"].tiling
    bias = inputs.bias
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    full = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    summed = [n == 1 and m != 1 for n, m in zip(bias.shape, full)]
    m_tiles = 1 if summed[2] else blocks(bias.shape[2], tiling.block_m)
    n_tiles = 1 if summed[3] else blocks(bias.shape[3], tiling.block_n)
    programs = bias.shape[0] * bias.shape[1] * m_tiles * n_tiles
    constexprs = {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, **widths(problem),
        **{k: v for k, v in features(problem).items() if k != "HAS_BIAS"},
        "SUM_B": summed[0], "SUM_H": summed[1], "SUM_M": summed[2], "SUM_N": summed[3], "PRECISION": precision(problem, device),
    }  # fmt: skip
    integers = (
        *_io_strides(inputs), *head_strides(grad_out, inputs.layout), *_lse_strides(problem), *broadcast_strides(dbias)[:4],
        *_extra_strides(inputs), m_tiles, n_tiles, bias.shape[1], problem.batch, problem.heads_q, *_sizes(problem),
    )  # fmt: skip
    options = compile_options(tiling.replace(num_stages=1), device)
    launch = Launch(backward_dbias_kernel, _guard(programs), integers, constexprs, options)
    launch(
        inputs.query, inputs.key, inputs.value, grad_out, lse, delta, dbias,
        *_extras(inputs), inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.scale, inputs.softcap,
    )  # fmt: skip
    return dbias.to(bias.dtype)
