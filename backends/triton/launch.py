"""Launch compiled kernels with little host time, and describe tensors to them."""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)  # TRITON_INTERPRET=1 when triton was imported


def fix_cache_keys(*kernels) -> None:
    """Let Triton hash the kernels' sources now, always in this order.

    It does so at a kernel's first launch, and up to 3.7 what it finds depends on which other kernel with the same helpers came
    before (a helper's globals count only once the helper has been hashed). A process that begins with another kernel then misses
    all that others have put into the cache on disk, and compiles it again.
    """
    if not INTERPRETED:
        for kernel in kernels:
            kernel.cache_key  # noqa: B018 - a property that remembers


class Launch:
    """One kernel with everything but its tensors fixed: compiled at the first call, then launched directly.

    Triton's own launcher inspects every argument at every call to find the compiled variant. The owner of a Launch
    keys it by all that decides the variant (strides, sizes, pointer alignment, options), so later calls skip that.
    """

    __slots__ = ("kernel", "grid", "integers", "constexprs", "options", "compiled")

    def __init__(self, kernel, programs: int, integers: tuple[int, ...], constexprs: dict, options: dict):
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.integers = integers
        self.constexprs = constexprs
        self.options = options
        self.compiled = None

    def __call__(self, *tensors_and_scalars) -> None:
        if self.grid[0] == 0:
            return
        if self.compiled is not None:
            self.compiled(*tensors_and_scalars, *self.integers, *self.constexprs.values())
            return
        result = self.kernel[self.grid](*tensors_and_scalars, *self.integers, **self.constexprs, **self.options)
        if not INTERPRETED:
            self.compiled = result[self.grid]


def describable(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: not empty, 16-byte base and strides, no broadcast dimension."""
    size = tensor.element_size()
    if tensor.numel() == 0 or tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
        return False
    return all(n == 1 or (s > 0 and s * size % 16 == 0) for n, s in zip(tensor.shape[:-1], tensor.stride()))


def descriptor(tensor: torch.Tensor, layout: str, rows: int, cols: int) -> TensorDescriptor:
    """4-D (B, H, S, D) descriptor that loads (1, 1, rows, cols) tiles."""
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    shape = [tensor.shape[i] for i in order]
    aligned = 16 // tensor.element_size()  # the stride of a dimension of size 1 means nothing but must be legal
    strides = [tensor.stride(i) if n > 1 else aligned for i, n in zip(order, shape)]
    strides[-1] = 1
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, cols])
