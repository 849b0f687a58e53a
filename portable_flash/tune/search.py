"""The fastest right candidate of a key with few measurements: successive halving, a gate, then a final beside the default.

Successive halving (Jamieson and Talwalkar 2016) gives every candidate a little time, keeps the faster part, and gives that part
more. After the first round the neighbours of the fastest join: what the model that chose the candidates did not foresee is mostly
one step from what it did. Whether a candidate is right costs more to find out than how fast it is: the gate takes candidates in
order of speed, until enough for the final are right. The default tiling is checked first and kept to the end, so that both figures
of an entry are of the same rounds.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ..tiling import Tiling
from ..worker import CONTINUES, WorkerError
from .journal import Journal, Record
from .keys import Key
from .measure import Check
from .space import kind, simplicity


FINAL = 100  # the final's level: it is no continuation of a rung
LEVELS = (0, 1, FINAL)

@dataclass(frozen=True, slots=True)
class Rung:
    """A round of timing: samples a candidate, and seconds of device time a sample."""

    rounds: int
    budget_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """How a search measures."""

    first: Rung = Rung(2, 0.002)
    keep: float = 0.4  # of the candidates, after the first round
    second: Rung = Rung(3, 0.002)  # with the neighbours
    final: Rung = Rung(12, 0.006)
    finalists: int = 2  # beside the default
    far: float = 0.1  # a finalist that was so much slower than the first one is left out: no noise of a round is as large
    leaders: int = 2  # whose neighbours join
    tie: float = 0.01  # medians closer than this are equal: the default, then the simpler tiling, is taken
    accuracy_multiple: float = 2.0  # of the smallest error ratio of those checked; never held below 1, PyTorch's own error
    check_timeout_s: float = 60.0  # wall time of one candidate's launch or check, compilation included where it was not compiled before
    prepare_timeout_s: float = 120.0  # wall time of making a key's inputs and oracle
    time_timeout_s: float = 5.0  # wall time of one candidate in one round, half a minute for all of them aside: each has launched before
    key_limit_s: float = 10.0  # wall time of a key, without what is prepared once; past it nothing but gate and final follow


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
    """What a search says of a key: right finalists, best first by `better`; the rejected. `finals`: all that the final timed, which
    in an exhaustive search are candidates that nobody checked as well."""

    key: Key
    ranking: list[Timed] = field(default_factory=list)
    default: Timed | None = None
    rejected: list[Rejected] = field(default_factory=list)
    checks: dict[Tiling, Check] = field(default_factory=dict)
    finals: dict[Tiling, Timed] = field(default_factory=dict)
    tried: int = 0
    gpu_s: float = 0.0  # wall time of the requests to the measuring process, its start and the preparation of data left out

    @property
    def best(self) -> Timed | None:
        return self.ranking[0] if self.ranking else None


class Asked(Protocol):
    """Whoever measures: a worker here or on another machine."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Raises WorkerError, and NodeLost."""


class NodeLost(Exception):
    """Whoever measures is gone for good, through no fault of the candidate: its keys are for others."""


class Stopped(Exception):
    """The budget is spent or the user interrupted: what was measured is in the journal."""


