"""Kernels compiled ahead, in processes beside the workers: a validation of a machine whose caches are empty would else mostly compile.

Each process runs tasks of the device's level up to the launch, with a runner that compiles what would be launched; the backends'
caches on disk hold the result. Nothing depends on it: what is not there in time, or fails, a worker compiles itself.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import backends
from ..backends import Gradients, Inputs, Needs, Plan
from ..device import Device
from .context import Runner

if TYPE_CHECKING:
    from torch import Tensor

    from .session import Options


MOST_PROCESSES = 16


class Compiled(Exception):
    """All kernels of a call are there: nothing more is wanted of its task."""


class CompileOnly(Runner):
    """Compiles for a device from tensors on the CPU, and ends the task after the first backward pass."""

    def __init__(self, device: Device):
        super().__init__(replace(device, index=None))  # nothing is probed, and tensors are on the CPU

    def forward(self, inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
        if plan.backend == "hip":
            from ..backends.hip import host

            return host.forward(inputs, plan, _compile_hip)
        return backends.load(plan.backend).forward(inputs, plan)

    def backward(
        self, inputs: Inputs, plan: Plan, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        if plan.backend == "hip":
            from ..backends.hip import host

            host.backward(inputs, plan, out, lse, grad_out, grad_lse, needs, _compile_hip)
        else:
            backends.load(plan.backend).backward(inputs, plan, out, lse, grad_out, grad_lse, needs)
        raise Compiled


def _compile_hip(launch, plan: Plan) -> None:
    from ..backends.hip import cache

    if launch.programs:
        cache.code_object(launch.kernel)


def only_compile(device: Device) -> None:
    """From now on Triton's launches in this process compile for `device`, through its own launcher: cache keys are those of launches."""
    try:
        from triton.runtime import driver
    except ImportError:
        return
    from ..backends.triton import compile as cross
    from ..backends.triton.launch import Launch
    from ..tune.compiling import Target

    def warm_up(launch: Launch, *arguments) -> None:
        if launch.grid[0]:
            launch.kernel.warmup(*arguments, *launch.integers, **launch.constexprs, **launch.options, grid=launch.grid)

    driver.set_active(Target(cross.target(device)))
    Launch.__call__ = warm_up


def compile_task(device: Device, options: Options, number: int) -> bool:
    """Compile the kernels of one task, in a process that does nothing else; whether that went through."""
    from .session import chosen_tasks, context_of

    only_compile(device)
    context = context_of(CompileOnly(device), options)
    try:
        for _ in chosen_tasks(context, options)[number].run(context):
            pass
    except Compiled:
        return True
    except Exception:  # the worker meets the same and reports it
        return False
    return True


class Ahead:
    """Compiles the tasks of the first GPU's model with the cores that the workers leave over, until the block ends."""

    def __init__(self, devices: Iterable[Device], options: Options, cores: int):
        devices = list(devices)
        self.pool = None
        gpu, spare = next((d for d in devices if d.vendor != "cpu"), None), cores - len(devices)
        if gpu is None or spare < 2:
            return
        from ..tune.compiling import quiet
        from .session import chosen_tasks, context_of

        numbers = range(len(chosen_tasks(context_of(CompileOnly(gpu), options), options)))
        self.pool = multiprocessing.get_context("spawn").Pool(min(spare, MOST_PROCESSES), quiet)
        for number in numbers:
            self.pool.apply_async(compile_task, (gpu, options, number))

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.pool is not None:
            self.pool.terminate()  # the caches are written file by file, each whole or not at all
