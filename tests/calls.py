"""Calls through the public API, drawn from a few sizes and options, and judged by the float64 oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import portable_flash
from portable_flash import reference
from portable_flash.backends import Gradients, Inputs
from portable_flash.problem import Problem


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; `draw` makes its tensors. bias and mask name those of (b, h, q, k) that are not 1."""

    batch: int = 2
    heads_k: int = 2
    group: int = 2
    seqlen_q: int = 50
    seqlen_k: int = 70
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    mask: str | None = None
    alibi: str | None = None  # "h": (Hq,), "bh": (B, Hq)
    sinks: bool = False
    grad_lse: bool = True
    lengths: tuple[tuple[int, int], ...] | None = None  # (rows, keys) of each packed sequence
    unused: int = 0  # packed rows after the last sequence
    cu_dtype: torch.dtype = torch.int32
    seed: int = 0

    def problem(self) -> Problem:
        """What the call means, worked out here and not by the package."""
        batch, seqlen_q, seqlen_k, packed = self.batch, self.seqlen_q, self.seqlen_k, {}
        if self.lengths is not None:
            rows, keys = [n for n, _ in self.lengths], [n for _, n in self.lengths]
            batch, seqlen_q, seqlen_k = len(self.lengths), max(rows, default=0), max(keys, default=0)
            packed = dict(varlen=True, total_q=sum(rows) + self.unused, total_k=sum(keys) + self.unused)
        left, right = self.window or (None, None)
        return Problem(
            self.dtype, batch=batch, heads_q=self.heads_k * self.group, heads_k=self.heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            head_dim=self.head_dim, head_dim_v=self.head_dim_v or self.head_dim, window_left=left, window_right=0 if self.causal else right,
            top_left=self.causal == "top_left", softcap=bool(self.softcap), bias=self.bias is not None, mask=self.mask is not None,
            alibi=self.alibi is not None, sinks=self.sinks, **packed,
        )  # fmt: skip

    def draw(self, device: str = "cpu") -> Call:
        p, generator = self.problem(), torch.Generator("cpu").manual_seed(self.seed)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        normal = lambda *shape, dtype=self.dtype: torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)
        chance = lambda *shape: torch.rand(*shape, generator=generator, device="cpu").to(device)
        rows, keys = (p.total_q, p.total_k) if p.varlen else (p.seqlen_q, p.seqlen_k)

        def tensor(heads, rows, width):
            if p.varlen:
                return normal(rows, heads, width)
            return normal(p.batch, heads, rows, width) if self.layout == "bhsd" else normal(p.batch, rows, heads, width)

        full = dict(b=p.batch, h=p.heads_q, q=p.seqlen_q, k=p.seqlen_k)
        sizes = lambda names: [n if name in names else 1 for name, n in full.items()]
        query, key, value = tensor(p.heads_q, rows, p.head_dim), tensor(p.heads_k, keys, p.head_dim), tensor(p.heads_k, keys, p.head_dim_v)
        call = Call(self, p, query, key, value)
        if self.bias is not None:
            call.bias = normal(*sizes(self.bias), dtype=self.bias_dtype or self.dtype)
            call.bias[chance(*sizes(self.bias)) < 0.1] = -torch.inf
        if self.mask is not None:
            call.mask = chance(*sizes(self.mask)) < 0.7
        if self.alibi is not None:
            call.alibi_slopes = chance(p.batch, p.heads_q) if self.alibi == "bh" else chance(p.heads_q)
        if self.sinks:
            call.sinks = normal(p.heads_q, dtype=wide)
        if p.varlen:
            ends = torch.tensor([(0, 0), *self.lengths], dtype=self.cu_dtype).cumsum(0, dtype=self.cu_dtype).to(device)
            call.cu_seqlens_q, call.cu_seqlens_k = ends[:, 0].contiguous(), ends[:, 1].contiguous()
        call.grad_out = tensor(p.heads_q, rows, p.head_dim_v)
        if self.grad_lse:
            call.grad_lse = normal(*((p.heads_q, rows) if p.varlen else (p.batch, p.heads_q, rows)), dtype=wide)
        return call