class Recorded:
    """Asks a worker what the journal does not know yet, and writes every answer down. `stop` is asked before each request."""

    def __init__(self, worker: Asked, journal: Journal, settings: Settings, stop: Callable[[], bool] = lambda: False):
        self.worker, self.journal, self.settings, self.stop = worker, journal, settings, stop
        self.gpu_s = 0.0  # of launches, checks, probes and timings
        self.prepare_s = 0.0  # of what every candidate of a key shares: a worker's start, inputs, oracle
        self.prepared: Key | None = None

    def _call(self, method: str, key: Key, *arguments: Any, timeout_s: float) -> Any:
        if self.stop():
            raise Stopped
        start = time.monotonic()
        try:
            if self.prepared != key:
                self.worker.call("prepare", key, timeout_s=self.settings.prepare_timeout_s)
                self.prepared = key
                self.prepare_s += time.monotonic() - start
                start = time.monotonic()
            return self.worker.call(method, key, *arguments, timeout_s=timeout_s)
        except WorkerError as error:
            if error.kind != CONTINUES:
                self.prepared = None  # the next process has nothing
            raise
        finally:
            self.gpu_s += time.monotonic() - start

    def judge(self, method: str, key: Key, tiling: Tiling) -> tuple[Check, str]:
        """The verdict of "launch", "check" or "probe" and the kind of failure. What ends the worker is a verdict as well.
        A launch that went well is not written down: it is no measurement, and what was timed was launched."""
        known = self.journal.get(method, key, tiling)
        if known is None:
            try:
                found = self._call(method, key, tiling, timeout_s=self.settings.check_timeout_s)
                known = [asdict(found), "" if found.ok else "wrong"]
            except WorkerError as error:
                known = [asdict(Check(False, error.reason)), error.kind]
            known[0]["error_ratio"] = _finite(known[0]["error_ratio"])
            if method != "launch" or known[1]:
                self.journal.put(Record(method, key, tiling, known))
        return Check(**known[0]), known[1]

    def time(self, key: Key, tilings: Iterable[Tiling], rung: Rung, level: int) -> tuple[dict[Tiling, list[float]], list[Rejected]]:
        """Samples in microseconds by tiling, which must launch. Candidates are timed side by side; if that ends the worker, one by
        one. Known are the times of all or none: what was timed in another company, at other clocks, is no match."""
        tilings, rejected = list(tilings), []
        samples = {t: known for t in tilings if (known := self.journal.get("time", key, t, level)) is not None}
        for tiling in [t for t in tilings if t not in samples and self.journal.get("launch", key, t) is not None]:
            tilings.remove(tiling)  # it ended the worker in this round, in a run before this one
            check, kind = self.judge("launch", key, tiling)
            rejected.append(Rejected(tiling, kind, check.reason))
        if len(samples) == len(tilings):
            return samples, rejected
        batches, samples = [tilings], {}
        while batches:
            batch = batches.pop(0)
            try:
                timeout = self.settings.time_timeout_s * len(batch) + 30
                found = self._call("time", key, tuple(batch), rung.rounds, rung.budget_s, timeout_s=timeout)
            except WorkerError as error:
                if len(batch) > 1:
                    batches += [[t] for t in batch]
                    continue
                rejected.append(Rejected(batch[0], error.kind, error.reason))
                self.journal.put(Record("launch", key, batch[0], [asdict(Check(False, error.reason)), error.kind]))
                continue
            new = {tiling: [round(v, 3) for v in values] for tiling, values in zip(batch, found, strict=True)}
            self.journal.put(*(Record("time", key, tiling, values, level) for tiling, values in new.items()))
            samples |= new
        return samples, rejected


