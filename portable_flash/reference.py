"""The meaning of an attention call in float64, and how far from it a result may be.

``attend`` writes out S and P: memory is quadratic, but every gradient comes from autograd and every line can be checked
by eye. ``compare_call`` judges what a backend returned. Tolerances live here and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .backends import Gradients, Inputs
from .problem import Problem

GRADIENTS = ("query", "key", "value", "bias", "sinks")


# ---------------------------------------------------------------- meaning
def attend(inputs: Inputs, problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Output in the layout of the inputs and lse (B, Hq, Sq), packed (Hq, total_q), every step in `dtype`."""
    query, key, value = (t.to(dtype) for t in (inputs.query, inputs.key, inputs.value))
    extras = inputs.bias, inputs.mask, inputs.alibi_slopes
    if not problem.varlen:
        if inputs.layout == "bshd":
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out, lse = _softmax_attention(query, key, value, *extras, inputs, problem)
        return (out.transpose(1, 2) if inputs.layout == "bshd" else out), lse

    outs, lses, end = [], [], 0
    sequences = zip(_sequences(inputs.cu_seqlens_q, len(query)), _sequences(inputs.cu_seqlens_k, len(key)), strict=True)
    for index, (rows, keys) in enumerate(sequences):
        q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], key[keys], value[keys]))
        out, lse = _softmax_attention(q, k, v, *(_of_sequence(t, index, q.shape[2], k.shape[2]) for t in extras), inputs, problem)
        outs += [query.new_zeros(rows.start - end, *query.shape[1:-1], value.shape[-1]), out[0].transpose(0, 1)]
        lses += [query.new_full((query.shape[1], rows.start - end), -torch.inf), lse[0]]
        end = rows.stop
    outs.append(query.new_zeros(len(query) - end, *query.shape[1:-1], value.shape[-1]))
    lses.append(query.new_full((query.shape[1], len(query) - end), -torch.inf))
    return torch.cat(outs), torch.cat(lses, -1)


def _sequences(cu_seqlens: Tensor, total: int) -> list[slice]:
    bounds = cu_seqlens.clamp(0, total).tolist()
    return [slice(a, max(a, b)) for a, b in zip(bounds, bounds[1:])]


