"""Which tilings are tried: all that the rules of `Tiling` and the device's limits allow, best first by a model of their cost.

The model only orders; what is measured decides. The default (the analytic rule's tiling) is always tried.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .. import backends
from ..candidates import candidates
from ..database import Blocked
from ..device import Device, catalogue
from ..problem import Problem
from ..tiling import Tiling, padded_head_dim
from ..tuning import rule
from .keys import Key

SHORTLIST = 16  # candidates of a search, the default among them: one of nearly every kind
JOINING = 10  # neighbours of the fastest of them, for all buckets together: all that are left of two kinds
SHARE = 0.3  # of a small space that a search starts with at most
JOINING_SHARE = 1 / 6  # of it that joins at most
REGISTER_SHARE = 0.85  # of a thread's registers that accumulators may take and still leave room for operands


# ------------------------------------------------------------------ the space
def default(key: Key, device: Device, blocked: tuple[Blocked, ...] = ()) -> Tiling:
    """What an untuned GPU of this kind would run."""
    return rule(key.kernel, key.problem(), device, blocked, key.backend)


@functools.lru_cache(maxsize=1024)
def space(key: Key, device: Device) -> tuple[Tiling, ...]:
    """Every tiling that the rules and limits allow, best first by `cost`, simpler ones first among equals."""
    problem = key.problem()
    allowed = {t for t in _combinations(key, device) if allows(key, t, device)}
    return tuple(sorted(allowed, key=lambda t: (cost(t, key.kernel, problem, device), simplicity(t))))


def shortlist(
    key: Key, device: Device, count: int = SHORTLIST, prior: Iterable[Tiling] = (), blocked: tuple[Blocked, ...] = ()
) -> tuple[Tiling, ...]:
    """The candidates of a search: the default first, then `prior` (what won for a key like this one), then what the
    database and the rule's lists know, then the space's best; those that differ little from one already taken come last."""
    listed, _ = candidates(key.backend, key.kernel, key.problem(), device)
    known = [t for t in (*prior, *known_tilings(key, device), *listed) if allows(key, t, device)]
    chosen: dict[Tiling, None] = {default(key, device, blocked): None}
    later = []
    for tiling in itertools.chain(known, _varied(space(key, device), later), later):
        if len(chosen) >= count:
            break
        if not any(b(tiling) for b in blocked):
            chosen.setdefault(tiling)
    return tuple(chosen)


def _varied(ordered: Iterable[Tiling], later: list[Tiling]) -> Iterator[Tiling]:
    """One tiling of each kind as they come, with the others put into `later`."""
    seen: set[tuple] = set()
    for tiling in ordered:
        if kind(tiling) in seen:
            later.append(tiling)
        else:
            seen.add(kind(tiling))
            yield tiling


def kind(tiling: Tiling) -> tuple:
    """What decides most of a tiling's speed."""
    return (tiling.block_m, tiling.block_n, tiling.num_warps, tiling.split_dkv)


def neighbours(key: Key, device: Device, leaders: Iterable[Tiling], known: Iterable[Tiling], count: int = JOINING) -> tuple[Tiling, ...]:
    """Tilings of the space that are near a leader and not known, at most `count`: those of the same blocks and warps (the shortlist has
    few of each such kind), then those with a block or the warps or both doubled or halved. The leaders' in turn, by the model."""
    everything, taken, problem = space(key, device), set(known), key.problem()
    count = min(count, max(2, round(len(everything) * JOINING_SHARE)))
    queues = []
    for leader in leaders:
        distances = {t: d for t in everything if (d := _distance(t, leader)) <= 1}
        queues.append(sorted(distances, key=lambda t, d=distances: (d[t], cost(t, key.kernel, problem, device))))
    near = (t for together in itertools.zip_longest(*queues) for t in together if t is not None and t not in taken)
    return tuple(itertools.islice(dict.fromkeys(near), count))


def joining(
    leaders: Mapping[Key, Iterable[Tiling]], candidates: Mapping[Key, Iterable[Tiling]], device: Device, count: int = JOINING,
    blocked: Iterable[Blocked] = (),
) -> dict[Key, tuple[Tiling, ...]]:  # fmt: skip
    """By key, what joins the searches of one group, whose buckets share compiled code: at most `count` neighbours of the leaders of all
    buckets, in turn, one leader a kind; those that lead in more buckets, and there come first, go first. leaders: by key, the
    fastest first; nothing joins a key that has none."""
    votes: collections.Counter[Tiling] = collections.Counter()
    for several in leaders.values():
        for place, tiling in enumerate(several):
            votes[tiling] += 4 if place == 0 else 1
    by_kind: dict[tuple, Tiling] = {}
    for tiling, _ in votes.most_common():
        by_kind.setdefault(kind(tiling), tiling)
    if not by_kind:
        return dict.fromkeys(leaders, ())
    known = set.intersection(*(set(candidates[k]) for k in leaders))
    found = neighbours(middle(leaders), device, by_kind.values(), known, count)
    right = [t for t in found if not any(b(t) for b in blocked)]
    return {k: tuple(t for t in right if several and allows(k, t, device)) for k, several in leaders.items()}


