"""Memory in which a kernel's strays show: outputs full of NaN before the launch, and guard bytes around outputs and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# NaN in bfloat16, float16, float32 and float64 alike, and not the NaN that arithmetic makes: who writes it means harm
PATTERN = -11  # 0xFFF5 as int16
GUARD_BYTES = 1 << 17  # more than the tile of 128 rows by 256 numbers that a program writes; a multiple of every alignment

_NEW = torch.ops.aten
_EMPTY = {
    _NEW.empty.memory_format, _NEW.empty_like.default, _NEW.new_empty.default, _NEW.empty_strided.default, _NEW.new_empty_strided.default,
}  # fmt: skip
_FILLED = {
    _NEW.zeros.default: 0.0, _NEW.zeros_like.default: 0.0, _NEW.new_zeros.default: 0.0, _NEW.ones.default: 1.0, _NEW.ones_like.default: 1.0,
    _NEW.new_ones.default: 1.0, _NEW.full.default: None, _NEW.full_like.default: None, _NEW.new_full.default: None,
}  # fmt: skip


class Guarded:
    """Buffers with guards, each handed out as a tensor in its middle."""

    def __init__(self):
        self.buffers: list[tuple[Tensor, int, str]] = []  # int16 words, bytes of the tensor, what it is

    def like(self, meta: Tensor, what: str = "", where: torch.device | None = None) -> Tensor:
        """A new tensor of meta's shape, strides and dtype, on `where` or its device, full of NaN (integers: of the pattern)."""
        size = meta.element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.stride(), strict=True)) if meta.numel() else 0
        room = -(-span * size // 256) * 256
        words = torch.full(((2 * GUARD_BYTES + room) // 2,), PATTERN, dtype=torch.int16, device=where or meta.device)
        self.buffers.append((words, span * size, what))
        typed = words.view(torch.uint8)[GUARD_BYTES : GUARD_BYTES + span * size].view(meta.dtype)
        return typed.as_strided(meta.shape, meta.stride())

    def copy(self, tensor: Tensor, what: str = "", where: torch.device | None = None) -> Tensor:
        """The same numbers on `where` behind the same strides, between guards."""
        base = unexpanded(tensor)
        return self.like(base, what, where or tensor.device).copy_(base).expand(tensor.shape)

    def disturbed(self) -> dict[str, int]:
        """Guard words of each buffer that no longer hold the pattern, where there are any."""
        found: dict[str, int] = {}
        for words, size, what in self.buffers:
            start, stop = GUARD_BYTES // 2, (GUARD_BYTES + size + 1) // 2
            ends = (words[:start], words[stop:])
            count = sum(int((end != PATTERN).sum()) for end in ends)
            if count:
                found[what] = found.get(what, 0) + count
        return found


def unexpanded(tensor: Tensor) -> Tensor:
    """Its first slice along each dimension whose stride is 0."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


class _Mode(TorchDispatchMode):
    def __init__(self, guarded: Guarded):
        super().__init__()
        self.guarded = guarded

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function not in _EMPTY and function not in _FILLED:
            return function(*arguments, **options)
        made = function(*arguments, **options)
        if made.device.type == "meta" or not made.numel():
            return made
        tensor = self.guarded.like(made, f"{made.dtype} {tuple(made.shape)}".removeprefix("torch."))
        return tensor.copy_(made) if function in _FILLED else tensor


@contextmanager
def guarded_allocations() -> Iterator[Guarded]:
    """Whatever is allocated in this block by empty, zeros, full and their kin lies between guards; what empty gives is NaN.

    Covers what a backend allocates in Python: outputs, lse, gradients and scratch. Results of other operators are not covered.
    """
    guarded = Guarded()
    with _Mode(guarded):
        yield guarded


def unwritten(tensor: Tensor) -> int:
    """Elements that are still the pattern that they were allocated with."""
    if not tensor.is_floating_point():
        return 0
    words = tensor.contiguous().view(torch.int16).view(-1, math.ceil(tensor.element_size() / 2))
    return int((words == PATTERN).all(-1).sum())
