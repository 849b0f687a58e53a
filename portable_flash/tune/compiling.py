"""Compile candidates before they are measured, without a GPU, each in a process of a pool: the backends' caches on disk hold
the result, so the measuring process only loads it."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .. import worker
from ..backends import KernelPlan, Needs, Plan
from ..backends.shared import dkv_passes, meta_call
from ..device import Device
from ..problem import Problem
from ..tiling import Tiling
from ..tuning import rule


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel in a tiling for a problem."""

    backend: str
    kernel: str
    problem: Problem
    tiling: Tiling
    device: Device
    layout: str = "bhsd"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What compiling found. Registers a lane and bytes of scratch a lane where they were asked for; -1 otherwise."""

    ok: bool
    reason: str = ""
    seconds: float = 0.0
    registers: int = -1
    spilled: int = -1
    shared_memory_bytes: int = -1


def pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that compile; jobs at least 1."""
    return ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context(worker.START_METHOD), initializer=quiet)


class CompilePool:
    """Processes that compile. A compiler that crashes takes its process along and, in a pool, the jobs of the others: those are
    done again, each in a process of its own, so that only the job that crashes again fails."""

    def __init__(self, jobs: int, function: Callable[[Job], Compiled] | None = None):
        self.jobs, self.function = jobs, function or precompile
        self._lock = threading.Lock()
        self._executor = pool(jobs)
        self._alone = ThreadPoolExecutor(1)

    def submit(self, job: Job) -> Future[Compiled]:
        outer: Future[Compiled] = Future()
        with self._lock:
            try:
                inner = self._executor.submit(self.function, job)
            except BrokenProcessPool:
                self._executor = pool(self.jobs)
                inner = self._executor.submit(self.function, job)
        inner.add_done_callback(lambda done: self._settle(done, job, outer))
        return outer

    def _settle(self, inner: Future[Compiled], job: Job, outer: Future[Compiled]) -> None:
        if inner.cancelled():
            outer.cancel()
        elif isinstance(inner.exception(), BrokenProcessPool):
            self._alone.submit(lambda: outer.set_result(self._in_its_own_process(job)))
        elif inner.exception() is not None:
            outer.set_result(Compiled(False, _reason(inner.exception())))
        elif outer.set_running_or_notify_cancel():
            outer.set_result(inner.result())

    def _in_its_own_process(self, job: Job) -> Compiled:
        with pool(1) as one:
            try:
                return one.submit(self.function, job).result()
            except BrokenProcessPool:
                return Compiled(False, "does not compile: the compiler crashed")

    def shutdown(self, wait: bool = False, cancel_futures: bool = True) -> None:
        with self._lock:
            self._executor.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._alone.shutdown(wait=wait, cancel_futures=cancel_futures)


def default_jobs() -> int:
    """All cores that this process may use but two: one is for the process that times, one for this."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable - 2)


def quiet() -> None:
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops; a compiler that prints a traceback helps nobody
    torch.set_num_threads(1)
    os.nice(5)  # timing comes first


def precompile(job: Job) -> Compiled:
    """Fill the cache on disk with the code that a launch will look for. Never raises."""
    start = time.monotonic()
    try:
        if job.backend == "hip":
            from ..backends.hip import cache

            for kernel in _hip_kernels(job):
                cache.code_object(kernel)
        else:
            _warm_up_triton(job)
    except Exception as error:  # whatever a compiler raises is the candidate's reason
        return Compiled(False, _reason(error), time.monotonic() - start)
    return Compiled(True, "", time.monotonic() - start)


def resources(job: Job) -> Compiled:
    """Compile for a device that need not be here and read what the machine code takes. Never raises."""
    start = time.monotonic()
    try:
        found = _hip_resources(job) if job.backend == "hip" else _triton_resources(job)
    except Exception as error:
        return Compiled(False, _reason(error), time.monotonic() - start)
    registers, spilled, shared = found
    return Compiled(True, "", time.monotonic() - start, registers, spilled, shared)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"does not compile: {type(error).__name__}: {lines[0][:200] if lines else ''}"


# ------------------------------------------------------------------ Triton
class Target:
    """Stands for Triton's driver where a kernel is compiled and not launched: no GPU context is made for it."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def _warm_up_triton(job: Job) -> None:
    """Through Triton's own launcher and with the very arguments of a launch, so that its cache key is that of the launch."""
    from triton.runtime import driver

    from ..backends.triton import compile as cross
    from ..backends.triton import host

    driver.set_active(Target(cross.target(job.device)))
    inputs, out, lse, grad_out = meta_call(job.problem, job.layout)
    plan = Plan(job.problem, job.device, "triton", MappingProxyType({job.kernel: KernelPlan(job.tiling, "tune")}))
    head = (*host._extras(inputs),)
    tail = (*head, None, None, inputs.scale, inputs.softcap)
    launches = []
    if job.kernel == "forward":
        launch, tma = host.plan_forward(inputs, plan)
        operands = host._forward_descriptors(inputs, plan) if tma else (inputs.query, inputs.key, inputs.value)
        launches.append((launch, (*operands, out, lse, *head, None, None, None, inputs.scale, inputs.softcap)))
    else:
        launch, _ = host.plan_delta(inputs, plan, out, grad_out, None)
        launches.append((launch, (out, grad_out, lse, None, lse)))
    if job.kernel == "backward_dkv":
        for dk, dv in dkv_passes(plan, Needs(query=False)):
            launch, tma = host.plan_dkv(inputs, plan, grad_out, dk, dv)
            q, do = host._dkv_descriptors(inputs, plan, grad_out) if tma else (inputs.query, grad_out)
            # the gradient that a pass does not compute is given all the same: its pointer is part of the variant
            launches.append((launch, (q, inputs.key, inputs.value, do, lse, lse, inputs.key, inputs.value, *tail)))
    if job.kernel == "backward_dq":
        launch, tma = host.plan_dq(inputs, plan, grad_out)
        k, v = host._dq_descriptors(inputs, plan) if tma else (inputs.key, inputs.value)
        launches.append((launch, (inputs.query, k, v, grad_out, lse, lse, inputs.query, *tail)))
    for launch, arguments in launches:
        launch.kernel.warmup(*arguments, *launch.integers, **launch.constexprs, **launch.options, grid=launch.grid)