def middle(keys: Iterable[Key]) -> Key:
    """The bucket that stands for a group."""
    return min(keys, key=lambda k: abs(k.seqlen - 4096))


def _distance(a: Tiling, b: Tiling) -> int:
    """0: of a kind. 1: one block or the warps or both differ by a factor of two, and nothing else. 2: farther."""
    if kind(a) == kind(b):
        return 0
    block_m, block_n, warps = (abs(getattr(a, n).bit_length() - getattr(b, n).bit_length()) for n in ("block_m", "block_n", "num_warps"))
    same = a.replace(block_m=b.block_m, block_n=b.block_n, num_warps=b.num_warps) == b
    return 1 if same and block_m + block_n <= 1 and warps <= 1 else 2


def known_tilings(key: Key, device: Device) -> list[Tiling]:
    """What files of GPUs of the same arch use for a call like this: the device's own file first."""
    kin = sorted((r for r in catalogue().values() if r.arch == device.arch), key=lambda r: r.slug != device.slug)
    found: dict[Tiling, None] = {}
    for record in kin:
        kernel = record.kernels.get(key.backend, {}).get(key.kernel)
        for entry in kernel.entries if kernel else ():
            if entry.when(key.problem()):
                found.setdefault(entry.use)
                break  # the first match is the one that would be used
    return list(found)


def allows(key: Key, tiling: Tiling, device: Device) -> bool:
    """Fits by the limits, leaves registers to operands, and is a tiling that the backend cuts as it stands."""
    problem, module = key.problem(), backends.load(key.backend)
    if getattr(module, "unfit", Tiling.unfit)(tiling, key.kernel, problem, device) is not None:
        return False
    if tiling.block_m > max(16, problem.seqlen_q) or tiling.block_n > max(16, problem.seqlen_k):
        return False
    if hasattr(module, "settle"):
        own = module.registers(tiling, key.kernel, problem, device)
        return module.settle(tiling, key.kernel, problem, device) == tiling and own <= device.registers_per_thread
    return tiling.accumulator_registers(key.kernel, problem, device.wave_size) <= REGISTER_SHARE * device.registers_per_thread


def _combinations(key: Key, device: Device) -> Iterator[Tiling]:
    stays, streams = ("block_n", "block_m") if key.kernel == "backward_dkv" else ("block_m", "block_n")
    wide = padded_head_dim(key.head_dim) > 64
    splits = (False, True) if key.kernel == "backward_dkv" and wide else (False,)
    vendor = _vendor_options(key.backend, device)
    for stay, stream, warps, split in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (2, 4, 8), splits):
        if warps * 16 > max(stay, stream) * (2 if wide else 1):
            continue  # a warp without 16 rows multiplies what others multiply too
        if device.vendor == "nvidia" and (warps < 4 or max(stay, stream) < 32):
            continue
        if device.has_wgmma and (stay < 64 or stream < 32):
            continue  # a warpgroup multiplies 64 rows at once
        for options in vendor:
            yield Tiling(**{stays: stay, streams: stream}, num_warps=warps, split_dkv=split, **options)


def _vendor_options(backend: str, device: Device) -> list[dict]:
    if device.vendor == "nvidia":
        moves = (False, True) if device.has_tma else (False,)
        return [{"num_stages": s, "tma": tma} for s in (2, 3, 1) for tma in moves]
    if backend == "hip":
        sides = (0, 32) if device.is_cdna else (0,)
        return [{"num_stages": s, "matrix_instr_nonkdim": side} for s in (1, 2) for side in sides]
    sides = (0, 16) if device.is_cdna else (0,)
    occupancy = (0, 2) if device.is_cdna else (0,)
    return [{"num_stages": s, "waves_per_eu": w, "matrix_instr_nonkdim": side} for s in (1, 2) for w in occupancy for side in sides]


