"""The torch.library operators: what autograd, torch.compile, export and FakeTensor see of an attention call.

Schemas take the options in their plain form: unbounded window = -1, no softcap = 0.0, best backend = "".
Sizes of outputs are a function of the inputs only, the same for every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch
from .backends import Gradients, Inputs, Needs, Plan, load
from .problem import Problem

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt window_left, SymInt window_right, bool top_left, float? scale, float softcap, "
    "str layout, bool deterministic, str backend"
)
_LIBRARY = torch.library.Library("portable_flash", "DEF")
_LIBRARY.define(f"attention_forward({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
forward_op = torch.ops.portable_flash.attention_forward.default
backward_op = torch.ops.portable_flash.attention_backward.default

NUM_TENSORS = 9  # leading tensor arguments of the forward operator
_GRADIENTS = ("query", "key", "value", "bias", "sinks")
_GRADIENT_POSITIONS = (0, 1, 2, 3, 5)  # of those in the forward operator's arguments


def problem_of(
    query: Tensor, key: Tensor, value: Tensor, bias, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, window_left, window_right, top_left, scale, softcap, layout, deterministic, backend, needs_grad=True,
) -> Problem:  # fmt: skip
    """The Problem of an operator call. Reaches that cannot hide a key are dropped, so that they cost nothing."""
    varlen = cu_seqlens_q is not None
    if varlen:
        batch, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k
        heads_q, heads_k = query.shape[1], key.shape[1]
        # lengths are on the device: only reaches beyond the packed rows are surely idle
        idle_left, idle_right = key.shape[0], query.shape[0]
    else:
        rows, heads = (2, 1) if layout == "bhsd" else (1, 2)
        batch, seqlen_q, seqlen_k = query.shape[0], query.shape[rows], key.shape[rows]
        heads_q, heads_k = query.shape[heads], key.shape[heads]
        diagonal = 0 if top_left else seqlen_k - seqlen_q
        idle_left, idle_right = seqlen_q - 1 + diagonal, seqlen_k - 1 - diagonal
    return Problem(
        dtype=query.dtype, batch=batch, heads_q=heads_q, heads_k=heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        head_dim=query.shape[-1], head_dim_v=value.shape[-1],
        window_left=None if window_left < 0 or window_left >= idle_left else window_left,
        window_right=None if window_right < 0 or window_right >= idle_right else window_right,
        top_left=top_left, varlen=varlen, total_q=query.shape[0] if varlen else 0, total_k=key.shape[0] if varlen else 0,
        softcap=softcap > 0, bias=bias is not None, alibi=alibi_slopes is not None, sinks=sinks is not None, mask=mask is not None,
        deterministic=deterministic, needs_grad=needs_grad,
    )  # fmt: skip


def inputs_of(arguments: tuple) -> Inputs:
    query, key, value, bias, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k = arguments[:NUM_TENSORS]
    scale, softcap, layout = arguments[14:17]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return Inputs(query, key, value, scale, softcap, layout, bias, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k)


def plan_of(arguments: tuple, needs_grad: bool = True) -> Plan:
    return dispatch.plan(problem_of(*arguments, needs_grad=needs_grad), dispatch.device_of(arguments[0].device), arguments[-1] or None)


# ---------------------------------------------------------------- kernels
def _forward(*arguments) -> tuple[Tensor, Tensor]:
    return run_forward(plan_of(arguments), arguments)


def run_forward(plan: Plan, arguments: tuple) -> tuple[Tensor, Tensor]:
    """Output and lse of a planned call; `arguments` are the forward operator's."""
    return load(plan.backend).forward(inputs_of(arguments), plan)


def _backward(grad_out, grad_lse, out, lse, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *arguments, needs = arguments
    return _run_backward(plan_of(tuple(arguments)), grad_out, grad_lse, out, lse, tuple(arguments), needs)


def _run_backward(plan: Plan, grad_out, grad_lse, out, lse, arguments: tuple, needs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads: Gradients = load(plan.backend).backward(inputs_of(arguments), plan, out, lse, grad_out, grad_lse, Needs(*needs))
    found = [getattr(grads, name) if need else None for name, need in zip(_GRADIENTS, needs)]
    return tuple(grad_out.new_empty(0) if g is None else g for g in found)


def _fake_forward(query, key, value, bias, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options):
    layout = options[5]
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if cu_seqlens_q is not None:
        total, heads, _ = query.shape
        return query.new_empty(total, heads, value.shape[-1]), query.new_empty(heads, total, dtype=lse_dtype)
    b, x, y, _ = query.shape
    heads, rows = (x, y) if layout == "bhsd" else (y, x)
    return query.new_empty(b, x, y, value.shape[-1]), query.new_empty(b, heads, rows, dtype=lse_dtype)


def _fake_backward(grad_out, grad_lse, out, lse, *arguments):
    *arguments, needs = arguments
    inputs = [arguments[i] for i in _GRADIENT_POSITIONS]
    return tuple(x.new_empty(x.shape) if need else grad_out.new_empty(0) for x, need in zip(inputs, needs))


# ---------------------------------------------------------------- autograd
def _setup_context(ctx, inputs, output):
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:NUM_TENSORS], out, lse)
    ctx.options = inputs[NUM_TENSORS:]


def _gradient(ctx, grad_out, grad_lse, run_backward):
    *tensors, out, lse = ctx.saved_tensors
    needs = [bool(ctx.needs_input_grad[i]) for i in _GRADIENT_POSITIONS]
    if (grad_out is None and grad_lse is None) or not any(needs):
        return (None,) * len(ctx.needs_input_grad)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = run_backward(grad_out, grad_lse, out, lse, *tensors, *ctx.options, needs)
    result = [None] * len(ctx.needs_input_grad)
    for position, need, grad in zip(_GRADIENT_POSITIONS, needs, grads):
        result[position] = grad if need else None
    return tuple(result)


def _operator_gradient(ctx, grad_out, grad_lse):
    return _gradient(ctx, grad_out, grad_lse, backward_op)


def _no_double_backward(ctx, *grads):
    raise NotImplementedError("attention has no double backward: gradients of its gradients (create_graph=True) are not available")


class EagerAttention(torch.autograd.Function):
    """The forward operator's autograd formula without the dispatcher, for plain eager calls; arguments, then their plan."""

    @staticmethod
    def forward(ctx, *arguments_and_plan):
        *arguments, plan = arguments_and_plan
        output = run_forward(plan, arguments)
        _setup_context(ctx, arguments, output)
        ctx.plan = plan
        return output

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if torch.is_grad_enabled():  # create_graph=True: the operator's own formula raises the error with a reason
            return _gradient(ctx, grad_out, grad_lse, backward_op)

        def run(grad_out, grad_lse, out, lse, *arguments):
            return _run_backward(ctx.plan, grad_out, grad_lse, out, lse, arguments[:-1], arguments[-1])

        return _gradient(ctx, grad_out, grad_lse, run)


for _name, _kernel, _fake in (("attention_forward", _forward, _fake_forward), ("attention_backward", _backward, _fake_backward)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"portable_flash::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("portable_flash::attention_forward", _operator_gradient, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("portable_flash::attention_backward", _no_double_backward, lib=_LIBRARY)