class Search:
    """The search of one key, in two halves, so that between them whoever runs it can compile what joins. Raises Stopped."""

    def __init__(self, key: Key, candidates: Iterable[Tiling], ask: Recorded, settings: Settings, exhaustive: bool = False):
        """candidates: the default first. exhaustive: every candidate is in the final."""
        self.key, self.candidates, self.ask, self.settings = key, list(dict.fromkeys(candidates)), ask, settings
        self.default, self.exhaustive = self.candidates[0], exhaustive
        self.found = Found(key, tried=len(self.candidates))
        self.alive: list[Tiling] = []  # of the next round, best first
        self._behind: list[Tiling] = []  # what the first round left out, best first: for the gate, if too few of the others are right
        self._spent_s = 0.0  # wall time

    def first(self) -> list[Tiling]:
        """First round; returns the fastest right ones of different kinds, whose neighbours are worth trying."""
        with self._timed():
            self.alive = self._launched(self.candidates)
            if self.exhaustive or len(self.alive) < 2:
                return []
            ordered = list(self._round(self.alive, self.settings.first, 0))
            count = max(self.settings.finalists + 1, math.ceil(self.settings.keep * len(ordered)))
            self.alive = [t for t in ordered if t in ordered[:count] or t == self.default]
            self._behind = [t for t in ordered if t not in self.alive]
            self._judged(self.default)
            leaders: dict[tuple, Tiling] = {}
            for tiling in ordered:
                if len(leaders) < self.settings.leaders and kind(tiling) not in leaders and self._judged(tiling):
                    leaders[kind(tiling)] = tiling
            return list(leaders.values())

    def finish(self, joining: Iterable[Tiling] = ()) -> Found:
        """The rounds that are left, with `joining` among the candidates; what is found."""
        with self._timed():
            if self.exhaustive:
                self.found.finals = self._final(self.alive)
                self._gate(self.found.finals, self.settings.finalists)
            else:
                self.found.finals = self._final(self._finalists(joining))
            right = [t for t in self.found.finals.values() if self._right(t.tiling)]
            self.found.ranking = better(right, self.default, self.settings.tie)
            self.found.default = next((t for t in right if t.tiling == self.default), None)
            limit = self._limit()
            for tiling in [t for t, check in self.found.checks.items() if (check.error_ratio or 0.0) > limit]:
                why = f"its error is {self.found.checks.pop(tiling).error_ratio:.3g} of PyTorch's, the limit here is {limit:.3g}"
                self.found.rejected.append(Rejected(tiling, "inaccurate", why))
        return self.found

    @contextmanager
    def _timed(self) -> Iterator[None]:
        gpu_s, prepare_s, start = self.ask.gpu_s, self.ask.prepare_s, time.monotonic()
        try:
            yield
        finally:
            self.found.gpu_s += self.ask.gpu_s - gpu_s
            self._spent_s += time.monotonic() - start - (self.ask.prepare_s - prepare_s)

    # -------------------------------------------------------------- rounds
    def _launched(self, tilings: Iterable[Tiling]) -> list[Tiling]:
        """Those that launch, each asked on its own, so that what faults or hangs does it alone."""
        return [t for t in tilings if was_timed(self.ask.journal, self.key, t) or self._passes("launch", t)]

    def _round(self, tilings: list[Tiling], rung: Rung, level: int) -> dict[Tiling, list[float]]:
        """Samples in microseconds, the fastest first."""
        samples, rejected = self.ask.time(self.key, tilings, rung, level)
        self.found.rejected += rejected
        return {t: samples[t] for t in sorted(samples, key=lambda t: statistics.median(samples[t]))}

    def _finalists(self, joining: Iterable[Tiling]) -> list[Tiling]:
        """After the second round, if there is time for one: the fastest that are right, and the default."""
        late = self._spent_s > self.settings.key_limit_s or self._was_late()
        new = [] if late else [t for t in dict.fromkeys(joining) if t not in self.candidates]
        self.found.tried += len(new)
        ordered, slowness = self.alive, {}
        together = [*self.alive, *self._launched(new)]
        if not late and (new or len(together) > self.settings.finalists + 1):
            samples = self._round(together, self.settings.second, 1)
            ordered, slowness = list(samples), {t: statistics.median(values) for t, values in samples.items()}
        best = self._gate([*ordered, *self._behind], self.settings.finalists)
        limit = (1 + self.settings.far) * min((slowness[t] for t in best if t in slowness), default=math.inf)
        return [t for t in best if slowness.get(t, 0.0) <= limit] + [self.default] * self._right(self.default)

    def _final(self, tilings: list[Tiling]) -> dict[Tiling, Timed]:
        return {t: timed(t, values) for t, values in self._round(tilings, self.settings.final, FINAL).items()}

    def _was_late(self) -> bool:
        """A run before this one went from the first round to the final."""
        final, second = (any(was_timed(self.ask.journal, self.key, t, (level,)) for t in self.candidates) for level in (FINAL, 1))
        return final and not second

    # -------------------------------------------------------------- gate
    def _gate(self, ordered: Iterable[Tiling], count: int) -> list[Tiling]:
        """The first `count` that are right, beside the default, which is checked before them."""
        self._judged(self.default)
        others = [t for t in ordered if t != self.default]
        while True:
            best = list(itertools.islice((t for t in others if self._judged(t)), count))
            if all(map(self._right, best)):  # the limit falls when a more accurate one is checked: then once more
                return best

    def _judged(self, tiling: Tiling) -> bool:
        """Whether it is right; checked if it was not yet."""
        if tiling not in self.found.checks and not any(r.tiling == tiling for r in self.found.rejected):
            self._passes("check", tiling)
        return self._right(tiling)

    def _passes(self, method: str, tiling: Tiling) -> bool:
        check, kind = self.ask.judge(method, self.key, tiling)
        if not check.ok:
            self.found.rejected.append(Rejected(tiling, kind, check.reason))
        elif method == "check":
            self.found.checks[tiling] = check
        return check.ok

    def _right(self, tiling: Tiling) -> bool:
        check = self.found.checks.get(tiling)
        failed = check is None or any(r.tiling == tiling for r in self.found.rejected)
        return not failed and (check.error_ratio or 0.0) <= self._limit()

    def _limit(self) -> float:
        """Of the error ratio: relative to the most accurate of those that were checked."""
        ratios = [c.error_ratio for c in self.found.checks.values() if c.error_ratio is not None]
        return max(1.0, self.settings.accuracy_multiple * min(ratios, default=1.0))


def search(
    key: Key, candidates: Iterable[Tiling], ask: Recorded, settings: Settings, exhaustive: bool = False,
    neighbours: Callable[[list[Tiling]], Iterable[Tiling]] = lambda leaders: (),
) -> Found:  # fmt: skip
    """Both halves at once. neighbours(leaders): what joins. Raises Stopped."""
    one = Search(key, candidates, ask, settings, exhaustive)
    return one.finish(neighbours(one.first()))


def was_timed(journal: Journal, key: Key, tiling: Tiling, levels: Iterable[int] = LEVELS) -> bool:
    return any(journal.get("time", key, tiling, level) is not None for level in levels)


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


def timed(tiling: Tiling, samples: list[float]) -> Timed:
    """samples: microseconds, at least one."""
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
