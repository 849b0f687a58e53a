"""Tilings for a GPU that is not here: every candidate compiled for it, those that spill or do not fit dropped, the rest ranked.

The ranking is the model of `space`, which is no measurement: another tiling than the default is taken only where the default
is dropped or the model puts the other one clearly ahead. Entries are marked `source: static`. `reported` entries of the device's
file, which name a public source, keep their place where they compile as well. fp16 and bf16 take the same registers, and a causal
kernel takes no fewer than one without a mask, so that one compilation speaks for all four.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from .. import backends
from ..candidates import candidates
from ..database import Entry, When
from ..device import Device, catalogue
from ..problem import Problem
from ..tiling import Tiling
from .compiling import Compiled, Job, resources
from .keys import DTYPES, Key
from .space import cost, default, shortlist
from .writer import general_entries, tiling_entry

COUNT = 6  # candidates a kernel and head_dim
# A tiling is preferred to the default where the model gives it at most this share of the default's cost. On an H200 the model's
# first choice lost to the default more often than it won, even where it promised a third less (benchmarks/results/static_ranking.json):
# only what promises more than half is believed, which is mostly warps taken from blocks too small for them.
CLEARLY = 0.45


@dataclass(frozen=True)
class Ranked:
    """What was found for keys that differ in dtype, mask and bucket: their tiling (None where all candidates spill), what each
    candidate takes, what is reported of it, and (with the first head_dim of a kernel) the entries for calls that no key stands for."""

    keys: tuple[Key, ...]
    chosen: Tiling | None
    compiled: dict[Tiling, Compiled]
    published: Entry | None = None
    general: tuple[Entry, ...] = ()


def rank(
    keys: Iterable[Key], device: Device, executor: Executor, count: int = COUNT, deadline: float | None = None,
    tell: Callable[[str], None] = lambda text: None, compile_one: Callable[[Job], Compiled] = resources,
) -> list[Ranked]:  # fmt: skip
    """Choose tilings for all keys without their GPU; stops between two kernels once `deadline` (time.monotonic) has passed."""
    groups: dict[tuple, list[Key]] = {}
    for key in keys:
        size = DTYPES[key.dtype].itemsize
        groups.setdefault((key.backend, key.kernel, size, key.head_dim), []).append(key)
    compiling = lambda jobs: list(executor.map(compile_one, jobs))
    results, started = [], set()
    for same in groups.values():
        if deadline is not None and time.monotonic() >= deadline:
            tell(f"the budget is spent: {len(groups) - len(results)} of {len(groups)} kernels are left")
            break
        name = (same[0].backend, same[0].kernel)
        general = () if name in started else general_static(*name, device, compiling)
        started.add(name)
        one = replace(rank_group(same, device, compiling, count), general=general)
        results.append(one)
        dropped = sum(not sound(c, device) for c in one.compiled.values())
        chosen = one.chosen or "nothing that does not spill"
        tell(f"{'/'.join(name)} d{same[0].head_dim}: {len(one.compiled)} compiled, {dropped} dropped; {chosen}")
    return results


def rank_group(same: list[Key], device: Device, compiling: Callable[[list[Job]], list[Compiled]], count: int = COUNT) -> Ranked:
    """One tiling for keys that differ in dtype, mask and bucket, by the causal call of the middle bucket: the model cannot tell
    buckets apart. What cannot change the choice is not compiled: where the default is sound, all but what is clearly ahead of it."""
    key = replace(min(same), causal=True, seqlen=min((k.seqlen for k in same), key=lambda s: abs(s - 4096)))
    usual, published = default(key, device), reported(key, device)
    every = list(dict.fromkeys((usual, *shortlist(key, device, count))))
    compiled: dict[Tiling, Compiled] = {}

    def good(tilings: Iterable[Tiling]) -> set[Tiling]:
        missing = [t for t in dict.fromkeys(tilings) if t not in compiled]
        jobs = [Job(key.backend, key.kernel, key.problem(), t, device) for t in missing]
        compiled.update(zip(missing, compiling(jobs), strict=True))
        return {t for t, c in compiled.items() if sound(c, device)}

    if published and published.use in good([published.use]):
        return Ranked(tuple(same), published.use, compiled, published)
    right = good(t for t in every if t == usual or ahead(t, key, device))
    if usual not in right:
        right = good(every)
    return Ranked(tuple(same), choose(key, device, right), compiled)


def sound(compiled: Compiled, device: Device) -> bool:
    """Compiles, keeps everything in registers, and fits in shared memory."""
    return compiled.ok and not compiled.spilled and compiled.shared_memory_bytes <= device.shared_memory_bytes


def choose(key: Key, device: Device, good: Iterable[Tiling]) -> Tiling | None:
    """The default if it is among the good ones and none is clearly ahead of it; None where nothing is good."""
    problem, usual = key.problem(), default(key, device)
    ordered = sorted(good, key=lambda t: (cost(t, key.kernel, problem, device), str(t)))
    if not ordered:
        return None
    return usual if usual in ordered and not ahead(ordered[0], key, device) else ordered[0]


def ahead(tiling: Tiling, key: Key, device: Device) -> bool:
    """Whether the model puts it clearly before the default."""
    problem = key.problem()
    return cost(tiling, key.kernel, problem, device) <= CLEARLY * cost(default(key, device), key.kernel, problem, device)


def reported(key: Key, device: Device) -> Entry | None:
    """The entry with a public source for the head_dim of this key in the device's file."""
    record = catalogue().get(device.slug)
    kernel = record.kernels.get(key.backend, {}).get(key.kernel) if record else None
    found = (e for e in kernel.entries if e.proof.get("source") == "reported") if kernel else ()
    return next((e for e in found if e.when.head_dim_le == key.head_dim and key.dtype in (e.when.dtype or ())), None)


