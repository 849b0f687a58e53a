"""Host time of one eager call: what a small call costs before the device matters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from .. import attention
from .records import SCHEMA
from .suite import Case, make_inputs

CASE = Case(batch=1, heads_q=8, heads_k=8, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64)
BATCHES = 5
CALLS = {"cuda": 400, "cpu": 20}  # in a batch; a CPU call contains the computation


@dataclass
class HostReport:
    """Microseconds a call: forward alone, "without_grad" under no_grad, "with_grad" on inputs that need gradients."""

    dtype: str
    case: Case
    calls_per_batch: int
    identity: dict[str, Any]
    microseconds: dict[str, dict[str, float]] = field(default_factory=dict)  # mode -> name -> microseconds
    ratio: dict[str, float] = field(default_factory=dict)  # mode -> ours / SDPA
    schema: int = SCHEMA
    kind: str = "host"


def measure_host(report: HostReport, dtype: torch.dtype, device: torch.device) -> HostReport:
    query, key, value, _ = make_inputs(report.case, dtype, device, seed=0)
    calls = {
        "ours": functools.partial(attention, query, key, value),
        "sdpa": functools.partial(F.scaled_dot_product_attention, query, key, value),
    }
    for mode, context in (("without_grad", torch.no_grad), ("with_grad", nullcontext)):
        with context():
            times = best_of_batches(calls, report.calls_per_batch, device)
        report.microseconds[mode] = times
        report.ratio[mode] = times["ours"] / times["sdpa"]
    return report


def best_of_batches(calls: dict[str, Callable[[], object]], count: int, device: torch.device) -> dict[str, float]:
    """Microseconds a call, the least of BATCHES batches; the device is waited for between batches, never inside one."""
    synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(1 + BATCHES):  # the first compiles and warms up; on a minimum it can stay in
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / count * 1e6)
    synchronize()
    return best