def _of_sequence(tensor: Tensor | None, index: int, rows: int, keys: int) -> Tensor | None:
    """One sequence's part of a bias, mask or ALiBi slopes, whose sizes may be 1."""
    if tensor is None:
        return None
    index = index if tensor.shape[0] > 1 else 0
    return tensor[index : index + 1, :, :rows, :keys] if tensor.dim() == 4 else tensor[index : index + 1]


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, slopes: Tensor | None,
    inputs: Inputs, problem: Problem,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(S) V over (B, H, S, D) tensors and the logarithm of its denominator (B, Hq, Sq)."""
    rows, keys, dtype = query.shape[2], key.shape[2], query.dtype
    group = query.shape[1] // max(1, key.shape[1])
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    i = torch.arange(rows, device=query.device)[:, None]
    j = torch.arange(keys, device=query.device)
    diagonal = i + (0 if problem.top_left else keys - rows)

    visible = torch.ones(*query.shape[:2], rows, keys, dtype=torch.bool, device=query.device)
    if problem.window_left is not None:
        visible = visible & (j >= diagonal - problem.window_left)
    if problem.window_right is not None:
        visible = visible & (j <= diagonal + problem.window_right)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -torch.inf)

    # 0 * NaN is NaN: what nothing sees is removed from the products too, forward and backward.
    sees = visible.any(3)[..., None]
    query = torch.where(sees, query, 0.0)
    key, value = (torch.where(visible.any(2)[..., None], t, 0.0) for t in (key, value))
    s = (query * inputs.scale) @ key.mT
    if inputs.softcap:
        s = inputs.softcap * torch.tanh(s / inputs.softcap)
    if bias is not None:
        s = s + bias.to(dtype).clamp(min=torch.finfo(dtype).min)  # a finite bias stays finite in a narrower dtype
    if slopes is not None:
        s = s - slopes.to(dtype)[..., None, None] * (i + (keys - rows) - j).abs().to(dtype)
    s = torch.where(visible, s, -torch.inf)
    if inputs.sinks is not None:
        s = torch.cat([s, inputs.sinks.to(dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)

    live = (s > -torch.inf).any(-1)
    s = torch.where(live[..., None], s, 0.0)
    p = torch.where(visible, s.softmax(-1)[..., :keys], 0.0)
    # The gradient of torch.logsumexp is exp(s - lse), which forgets the sum where |lse| is huge: it is a shift here only.
    m = s.detach().logsumexp(-1, keepdim=True)
    lse = m[..., 0] + (s - m).exp().sum(-1).log()
    return torch.where(sees, p @ value, 0.0), torch.where(live, lse, -torch.inf)


def differentiate(
    inputs: Inputs, problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, names: tuple[str, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Gradients]:
    """Output, lse and the gradients that `names` lists of sum(out * grad_out) + sum(lse * grad_lse)."""
    with torch.enable_grad():
        leaves = {}
        for name in names:
            tensor = getattr(inputs, name).detach()
            leaves[name] = tensor.to(dtype if dtype == torch.float64 else tensor.dtype, copy=True).requires_grad_()
        out, lse = attend(replace(inputs, **leaves), problem, dtype)
        weights = {out: grad_out.to(out.dtype), lse: torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)}
        weights = {output: weight for output, weight in weights.items() if output.requires_grad}
        grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if weights:  # otherwise nothing depends on a leaf: packed rows without a sequence
            chosen = dict(allow_unused=True, materialize_grads=True)
            grads = torch.autograd.grad(list(weights), list(leaves.values()), list(weights.values()), **chosen)
    return out.detach(), lse.detach(), Gradients(**dict(zip(leaves, grads, strict=True)))


# ---------------------------------------------------------------- tolerances
@dataclass(frozen=True, slots=True)
class Limits:
    """Errors allowed, as multiples of those that unfused PyTorch makes on the same inputs in the same dtype.

    max_ratio: the tests of flash-attention allow twice PyTorch's largest error for outputs and three times for
        gradients, plus a rounding floor, 2 * (x + 0.3 - 0.3 - x).max(). The floor here is that rounding of the
        largest element itself, 2 * eps / 2 * max |x|, so that it scales with the tensor.
    rms_ratio: of the root mean square error over each tile of 1024 consecutive elements, which sees what the largest
        error of a whole tensor hides: bfloat16 outputs with one tile 1% off fail by it alone. Fused kernels round less
        often than unfused PyTorch, so that right ones measure below 1. Gradients: times the square root of 2, because
        dS is rounded to the input dtype before dS K and dS^T Q (as FlashAttention does), one rounding more than the
        yardstick makes where that of its result is all its error. Floor: the RMS of one more rounding, eps / 4.
    Both floors add one rounding error in the accumulation dtype of the largest summand (see `_summands`), since sums that
    cancel to 0 may come out as exactly 0 in one order of summation and not in another.
    """

    max_ratio: float
    rms_ratio: float


OUTPUT = Limits(max_ratio=2.0, rms_ratio=1.25)
GRADIENT = Limits(max_ratio=3.0, rms_ratio=1.25 * math.sqrt(2))
TILE = 1024
MOST_LOST_TO_LSE = 100.0  # |lse| up to which a gradient may carry the rounding error of lse; beyond, a backend must do better
UNUSABLE_REFERENCE = 0.1  # relative Frobenius error of the yardstick itself; beyond it no verdict (torchtitan's verifier)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one tensor. `status` is "pass", "fail" or "inconclusive"; only a pass is ok."""

    name: str
    status: str
    detail: str = ""
    max_error: float = 0.0
    max_limit: float = 0.0
    rms_error: float = 0.0  # of the tile nearest to or furthest beyond its limit
    rms_limit: float = 0.0
    reference_error: float = 0.0  # PyTorch's own largest error
    worst: tuple[int, ...] = ()  # index of the largest error
    actual: float = math.nan  # the two values there
    expected: float = math.nan
    cosine: float = math.nan  # of the angle between result and truth

    @property
    def ok(self) -> bool:
        return self.status == "pass"

    @property
    def ratio(self) -> float:
        """Largest error as a multiple of PyTorch's own."""
        return self.max_error / self.reference_error if self.reference_error else (math.inf if self.max_error else 0.0)

    def __str__(self) -> str:
        text = f"{self.name}: {self.status}"
        if self.detail:
            text += f", {self.detail}"
        if self.worst:
            text += (
                f"; max error {self.max_error:.3g} (limit {self.max_limit:.3g}, PyTorch's {self.reference_error:.3g}) at {self.worst}: "
                f"{self.actual:.9g}, expected {self.expected:.9g}; RMS of a tile {self.rms_error:.3g} (limit {self.rms_limit:.3g})"
            )
        return text


