"""Peak memory of a call, on any device, and how it grows with the sequence."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .peers import OURS, PEERS, Call, first_line
from .records import SCHEMA
from .suite import Case, make_inputs

UNFUSED = "unfused"
LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384, 32768, 65536), "cpu": (256, 512, 1024, 2048)}
CPU_LIMIT_BYTES = 2 << 30  # unfused stops before it needs more than this of host memory


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes alive at one time that `call` allocated, its results included."""
    return _cuda_peak(call, device) if device.type == "cuda" else _cpu_peak(call)


def _cuda_peak(call: Callable[[], object], device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(call: Callable[[], object]) -> int:
    """From the allocator's own events, which the profiler records: temporaries inside fused operators count too."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():
        profiler.start()
    result = call()
    with _silent_stderr():
        profiler.stop()
    del result
    events = [(event.start_ns(), event.nbytes()) for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        live += change
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Some builds of PyTorch print trace lines from C++ whenever a profiler starts and stops."""
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


# ---------------------------------------------------------------------- growth with the sequence
@dataclass
class MemoryPoint:
    """Bytes of one forward + backward. None where it did not fit (reason says so)."""

    peer: str
    seqlen: int
    extra_bytes: int | None
    results_bytes: int  # output and the three gradients, which any implementation must return
    input_bytes: int  # query, key, value
    grad_out_bytes: int
    reason: str = ""

    @property
    def overhead_percent(self) -> float | None:
        """What was needed beyond the results, in per cent of query, key and value."""
        if self.extra_bytes is None:
            return None
        return 100 * (self.extra_bytes - self.results_bytes) / self.input_bytes


@dataclass
class MemoryReport:
    dtype: str
    batch: int
    heads: int
    head_dim: int
    causal: bool
    identity: dict[str, Any]
    points: list[MemoryPoint] = field(default_factory=list)
    schema: int = SCHEMA
    kind: str = "memory"


def forward_backward(call: Call, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Output and the gradients of query, key and value."""
    out = call(query, key, value)
    return out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)


def unfused_peak_estimate(case: Case, dtype: torch.dtype) -> int:
    """S, P, dP and dS alive together, in the input dtype."""
    return 4 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * dtype.itemsize


def measure_point(peer: str, case: Case, dtype: torch.dtype, device: torch.device) -> MemoryPoint:
    inputs = make_inputs(case, dtype, device, seed=0)
    query, key, value, grad_out = inputs
    input_bytes = case.input_bytes(dtype)
    point = MemoryPoint(peer, case.seqlen_q, None, input_bytes + grad_out.nbytes, input_bytes, grad_out.nbytes)
    if peer == UNFUSED and device.type == "cpu" and unfused_peak_estimate(case, dtype) > CPU_LIMIT_BYTES:
        point.reason = f"needs about {unfused_peak_estimate(case, dtype) / 2**30:.0f} GiB"
        return point
    try:
        built = PEERS[peer].build(case, query, key, value)
        with built.context():
            forward_backward(built.call, *inputs)  # compiled kernels and library handles are not part of the call
            point.extra_bytes = peak_extra_bytes(lambda: forward_backward(built.call, *inputs), device)
    except torch.OutOfMemoryError as error:
        point.reason = f"out of memory: {first_line(error)}"
    if point.reason and device.type == "cuda":  # outside of except: there the traceback keeps the tensors alive
        torch.cuda.empty_cache()
    return point


def measure_growth(report: MemoryReport, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> MemoryReport:
    """Fill the report for this library at every length and for unfused attention until it no longer fits."""
    for peer in (OURS, UNFUSED):
        for seqlen in lengths:
            case = Case(report.batch, report.heads, report.heads, seqlen, seqlen, report.head_dim, report.head_dim, report.causal)
            point = measure_point(peer, case, dtype, device)
            report.points.append(point)
            if point.extra_bytes is None:
                break
    return report
