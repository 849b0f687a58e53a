"""Calls as data, and their tensors: what the checks run, through the same preparation as a call of the public API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..backends import Inputs, Needs, Plan
from ..functional import _prepare
from ..problem import DTYPE_NAMES, Problem
from . import inputs as generate
from .levels import Sizes

if TYPE_CHECKING:
    from .context import Runner

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
TENSORS = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks")  # results, in the order of reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. Sizes that are None are those of the device's kind (levels.Sizes); bias and mask name those of (b, h, q, k) not 1.

    same_head: every batch and head gets the numbers of the first, so that all results must be copies of one.
    lengths: rows and keys of each packed sequence, with `unused` rows after the last.
    """

    name: str
    dtype: str = "bf16"
    head_dim: int = 64
    head_dim_v: int | None = None
    group: int = 2
    batch: int | None = None
    heads_k: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    layout: str = "bhsd"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    mask: str | None = None
    alibi: bool = False
    sinks: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None
    unused: int = 0
    same_head: bool = False
    quick: bool = False  # is part of the quick level

    @property
    def results(self) -> tuple[str, ...]:
        """Which of TENSORS this call has."""
        absent = {"grad_bias": self.bias is None, "grad_sinks": not self.sinks}
        return tuple(name for name in TENSORS if not absent.get(name, False))

    def sized(self, sizes: Sizes) -> Case:
        defaults = {name: getattr(sizes, name) for name in ("batch", "heads_k", "seqlen_q", "seqlen_k")}
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    def draw(self, seed: int) -> Call:
        """Its tensors on the CPU; all sizes must be given."""
        heads_q, dtype, width = self.heads_k * self.group, DTYPES[self.dtype], self.head_dim_v or self.head_dim
        numbers = lambda what, *shape: generate.numbers(seed, f"{self.name}/{what}", *shape, full=dtype.itemsize > 2).to(dtype)
        batch, rows, keys = self.batch, self.seqlen_q, self.seqlen_k
        packed = self.lengths is not None
        if packed:
            batch, longest_q, longest_k = len(self.lengths), *(max(n) for n in zip(*self.lengths, strict=True))
            rows, keys = (sum(n) + self.unused for n in zip(*self.lengths, strict=True))

        def draw(what: str, heads: int, length: int, size: int) -> Tensor:
            if packed:
                return numbers(what, length, heads, size)
            if self.same_head:
                one = numbers(what, length, size)
                tensor = one.expand(batch, heads, length, size).contiguous()
            else:
                tensor = numbers(what, batch, heads, length, size)
            return tensor if self.layout == "bhsd" else tensor.transpose(1, 2).contiguous()

        query, grad_out = draw("query", heads_q, rows, self.head_dim), draw("grad_out", heads_q, rows, width)
        key, value = draw("key", self.heads_k, keys, self.head_dim), draw("value", self.heads_k, keys, width)
        full = dict(b=batch, h=heads_q, q=longest_q if packed else rows, k=longest_k if packed else keys)
        some = lambda names: [n if letter in names else 1 for letter, n in full.items()]
        bias = mask = slopes = sinks = bounds = None
        if self.bias is not None:
            bias = numbers("bias", *some(self.bias))
            bias = bias.masked_fill(generate.chances(seed, f"{self.name}/hidden", 24, *bias.shape), -torch.inf)
        if self.mask is not None:
            mask = generate.chances(seed, f"{self.name}/mask", 180, *some(self.mask))
        if self.alibi:
            slopes = 2.0 ** -(torch.arange(heads_q) % 8 + 1).to(torch.float32)  # powers of two: exact
        if self.sinks:
            sinks = generate.numbers(seed, f"{self.name}/sinks", heads_q)
        if packed:
            ends = torch.tensor([(0, 0), *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            bounds = (batch, ends[:, 0].contiguous(), ends[:, 1].contiguous(), full["q"], full["k"])
        lse_shape = (heads_q, rows) if packed else (batch, heads_q, rows)
        grad_lse = generate.numbers(seed, f"{self.name}/grad_lse", *(lse_shape[-1:] if self.same_head else lse_shape))
        call = Call(self, None, None, grad_out, grad_lse.expand(lse_shape).contiguous())
        return call.prepared(query, key, value, bias, slopes, sinks, mask, bounds)


@dataclass(frozen=True, slots=True)
class Call:
    """A case with its tensors, all on one device."""

    case: Case
    problem: Problem
    inputs: Inputs
    grad_out: Tensor
    grad_lse: Tensor | None

    def prepared(self, query, key, value, bias, slopes, sinks, mask, bounds) -> Call:
        """The problem and inputs that a call of the public functions with these tensors makes."""
        case = self.case
        arguments = _prepare(
            query, key, value, case.causal, case.window, case.scale, case.softcap, bias, slopes, sinks, mask, 0.0, case.layout,
            False, None, packed=bounds,
        )  # fmt: skip
        return replace(self, problem=ops.problem_of(*arguments), inputs=ops.inputs_of(arguments))

    @property
    def needs(self) -> Needs:
        return Needs(bias=self.inputs.bias is not None, sinks=self.inputs.sinks is not None)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that goes in, by name."""
        named = {name: getattr(self.inputs, name) for name in Inputs.__slots__} | {"grad_out": self.grad_out, "grad_lse": self.grad_lse}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def replaced(self, **tensors: Tensor) -> Call:
        """With other tensors of the same meaning (a view, other strides, another device)."""
        own = {name: tensors.pop(name) for name in ("grad_out", "grad_lse") if name in tensors}
        return replace(self, inputs=replace(self.inputs, **tensors), **own)

    def on(self, where: torch.device) -> Call:
        """The same numbers behind the same strides, with the same surroundings."""
        return self if where.type == "cpu" else self.replaced(**{name: moved(t, where) for name, t in self.tensors().items()})

    def repeated(self, times: int) -> Call:
        """A dense call with its batch `times` over."""
        batch = self.problem.batch
        grow = lambda t: torch.cat([t] * times) if t.dim() > 1 and t.shape[0] == batch else t
        new = self.replaced(**{name: grow(tensor) for name, tensor in self.tensors().items()})
        return replace(new, problem=replace(self.problem, batch=batch * times))

    def first_head(self) -> Call:
        """The first head of the first sequence of a dense "bhsd" call without grouped heads, as a call of its own."""
        cut = lambda t: t[:1, :1] if t.dim() > 1 else t
        new = self.replaced(**{name: cut(tensor) for name, tensor in self.tensors().items()})
        return replace(new, problem=replace(self.problem, batch=1, heads_q=1, heads_k=1))

    def sha256(self) -> str:
        return generate.sha256(*self.tensors().values())


def moved(tensor: Tensor, where: torch.device) -> Tensor:
    """A copy behind the same strides and offset, with what lies around and between its elements."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return whole.to(where).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def run(runner: Runner, call: Call, plan: Plan) -> dict[str, Tensor]:
    """Every result of the call, by its name in TENSORS: forward, then backward with all gradients that the call has."""
    with torch.no_grad():
        out, lse = runner.forward(call.inputs, plan)
        grads = runner.backward(call.inputs, plan, out, lse, call.grad_out, call.grad_lse, call.needs)
    found = {"out": out, "lse": lse}
    return found | {f"grad_{name}": grad for name in grads.__slots__ if (grad := getattr(grads, name)) is not None}


# ---------------------------------------------------------------- the cases of accuracy
# No causal row sees only a few keys, and no key only a few rows (hence 8 heads to a key): their gradients are multiples of few vectors,
# with a rounding each, in which PyTorch may be so lucky that it is no yardstick.
_LENGTHS = ((130, 241), (0, 70), (226, 0), (1, 300), (64, 97))
_SHORT = ((13, 34), (0, 7), (22, 0), (1, 30), (16, 40))


def _scale(head_dim: int) -> float | None:
    """The usual one, or a number near it where that is a power of two: PyTorch would multiply without a rounding error, kernels not."""
    return {64: 0.12, 256: 0.06}.get(head_dim)


def accuracy_cases(sizes: Sizes) -> tuple[Case, ...]:
    """Those of the quick level first. Packed sequences are as long as the sizes allow."""
    short = sizes.seqlen_q < 100
    packed = dict(lengths=_SHORT if short else _LENGTHS, unused=5, group=8)
    window = (max(2, sizes.seqlen_k // 5), 3)
    # a gradient of sinks has one element a head, and PyTorch's luck with a few is no yardstick
    many = dict(batch=1, heads_k=8, group=8, seqlen_q=sizes.seqlen_q // 2, seqlen_k=sizes.seqlen_k // 2)
    quick = [
        Case(name="bf16-d128-causal", head_dim=128, causal=True),
        Case(name="fp16-d64-full", dtype="fp16", scale=_scale(64)),
        Case(name="fp32-d64-causal", dtype="fp32", causal=True, scale=_scale(64)),
        Case(name="bf16-d64-window-softcap-sinks", window=window, softcap=2.0, scale=0.5, sinks=True, **many),
        Case(name="fp16-d96-bias-alibi-mask", dtype="fp16", head_dim=96, bias="hqk", alibi=True, mask="bk"),
        Case(name="bf16-d128-varlen-causal", head_dim=128, causal=True, **packed),
    ]
    more = [
        Case(name=f"{dtype}-d{d}-{'causal' if causal else 'full'}", dtype=dtype, head_dim=d, causal=causal, scale=_scale(d))
        for dtype in ("bf16", "fp16", "fp32")
        for d in ((64, 96, 128, 192, 256) if dtype != "fp32" else (64, 128))
        for causal in (True, False)
    ]
    more += [
        Case(name="bf16-d192-v128-causal", head_dim=192, head_dim_v=128, causal=True),
        Case(name="bf16-d128-gqa8", head_dim=128, group=8, causal=True),
        Case(name="bf16-d128-mha-bshd", head_dim=128, group=1, layout="bshd"),
        Case(name="bf16-d128-top-left", head_dim=128, causal="top_left"),
        Case(name="bf16-d128-window", head_dim=128, window=window),
        Case(name="bf16-d128-window-causal", head_dim=128, window=(window[0], None), causal=True),
        Case(name="bf16-d128-softcap", head_dim=128, softcap=2.0, scale=0.5),
        Case(name="bf16-d128-sinks", head_dim=128, sinks=True, causal=True, **many),
        Case(name="bf16-d128-alibi", head_dim=128, alibi=True, causal=True),
        Case(name="bf16-d128-bias", head_dim=128, bias="bhqk"),
        Case(name="bf16-d128-bias-heads", head_dim=128, bias="hk"),
        Case(name="bf16-d128-mask", head_dim=128, mask="bqk"),
        Case(name="fp16-d64-varlen", dtype="fp16", scale=_scale(64), **packed),
        Case(
            name="fp32-d64-everything", dtype="fp32", window=window, softcap=2.0, scale=0.5, bias="hqk", alibi=True, sinks=True,
            mask="bqk", **many,
        ),
    ]
    known = {case.name for case in quick}
    return (*(replace(case, quick=True) for case in quick), *(case for case in more if case.name not in known))


def large_case(sizes: Sizes, heads: int, dtype: str = "bf16") -> Case:
    """Every unit computes the same head: the oracle looks at one, and all others must be its copies, bit for bit."""
    return Case(
        name=f"{dtype}-d128-causal-large", dtype=dtype, head_dim=128, group=1, batch=1, heads_k=heads, seqlen_q=sizes.large,
        seqlen_k=sizes.large + max(32, sizes.large // 16), causal=True, same_head=True, quick=dtype == "bf16",
    )  # fmt: skip


def fixed_cases(sizes: Sizes) -> tuple[Case, ...]:
    """Whose results identical devices must share: the same at every level, for every seed."""
    size = f"s{sizes.seqlen_k}"
    return (
        Case(name=f"fixed-bf16-d128-causal-{size}", head_dim=128, causal=True, quick=True),
        Case(name=f"fixed-fp16-d64-{size}", dtype="fp16", group=1, quick=True),
        Case(name=f"fixed-bf16-d64-options-{size}", window=(40, 3), softcap=2.0, scale=0.5, sinks=True, alibi=True),
        Case(name=f"fixed-fp32-d64-causal-{size}", dtype="fp32", causal=True),
    )