@dataclass
class Call:
    """The tensors of a case. Any may be replaced (by a view, say) before `run` and `judge`."""

    case: Case
    problem: Problem
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    grad_out: Tensor | None = None
    grad_lse: Tensor | None = None
    options: dict = field(default_factory=dict)  # more keyword arguments of the public call: backend, deterministic, ...

    def attention(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Output and lse; `tensors` take the place of the call's own."""
        c = self.case
        t = lambda name: tensors.get(name, getattr(self, name))
        options = dict(causal=c.causal, window=c.window, scale=c.scale, softcap=c.softcap, layout=c.layout, return_lse=True) | self.options
        options |= {name: t(name) for name in ("bias", "mask", "alibi_slopes", "sinks")}
        if not self.problem.varlen:
            return portable_flash.attention(t("query"), t("key"), t("value"), **options)
        bounds = (self.cu_seqlens_q, self.cu_seqlens_k, self.problem.seqlen_q, self.problem.seqlen_k)
        return portable_flash.attention_varlen(t("query"), t("key"), t("value"), *bounds, **options)

    def run(self, needs: tuple[str, ...] = reference.GRADIENTS) -> tuple[Tensor, Tensor, Gradients]:
        """Output, lse and the gradients of those inputs that `needs` names and the call has."""
        leaves = {name: getattr(self, name).detach().requires_grad_() for name in needs if getattr(self, name) is not None}
        with uninitialised_memory_is_nan():
            out, lse = self.attention(**leaves)
            outputs, weights = (out,), (self.grad_out,)
            if self.grad_lse is not None:
                outputs, weights = (out, lse), (self.grad_out, self.grad_lse)
            grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
        return out.detach(), lse.detach(), Gradients(**dict(zip(leaves, grads, strict=True)))

    def inputs(self) -> Inputs:
        """What the oracle takes."""
        p, wide = self.problem, torch.float64 if self.case.dtype == torch.float64 else torch.float32
        return Inputs(
            self.query, self.key, self.value, p.head_dim**-0.5 if self.case.scale is None else self.case.scale, self.case.softcap or 0.0,
            self.case.layout, self.bias, None if self.alibi_slopes is None else self.alibi_slopes.to(wide).expand(p.batch, p.heads_q),
            self.sinks, self.mask, self.cu_seqlens_q, self.cu_seqlens_k,
        )  # fmt: skip

    def judge(self, out: Tensor, lse: Tensor, grads: Gradients | None = None) -> None:
        """Fail, with every verdict that is not a pass, unless the oracle agrees."""
        assert out.is_contiguous() and lse.is_contiguous()
        verdicts = reference.compare_call(self.inputs(), self.problem, out, lse, grads, self.grad_out, self.grad_lse)
        wrong = [str(v) for v in verdicts if not v.ok]
        assert not wrong, "\n".join(wrong)

    def poisoned(self, number: float) -> Call:
        """With `number` in queries that see no key and keys that no query sees; there must be some."""
        # the oracle's lse is -inf where a row sees nothing, and no gradient of O = PV reaches a value that no row sees
        ones = torch.ones(*self.query.shape[:-1], self.problem.head_dim_v, device=self.query.device)
        _, lse, grads = reference.differentiate(replace(self.inputs(), sinks=None), self.problem, ones, None, ("value",))
        rows = (lse == -torch.inf)[..., None]
        rows = rows.transpose(0, 1) if self.problem.varlen else rows.transpose(1, 2) if self.case.layout == "bshd" else rows
        keys = grads.value[..., :1] == 0
        assert rows.any() or keys.any()
        fill = lambda tensor, where: tensor.masked_fill(where, number)
        queries = dict(query=fill(self.query, rows), grad_out=fill(self.grad_out, rows))
        return replace(self, **queries, key=fill(self.key, keys), value=fill(self.value, keys))

    def check(self) -> tuple[Tensor, Tensor, Gradients]:
        """Run forward and backward, judge everything, and return it."""
        result = self.run()
        self.judge(*result)
        return result


def strided(tensor: Tensor, how: str) -> Tensor:
    """The same numbers behind other strides."""
    if how == "transposed":  # the two middle (packed: first) dimensions change places in memory
        dims = (0, 1) if tensor.dim() == 3 else (1, 2)
        return tensor.transpose(*dims).contiguous().transpose(*dims)
    if how == "sliced":  # rows and columns of a longer buffer: neither pointers nor strides are multiples of 16 bytes
        buffer = tensor.new_full([n + 3 for n in tensor.shape], torch.nan)
        view = buffer[tuple(slice(1, n + 1) for n in tensor.shape)]
        return view.copy_(tensor)
    if how == "columns":  # the last dimension is not contiguous
        return tensor.mT.contiguous().mT
    raise ValueError(how)


def expanded(tensor: Tensor, dim: int) -> Tensor:
    """Its first slice along dim, repeated with stride 0."""
    return tensor.narrow(dim, 0, 1).expand_as(tensor)


@contextlib.contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch.empty fills with NaN, so that an element which no kernel writes is seen."""
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
