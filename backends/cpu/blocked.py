"""Blocked attention over a batch of equally long sequences: online softmax forward, recomputing backward.

The mathematics is FlashAttention's (Dao et al. 2022, Algorithms 1 and 4; Dao 2023, section 3.1), in its symbols:
S = QK^T, P = exp(S - lse), O = PV, m and l the running maximum and sum of a row, D = rowsum(dO * O).
Work goes chunk by chunk (some heads), then by blocks of query rows, then by blocks of keys. The query heads of a
key/value head are stacked as rows of one matrix, so that grouped heads share K and V without a copy of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .. import Gradients

LOG2E = math.log2(math.e)
ROWS = 256  # rows of a block of S, over all query heads of a group
KEYS = 512  # its columns, at least
BLOCK_ELEMENTS = 1 << 19  # of S for each thread: 2 MiB of float32 stay in the last cache; smaller blocks wait for threads more often
LARGE_PRODUCT = 2.0**120  # sums that stay below it cannot overflow float32


@dataclass(slots=True)
class Call:
    """One call as (B, H, S, D) views. Query i sees those keys i + low <= j <= i + high that mask and bias let through."""

    query: torch.Tensor  # (B, Hq, Sq, D)
    key: torch.Tensor  # (B, Hk, Sk, D)
    value: torch.Tensor  # (B, Hk, Sk, Dv)
    scale: float
    softcap: float
    bias: torch.Tensor | None  # (B, Hq, Sq, Sk), each size possibly 1
    mask: torch.Tensor | None  # likewise, boolean
    alibi_slopes: torch.Tensor | None  # (B, Hq)
    sinks: torch.Tensor | None  # (Hq,)
    low: int | None
    high: int | None
    shift: int  # ALiBi's distance is |i + shift - j|

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def factor(self) -> float:
        """What queries are multiplied by before S = QK^T."""
        return self.scale / self.softcap if self.softcap else self.scale

    def key_range(self, rows: slice) -> tuple[int, int]:
        """The first key, and one past the last, that position lets any of these rows see."""
        keys = self.key.shape[2]
        start = 0 if self.low is None else min(max(rows.start + self.low, 0), keys)
        stop = keys if self.high is None else min(max(rows.stop + self.high, 0), keys)
        return start, max(start, stop)

    def hidden(self, batches: slice, heads: slice, rows: slice, keys: slice) -> torch.Tensor | None:
        """What position and mask hide in a block, broadcasting to (batches, heads, group, rows, keys); None = nothing."""
        hidden = None
        below = self.low is not None and keys.start < rows.stop - 1 + self.low
        above = self.high is not None and keys.stop - 1 > rows.start + self.high
        if below or above:
            device = self.query.device
            reach = torch.arange(keys.start, keys.stop, device=device) - torch.arange(rows.start, rows.stop, device=device)[:, None]
            if below:
                hidden = reach < self.low
            if above:
                hidden = reach > self.high if hidden is None else hidden | (reach > self.high)
        if self.mask is not None:
            masked = ~pairs(self.mask, self.group, batches, heads, rows, keys)
            hidden = masked if hidden is None else hidden | masked
        return hidden


def forward(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), views of any strides."""
    if lse.numel() == 0:
        return
    call, _, dtype = prepared(call)
    limit = torch.finfo(lse.dtype).max
    for chunk in chunks(call, dtype):
        for rows in spans(0, call.query.shape[2], chunk.block_rows):
            m, l, acc = chunk.attend(rows)
            chunk.rows_of(out, rows).copy_(chunk.unstacked(acc.div_(l.masked_fill(l == 0, 1.0))))
            row_lse = (m + l.log2() / LOG2E) if chunk.unit == 1.0 else (m + l.log2()) / LOG2E
            # Logits beyond float32 are finite in float64: their lse stays finite too, and only l = 0 gives -inf.
            row_lse.clamp_(-limit, limit).masked_fill_(l == 0, -torch.inf)
            chunk.rows_of(lse, rows).copy_(chunk.unstacked(row_lse)[..., 0])