def simplicity(tiling: Tiling) -> tuple:
    """Orders tilings from simple to elaborate: ties in speed go to the simpler."""
    hints = (tiling.maxnreg is not None, tiling.waves_per_eu, tiling.matrix_instr_nonkdim)
    return (tiling.split_dkv, tiling.tma, hints, tiling.num_stages, tiling.num_warps, tiling.block_m * tiling.block_n, tiling.block_m)


# ------------------------------------------------------------------ the model
@dataclass(frozen=True, slots=True)
class _Unit:
    """What one SM or CU does in a clock, to a factor of two: the model orders tilings of one device, it predicts no time."""

    flops: float  # by its matrix unit, 16-bit operands
    exps: float
    cache_bytes: float  # from the last cache
    registers: int  # 32-bit, of all threads
    latency: float  # clocks of a step that nothing of the same warp hides: barriers, reductions, the matrix unit's pipeline


def _unit(device: Device) -> _Unit:
    if device.vendor == "nvidia":
        data_centre = device.arch in ("sm_90", "sm_100", "sm_103")
        return _Unit(4096.0 if data_centre else 2048.0 if device.arch == "sm_80" else 1024.0, 16.0, 64.0, 65536, 300.0)
    if device.is_cdna:
        return _Unit(2048.0 if device.arch in ("gfx942", "gfx950") else 1024.0, 16.0, 64.0, 131072, 400.0)
    return _Unit(512.0, 16.0, 32.0, 49152, 300.0)


_PRODUCTS = {"forward": 2, "backward_dkv": 4, "backward_dq": 3}  # of a step, each 2 * block_m * block_n * head_dim FLOPs


def cost(tiling: Tiling, kernel: str, problem: Problem, device: Device) -> float:
    """Clocks of one unit for the whole problem, by the model: matrix products, exponentials, what streams from the cache and
    what is left of the latency of a step after the programs that share a unit have hidden it; HBM traffic by the IO analysis."""
    unit = _unit(device)
    size, width = problem.dtype.itemsize, padded_head_dim(problem.head_dim)
    m, n = tiling.block_m, tiling.block_n
    stay, stream = (n, m) if kernel == "backward_dkv" else (m, n)
    rows = problem.seqlen_k if kernel == "backward_dkv" else problem.seqlen_q
    streamed = problem.seqlen_q if kernel == "backward_dkv" else problem.seqlen_k
    heads = problem.batch * (problem.heads_k if kernel == "backward_dkv" else problem.heads_q)
    programs, steps = heads * math.ceil(rows / stay), math.ceil(streamed / stream)
    if problem.causal:  # half of the square, and the blocks that the diagonal cuts
        steps = steps / 2 + max(1.0, stay / stream) / 2
    products = _PRODUCTS[kernel] + (1 if tiling.split_dkv else 0)  # S once more
    passes = 2 if tiling.split_dkv else 1
    matrix = 2.0 * m * n * width * products / unit.flops * size / 2
    other = passes * m * n / unit.exps * (1 if kernel == "forward" else 1.25)
    moved = passes * stream * 2 * width * size / unit.cache_bytes

    registers = min(device.registers_per_thread, tiling.accumulator_registers(kernel, problem, device.wave_size) + 56)
    threads = tiling.num_warps * device.wave_size
    by_registers = unit.registers // (threads * registers)
    by_memory = max(1, device.shared_memory_bytes) // max(1, tiling.shared_memory_bytes(kernel, problem) + 1024)
    beside = max(1, min(by_registers, by_memory, 8))
    teams = max(1.0, tiling.num_warps / 4)  # groups of warps that wait on their own
    exposed = moved if tiling.num_stages == 1 and device.vendor == "nvidia" else moved / 8  # AMD's kernels prefetch into registers
    chain = (matrix + other) / teams + passes * unit.latency + exposed
    pressure = tiling.accumulator_registers(kernel, problem, device.wave_size) / device.registers_per_thread
    spilling = 1.0 + max(0.0, pressure - 0.7)  # near the limit compilers spill or serialise
    moving = 1.0 if tiling.tma or not device.has_tma else 1.08  # addresses take registers and instructions
    crowded = max(1.0, 16 * tiling.num_warps / stay)  # warps that share rows add up across warps and read operands twice
    step = max(matrix, other, moved, chain / beside) * spilling * moving * crowded
    waves = math.ceil(programs / (device.compute_units * beside)) * beside if not problem.causal else programs / device.compute_units
    direction = "forward" if kernel == "forward" else "backward"
    traffic = tiling.hbm_bytes(direction, problem, device) / device.compute_units / (unit.cache_bytes / 4)
    return max(waves * (steps * step + 2 * unit.latency), traffic)
