"""CPU backend: blocked attention in PyTorch operations. Runs on any torch device, with memory linear in the sequence.

The arithmetic is in ``blocked``; here a call is cut into batches of equally long sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...device import Device
from ...problem import DTYPE_NAMES, Problem
from .. import Gradients, Inputs, Needs, Plan
from . import blocked

NAME = "cpu"


def unavailable(device: Device) -> str | None:
    return None


def supports(problem: Problem, device: Device) -> str | None:
    if problem.dtype not in DTYPE_NAMES:
        return f"dtype {problem.dtype}: allowed are {', '.join(DTYPE_NAMES.values())}"
    if not (1 <= problem.head_dim <= 256 and 1 <= problem.head_dim_v <= 256):
        return f"head_dim {problem.head_dim} (value {problem.head_dim_v}): allowed are 1 to 256"
    return None


def tuned_kernels(problem: Problem) -> tuple[str, ...]:
    return ()


@torch.no_grad()
def forward(inputs: Inputs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the caller's layout and lse (B, Hq, Sq), packed (Hq, total_q); lse is float32, for float64 inputs float64."""
    query = inputs.query
    out = query.new_zeros(*query.shape[:-1], inputs.value.shape[-1])
    lse_shape = query.shape[1::-1] if plan.problem.varlen else _heads_first(query, inputs.layout).shape[:3]
    lse = query.new_full(lse_shape, -torch.inf, dtype=_statistics_dtype(query.dtype))
    for cut in _cuts(inputs, plan.problem):
        blocked.forward(cut.call(inputs, plan.problem), cut.rows_of(out), cut.lse_of(lse))
    return out, lse


@torch.no_grad()
def backward(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs
) -> Gradients:
    """Gradients of what `needs` names. Those of bias and sinks accumulate in float32 (float64 for float64 inputs)."""
    statistics = _statistics_dtype(inputs.query.dtype)
    grads = Gradients()
    for name, dtype in (("query", None), ("key", None), ("value", None), ("bias", statistics), ("sinks", statistics)):
        tensor = getattr(inputs, name)
        if getattr(needs, name) and tensor is not None:
            setattr(grads, name, torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device))
    for cut in _cuts(inputs, plan.problem):
        views = Gradients(
            query=None if grads.query is None else cut.rows_of(grads.query),
            key=None if grads.key is None else cut.keys_of(grads.key),
            value=None if grads.value is None else cut.keys_of(grads.value),
            bias=None if grads.bias is None else cut.pairs_of(grads.bias),
            sinks=grads.sinks,
        )
        cut_grad_lse = None if grad_lse is None else cut.lse_of(grad_lse)
        blocked.backward(cut.call(inputs, plan.problem), cut.rows_of(out), cut.lse_of(lse), cut.rows_of(grad_out), cut_grad_lse, views)
    if grads.bias is not None:
        grads.bias = grads.bias.to(inputs.bias.dtype)
    if grads.sinks is not None:
        grads.sinks = grads.sinks.to(inputs.sinks.dtype)
    return grads


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if layout == "bshd" else tensor


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a batch of equally long sequences lies: the whole of a dense call, or one sequence of a packed one."""

    layout: str
    index: int | None  # number of the packed sequence
    rows: slice  # of the packed query; dense calls do not read it
    keys: slice

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View (B, Hq, Sq, D) of a tensor in the caller's layout."""
        return _heads_first(tensor, self.layout) if self.index is None else tensor[self.rows].transpose(0, 1)[None]

    def keys_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return _heads_first(tensor, self.layout) if self.index is None else tensor[self.keys].transpose(0, 1)[None]

    def lse_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.index is None else tensor[None, :, self.rows]

    def batch_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sequence's own entry of a tensor whose first size is the batch or 1."""
        if self.index is None:
            return tensor
        return tensor[:1] if tensor.shape[0] == 1 else tensor[self.index : self.index + 1]

    def pairs_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View (B, Hq, Sq, Sk), each size possibly 1, of a bias or mask that packed calls size by max_seqlen."""
        if self.index is None:
            return tensor
        rows = slice(None) if tensor.shape[2] == 1 else slice(self.rows.stop - self.rows.start)
        keys = slice(None) if tensor.shape[3] == 1 else slice(self.keys.stop - self.keys.start)
        return self.batch_of(tensor)[:, :, rows, keys]

    def call(self, inputs: Inputs, problem: Problem) -> blocked.Call:
        query, key = self.rows_of(inputs.query), self.keys_of(inputs.key)
        shift = key.shape[2] - query.shape[2]
        diagonal = 0 if problem.top_left else shift
        return blocked.Call(
            query=query,
            key=key,
            value=self.keys_of(inputs.value),
            scale=inputs.scale,
            softcap=inputs.softcap,
            bias=None if inputs.bias is None else self.pairs_of(inputs.bias),
            mask=None if inputs.mask is None else self.pairs_of(inputs.mask),
            alibi_slopes=None if inputs.alibi_slopes is None else self.batch_of(inputs.alibi_slopes),
            sinks=inputs.sinks,
            low=None if problem.window_left is None else diagonal - problem.window_left,
            high=None if problem.window_right is None else diagonal + problem.window_right,
            shift=shift,
        )


def _cuts(inputs: Inputs, problem: Problem) -> Iterator[_Cut]:
    if not problem.varlen:
        yield _Cut(inputs.layout, None, slice(None), slice(None))
        return
    # Bounds are clamped, not trusted: a wrong value gives a wrong answer, never an access outside the tensors.
    rows = _clamped(inputs.cu_seqlens_q, inputs.query.shape[0])
    keys = _clamped(inputs.cu_seqlens_k, inputs.key.shape[0])
    for index in range(len(rows) - 1):
        yield _Cut(
            inputs.layout,
            index,
            slice(rows[index], max(rows[index], rows[index + 1])),
            slice(keys[index], max(keys[index], keys[index + 1])),
        )


def _clamped(cu_seqlens: torch.Tensor, total: int) -> list[int]:
    return cu_seqlens.clamp(0, total).tolist()
