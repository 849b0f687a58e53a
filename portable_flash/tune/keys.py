"""What is tuned: a key is a kernel of a backend for a kind of call, and the call that stands for its kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ..database import BACKENDS, When
from ..problem import DTYPE_NAMES, Problem
from ..tiling import KERNELS

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.itemsize <= 4}
DEFAULT_DTYPES = ("bf16", "fp16")
DEFAULT_HEAD_DIMS = (64, 96, 128, 192, 256)
DEFAULT_BUCKETS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = {"full": False, "causal": True}
TOKENS = 16384  # of the call that stands for a bucket, batch times sequence: as published figures are measured
HIDDEN = 2048  # heads times head_dim, likewise
PROBE = (2, 4, 2, 249, 377)  # batch, heads_q, heads_k, seqlen_q, seqlen_k of the odd call
KEY_FORM = "backend/kernel/dtype/d<head_dim>/full|causal/s<seqlen>"


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One entry of the database. seqlen is the upper bound of a bucket: calls up to it, and beyond the bucket before."""

    backend: str
    kernel: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.backend}/{self.kernel}/{self.dtype}/d{self.head_dim}/{mask}/s{self.seqlen}"

    @property
    def group(self) -> tuple[str, str, str, int, bool]:
        """What decides the compiled code: keys that differ in seqlen alone share it."""
        return (self.backend, self.kernel, self.dtype, self.head_dim, self.causal)

    def problem(self) -> Problem:
        """The call that stands for this key."""
        heads, batch = max(1, HIDDEN // self.head_dim), max(1, TOKENS // self.seqlen)
        return self._problem(batch, heads, heads, self.seqlen, self.seqlen, self.head_dim)

    def probe(self) -> Problem:
        """An odd call: a head_dim that fills no tile, lengths that fill no block, shared heads; in layout "bshd"."""
        return self._problem(*PROBE, max(8, self.head_dim - 8))

    def _problem(self, batch: int, heads_q: int, heads_k: int, seqlen_q: int, seqlen_k: int, head_dim: int) -> Problem:
        right = 0 if self.causal else None
        return Problem(DTYPES[self.dtype], batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim, window_right=right)

    def when(self) -> When:
        """The calls that the entry is for; the last bucket has no upper bound."""
        bound = None if self.seqlen >= max(DEFAULT_BUCKETS) else self.seqlen
        return When(
            dtype=(self.dtype,), head_dim_le=self.head_dim, head_dim_v_le=self.head_dim, seqlen_q_le=bound, seqlen_k_le=bound,
            causal=self.causal, varlen=False, mask_or_bias=False,
        )  # fmt: skip


def key_set(
    backend: str,
    kernels: Iterable[str] = KERNELS,
    dtypes: Iterable[str] = DEFAULT_DTYPES,
    head_dims: Iterable[int] = DEFAULT_HEAD_DIMS,
    buckets: Iterable[int] = DEFAULT_BUCKETS,
    causal: Iterable[bool] = (False, True),
) -> list[Key]:
    """All combinations. The keys of one group are neighbours, and the dtypes of 16 bits follow one another, so that the
    second starts from what the first found."""
    order = itertools.product(dtypes, head_dims, causal, kernels)
    return [Key(backend, k, t, d, c, s) for t, d, c, k in order for s in sorted(set(buckets))]


def parse_key(text: str) -> Key:
    """A Key from KEY_FORM. Raises ValueError that names the part, its value and what is allowed."""
    parts = text.split("/")
    if len(parts) != 6:
        raise ValueError(f"key {text!r}: must be {KEY_FORM}, for example triton/forward/bf16/d128/causal/s4096")
    backend, kernel, dtype, head_dim, mask, seqlen = parts
    words = (("backend", backend, BACKENDS), ("kernel", kernel, KERNELS), ("dtype", dtype, DTYPES), ("mask", mask, MASKS))
    for what, value, allowed in words:
        if value not in allowed:
            raise ValueError(f"key {text!r}: {what} {value!r}: allowed are {', '.join(allowed)}")
    for what, value, letter in (("head_dim", head_dim, "d"), ("seqlen", seqlen, "s")):
        if not (value.startswith(letter) and value[1:].isdecimal() and int(value[1:])):
            raise ValueError(f"key {text!r}: {what} {value!r}: must be {letter} and a positive integer")
    return Key(backend, kernel, dtype, int(head_dim[1:]), MASKS[mask], int(seqlen[1:]))


def fits_memory(key: Key, memory_bytes: int) -> bool:
    """Whether the call, its gradients and a copy of each leave half of the memory to the oracle."""
    sizes = key.problem().operand_bytes()
    return 4 * sum(sizes.values()) <= memory_bytes // 2

