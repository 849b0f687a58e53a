"""The protocol that every backend keeps, and the list of backends in the order in which they are tried."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..device import Device
    from ..problem import Problem
    from ..tiling import Tiling

NAMES = ("triton", "hip", "cpu")  # order of preference; a backend that cannot run somewhere says so itself
VENDORS = {"hip": "amd"}  # backends for one vendor's devices: elsewhere they are not tried unless named


@dataclass(slots=True)
class Inputs:
    """The tensors and scalars of one checked call, as the operators receive them.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv) for layout "bhsd"; (B, S, H, D) for "bshd";
    packed (total, H, D) when cu_seqlens_q and cu_seqlens_k (B + 1,) are given. Strides are free except that the last
    one is 1. bias (floating point, -inf hides) and mask (boolean, True = may attend) are 4-D, each size 1 or that of
    (B, Hq, Sq, Sk); in packed calls Sq and Sk are max_seqlen_q and max_seqlen_k and positions count from the start of
    each sequence. alibi_slopes is float32 (B, Hq), often an expanded view; sinks float32 (Hq,). Everything else about
    the call (window, alignment, sizes) is in plan.problem.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float = 0.0  # 0 = none
    layout: str = "bhsd"
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients are asked for; the others are returned as None and cost nothing."""

    query: bool = True
    key: bool = True
    value: bool = True
    bias: bool = False
    sinks: bool = False


@dataclass(slots=True)
class Gradients:
    """Each has the shape and dtype of its input; bias keeps its broadcast sizes of 1."""

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class KernelPlan:
    """The tiling of one kernel and where it was found ("argument", "user file", "h200.yaml", "rule", ...)."""

    tiling: Tiling
    source: str


@dataclass(frozen=True)
class Plan:
    """What will run for a Problem on a Device, and why."""

    problem: Problem
    device: Device
    backend: str
    kernels: MappingProxyType[str, KernelPlan] = field(default_factory=lambda: MappingProxyType({}))
    rejected: tuple[tuple[str, str], ...] = ()  # (backend, reason), in the order tried


class Backend(Protocol):
    """A backend is a module with these names.

    Three more are optional, for a backend whose kernels the resource model of `Tiling` does not describe; the look-up of
    tilings asks them. All take (tiling, kernel, problem, device): `unfit`, why the tiling cannot run, or None; `registers`, the
    estimated registers a thread; `settle`, the nearest tiling that the kernels can cut a problem by.
    """

    NAME: str

    def unavailable(self, device: Device) -> str | None:
        """Why nothing can run on this device (library absent, arch without a path); None when something can."""

    def supports(self, problem: Problem, device: Device) -> str | None:
        """Why this call cannot run; None when it can."""

    def tuned_kernels(self, problem: Problem) -> tuple[str, ...]:
        """Names of the kernels of this call that take a Tiling."""

    def space(self, kernel: str) -> str:
        """Hash of the kernel's code: tilings tuned for another hash are void. Only called for tuned_kernels."""

    def forward(self, inputs: Inputs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, shaped like query with value's head_dim; lse float32 (B, Hq, Sq), packed (Hq, total_q)."""

    def backward(
        self, inputs: Inputs, plan: Plan, out: torch.Tensor, lse: torch.Tensor,
        grad_out: torch.Tensor, grad_lse: torch.Tensor | None, needs: Needs,
    ) -> Gradients:
        """Gradients of what `needs` names, S and P recomputed from lse."""


def load(name: str) -> Backend:
    """Import a backend by name. Nothing is imported before it is needed."""
    if name not in NAMES:
        raise ValueError(f"backend={name!r}: allowed are {', '.join(map(repr, NAMES))} or None for the best that can run")
    return importlib.import_module(f"{__name__}.{name}")
