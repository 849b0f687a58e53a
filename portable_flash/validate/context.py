"""What every check is given: a device, how thorough to be, and the one way to run attention on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import backends, dispatch
from ..backends import Gradients, Inputs, Needs, Plan
from ..bench.timing import clock_for
from ..device import Device
from ..problem import Problem
from .report import Digest, Used


class Runner:
    """Runs attention as a call does, through the backends' protocol. Tests derive from it to corrupt what comes back."""

    def __init__(self, device: Device):
        self.device = device
        self.where = torch.device("cpu") if device.index is None else torch.device("cuda", device.index)
        self._clock = clock_for(self.where)

    def plan(self, problem: Problem, backend: str | None = None) -> Plan:
        """The plan that a call gets; raises dispatch.NoBackendError."""
        return dispatch.plan(problem, self.device, backend)

    def forward(self, inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
        return backends.load(plan.backend).forward(inputs, plan)

    def backward(
        self, inputs: Inputs, plan: Plan, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        return backends.load(plan.backend).backward(inputs, plan, out, lse, grad_out, grad_lse, needs)

    def seconds(self, step: Callable[[int], object], calls: int) -> float:
        """Seconds of device time that step(0), step(1), ... take together: the Clock of bench.timing."""
        return self._clock.seconds(step, calls)


@dataclass
class Context:
    """One device under validation. A check appends to `used` and `digests` what it ran."""

    runner: Runner
    level: str  # one of report.LEVELS
    seed: int
    small: bool = False  # shapes of a device without matrix units, or where many runs are wanted
    hours: float = 0.0  # of a soak
    deadline: float | None = None  # time.monotonic() by which to stop: what is left is reported as skipped
    used: dict[tuple[str, str, str], Used] = field(default_factory=dict)
    digests: list[Digest] = field(default_factory=list)

    @property
    def device(self) -> Device:
        return self.runner.device

    @property
    def where(self) -> torch.device:
        return self.runner.where
