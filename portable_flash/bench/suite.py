"""The shapes that are timed, as data, and how a shape is written on the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ..problem import Problem

DIRECTIONS = ("forward", "backward")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FLOPS_CONVENTION = "FLOPs: 4*B*H*S*S*D forward, 2.5x that backward, half for causal"
CallInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value, grad_out
SHAPE_FORM = "B,Hq,Hk,Sq,Sk,D[,Dv][,causal]"


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a suite. Sizes are counts of elements; key and value heads are shared by heads_q // heads_k query heads."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False

    @property
    def name(self) -> str:
        seqlen = f"S{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"S{self.seqlen_q}/{self.seqlen_k}"
        head_dim = f"D{self.head_dim}" if self.head_dim == self.head_dim_v else f"D{self.head_dim}/{self.head_dim_v}"
        return f"B{self.batch} H{self.heads_q}/{self.heads_k} {seqlen} {head_dim} {'causal' if self.causal else 'full'}"

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_k

    def problem(self, dtype: torch.dtype) -> Problem:
        sizes = asdict(self)
        causal = sizes.pop("causal")
        return Problem(dtype=dtype, window_right=0 if causal else None, **sizes)

    def flops(self, direction: str) -> float:
        """FLOPs by the convention of published figures (FLOPS_CONVENTION), so that figures compare.

        It counts the causal triangle as half of the square, without the half of the diagonal that the exact count has.
        """
        exact = self.problem(torch.float16).flops(direction)
        if self.causal and self.seqlen_q == self.seqlen_k:
            return exact * self.seqlen_k / (self.seqlen_k + 1)
        return float(exact)

    def input_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of query, key and value."""
        sizes = self.problem(dtype).operand_bytes()
        return sizes["q"] + sizes["k"] + sizes["v"]


def _both(*sizes: int) -> list[Case]:
    batch, heads_q, heads_k, seqlen, head_dim = sizes
    return [Case(batch, heads_q, heads_k, seqlen, seqlen, head_dim, head_dim, causal) for causal in (False, True)]


SUITES: dict[str, list[Case]] = {
    "peers": [
        *_both(8, 32, 32, 2048, 64),
        *_both(1, 32, 32, 16384, 64),
        *_both(8, 16, 16, 2048, 128),
        *_both(1, 16, 16, 16384, 128),
        *_both(8, 8, 8, 2048, 256),
        *_both(1, 8, 8, 16384, 256),
        *_both(1, 64, 8, 8192, 128),
        *_both(4, 32, 8, 4096, 128),
    ],
    "quick": [*_both(8, 32, 32, 2048, 64), *_both(8, 16, 16, 2048, 128), *_both(4, 32, 8, 4096, 128)],
    "cpu": [*_both(1, 8, 8, 512, 64), Case(1, 8, 2, 1024, 1024, 64, 64, causal=True), Case(1, 8, 8, 2048, 2048, 64, 64)],
}


def parse_shape(text: str) -> Case:
    """A Case from SHAPE_FORM. Raises ValueError that names the argument, its value and what is allowed."""
    words = [word.strip() for word in text.split(",")]
    causal = words[-1] == "causal"
    words = words[:-1] if causal else words
    if not 6 <= len(words) <= 7 or not all(word.isdigit() and int(word) for word in words):
        raise ValueError(f"--shape {text!r}: allowed is {SHAPE_FORM} with positive integers, for example 1,32,8,4096,4096,128,causal")
    sizes = [int(word) for word in words]
    case = Case(*sizes[:6], sizes[6] if len(sizes) == 7 else sizes[5], causal)
    if case.heads_q % case.heads_k:
        raise ValueError(f"--shape {text!r}: Hq={case.heads_q} must be a multiple of Hk={case.heads_k}")
    return case


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> CallInputs:
    """Standard normal query, key, value (leaves that need gradients) and grad_out, in layout bhsd."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, seqlen: int, head_dim: int) -> torch.Tensor:
        return torch.randn(case.batch, heads, seqlen, head_dim, dtype=dtype, device=device, generator=generator)

    query = draw(case.heads_q, case.seqlen_q, case.head_dim).requires_grad_()
    key = draw(case.heads_k, case.seqlen_k, case.head_dim).requires_grad_()
    value = draw(case.heads_k, case.seqlen_k, case.head_dim_v).requires_grad_()
    return query, key, value, draw(case.heads_q, case.seqlen_q, case.head_dim_v)
