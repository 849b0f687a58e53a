"""Host side of the HIP kernels: outputs, launches, and what is known before a launch.

Launches are data: `plan_*` say what one is, from tensors that may have no memory, and `forward` and `backward` hand each to an
executor, which is the GPU unless the caller brings another (an emulator, a harness on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...device import Device
from ...problem import Problem
from .. import Gradients, Inputs, KernelPlan, Needs, Plan
from ..shared import (
    DELTA_ROWS,
    addressable,
    alignment,
    blocks,
    broadcast_strides,
    dkv_passes,
    empty_outputs,
    grad_lse_strides,
    guard,
    head_strides,
    heads_per_group,
    key_bytes,
    lse_strides,
    meta_call,
    new_gradients,
    on_device,
    query_bytes,
    row_major,
    sink_gradient,
    strides_key,
    window,
)
from .arguments import Call, Strides3, Strides4, pack
from .runtime import max_programs
from .specialise import Kernel, attention_kernel, dbias_tiling, delta_kernel

_PREPARED: dict[tuple, tuple] = {}
_INT32_MAX = 2**31 - 1
_MAX_PREPARED = 8192  # distinct launches remembered; beyond that the memory starts again from nothing


class Prepared:
    """A kernel with everything but its tensors fixed: which variant, how many programs, the sizes and strides."""

    __slots__ = ("kernel", "programs", "call", "packed_call", "function")

    def __init__(self, kernel: Kernel, programs: int, call: Call):
        self.kernel = kernel
        self.programs = guard(programs, max_programs(kernel.threads))
        self.call = call
        self.packed_call = bytes(call)
        self.function = None  # what the GPU launches, once it has


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: a prepared kernel and its tensors by the name of their pointer (absent ones null)."""

    prepared: Prepared
    tensors: Mapping[str, torch.Tensor | None]

    @property
    def kernel(self) -> Kernel:
        return self.prepared.kernel

    @property
    def programs(self) -> int:
        """Workgroups, all along x; 0 is nothing to do."""
        return self.prepared.programs

    @property
    def call(self) -> Call:
        return self.prepared.call

    def arguments(self) -> bytes:
        """The kernel's arguments as they lie in memory."""
        addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items() if tensor is not None}
        return pack(addresses, self.prepared.packed_call)


Executor = Callable[[Launch, Plan], None]


def launch_on_gpu(launch: Launch, plan: Plan) -> None:
    """Launch on the current stream of the plan's device, which is the current one; compiles at the first launch of a variant."""
    from . import runtime

    prepared = launch.prepared
    if prepared.programs == 0:
        return
    if prepared.function is None:
        prepared.function = runtime.function(prepared.kernel, plan.device.index)
    stream = torch.cuda.current_stream(plan.device.index).cuda_stream
    runtime.launch(prepared.function, prepared.programs, launch.arguments(), stream)


# ---------------------------------------------------------------- forward and backward
@on_device
def forward(inputs: Inputs, plan: Plan, execute: Executor = launch_on_gpu) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = empty_outputs(inputs.query, plan.problem.head_dim_v, inputs.layout, plan.problem.varlen)
    for launch in forward_launches(inputs, plan, out, lse):
        execute(launch, plan)
    return out, lse


@on_device
def backward(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs,
    execute: Executor = launch_on_gpu,
) -> Gradients:  # fmt: skip
    grad_out = addressable(grad_out, inputs.layout)
    delta = torch.empty_like(lse)
    grads = new_gradients(inputs, plan.problem, needs)
    for launch in backward_launches(inputs, plan, out, lse, grad_out, grad_lse, delta, grads):
        execute(launch, plan)
    if needs.bias:
        grads.bias = grads.bias.to(inputs.bias.dtype)
    if needs.sinks:
        grads.sinks = sink_gradient(inputs.sinks, lse, delta, plan.problem.varlen)
    return grads


