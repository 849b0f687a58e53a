"""The fastest candidate of a key with few measurements: a gate, then successive halving, then a final beside the default.

Successive halving (Jamieson and Talwalkar 2016) gives every candidate a little time, keeps the faster part, and gives that part
more. The default tiling is kept to the end whatever its time, so that both figures of an entry are of the same rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ..tiling import Tiling
from .journal import Journal
from .keys import Key
from .measure import Check
from .space import simplicity
from ..worker import WorkerError


@dataclass(frozen=True, slots=True)
class Rung:
    """A round of timing: samples a candidate, seconds of device time a sample, and the share of candidates that go on."""

    rounds: int
    budget_s: float
    keep: float


@dataclass(frozen=True, slots=True)
class Settings:
    """How a search measures."""

    rungs: tuple[Rung, ...] = (Rung(2, 0.002, 0.4), Rung(4, 0.004, 0.5))
    final: Rung = Rung(12, 0.006, 1.0)
    finalists: int = 2  # beside the default
    tie: float = 0.01  # medians closer than this are equal: the default, then the simpler tiling, is taken
    accuracy_multiple: float = 2.0  # of the most accurate candidate's error ratio; never held below 1, PyTorch's own error
    check_timeout_s: float = 60.0  # wall time of one candidate's gate, its compilation included where it was not compiled before
    time_timeout_s: float = 20.0  # wall time of one candidate in one rung
    key_limit_s: float = 10.0  # wall time of a key; past it the rungs after the first are skipped


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds a call."""

    tiling: Tiling
    median_us: float
    p20_us: float
    p80_us: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """kind: "wrong", "error", "fault", "hang" or "inaccurate"."""

    tiling: Tiling
    kind: str
    reason: str


@dataclass
class Found:
    """What a search says of a key: the finalists, best first by `better`; every rejected candidate."""

    key: Key
    ranking: list[Timed] = field(default_factory=list)
    default: Timed | None = None
    rejected: list[Rejected] = field(default_factory=list)
    checks: dict[Tiling, Check] = field(default_factory=dict)
    tried: int = 0
    gpu_s: float = 0.0  # wall time of the requests to the measuring process

    @property
    def best(self) -> Timed | None:
        return self.ranking[0] if self.ranking else None


class Asked(Protocol):
    """Whoever measures: a worker here or on another machine."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Raises WorkerError."""


class Stopped(Exception):
    """The budget is spent or the user interrupted: what was measured is in the journal."""


class Recorded:
    """Asks a worker what the journal does not know yet, and writes every answer down. `stop` is asked before each request."""

    def __init__(self, worker: Asked, journal: Journal, settings: Settings, stop: Callable[[], bool] = lambda: False):
        self.worker, self.journal, self.settings, self.stop = worker, journal, settings, stop
        self.gpu_s = 0.0
        self.asked = 0

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if self.stop():
            raise Stopped
        start = time.monotonic()
        self.asked += 1
        try:
            return self.worker.call(method, *arguments, timeout_s=timeout_s)
        finally:
            self.gpu_s += time.monotonic() - start

    def judge(self, method: str, key: Key, tiling: Tiling) -> tuple[Check, str]:
        """The verdict of "check" or "probe" and the kind of failure. What ends the worker is a verdict as well."""
        known = self.journal.get(method, key, tiling)
        if known is None:
            try:
                found = self._call(method, key, tiling, timeout_s=self.settings.check_timeout_s)
                known = [asdict(found), "" if found.ok else "wrong"]
            except WorkerError as error:
                known = [asdict(Check(False, error.reason)), error.kind]
            known[0]["error_ratio"] = _finite(known[0]["error_ratio"])
            self.journal.put(method, key, known, tiling)
        return Check(**known[0]), known[1]

    def time(self, key: Key, tilings: Iterable[Tiling], rung: Rung, level: int) -> tuple[dict[Tiling, list[float]], list[Rejected]]:
        """Samples in microseconds by tiling. Candidates are timed side by side; if that ends the worker, one by one."""
        tilings = list(tilings)
        samples = {t: known for t in tilings if (known := self.journal.get("time", key, t, level)) is not None}
        rest, rejected = [t for t in tilings if t not in samples], []
        batches = [rest] if rest else []
        while batches:
            batch = batches.pop(0)
            try:
                timeout = self.settings.time_timeout_s * len(batch) + 10
                found = self._call("time", key, tuple(batch), rung.rounds, rung.budget_s, timeout_s=timeout)
            except WorkerError as error:
                if len(batch) > 1:
                    batches += [[t] for t in batch]
                    continue
                rejected.append(Rejected(batch[0], error.kind, error.reason))
                self.journal.put("check", key, [asdict(Check(False, error.reason)), error.kind], batch[0])
                continue
            for tiling, values in zip(batch, found, strict=True):
                samples[tiling] = [round(v, 3) for v in values]
                self.journal.put("time", key, samples[tiling], tiling, level)
        return samples, rejected