def _triton_resources(job: Job) -> tuple[int, int, int]:
    from ..backends.triton import compile as cross

    found = cross.compile_problem(job.problem, job.device, {job.kernel: KernelPlan(job.tiling, "tune")}, job.layout)
    worst = [0, 0, 0]
    for name, kernel in found.items():
        if name == "backward_delta":
            continue
        asm = kernel.binary.asm
        registers, spilled = nvidia_usage(asm["cubin"]) if job.device.vendor == "nvidia" else _amd_usage(asm["amdgcn"])
        worst = [max(pair) for pair in zip(worst, (registers, spilled, kernel.binary.metadata.shared), strict=True)]
    return tuple(worst)


def nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes a thread of stack and local memory, which hold what did not fit in them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return int(used["REG"]), max(int(used["STACK"]), int(used["LOCAL"]))


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Registers a lane (accumulation registers included) and bytes of scratch a lane."""
    field = lambda name: int(re.search(rf"^\s+\.{name}:\s+(\d+)", assembly, re.MULTILINE).group(1))
    return field("vgpr_count"), max(field("private_segment_fixed_size"), 4 * field("vgpr_spill_count"))


# ------------------------------------------------------------------ HIP
def _hip_kernels(job: Job) -> list:
    from ..backends.hip import host

    names = ("forward",) if job.kernel == "forward" else ("backward_dkv", "backward_dq")
    tilings = {name: rule(name, job.problem, job.device, (), "hip") for name in names} | {job.kernel: job.tiling}
    kernels = host.kernels_of(job.problem, job.device, {n: KernelPlan(t, "tune") for n, t in tilings.items()}, job.layout)
    wanted = {"backward_dkv": ("backward_dk", "backward_dv"), "backward_dq": ("backward_dq",)}.get(job.kernel, ("forward",))
    return [kernel for name, kernel in kernels.items() if name.startswith(wanted)]


def _hip_resources(job: Job) -> tuple[int, int, int]:
    from ..backends.hip import compiler

    worst = [0, 0, 0]
    for kernel in _hip_kernels(job):
        code = compiler.compile_kernel(kernel, "clang")
        notes = _code_object_notes(code)
        worst = [max(pair) for pair in zip(worst, notes, strict=True)]
    return tuple(worst)


def _code_object_notes(code: bytes) -> tuple[int, int, int]:
    """Registers, scratch and LDS from the metadata that an AMD code object carries as MessagePack: name, then an integer."""

    def field(name: bytes) -> int:
        at = code.find(bytes([0xA0 | len(name)]) + name if len(name) < 32 else b"\xd9" + bytes([len(name)]) + name)
        if at < 0:
            return 0
        at += len(name) + (1 if len(name) < 32 else 2)
        kind = code[at]
        if kind < 0x80:
            return kind
        width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[kind]
        return int.from_bytes(code[at + 1 : at + 1 + width], "big")

    scratch = max(field(b".private_segment_fixed_size"), 4 * field(b".vgpr_spill_count"))
    return field(b".vgpr_count"), scratch, field(b".group_segment_fixed_size")