def forward_launches(inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor) -> list[Launch]:
    """The launches of a forward pass, in order; packed outputs must hold 0 and -inf before."""
    query, key, value = inputs.query, inputs.key, inputs.value
    remembered = ("forward", id(plan), *_scalars_key(inputs), *alignment(query, key, value, out), out.stride())
    prepared = _planned(remembered, plan, plan_forward, inputs, plan, out)
    return [Launch(prepared, {**_operands(inputs), "out": out, "lse": lse, "sinks": inputs.sinks})]


def backward_launches(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None,
    delta: torch.Tensor, grads: Gradients,
) -> list[Launch]:  # fmt: skip
    """The launches of a backward pass, in order: those that fill delta and the gradients that `grads` has memory for.

    grad_out's last dimension is contiguous; delta is like lse; grads.bias is float32 in bias's shape, its zeros included where
    no program writes; packed gradients hold 0 before.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    key_of_call = (id(plan), *_scalars_key(inputs), grad_out.stride(), *alignment(query, key, value, grad_out))
    lse_stride = None if grad_lse is None else grad_lse.stride()
    remembered = ("delta", *key_of_call, out.stride(), *alignment(out), lse_stride)
    prepared = _planned(remembered, plan, plan_delta, inputs, plan, out, grad_out, grad_lse)
    launches = [Launch(prepared, {"out": out, "grad_out": grad_out, "lse": lse, "grad_lse": grad_lse, "delta": delta})]
    operands = {**_operands(inputs), "grad_out": grad_out, "lse": lse, "delta": delta}
    if grads.key is not None or grads.value is not None:
        for need_dk, need_dv in dkv_passes(plan, Needs(key=grads.key is not None, value=grads.value is not None)):
            dkey, dvalue = grads.key if need_dk else None, grads.value if need_dv else None
            written = (*alignment(dkey, dvalue), *[None if t is None else t.stride() for t in (dkey, dvalue)])
            prepared = _planned(("dkv", *key_of_call, *written), plan, plan_dkv, inputs, plan, grad_out, dkey, dvalue)
            launches.append(Launch(prepared, {**operands, "dkey": dkey, "dvalue": dvalue}))
    if grads.query is not None:
        remembered = ("dq", *key_of_call, *alignment(grads.query), grads.query.stride())
        prepared = _planned(remembered, plan, plan_dq, inputs, plan, grad_out, grads.query)
        launches.append(Launch(prepared, {**operands, "dquery": grads.query}))
    if grads.bias is not None:
        prepared = _planned(("dbias", *key_of_call), plan, plan_dbias, inputs, plan, grad_out)
        launches.append(Launch(prepared, {**operands, "dbias": grads.bias}))
    return launches


def kernels_of(
    problem: Problem, device: Device, kernels: Mapping[str, KernelPlan] | None = None, layout: str = "bhsd"
) -> dict[str, Kernel]:
    """Every variant that a problem needs on a device, by name, without tensors: for building ahead of time and for tests.

    `kernels` are the tilings, looked up when None. Where dK and dV are separate launches they are "backward_dk" and "backward_dv".
    """
    if kernels is None:
        from ...tuning import lookup
        from . import NAME, space, tuned_kernels

        kernels = {name: lookup(name, problem, device, space(name), NAME) for name in tuned_kernels(problem)}
    inputs, out, lse, grad_out = meta_call(problem, layout)
    plan = Plan(problem, device, "hip", MappingProxyType(dict(kernels)))
    launches = forward_launches(inputs, plan, out, lse) if "forward" in kernels else []
    if {"backward_dkv", "backward_dq"} <= kernels.keys():
        grads = new_gradients(inputs, problem, Needs(bias=problem.bias))
        launches += backward_launches(inputs, plan, out, lse, grad_out, None, torch.empty_like(lse), grads)
    return {_name(launch): launch.kernel for launch in launches}


def _name(launch: Launch) -> str:
    if launch.kernel.name != "backward_dkv":
        return launch.kernel.name
    return "backward_d" + "k" * (launch.tensors["dkey"] is not None) + "v" * (launch.tensors["dvalue"] is not None)


# ---------------------------------------------------------------- what is decided before a launch
def plan_forward(inputs: Inputs, plan: Plan, out: torch.Tensor) -> Prepared:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["forward"].tiling
    kernel = attention_kernel("forward", problem, device, tiling, wide_loads=_wide(*_io(inputs), out), **_dtypes(inputs))
    call = _call(inputs, problem, out=out)
    return Prepared(kernel, _query_blocks(call, problem, device, tiling.block_m), call)


def plan_delta(inputs: Inputs, plan: Plan, out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> Prepared:
    """Packed tensors are one sequence here. Head after head: nothing is shared between programs."""
    problem = plan.problem
    kernel = delta_kernel(problem, plan.device, wide_loads=_wide(out, grad_out), grad_lse=grad_lse is not None)
    call = _call(inputs, problem, out=out, grad_out=grad_out)
    call.grad_lse = Strides3(*grad_lse_strides(grad_lse))
    rows, sequences = (problem.total_q, 1) if problem.varlen else (problem.seqlen_q, problem.batch)
    call.batch, call.seqlen_q = sequences, rows
    return Prepared(kernel, _ordered(call, blocks(rows, DELTA_ROWS), sequences * problem.heads_q, 1), call)


def plan_dkv(inputs: Inputs, plan: Plan, grad_out: torch.Tensor, dkey: torch.Tensor | None, dvalue: torch.Tensor | None) -> Prepared:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["backward_dkv"].tiling
    kernel = attention_kernel(
        "backward_dkv", problem, device, tiling, wide_loads=_wide(*_io(inputs), grad_out, dkey, dvalue), **_dtypes(inputs),
        need_dk=dkey is not None, need_dv=dvalue is not None,
    )  # fmt: skip
    call = _call(inputs, problem, grad_out=grad_out, dkey=dkey, dvalue=dvalue)
    heads = problem.batch * problem.heads_k
    grouped = heads_per_group(device, query_bytes(problem), heads, 1)
    return Prepared(kernel, _ordered(call, blocks(problem.seqlen_k, tiling.block_n), heads, grouped), call)


def plan_dq(inputs: Inputs, plan: Plan, grad_out: torch.Tensor, dquery: torch.Tensor) -> Prepared:
    problem, device, tiling = plan.problem, plan.device, plan.kernels["backward_dq"].tiling
    wide = _wide(*_io(inputs), grad_out, dquery)
    kernel = attention_kernel("backward_dq", problem, device, tiling, wide_loads=wide, **_dtypes(inputs))
    call = _call(inputs, problem, grad_out=grad_out, dquery=dquery)
    return Prepared(kernel, _query_blocks(call, problem, device, tiling.block_m), call)


def plan_dbias(inputs: Inputs, plan: Plan, grad_out: torch.Tensor) -> Prepared:
    """One program a tile of bias's own shape; tiles as in dQ, whose products these are, where LDS holds both blocks."""
    problem, device, shape = plan.problem, plan.device, tuple(inputs.bias.shape)
    tiling = dbias_tiling(plan.kernels["backward_dq"].tiling, problem, device)
    summed = tuple(n == 1 for n in shape)
    wide = _wide(*_io(inputs), grad_out)
    kernel = attention_kernel("backward_dbias", problem, device, tiling, wide_loads=wide, **_dtypes(inputs), summed=summed)
    call = _call(inputs, problem, grad_out=grad_out)
    call.dbias = Strides4(*(0 if n == 1 else stride for n, stride in zip(shape, row_major(shape))))
    m_tiles = 1 if summed[2] else blocks(shape[2], tiling.block_m)
    n_tiles = 1 if summed[3] else blocks(shape[3], tiling.block_n)
    call.m_tiles, call.n_tiles, call.bias_heads = m_tiles, n_tiles, shape[1]
    return Prepared(kernel, shape[0] * shape[1] * m_tiles * n_tiles, call)