# ------------------------------------------------------------------ calls that no key stands for
def general_static(backend: str, kernel: str, device: Device, compiling: Callable[[list[Job]], list[Compiled]]) -> tuple[Entry, ...]:
    """The general entries of a kernel with the rule's tiling; where that spills, with the one of the rule's list that spills least.

    Where every one spills (float32 and 256 columns on RDNA 3), the proof says `spilled_bytes`.
    """
    runs: list[list[Entry]] = []  # neighbours that differ in head_dim alone: the widest speaks for all if it is sound
    for entry in general_entries(backend, kernel, device):
        if entry.when.dtype is None and entry.when != When():  # else it would come before wider entries of 16 bits
            entry = replace(entry, when=replace(entry.when, dtype=("fp32",)))
        if runs and _kind(runs[-1][-1]) == _kind(entry):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    job = lambda entry, tiling: Job(backend, kernel, stands_for(entry.when), tiling, device)
    widest = compiling([job(run[-1], run[-1].use) for run in runs])
    tried: dict[When, dict[Tiling, Compiled]] = {run[-1].when: {run[-1].use: c} for run, c in zip(runs, widest, strict=True)}
    unsound = [entry for run, c in zip(runs, widest, strict=True) if not sound(c, device) for entry in run]
    more = [(e.when, job(e, t)) for e in unsound for t in alternatives(job(e, e.use)) if t not in tried.get(e.when, {})]
    for (when, done), c in zip(more, compiling([j for _, j in more]), strict=True):
        tried.setdefault(when, {})[done.tiling] = c
    found = []
    for when in (e.when for run in runs for e in run if e.when in tried):
        usable = {t: c for t, c in tried[when].items() if c.ok and c.shared_memory_bytes <= device.shared_memory_bytes}
        if usable:
            best = min(usable, key=lambda t: usable[t].spilled)  # the first of those that spill nothing
            found.append(_entry(when, best, usable[best]))
    return tuple(found)


def alternatives(job: Job) -> list[Tiling]:
    """The job's own tiling, then those of the rule's list that its backend can cut."""
    listed, _ = candidates(job.backend, job.kernel, job.problem, job.device)
    unfit = getattr(backends.load(job.backend), "unfit", Tiling.unfit)
    return list(dict.fromkeys((job.tiling, *(t for t in listed if unfit(t, job.kernel, job.problem, job.device) is None))))


def stands_for(when: When) -> Problem:
    """The call that a general entry is compiled for: the widest that it matches, packed where it has neither mask nor bias."""
    masked = when.mask_or_bias is not False
    dtype = DTYPES[when.dtype[0]] if when.dtype else torch.float32
    d, rows = when.head_dim_le or 256, 0 if masked else 4096
    return Problem(dtype, 4, 16, 16, 1024, 1024, d, d, varlen=not masked, total_q=rows, total_k=rows, mask=masked)


# ------------------------------------------------------------------ entries
def entries(ranked: Iterable[Ranked]) -> dict[tuple[str, str], list[Entry]]:
    """By backend and kernel: one entry a head_dim and size of dtype, unless the next head_dim has the same, then the general ones."""
    found: dict[tuple[str, str], list[Entry]] = {}
    general: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for one in sorted(ranked, key=lambda r: (DTYPES[r.keys[0].dtype].itemsize, r.keys[0].head_dim)):
        name = (one.keys[0].backend, one.keys[0].kernel)
        same = found.setdefault(name, [])
        general[name] = general.get(name) or one.general
        if one.chosen:
            dtypes = tuple(sorted({k.dtype for k in one.keys}))
            largest = max(one.keys, key=lambda k: k.seqlen)
            when = replace(largest.when(), dtype=dtypes, causal=None)
            if same and _kind(same[-1]) == (dtypes, False, one.chosen) and "static" == same[-1].proof["source"] and not one.published:
                same.pop()
            same.append(_entry(when, one.chosen, one.compiled[one.chosen], one.published))
    return {name: [*same, *general[name]] for name, same in found.items() if same or general[name]}


def _kind(entry: Entry) -> tuple:
    return (entry.when.dtype, entry.when.mask_or_bias, entry.use)


def _entry(when: When, tiling: Tiling, used: Compiled, published: Entry | None = None) -> Entry:
    spilled = used.spilled if used.spilled > 0 else None
    taken = {"registers": used.registers, "shared_memory_bytes": used.shared_memory_bytes, "spilled_bytes": spilled}
    return tiling_entry(when, tiling, **{**(published.proof if published else {"source": "static"}), **taken})
