"""Triton backend: one set of kernels for NVIDIA sm_80 and newer and for AMD CDNA and RDNA GPUs."""

from __future__ import annotations

import functools
import tokenize
from pathlib import Path

import torch

from ...device import Device
from ...problem import Problem
from ...tuning import space_hash
from .. import Gradients, Inputs, Needs, Plan

NAME = "triton"
AMD_ARCHES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unavailable(device: Device) -> str | None:
    """Why Triton cannot run there."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error}); CUDA and ROCm builds of torch bring it"
    if device.vendor == "cpu":
        from .launch import INTERPRETED

        return None if INTERPRETED else "the CPU needs Triton's interpreter (TRITON_INTERPRET=1 before the first import)"
    if device.vendor == "nvidia" and int(device.arch.removeprefix("sm_")) < 80:
        return f"needs compute capability 8.0 or newer, this is {device.arch}"
    if device.vendor == "amd" and device.arch not in AMD_ARCHES:
        return f"has no path for {device.arch}; it has for {', '.join(AMD_ARCHES)}"
    return None


def supports(problem: Problem, device: Device) -> str | None:
    """Why these kernels cannot do this call."""
    if problem.dtype not in DTYPES:
        return f"computes fp16, bf16 and fp32, not {problem.dtype_name}"
    if device.vendor == "cpu" and problem.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bf16 as if it were integers"
    if max(problem.head_dim, problem.head_dim_v) > 256:
        return f"head_dim goes up to 256, here {max(problem.head_dim, problem.head_dim_v)}"
    return None


def tuned_kernels(problem: Problem) -> tuple[str, ...]:
    return ("forward", "backward_dkv", "backward_dq") if problem.needs_grad else ("forward",)


@functools.cache
def space(kernel: str) -> str:
    """Hash of what a tiling of this kernel was tuned for: the kernels' code, without comments, docstrings and line breaks."""
    parts = ["common.py", "forward_kernels.py" if kernel == "forward" else "backward_kernels.py"]
    return space_hash("\n".join(_code(Path(__file__).with_name(part)) for part in parts))


def _code(path: Path) -> str:
    """The tokens that mean something. Tokens, because the text that `ast` makes of a tree depends on Python's version."""
    layout = {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ";"}  # their texts hold white space
    kept: list[str] = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
                continue
            docstring = token.type == tokenize.STRING and (not kept or kept[-1] in layout.values())
            kept.append("" if docstring else layout.get(token.type, token.string))
    return " ".join(kept)


def forward(inputs: Inputs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    from . import host

    return host.forward(inputs, plan)


def backward(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs
) -> Gradients:
    from . import host

    return host.backward(inputs, plan, out, lse, grad_out, grad_lse, needs)