def _planned(key: tuple, plan: Plan, prepare: Callable[..., Prepared], *arguments) -> Prepared:
    """The Prepared of this key, made at the first call."""
    found = _PREPARED.get(key)
    if found is None:
        if len(_PREPARED) >= _MAX_PREPARED:
            _PREPARED.clear()
        found = _PREPARED[key] = (prepare(*arguments), plan)  # the plan is kept alive: its id is in the key
    return found[0]


def _scalars_key(inputs: Inputs) -> tuple:
    return (*strides_key(inputs), inputs.scale, inputs.softcap)


def _io(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return inputs.query, inputs.key, inputs.value


def _wide(*tensors: torch.Tensor | None) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is one long; strides along dimensions of size 1 do not matter."""
    for t in tensors:
        if t is None or t.numel() == 0:
            continue
        size = t.element_size()
        if t.data_ptr() % 16 or t.shape[-1] * size % 16 or any(n > 1 and s * size % 16 for n, s in zip(t.shape[:-1], t.stride())):
            return False
    return True


def _dtypes(inputs: Inputs) -> dict[str, torch.dtype | None]:
    """Of bias and of cu_seqlens, of which both are widened where they differ."""
    q, k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    index = None if q is None else q.dtype if q.dtype == k.dtype else torch.int64
    return {"bias_dtype": None if inputs.bias is None else inputs.bias.dtype, "index_dtype": index}


def _operands(inputs: Inputs) -> dict[str, torch.Tensor | None]:
    """What all kernels but delta read, booleans as bytes."""
    q, k, mask = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.mask
    if q is not None and q.dtype != k.dtype:
        q, k = q.long(), k.long()
    return {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "bias": inputs.bias,
        "mask": None if mask is None else mask.view(torch.uint8), "alibi_slopes": inputs.alibi_slopes,
        "cu_seqlens_q": q, "cu_seqlens_k": k,
    }  # fmt: skip


def _query_blocks(call: Call, problem: Problem, device: Device, block_m: int) -> int:
    """Programs of a kernel that has one a query block and head; their order goes into the call."""
    heads = problem.batch * problem.heads_q
    return _ordered(call, blocks(problem.seqlen_q, block_m), heads, heads_per_group(device, key_bytes(problem), heads, problem.group))


def _ordered(call: Call, num_blocks: int, num_heads: int, heads_per_group: int) -> int:
    call.num_blocks, call.num_heads, call.heads_per_group = num_blocks, num_heads, heads_per_group
    return num_blocks * num_heads


def _call(inputs: Inputs, problem: Problem, **written: torch.Tensor | None) -> Call:
    """Sizes and strides of the inputs, and of further tensors that have the layout of the query or key."""
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **written}
    strides = {name: Strides3(*head_strides(t, inputs.layout)) for name, t in tensors.items() if t is not None}
    bias, mask = broadcast_strides(inputs.bias), broadcast_strides(inputs.mask)
    lse_batch, lse_head = lse_strides(problem)
    alibi_batch, alibi_head = (0, 0) if inputs.alibi_slopes is None else inputs.alibi_slopes.stride()
    window_left, window_right = window(problem)
    return Call(
        **strides, bias=Strides4(*bias[:4]), mask=Strides4(*mask[:4]), lse_batch=lse_batch, lse_head=lse_head,
        alibi_batch=alibi_batch, alibi_head=alibi_head, total_q=problem.total_q, total_k=problem.total_k,
        scale=inputs.scale, softcap=inputs.softcap, bias_rows=bias[4], bias_columns=bias[5], mask_rows=mask[4], mask_columns=mask[5],
        batch=problem.batch, heads_q=problem.heads_q, heads_k=problem.heads_k, group=problem.group,
        seqlen_q=min(problem.seqlen_q, _INT32_MAX), seqlen_k=min(problem.seqlen_k, _INT32_MAX),  # packed: bounds that a person gave
        window_left=window_left, window_right=window_right,
    )  # fmt: skip