def backward(
    call: Call, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, grads: Gradients
) -> None:
    """Write the gradients that are not None, views like their tensors; those of bias and sinks are added to."""
    if lse.numel() == 0:
        return
    call, grad_out, dtype = prepared(call, grad_out)
    # A large lse has no bits left for log l (a row of equal huge logits): m and l are then computed once more.
    exact = dtype != lse.dtype or not largest(lse.masked_fill(lse == -torch.inf, 0.0)) < 1 / torch.finfo(dtype).eps
    for chunk in chunks(call, torch.float64 if exact else dtype):
        chunk.differentiate(out, lse, grad_out, grad_lse, grads, exact)


def prepared(call: Call, grad_out: torch.Tensor | None = None) -> tuple[Call, torch.Tensor | None, torch.dtype]:
    """The call and grad_out without non-finite numbers in unseen slots, and the dtype to accumulate in.

    That is float32, but float64 for float64 inputs, for logits that may be so large that float32 has no fractional bits
    for them, and where a product of finite numbers may overflow.
    """
    sizes = [largest(t) for t in (call.query, call.key, call.value, grad_out)]
    if not math.isfinite(sum(sizes)):
        call, grad_out = without_unseen(call, grad_out)
        sizes = [largest(t) for t in (call.query, call.key, call.value, grad_out)]
    if call.query.dtype == torch.float64:
        return call, grad_out, torch.float64
    q, k, v, g = sizes
    rows, keys = call.group * call.query.shape[2], call.key.shape[2]
    logit = abs(call.scale) * call.query.shape[3] * q * k
    distance = largest(call.alibi_slopes) * (call.query.shape[2] + keys)
    sink = 0.0 if call.sinks is None else largest(call.sinks.masked_fill(call.sinks == -torch.inf, 0.0))
    grad_p = 2 * g * v * call.value.shape[3]
    products = (
        logit / (call.softcap or 1.0), abs(call.factor) * q, v * keys, g * rows, grad_p,
        grad_p * abs(call.scale) * k * keys, grad_p * abs(call.scale) * q * rows,
    )  # fmt: skip
    fits = logit + distance + sink < 1 / torch.finfo(torch.float32).eps and all(p < LARGE_PRODUCT for p in products)
    fits = fits and (call.factor == 0.0 or abs(call.factor) > 1 / LARGE_PRODUCT)
    return call, grad_out, torch.float32 if fits else torch.float64


def without_unseen(call: Call, grad_out: torch.Tensor | None) -> tuple[Call, torch.Tensor | None]:
    """Copies with 0 in rows that see no key and in keys that no row sees: 0 * NaN is NaN, so P = 0 alone hides nothing."""
    batch, heads_q, rows_q, _ = call.query.shape
    heads, keys_k = call.key.shape[1:3]
    seen_rows = torch.zeros(batch, heads, call.group, rows_q, dtype=torch.bool, device=call.query.device)
    seen_keys = torch.zeros(batch, heads, keys_k, dtype=torch.bool, device=call.query.device)
    for rows in spans(0, rows_q, ROWS):
        for keys in spans(*call.key_range(rows), KEYS):
            block = slice(0, batch), slice(0, heads), rows, keys
            visible = torch.ones(1, 1, 1, rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool, device=call.query.device)
            hidden = call.hidden(*block)
            if hidden is not None:
                visible = visible & ~hidden
            if call.bias is not None:
                visible = visible & (pairs(call.bias, call.group, *block) != -torch.inf)
            seen_rows[..., rows] |= visible.any(4)
            seen_keys[..., keys] |= visible.any(3).any(2)
    seen_rows = seen_rows.view(batch, heads_q, rows_q, 1)
    seen_keys = seen_keys[..., None]
    call = replace(
        call,
        query=torch.where(seen_rows, call.query, 0.0),
        key=torch.where(seen_keys, call.key, 0.0),
        value=torch.where(seen_keys, call.value, 0.0),
    )
    return call, None if grad_out is None else torch.where(seen_rows, grad_out, 0.0)


