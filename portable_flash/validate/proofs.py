"""Which calls are timed, and what is known of their times: the proofs of the tuning database, where they hold here.

A proof holds for the tiling that a call gets here, on a whole device of that model, with the kernel's code and the Triton that
it was measured with. Where none holds, the reason is reported and the same calls are timed for the comparison between devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .. import backends
from ..backends import Plan
from ..database import DeviceRecord, Entry, KernelRecord
from ..device import Device
from ..problem import Problem
from ..tune.keys import DTYPES, Key
from ..tuning import _minor, _rungs, lookup, triton_version
from .report import LEVELS

_TEXT = re.compile(r"B(\d+) H(\d+)(?:/(\d+))? S(\d+) D(\d+) (full|causal) (\w+)")  # as session.entry_of writes it


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call that is worth timing; the recorded call nearest to it stands for it."""

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int


KINDS: dict[str, tuple[Kind, ...]] = {
    "quick": (Kind("bf16", 128, True, 4096),),
    "standard": (
        Kind("bf16", 128, True, 4096), Kind("bf16", 64, True, 8192), Kind("bf16", 128, True, 8192), Kind("bf16", 256, True, 8192),
        Kind("bf16", 128, False, 1024),
    ),
}  # fmt: skip
KINDS["soak"] = KINDS["standard"]
assert set(KINDS) == set(LEVELS)
SMALL = Kind("fp32", 32, True, 64)  # where many runs are wanted
CPU = Kind("fp32", 64, True, 256)


@dataclass(frozen=True, slots=True)
class Record:
    """How long a call took once. origin: where that is written."""

    median_us: float
    origin: str
    power_cap_w: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """A call to time. kernel: one of the tuned kernels, "forward" or "backward". reason: why there is no record."""

    kernel: str
    problem: Problem
    plan: Plan
    record: Record | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """The part of a check's id that says what was timed."""
        p = self.problem
        heads = f"h{p.heads_q}" if p.heads_q == p.heads_k else f"h{p.heads_q}-{p.heads_k}"
        mask = "causal" if p.causal else "full"
        return f"{self.kernel}/b{p.batch}-{heads}-s{p.seqlen_q}-d{p.head_dim}-{mask}-{p.dtype_name}"


def parse_problem(text: str) -> Problem | None:
    """The call that a proof names, like "B8 H16 S2048 D128 causal bf16"; None for another form."""
    found = _TEXT.fullmatch(text)
    if found is None or found[7] not in DTYPES:
        return None
    batch, heads_q, heads_k, seqlen, head_dim = (int(n) for n in (found[1], found[2], found[3] or found[2], found[4], found[5]))
    if 0 in (batch, heads_q, heads_k, seqlen, head_dim) or heads_q % heads_k:
        return None
    right = 0 if found[6] == "causal" else None
    return Problem(DTYPES[found[7]], batch, heads_q, heads_k, seqlen, seqlen, head_dim, head_dim, window_right=right)


def timings(device: Device, level: str, plan_of, small: bool = False) -> list[Timing]:
    """The calls of a level with their records. plan_of(problem) -> Plan, as a call gets it; raises NoBackendError."""
    kinds = (SMALL,) if small else (CPU,) if device.vendor == "cpu" else KINDS[level]
    found: dict[str, Timing] = {}
    for kind in kinds:
        stand_in = Key("triton", "forward", kind.dtype, kind.head_dim, kind.causal, kind.seqlen).problem()
        if device.vendor == "cpu" or small:
            stand_in = Problem(DTYPES[kind.dtype], 1, 4, 4, kind.seqlen, kind.seqlen, kind.head_dim, kind.head_dim, window_right=0)
        plan = plan_of(stand_in)
        for kernel in tuple(plan.kernels) or ("forward", "backward"):
            known, reason = recorded(kernel, plan.backend, device) if plan.kernels else ([], "the tuning database is for GPUs")
            if known:
                problem, record = min(known, key=lambda pair: distance(kind, pair[0]))
                one = Timing(kernel, problem, plan_of(problem), record)
            else:
                one = Timing(kernel, stand_in, plan, None, reason)
            found.setdefault(one.name, one)
    return list(found.values())


def distance(kind: Kind, problem: Problem) -> float:
    """How unlike a recorded call is to a kind: dtype and mask matter before lengths."""
    sizes = abs(math.log2(problem.head_dim / kind.head_dim)) * 4 + abs(math.log2(problem.seqlen_q / kind.seqlen))
    return sizes + 8 * (problem.dtype_name != kind.dtype) + 6 * (problem.causal != kind.causal)


# ------------------------------------------------------------------ the database
def recorded(kernel: str, backend: str, device: Device) -> tuple[list[tuple[Problem, Record]], str]:
    """Calls of this kernel whose recorded time holds on this device, and if there is none, why."""
    reasons: list[str] = []
    found: dict[Problem, Record] = {}
    for record, source, own in _rungs(device):
        if not own or (of_kernel := record.kernels.get(backend, {}).get(kernel)) is None:
            continue
        if why := _not_here(record, of_kernel, backend, kernel, device):
            reasons.append(f"{source}: {why}")
            continue
        for entry, problem, median in _proofs(of_kernel):
            used = lookup(kernel, problem, device, backends.load(backend).space(kernel), backend)
            if used.tiling == entry.use and used.source.startswith(source):
                cap = record.measured_with.get("power_cap_w")
                found.setdefault(problem, Record(median, source, _number(cap)))
        if not found:
            reasons.append(f"{source}: no measured time of a tiling that is in use here")
    return list(found.items()), "" if found else "; ".join(reasons) or f"the tuning database has no {backend} {kernel} of this device"


def _not_here(record: DeviceRecord, of_kernel: KernelRecord, backend: str, kernel: str, device: Device) -> str:
    current = backends.load(backend).space(kernel)
    if of_kernel.space not in (None, current):
        return f"its times are of an older kernel (space {of_kernel.space}, now {current})"
    if record.compute_units != device.compute_units:
        return f"its times are of {record.compute_units} compute units, this device has {device.compute_units}"
    measured, installed = record.measured_with.get("triton"), triton_version()
    if backend == "triton" and isinstance(measured, str) and installed is not None and _minor(measured) != _minor(installed):
        return f"its times are of triton {_minor(measured)}, installed is {_minor(installed)}"
    return ""


def _proofs(of_kernel: KernelRecord) -> Iterator[tuple[Entry, Problem, float]]:
    for entry in of_kernel.entries:
        text, median = entry.proof.get("problem"), _number(entry.proof.get("median_us"))
        problem = parse_problem(text) if entry.proof.get("source") == "measured" and isinstance(text, str) else None
        if problem is not None and median is not None and median > 0:
            yield entry, problem, median


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
