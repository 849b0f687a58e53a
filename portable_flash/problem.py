"""What is asked: an attention call as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


MAX_ROW_STRIDE = 2**23  # elements from row to row: the 256 rows of the largest tile then span less than 2**31


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes and options of one attention call; everything that a choice of kernel may depend on.

    A causal call is a window whose right reach is 0 (both alignments are described in ``functional``), so that
    no layer below the public call knows two rules of visibility. For packed (varlen) calls ``batch`` is the number
    of sequences and ``seqlen_q``/``seqlen_k`` are the launch bounds ``max_seqlen_q``/``max_seqlen_k``.
    """

    dtype: torch.dtype
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    window_left: int | None = None  # reach to the left of the diagonal in keys, itself not counted; None = unbounded
    window_right: int | None = None
    top_left: bool = False  # the diagonal starts at key 0, not at key seqlen_k - seqlen_q
    varlen: bool = False
    total_q: int = 0  # rows of the packed tensors; 0 unless varlen
    total_k: int = 0
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: bool = False
    deterministic: bool = False
    needs_grad: bool = True  # a backward pass may follow: its kernels are planned too

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_k if self.heads_k else 1

    def visible_pairs(self) -> int:
        """Number of (query, key) pairs of one head that position alone lets through (masks not counted)."""
        diagonal = 0 if self.top_left else self.seqlen_k - self.seqlen_q
        if self.window_left is None and self.window_right is None:
            return self.seqlen_q * self.seqlen_k
        rows = torch.arange(self.seqlen_q, dtype=torch.int64)
        low = torch.zeros_like(rows) if self.window_left is None else (rows + diagonal - self.window_left).clamp(min=0)
        high = torch.full_like(rows, self.seqlen_k - 1)
        if self.window_right is not None:
            high = torch.minimum(high, rows + diagonal + self.window_right)
        return int((high - low + 1).clamp(min=0).sum())

    def flops(self, direction: str) -> int:
        """Multiply-adds counted as 2, matrix products only.

        forward: S = QK^T and O = PV. backward: S, dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q
        (FlashAttention, Dao et al. 2022, Algorithms 1 and 4).
        """
        pairs = self.batch * self.heads_q * self.visible_pairs()
        if direction == "forward":
            return 2 * pairs * (self.head_dim + self.head_dim_v)
        if direction == "backward":
            return 2 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        raise ValueError(f"direction={direction!r}: allowed are 'forward' and 'backward'")

    def unfused_hbm_bytes(self, direction: str) -> int:
        """Bytes that matmul, softmax, matmul move when S and P are written out (same paper, Algorithm 0).

        Forward: S written and read, P written and read. Backward: P read twice (for dV and dS), dP written and
        read, dS written and read twice. Elements have the size of the input type.
        """
        matrix = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k * self.dtype.itemsize
        io = self.operand_bytes()
        if direction == "forward":
            return io["q"] + io["k"] + io["v"] + io["o"] + 4 * matrix
        return 2 * (io["q"] + io["k"] + io["v"]) + 3 * io["o"] + 7 * matrix

    def operand_bytes(self) -> dict[str, int]:
        """Bytes of query, key, value, output and lse, each counted once."""
        rows_q = self.total_q if self.varlen else self.batch * self.seqlen_q
        rows_k = self.total_k if self.varlen else self.batch * self.seqlen_k
        size = self.dtype.itemsize
        return {
            "q": rows_q * self.heads_q * self.head_dim * size,
            "k": rows_k * self.heads_k * self.head_dim * size,
            "v": rows_k * self.heads_k * self.head_dim_v * size,
            "o": rows_q * self.heads_q * self.head_dim_v * size,
            "lse": rows_q * self.heads_q * 4,
        }
