"""Tilings for a GPU that is not here: every candidate compiled for it, those that spill or do not fit dropped, the rest ranked.

The ranking is the model of `space`, which is no measurement: another tiling than the default is taken only where the model puts
it clearly ahead. Entries are marked `source: static`. fp16 and bf16 take the same registers, and a causal kernel takes no fewer
than one without a mask, so that one compilation speaks for all four.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ..database import Entry
from ..device import Device
from ..tiling import Tiling
from .compiling import Compiled, Job, resources
from .keys import DTYPES, Key
from .space import cost, default, shortlist
from .writer import tiling_entry

COUNT = 6  # candidates a kernel and head_dim
CLEARLY = 0.6  # a tiling is preferred to the default where the model gives it at most this share of the default's cost


@dataclass(frozen=True)
class Ranked:
    """What was found for one kernel and head_dim: the choice by key, and what each candidate takes."""

    keys: tuple[Key, ...]
    chosen: dict[Key, Tiling]
    compiled: dict[Tiling, Compiled]


def rank(
    keys: Iterable[Key], device: Device, executor: Executor, count: int = COUNT, deadline: float | None = None,
    tell: Callable[[str], None] = lambda text: None, compile_one: Callable[[Job], Compiled] = resources,
) -> list[Ranked]:  # fmt: skip
    """Choose tilings for all keys without their GPU; stops between two kernels once `deadline` (time.monotonic) has passed."""
    groups: dict[tuple, list[Key]] = {}
    for key in keys:
        size = DTYPES[key.dtype].itemsize
        groups.setdefault((key.backend, key.kernel, size, key.head_dim), []).append(key)
    results = []
    for same in groups.values():
        if deadline is not None and time.monotonic() >= deadline:
            tell(f"the budget is spent: {len(groups) - len(results)} of {len(groups)} kernels are left")
            break
        stands = replace(same[0], causal=True, seqlen=min((k.seqlen for k in same), key=lambda s: abs(s - 4096)))
        defaults = list(dict.fromkeys(default(k, device) for k in same))
        tilings = list(dict.fromkeys((*defaults, *shortlist(stands, device, count))))
        jobs = [Job(stands.backend, stands.kernel, stands.problem(), t, device) for t in tilings]
        compiled = dict(zip(tilings, executor.map(compile_one, jobs), strict=True))
        good = {t for t, c in compiled.items() if c.ok and not c.spilled and c.shared_memory_bytes <= device.shared_memory_bytes}
        alike = {key: replace(key, causal=True, dtype=stands.dtype) for key in same}  # one choice for both masks and dtypes
        chosen = {key: choice for key in same if (choice := choose(alike[key], device, good)) is not None}
        results.append(Ranked(tuple(same), chosen, compiled))
        dropped = len(tilings) - len(good)
        tell(f"{stands.backend}/{stands.kernel} d{stands.head_dim}: {len(tilings)} compiled, {dropped} dropped; "
             + ", ".join(dict.fromkeys(str(t) for t in chosen.values())))  # fmt: skip
    return results


def choose(key: Key, device: Device, good: Iterable[Tiling]) -> Tiling | None:
    """The default if it is among the good ones and none is clearly ahead of it; None where nothing is good."""
    problem, usual = key.problem(), default(key, device)
    ordered = sorted(good, key=lambda t: (cost(t, key.kernel, problem, device), str(t)))
    if not ordered:
        return None
    best = ordered[0]
    if usual in ordered and cost(best, key.kernel, problem, device) > CLEARLY * cost(usual, key.kernel, problem, device):
        return usual
    return best


def entries(ranked: Iterable[Ranked]) -> dict[tuple[str, str], list[Entry]]:
    """By backend and kernel: one entry for neighbouring buckets of a head_dim that share their tiling and their dtypes."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for one in ranked:
        dtypes = tuple(dict.fromkeys(k.dtype for k in one.keys))
        buckets = sorted({k.seqlen for k in one.chosen})
        by_bucket = {s: next(t for k, t in one.chosen.items() if k.seqlen == s) for s in buckets}
        for place, seqlen in enumerate(buckets):
            tiling = by_bucket[seqlen]
            if place + 1 < len(buckets) and by_bucket[buckets[place + 1]] == tiling:
                continue  # the next, larger bucket says it
            key = replace(one.keys[0], seqlen=seqlen)
            when = replace(key.when(), dtype=dtypes, causal=None)
            used = one.compiled[tiling]
            entry = tiling_entry(when, tiling, source="static", registers=used.registers, shared_memory_bytes=used.shared_memory_bytes)
            found.setdefault((key.backend, key.kernel), []).append(entry)
    return found
