"""How a call is timed: interleaved rounds, so that heat and power caps strike every implementation alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

WARM_UP_CALLS = 3  # library handles and autograd graphs exist after the first; the others settle clocks and allocator


class Clock(Protocol):
    def seconds(self, step: Callable[[int], object], calls: int) -> float:
        """Seconds that `calls` calls step(0), step(1), ... take on the device, together."""


class WallClock:
    """Host clock, for devices that finish a call before it returns."""

    def seconds(self, step: Callable[[int], object], calls: int) -> float:
        start = time.perf_counter()
        for i in range(calls):
            step(i)
        return time.perf_counter() - start


class CudaClock:
    """CUDA (and ROCm) events around the calls; calls follow one another without a synchronisation in between."""

    def seconds(self, step: Callable[[int], object], calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for i in range(calls):
            step(i)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else WallClock()


@dataclass
class Run:
    """A timed thing: step(i) makes one call on input set i modulo their number, inside context()."""

    step: Callable[[int], object]
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Samples:
    """Seconds a call, one sample a round."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 0  # calls behind each sample

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """Linear interpolation between the sorted samples."""
        ordered = sorted(self.seconds)
        position = (len(ordered) - 1) * percent / 100
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    def speedup_over(self, baseline: Samples) -> float:
        """Median over rounds of baseline seconds / own seconds: only neighbours in time are compared."""
        return statistics.median(base / own for base, own in zip(baseline.seconds, self.seconds, strict=True))


def interleave(runs: dict[str, Run], clock: Clock, rounds: int, budget_s: float) -> dict[str, Samples]:
    """Time every run in each of `rounds` rounds, as many calls a round as fit in budget_s seconds (at least one).

    The order turns by one each round, so that no run always follows the same neighbour.
    """
    samples = {name: Samples(calls=_calls_in(run, clock, budget_s)) for name, run in runs.items()}
    names = list(runs)
    for turn in range(rounds):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            calls = samples[name].calls
            with runs[name].context():
                samples[name].seconds.append(clock.seconds(runs[name].step, calls) / calls)
    return samples


def _calls_in(run: Run, clock: Clock, budget_s: float) -> int:
    """Warm up, then estimate how many calls fill the budget."""
    with run.context():
        one = clock.seconds(run.step, 1)
        if one < budget_s:
            one = clock.seconds(run.step, WARM_UP_CALLS) / WARM_UP_CALLS
    return max(1, min(1000, int(budget_s / max(one, 1e-7))))