def chunks(call: Call, dtype: torch.dtype) -> Iterator[Chunk]:
    """Whole batches, or else some heads of one, so that every thread has a matrix and the blocks of S stay in cache."""
    batch, heads = call.key.shape[:2]
    threads = torch.get_num_threads() if call.query.device.type == "cpu" else 64
    block_rows, block_keys = block_sizes(call)
    matrices = max(1, threads * BLOCK_ELEMENTS // (block_rows * call.group * block_keys))
    head_step = heads if matrices >= heads else -(-heads // -(-heads // matrices))
    for batches in spans(0, batch, max(1, matrices // heads)):
        for part in spans(0, heads, head_step):
            yield Chunk(call, dtype, batches, part)


def block_sizes(call: Call) -> tuple[int, int]:
    """Query positions and keys of a block; few rows (decoding) are made up for by more keys."""
    rows = max(1, min(ROWS // call.group, call.query.shape[2]))
    keys = max(KEYS, ROWS * KEYS // (rows * call.group))
    return rows, max(1, min(keys, call.key.shape[2]))


class Chunk:
    """Some heads of a call, n = batches * heads matrices, and the buffers for its blocks. R = group * query positions.

    `unit` is that of S, m and lse inside: LOG2E where exp is 2**x with the factor folded into Q. With a bias it is 1,
    because LOG2E times a finite bias can be infinite, and -inf would hide what a finite bias must not.
    """

    def __init__(self, call: Call, dtype: torch.dtype, batches: slice, heads: slice):
        self.call, self.dtype, self.batches, self.heads = call, dtype, batches, heads
        self.block_rows, self.block_keys = block_sizes(call)
        self.unit = LOG2E if call.bias is None else 1.0
        self.sizes = (batches.stop - batches.start, heads.stop - heads.start, call.group)
        self.n = self.sizes[0] * self.sizes[1]
        self.key = call.key[batches, heads].to(dtype).reshape(self.n, *call.key.shape[2:])
        self.value = call.value[batches, heads].to(dtype).reshape(self.n, *call.value.shape[2:])
        self.rounded = call.query.dtype if call.query.dtype.itemsize == 2 else None
        self.buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised contiguous scratch; the first block of a chunk is the largest."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.key.device)
        return self.buffers[name][:size].view(shape)

    def rows_of(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        """View (batches, heads, group, rows, ...) of a (B, Hq, Sq, ...) tensor."""
        return tensor.unflatten(1, (-1, self.call.group))[self.batches, self.heads, :, rows]

    def unstacked(self, block: torch.Tensor) -> torch.Tensor:
        """(n, R, x) as (batches, heads, group, rows, x)."""
        return block.view(*self.sizes, -1, block.shape[-1])

    def stacked(self, name: str, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        """The chunk's rows of (B, Hq, Sq, x) as an (n, R, x) matrix of the accumulation dtype."""
        view = self.rows_of(tensor, rows)
        block = self.buffer(name, self.n, view.shape[2] * view.shape[3], view.shape[4])
        self.unstacked(block).copy_(view)
        return block

    def per_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B or 1, Hq) as (batches or 1, heads, group, 1, 1)."""
        batches = self.batches if tensor.shape[0] != 1 else slice(None)
        return tensor.unflatten(1, (-1, self.call.group))[batches, self.heads, :, None, None].to(self.dtype)

    def exp_(self, x: torch.Tensor) -> torch.Tensor:
        # exp2 is the fast one on every CPU: exp goes through a library whose underflow path is 50 times slower
        return x.exp2_() if self.unit == LOG2E else x.mul_(LOG2E).exp2_()

    def add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # baddbmm into a view with gaps between its matrices leaves the batched routine: half the speed
        total.add_(torch.bmm(a, b, out=self.buffer("product", *total.shape)))

    def scaled_query(self, rows: slice) -> torch.Tensor:
        return self.stacked("q", self.call.query, rows).mul_(self.call.factor * (1.0 if self.call.softcap else self.unit))

    def key_blocks(self, rows: slice) -> Iterator[slice]:
        return spans(*self.call.key_range(rows), self.block_keys)

    def scores(self, q: torch.Tensor, rows: slice, keys: slice, tanh: torch.Tensor | None = None) -> torch.Tensor:
        """S (n, R, keys) with everything added and hidden pairs -inf, in units of `unit`; tanh keeps that of softcap."""
        call = self.call
        block = self.batches, self.heads, rows, keys
        s = torch.bmm(q, self.key[:, keys].mT, out=self.buffer("s", self.n, q.shape[1], keys.stop - keys.start))
        if call.softcap:
            s.tanh_()
            if tanh is not None:
                tanh.copy_(s)
            s.mul_(call.softcap * self.unit)
        if call.alibi_slopes is not None:
            i = torch.arange(rows.start, rows.stop, device=s.device, dtype=self.dtype)
            j = torch.arange(keys.start, keys.stop, device=s.device, dtype=self.dtype)
            distance = (i[:, None] + call.shift - j).abs_()
            self.unstacked(s).addcmul_(self.per_head(call.alibi_slopes), distance, value=-self.unit)
        hidden = call.hidden(*block)
        bias = None if call.bias is None else pairs(call.bias, call.group, *block).to(self.dtype)
        # One addition of a tensor that is mostly broadcast is faster than masked_fill over S.
        if hidden is not None:
            infinity = torch.full((), -torch.inf, dtype=self.dtype, device=s.device)
            bias = torch.where(hidden, infinity, torch.zeros_like(infinity) if bias is None else bias)
        if bias is not None:
            self.unstacked(s).add_(bias)
        return s

    def attend(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """m (n, R, 1) in units of `unit`, l (n, R, 1) and the unnormalised output (n, R, Dv) of a block of rows."""
        q = self.scaled_query(rows)
        acc = self.buffer("acc", self.n, q.shape[1], self.value.shape[-1]).zero_()
        # m starts at a finite number, so that rows that have seen no key yet give exp(-inf - m) = 0 and not NaN.
        m = torch.full((self.n, q.shape[1], 1), torch.finfo(self.dtype).min, dtype=self.dtype, device=q.device)
        l = torch.zeros_like(m)
        if self.call.sinks is not None:  # a sink is a key without value that comes first
            sink = self.sink(rows)
            torch.maximum(m, sink, out=m)
            l = self.exp_(sink - m)
        for keys in self.key_blocks(rows):
            s = self.scores(q, rows, keys)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            rescale = self.exp_(m - m_new)
            p = self.exp_(s.sub_(m_new))
            l.mul_(rescale).add_(p.sum(-1, keepdim=True))
            if self.rounded is not None:
                p.copy_(p.to(self.rounded))
            acc.mul_(rescale).baddbmm_(p, self.value[:, keys])
            m = m_new
        return m, l, acc

    def sink(self, rows: slice) -> torch.Tensor:
        """Sinks of the rows of a block (n, R, 1), in units of `unit`."""
        sink = self.per_head(self.call.sinks[None]) * self.unit
        return sink.expand(*self.sizes, rows.stop - rows.start, 1).reshape(self.n, -1, 1)

    def differentiate(
        self, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, grads: Gradients, exact: bool
    ) -> None:
        """Add this chunk to `grads`. `exact` computes each row's m and l anew in place of reading lse."""
        call = self.call
        grad_key = None if grads.key is None else torch.zeros_like(self.key, memory_format=torch.contiguous_format)
        grad_value = None if grads.value is None else torch.zeros_like(self.value, memory_format=torch.contiguous_format)
        needs_scores = any(g is not None for g in (grads.query, grads.key, grads.bias))
        for rows in spans(0, call.query.shape[2], self.block_rows):
            inverse_l = None
            if exact:
                m, l, _ = self.attend(rows)
                inverse_l = l.masked_fill_(l == 0, 1.0).reciprocal_()
            else:
                m = self.stacked("lse", lse[..., None], rows).mul_(self.unit)
                m.masked_fill_(m == -torch.inf, torch.inf)  # a row that sees no key: exp(s - inf) = 0
            grad_o = self.stacked("do", grad_out, rows)
            delta = (grad_o * self.stacked("o", out, rows)).sum(-1, keepdim=True)  # D
            if grad_lse is not None:
                # d lse / d S = P as well, so dS = P * (dP - D + dlse)
                row_lse = self.rows_of(lse, rows)
                delta.sub_(self.rows_of(grad_lse, rows).masked_fill(row_lse == -torch.inf, 0.0).reshape(delta.shape))
            if grads.sinks is not None:
                p_sink = self.exp_(self.sink(rows) - m)
                if exact:
                    p_sink.mul_(inverse_l)
                grads.sinks.unflatten(0, (-1, call.group))[self.heads].sub_(self.unstacked(p_sink.mul_(delta)).sum((0, 3, 4)))
            if not needs_scores and grad_value is None:
                continue
            q = self.scaled_query(rows)
            grad_query = None if grads.query is None else self.buffer("dq", *q.shape).zero_()
            for keys in self.key_blocks(rows):
                shape = (self.n, q.shape[1], keys.stop - keys.start)
                tanh = self.buffer("tanh", *shape) if call.softcap and needs_scores else None
                p = self.exp_(self.scores(q, rows, keys, tanh).sub_(m))
                if exact:
                    p.mul_(inverse_l)
                if grad_value is not None:
                    self.add_product(grad_value[:, keys], p.mT, grad_o)
                if not needs_scores:
                    continue
                grad_s = torch.bmm(grad_o, self.value[:, keys].mT, out=self.buffer("ds", *shape)).sub_(delta).mul_(p)
                if grads.bias is not None:
                    part = pairs(grads.bias, call.group, self.batches, self.heads, rows, keys)
                    part.add_(self.unstacked(grad_s).sum_to_size(part.shape))
                if tanh is not None:  # d tanh x / d x = 1 - tanh(x)^2
                    grad_s.addcmul_(grad_s, tanh.square_(), value=-1.0)
                if grad_query is not None:
                    grad_query.baddbmm_(grad_s, self.key[:, keys])
                if grad_key is not None:
                    self.add_product(grad_key[:, keys], grad_s.mT, q)
            if grad_query is not None:
                self.rows_of(grads.query, rows).copy_(self.unstacked(grad_query.mul_(call.scale)))
        if grad_key is not None:  # dK = dS^T (scale * Q); q holds scale * Q / softcap, or scale * Q * unit
            grad_key.mul_(call.softcap or 1.0 / self.unit)
            grads.key[self.batches, self.heads].copy_(grad_key.view(*self.sizes[:2], *grad_key.shape[1:]))
        if grad_value is not None:
            grads.value[self.batches, self.heads].copy_(grad_value.view(*self.sizes[:2], *grad_value.shape[1:]))


def spans(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, stop)) for i in range(start, stop, step))


def pairs(tensor: torch.Tensor, group: int, batches: slice, heads: slice, rows: slice, keys: slice) -> torch.Tensor:
    """Block of a (B, Hq, Sq, Sk) tensor whose sizes may be 1: a view that broadcasts to (batches, heads, group, rows, keys)."""
    tensor = tensor.unsqueeze(2) if tensor.shape[1] == 1 else tensor.unflatten(1, (-1, group))
    block = (batches, heads, slice(None), rows, keys)
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, block, strict=True))]


def largest(tensor: torch.Tensor | None) -> float:
    """Largest magnitude; NaN if there is one. On a GPU this waits for the device."""
    return 0.0 if tensor is None or not tensor.numel() else torch.linalg.vector_norm(tensor, ord=torch.inf).item()
