"""HIP backend: C++ kernels compiled at run time for AMD GPUs, also for those that Triton has no path for."""

from __future__ import annotations

import functools
import re

import torch

from ...device import Device
from ...problem import Problem
from ...tuning import space_hash
from .. import Gradients, Inputs, Needs, Plan
from .specialise import ARCHES, DTYPES, registers, settle, unfit  # noqa: F401  what the look-up of tilings asks

NAME = "hip"
MAX_HEAD_DIM = 256


def unavailable(device: Device) -> str | None:
    """Why these kernels cannot run there. A GPU of the catalogue is planned for whether or not a HIP library is here."""
    if device.vendor != "amd":
        return "runs on AMD GPUs"
    if device.arch not in ARCHES:
        return f"has no path for {device.arch}; it has for {', '.join(ARCHES)}"
    return _missing() if device.present else None


@functools.cache  # asked for every new problem, and what is installed does not change under a process
def _missing() -> str | None:
    from . import cache, runtime

    return runtime.unavailable() or cache.unavailable()


def supports(problem: Problem, device: Device) -> str | None:
    """Why these kernels cannot do this call."""
    if problem.dtype not in DTYPES:
        return f"computes fp16, bf16 and fp32, not {problem.dtype_name}"
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return f"head_dim goes up to {MAX_HEAD_DIM}, here {max(problem.head_dim, problem.head_dim_v)}"
    return None


def tuned_kernels(problem: Problem) -> tuple[str, ...]:
    return ("forward", "backward_dkv", "backward_dq") if problem.needs_grad else ("forward",)


@functools.cache
def space(kernel: str) -> str:
    """Hash of what a tiling of this kernel was tuned for: its source and all that it includes, without comments."""
    from .compiler import source

    whole = source(kernel)
    return space_hash("\n".join(_code(text) for text in (whole.text, *[text for _, text in whole.headers])))


def _code(text: str) -> str:
    """Without comments, blank lines and indentation; what is in string literals stays."""
    kept = re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', lambda m: m[0] if m[0][0] == '"' else " ", text, flags=re.DOTALL)
    return "\n".join(stripped for line in kept.splitlines() if (stripped := line.strip()))


def forward(inputs: Inputs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    from . import host

    return host.forward(inputs, plan)


def backward(
    inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs
) -> Gradients:
    from . import host

    return host.backward(inputs, plan, out, lse, grad_out, grad_lse, needs)