def search(key: Key, candidates: Iterable[Tiling], ask: Recorded, settings: Settings, exhaustive: bool = False) -> Found:
    """Gate, then halve, then the final; the default is the first candidate. exhaustive: every candidate is in the final.

    Raises Stopped.
    """
    candidates = list(dict.fromkeys(candidates))
    default, found, before, start = candidates[0], Found(key, tried=len(candidates)), ask.gpu_s, time.monotonic()
    alive = _gate(key, candidates, ask, settings, found)
    level = 0
    for rung in () if exhaustive else settings.rungs:
        late = level > 0 and time.monotonic() - start > settings.key_limit_s
        if len(alive) <= settings.finalists + (default in alive) or late:
            break
        samples, rejected = ask.time(key, alive, rung, level)
        found.rejected += rejected
        ordered = sorted(samples, key=lambda t: statistics.median(samples[t]))
        count = max(settings.finalists + 1, math.ceil(rung.keep * len(ordered)))
        alive = [t for t in ordered if t in ordered[:count] or t == default]
        level += 1
    if not exhaustive:
        alive = [t for t in alive if t != default][: settings.finalists] + [t for t in alive if t == default]
    samples, rejected = ask.time(key, alive, settings.final, 100)  # its own level: a final is no continuation of a rung
    found.rejected += rejected
    timed = [_timed(t, values) for t, values in samples.items()]
    found.ranking = better(timed, default, settings.tie)
    found.default = next((t for t in timed if t.tiling == default), None)
    found.gpu_s = ask.gpu_s - before
    return found


def _gate(key: Key, candidates: list[Tiling], ask: Recorded, settings: Settings, found: Found) -> list[Tiling]:
    """Those that are right, and about as accurate as the most accurate one."""
    for tiling in candidates:
        check, kind = ask.judge("check", key, tiling)
        if check.ok:
            found.checks[tiling] = check
        else:
            found.rejected.append(Rejected(tiling, kind, check.reason))
    ratios = [c.error_ratio for c in found.checks.values() if c.error_ratio is not None]
    limit = max(1.0, settings.accuracy_multiple * min(ratios, default=1.0))
    for tiling, check in list(found.checks.items()):
        if check.error_ratio is not None and check.error_ratio > limit:
            del found.checks[tiling]
            why = f"its error is {check.error_ratio:.3g} of PyTorch's, the limit here is {limit:.3g}"
            found.rejected.append(Rejected(tiling, "inaccurate", why))
    return list(found.checks)


def better(timed: list[Timed], default: Tiling, tie: float) -> list[Timed]:
    """Best first. Those within `tie` of the fastest are equal: the default before others, the simpler before the elaborate."""
    if not timed:
        return []
    limit = min(t.median_us for t in timed) * (1 + tie)
    equal = sorted((t for t in timed if t.median_us <= limit), key=lambda t: (t.tiling != default, simplicity(t.tiling)))
    return equal + sorted((t for t in timed if t.median_us > limit), key=lambda t: t.median_us)


def probed(found: Found, ask: Recorded) -> Timed | None:
    """The best of the ranking that is right at the odd shape too; those that are not are rejected. Raises Stopped."""
    for timed in list(found.ranking):
        check, kind = ask.judge("probe", found.key, timed.tiling)
        if check.ok:
            return timed
        found.ranking.remove(timed)
        found.rejected.append(Rejected(timed.tiling, kind, f"at an odd shape: {check.reason}"))
    return None


def _timed(tiling: Tiling, samples: list[float]) -> Timed:
    ordered = sorted(samples)

    def percentile(percent: float) -> float:
        position = (len(ordered) - 1) * percent / 100
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    return Timed(tiling, *(round(percentile(p), 2) for p in (50, 20, 80)))


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
