"""What every check is given: a device, how thorough to be, and the one way to run attention on it."""

from __future__ import annotations

import functools
import hashlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .. import backends, dispatch
from ..backends import Gradients, Inputs, Needs, Plan
from ..bench.timing import clock_for
from ..device import Device
from ..problem import Problem
from .cases import Call, Case
from .levels import LEVELS, Level, Sizes, sizes_for
from .report import Digest, Identity, Software, Used


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
    backend: str | None = None  # the one that is asked for; None is what a call gets
    used: dict[tuple[str, str, str], Used] = field(default_factory=dict)  # by backend, kernel and tiling
    digests: list[Digest] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # SHA-256 of the inputs of each case
    identity: Identity | None = None  # for the keys of digests
    software: Software | None = None
    driver: str | None = None
    golden: Path | None = None  # folder of recorded digests and times; None is the user's own

    @property
    def device(self) -> Device:
        return self.runner.device

    @property
    def where(self) -> torch.device:
        return self.runner.where

    @property
    def settings(self) -> Level:
        return LEVELS[self.level]

    @property
    def sizes(self) -> Sizes:
        return sizes_for(self.device, self.small)

    def seconds_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def draw(self, case: Case, seed: int | None = None) -> Call:
        """The case's tensors on the CPU, its inputs entered into the report."""
        call = case.sized(self.sizes).draw(self.seed if seed is None else seed)
        self.inputs[case.name] = call.sha256()
        return call

    def plan(self, call: Call, backend: str | None = None) -> Plan:
        """The plan that a call gets, its kernels entered into the report. Raises dispatch.NoBackendError."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fallbacks: the report names the backend
            plan = self.runner.plan(call.problem, backend or self.backend)
        self.enter(plan, call.case.name)
        return plan

    def enter(self, plan: Plan, case: str) -> None:
        kernels = {name: (str(k.tiling), k.source) for name, k in plan.kernels.items()} or {"operations": ("", "")}
        for kernel, (tiling, source) in kernels.items():
            print_ = fingerprint(plan.backend, kernel)
            entry = Used(backend=plan.backend, kernel=kernel, fingerprint=print_, case=case, tiling=tiling, source=source)
            self.used.setdefault((plan.backend, kernel, tiling), entry)


@functools.cache
def fingerprint(backend: str, kernel: str) -> str:
    """Hash of the code that computes: of a tuned kernel the backend's own, of a backend in torch operations its source."""
    module = backends.load(backend)
    if kernel != "operations":
        return module.space(kernel)
    files = sorted(Path(module.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