def check(name: str, actual: Tensor, expected: Tensor, lowprec: Tensor, limits: Limits = OUTPUT, summands: float | None = None) -> Verdict:
    """Judge `actual` against the float64 `expected`, with the error of `lowprec` (unfused PyTorch) as the yardstick.

    summands: magnitude of the terms that an element is a sum of, by default the largest element. Shape and the positions
    of NaN and infinities are compared first.
    """
    if actual.shape != expected.shape:
        return Verdict(name, "fail", f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel() == 0:
        return Verdict(name, "pass", "empty")
    eps = torch.finfo(actual.dtype).eps
    accumulation_eps = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps
    actual, lowprec = (t.detach().to(expected.device, torch.float64) for t in (actual, lowprec))
    finite = expected.isfinite()
    odd = (actual.isfinite() != finite) | (~finite & (actual != expected) & ~(actual.isnan() & expected.isnan()))
    if odd.any():
        worst = tuple(odd.nonzero()[0].tolist())
        count = f"{int(odd.sum())} of {odd.numel()} elements differ in being finite"
        detail = f"{count}, first at {worst}: {actual[worst]}, expected {expected[worst]}"
        return Verdict(name, "fail", detail, worst=worst, actual=actual[worst].item(), expected=expected[worst].item(), max_error=math.inf)
    if not lowprec[finite].isfinite().all():
        return Verdict(name, "inconclusive", "PyTorch's own result is not finite")

    expected, actual, lowprec = (torch.where(finite, t, 0.0) for t in (expected, actual, lowprec))
    error, yardstick = (actual - expected).abs(), (lowprec - expected).abs()
    size = expected.abs().max().item()
    cancellation = accumulation_eps * (size if summands is None else max(size, summands))
    reference_error = yardstick.max().item()
    max_error, max_limit = error.max().item(), limits.max_ratio * reference_error + eps * size + cancellation
    # a tile in which PyTorch happened to be lucky is held to PyTorch's relative error overall
    usual = yardstick.norm() / expected.norm() if expected.any() else 0.0
    tile_yardstick = torch.maximum(_tile_rms(yardstick), usual * _tile_rms(expected))
    tiles = limits.rms_ratio * tile_yardstick + eps / 4 * _tile_rms(expected) + cancellation
    tile_errors = _tile_rms(error)
    tile = int((tile_errors / tiles.clamp(min=torch.finfo(torch.float64).tiny)).argmax())
    rms_error, rms_limit = tile_errors[tile].item(), tiles[tile].item()
    worst = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
    failed = [what for what, over in (("largest error", max_error > max_limit), (f"RMS of tile {tile}", rms_error > rms_limit)) if over]
    unusable = yardstick.norm() > UNUSABLE_REFERENCE * expected.norm() and reference_error > cancellation
    return Verdict(
        name,
        "inconclusive" if unusable else "fail" if failed else "pass",
        "PyTorch's own error is above 10%" if unusable else " and ".join(failed) + " beyond its limit" if failed else "",
        max_error, max_limit, rms_error, rms_limit, reference_error, worst, actual[worst].item(), expected[worst].item(),
        _cosine(actual, expected),
    )  # fmt: skip


def _cosine(a: Tensor, b: Tensor) -> float:
    """1 where both are 0, NaN where one is."""
    norms = a.norm() * b.norm()
    return ((a * b).sum() / norms).item() if norms else 1.0 if not (a.any() or b.any()) else math.nan


def _tile_rms(values: Tensor) -> Tensor:
    """RMS of each tile without its largest element: one element alone is judged by the largest error, not here."""
    squares = values.flatten().square()
    count = max(1, squares.numel() // TILE)  # a last tile of few elements would be noise: it joins its neighbour
    index = (torch.arange(squares.numel(), device=squares.device) // TILE).clamp_(max=count - 1)
    total = squares.new_zeros(count).index_add_(0, index, squares)
    largest = squares.new_zeros(count).scatter_reduce_(0, index, squares, "amax")
    return ((total - largest).clamp_(min=0) / index.bincount(minlength=count)).sqrt()


def compare_call(
    inputs: Inputs,
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    grads: Gradients | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    device: torch.device | None = None,
) -> list[Verdict]:
    """Judge everything that a backend returned for a call: output, lse, and those gradients that are not None.

    device: where the references are computed, by default where the inputs are. They need memory for S, several times.
    """
    device = inputs.query.device if device is None else torch.device(device)
    to = lambda t: t.to(device) if isinstance(t, Tensor) else t
    inputs = Inputs(**{name: to(getattr(inputs, name)) for name in Inputs.__slots__})
    names = tuple(n for n in GRADIENTS if grads is not None and getattr(grads, n) is not None)
    grad_out = torch.zeros_like(out, device=device) if grad_out is None else to(grad_out)
    narrow = inputs.query.dtype
    wide = torch.float64 if narrow == torch.float64 else torch.float32
    expected = _by_name(*differentiate(inputs, problem, grad_out, to(grad_lse), names))
    lowprec = _by_name(*differentiate(inputs, problem, grad_out, to(grad_lse), names, torch.float32 if narrow == torch.float64 else narrow))
    if narrow == torch.float64:  # the oracle cannot be its own yardstick: float32's error, scaled down to float64
        shrink = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        lowprec = {name: expected[name] + (lowprec[name] - expected[name]) * shrink for name in expected}
    elif narrow != wide:  # lse is accumulated in float32 whatever the inputs: so is its yardstick
        lowprec["lse"] = attend(inputs, problem, wide)[1].detach()

    results = _by_name(out, lse, grads or Gradients())
    dtypes = {"out": narrow, "lse": wide} | {f"grad_{n}": getattr(inputs, n).dtype for n in names}
    summands = _summands(inputs, expected["lse"], grad_out, to(grad_lse))
    limits = lambda name: GRADIENT if name.startswith("grad") else OUTPUT
    return [_typed(check(n, results[n], expected[n], lowprec[n], limits(n), summands[n]), results[n], dtypes[n]) for n in dtypes]


def _by_name(out: Tensor, lse: Tensor, grads: Gradients) -> dict[str, Tensor]:
    return {"out": out, "lse": lse} | {f"grad_{n}": getattr(grads, n) for n in GRADIENTS if getattr(grads, n) is not None}


def _typed(verdict: Verdict, actual: Tensor, dtype: torch.dtype) -> Verdict:
    return verdict if actual.dtype == dtype else Verdict(verdict.name, "fail", f"dtype {actual.dtype}, expected {dtype}")


def _summands(inputs: Inputs, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> dict[str, float]:
    """Size of the largest summand of an element of each result, from the largest finite elements of the inputs.

    P = exp(S - lse) has the rounding error of lse, relative to P; sums over whole broadcast sizes of a bias, or over the
    rows of a sink, gather rounding errors as a random walk does.
    """

    def largest(tensor: Tensor | None) -> float:
        return 0.0 if tensor is None or not tensor.numel() else tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item()

    q, k, v, g = (largest(t) for t in (inputs.query, inputs.key, inputs.value, grad_out))
    score = abs(inputs.scale) * q * k * inputs.query.shape[-1] ** 0.5
    p = min(max(1.0, largest(lse)), MOST_LOST_TO_LSE)
    grad_score = p * (g * v * inputs.value.shape[-1] ** 0.5 + largest(grad_lse))
    terms = lambda tensor, count: 1.0 if tensor is None else math.sqrt(count / max(1, tensor.numel()))
    keys = inputs.key.shape[0 if inputs.key.dim() == 3 else 2 if inputs.layout == "bhsd" else 1]
    return {
        "out": v,
        "lse": max(1.0, score),
        "grad_query": abs(inputs.scale) * grad_score * k,
        "grad_key": abs(inputs.scale) * grad_score * q,
        "grad_value": p * g,
        "grad_bias": grad_score * terms(inputs.bias, lse.numel() * keys),
        "grad_sinks": grad_score * terms(inputs.sinks, lse.numel()),
    }
