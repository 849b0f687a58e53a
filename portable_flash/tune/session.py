"""A whole run: keys in, entries of the database out. Compiling, measuring and probing overlap; every worker has a thread here.

Groups of keys that share compiled code move through stages: compile the candidates, time them a little, compile the neighbours of
the fastest, time on and check the fastest, compile the winners for an odd shape, probe them there. While one group compiles, another is
measured. A group that another dtype of the same size went before starts from what that one found.
"""

from __future__ import annotations

import collections
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

from ..database import Blocked
from ..device import Device
from ..tiling import Tiling
from .compiling import Compiled, Job
from .journal import Journal, Record
from .keys import DEFAULT_BUCKETS, DTYPES, Key
from .nodes import Node
from .outcomes import Outcome
from .search import Found, NodeLost, Recorded, Rejected, Search, Settings, Stopped, probed, was_timed
from .space import JOINING, SHARE, SHORTLIST, allows, default, joining, known_tilings, middle, shortlist, space

LOOKAHEAD = 4  # groups that are compiled before they are measured, a worker
PRIOR = 4  # tilings that a group takes from its peer of another dtype, beside each default; as many neighbours join
FEWEST = 6  # candidates, however small the space
SAVE_EVERY_S = 20.0


@dataclass(frozen=True, slots=True)
class Event:
    """What a display shows. kind: "compiled", "search", "key", "rejected", "saved", "note"."""

    kind: str
    text: str = ""
    key: Key | None = None
    outcome: Outcome | None = None
    node: str = ""


@dataclass
class Report:
    """What a run did. Seconds of wall time; gpu_s: of requests to the measuring processes, all together."""

    outcomes: list[Outcome] = field(default_factory=list)
    left: list[Key] = field(default_factory=list)
    gpu_s: float = 0.0
    wall_s: float = 0.0
    stopped: str = ""  # why the run ended early


@dataclass
class _Group:
    keys: list[Key]
    candidates: dict[Key, tuple[Tiling, ...]]
    compiled: dict[Tiling, Future[Compiled]]
    support: list[Future[Compiled]] = field(default_factory=list)  # forward kernels that a backward measurement calls first
    searches: list[Search] = field(default_factory=list)
    joining: dict[Key, tuple[Tiling, ...]] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    probes: list[Future[Compiled]] = field(default_factory=list)

    def futures(self) -> list[Future[Compiled]]:
        """What the next stage waits for."""
        return [*self.compiled.values(), *self.support, *self.probes]

    def ready(self) -> bool:
        return all(future.done() for future in self.futures())


@dataclass
class _Groups:
    """What a node has under way, by stage, the next first."""

    starting: collections.deque[_Group] = field(default_factory=collections.deque)
    joining: collections.deque[_Group] = field(default_factory=collections.deque)
    probing: collections.deque[_Group] = field(default_factory=collections.deque)

    def all(self) -> list[_Group]:
        return [*self.starting, *self.joining, *self.probing]


class Session:
    """Runs keys on nodes. save(outcomes) is called with all finished keys from time to time and at the end."""

    def __init__(
        self, device: Device, nodes: list[Node], journal: Journal, *, settings: Settings | None = None, budget_s: float | None = None,
        save: Callable[[list[Outcome]], None] = lambda outcomes: None, tell: Callable[[Event], None] = lambda event: None,
        count: int = SHORTLIST, exhaustive: bool = False, blocked: Mapping[tuple[str, str], tuple[Blocked, ...]] | None = None,
    ):  # fmt: skip
        self.device, self.nodes, self.journal, self.settings = device, nodes, journal, settings or Settings()
        self.save, self.tell, self.count, self.exhaustive, self.blocked = save, tell, count, exhaustive, blocked or {}
        self.deadline = None if budget_s is None else time.monotonic() + budget_s
        self.report = Report()
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        self._waiting: collections.deque[list[Key]] = collections.deque()
        self._under_way: set[tuple] = set()  # groups that a node has taken and not finished
        self._finished: dict[Key, Outcome] = {}
        self._saved_at = time.monotonic()
        self._failure: BaseException | None = None
        self._alive = list(nodes)

    # -------------------------------------------------------------- the run
    def run(self, keys: Iterable[Key]) -> Report:
        """Measure all keys, or as many as the budget allows; returns what was done. Ctrl-C stops cleanly."""
        start, keys = time.monotonic(), list(keys)
        groups: dict[tuple, list[Key]] = {}
        for key in keys:
            groups.setdefault(key.group, []).append(key)
        self._waiting.extend(groups.values())
        with self._interruptible():
            while self._waiting and self._alive and not self.stopped():  # again, if a node was lost after the others had ended
                threads = [threading.Thread(target=self._drive, args=(node,), daemon=True) for node in self._alive]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.2)
        if self._failure is not None:
            self._save()
            raise self._failure
        self._save()
        done = self._finished
        self.report.outcomes = [done[key] for key in keys if key in done]
        self.report.left = [key for key in keys if key not in done]
        self.report.wall_s = time.monotonic() - start
        if self.report.left:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            self.report.stopped = "interrupted" if self._interrupted.is_set() else "the budget is spent" if late else "no GPU is left"
        return self.report

    def stopped(self) -> bool:
        return self._interrupted.is_set() or (self.deadline is not None and time.monotonic() >= self.deadline)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) ends the run after the measurement under way; the second is Python's own."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(number, frame):
            self._interrupted.set()
            signal.signal(number, old[number])

        for number in old:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _drive(self, node: Node) -> None:
        groups = _Groups()
        try:
            self._drive_groups(node, groups)
        except NodeLost as error:
            self.tell(Event("note", f"lost {error}; its keys go to others", node=node.name))
            with self._lock:
                self._alive.remove(node)
                for group in groups.all():
                    self._under_way.discard(group.keys[0].group)
                    self._waiting.appendleft(group.keys)  # what was measured of them is in the journal
        except BaseException as error:  # reported by run(), which is in another thread
            self._failure = error
            self._interrupted.set()

    def _drive_groups(self, node: Node, groups: _Groups) -> None:
        ask = Recorded(node.worker, self.journal, self.settings, self.stopped)
        try:
            with contextlib.suppress(Stopped):
                while not self.stopped() and self._advance(node, groups, ask):
                    pass
            ask.stop = lambda: False
            for group in [group for group in groups.probing if group.ready()]:  # measured already: what a probe needs is little
                self._finish(node, group, ask)
        finally:
            with self._lock:
                self.report.gpu_s += ask.gpu_s + ask.prepare_s
            for group in (*groups.starting, *groups.joining):
                for future in group.futures():
                    future.cancel()

    def _advance(self, node: Node, groups: _Groups, ask: Recorded) -> bool:
        """Bring one group a stage further, the one that is nearest to its end, or wait for compilers; False when all is done."""
        starting, joining, probing = groups.starting, groups.joining, groups.probing
        while len(starting) < LOOKAHEAD and (keys := self._take(busy=bool(groups.all()))):
            starting.append(self._submit(node, keys))
        if probing and probing[0].ready():
            self._finish(node, probing[0], ask)
            probing.popleft()
        elif joining and joining[0].ready():
            self._measure(node, joining[0], ask)
            probing.append(joining.popleft())
        elif starting and starting[0].ready():
            self._begin(node, starting[0], ask)
            joining.append(starting.popleft())
        elif futures := [f for stage in (starting, joining, probing) if stage for f in stage[0].futures() if not f.done()]:
            wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
        return bool(groups.all())

    def _take(self, busy: bool) -> list[Key] | None:
        """The next group; for a node that is busy not one whose peer of another dtype is being measured, whose results it wants."""
        with self._lock:
            if not self._waiting or (busy and any(peer in self._under_way for peer in _peers(self._waiting[0][0]))):
                return None
            self._under_way.add(self._waiting[0][0].group)
            keys = self._waiting.popleft()
        self.journal.refresh()  # another run may have shared what it found
        return keys

    # -------------------------------------------------------------- stages
    def candidates(self, keys: list[Key]) -> dict[Key, tuple[Tiling, ...]]:
        """By key, the default first. One choice for all buckets, so that they share compiled code."""
        blocked = self.blocked.get((keys[0].backend, keys[0].kernel), ())
        if self.exhaustive:
            return {k: tuple(dict.fromkeys((*shortlist(k, self.device, 1, (), blocked), *space(k, self.device)))) for k in keys}
        central = middle(keys)
        prior = self._prior(keys)
        count = min(self.count, PRIOR + 1) if prior else min(self.count, max(FEWEST, round(SHARE * len(space(central, self.device)))))
        known = [t for k in keys for t in known_tilings(k, self.device)]
        shared = shortlist(central, self.device, count, (*prior, *known), blocked)
        own = {k: (*shortlist(k, self.device, 1, (), blocked), *(t for t in shared if allows(k, t, self.device))) for k in keys}
        return {k: tuple(dict.fromkeys(tilings)) for k, tilings in own.items()}

    def _prior(self, keys: list[Key]) -> list[Tiling]:
        """What the same keys of another dtype of this size ended with, the most frequent winners first."""
        names = [peer[2] for peer in _peers(keys[0])]
        with self._lock:
            outcomes = [self._finished.get(replace(k, dtype=name)) for k in keys for name in names]
        votes: collections.Counter[Tiling] = collections.Counter()
        for outcome in outcomes:
            for place, timed in enumerate(outcome.found.ranking[:2] if outcome else ()):
                votes[timed.tiling] += 4 - 3 * place
        return [tiling for tiling, _ in votes.most_common(PRIOR)]

    def _submit(self, node: Node, keys: list[Key]) -> _Group:
        candidates = self.candidates(keys)
        compiled = self._compile(node, {k: candidates[k] for k in keys})
        return _Group(keys, candidates, compiled, node.compile(self.support(keys)) if compiled else [])

    def _compile(self, node: Node, tilings: Mapping[Key, Iterable[Tiling]]) -> dict[Tiling, Future[Compiled]]:
        """Of one group, those that the journal has neither a failed launch nor a time of: each once, for the first key that wants it."""
        needed: dict[Tiling, Key] = {}
        for key, several in tilings.items():
            for tiling in several:
                if self.journal.get("launch", key, tiling) is None and not was_timed(self.journal, key, tiling):
                    needed.setdefault(tiling, key)
        jobs = [Job(k.backend, k.kernel, k.problem(), t, self.device) for t, k in needed.items()]
        return dict(zip(needed, node.compile(jobs), strict=True))

    def support(self, keys: list[Key]) -> list[Job]:
        """The default forward kernels whose results the backward kernels of these keys start from."""
        if keys[0].kernel == "forward":
            return []
        forward = [replace(k, kernel="forward") for k in keys]
        ordinary = {default(k, self.device): Job(k.backend, "forward", k.problem(), default(k, self.device), self.device) for k in forward}
        short = replace(forward[0], seqlen=min(DEFAULT_BUCKETS))
        odd = Job(short.backend, "forward", short.probe(), default(short, self.device), self.device, "bshd")
        return [*ordinary.values(), odd]

    def _failed(self, group: _Group) -> dict[Tiling, str]:
        """Why those that do not compile do not."""
        compiled = {t: f.result() for t, f in group.compiled.items()}
        failed = {t: c.reason for t, c in compiled.items() if not c.ok}
        if len(failed) < max(2, len(compiled)):
            return failed
        self.tell(Event("note", f"none of {len(compiled)} candidates compiled ahead: {next(iter(failed.values()))}; the worker tries"))
        return {}

    def _begin(self, node: Node, group: _Group, ask: Recorded) -> None:
        """The first half of every key's search; then the neighbours of the fastest compile."""
        failed, leaders = self._failed(group), {}
        for key in group.keys:
            self.tell(Event("search", f"{len(group.candidates[key])} candidates", key, node=node.name))
            right = [t for t in group.candidates[key] if t not in failed]
            rejected = [Rejected(t, "error", failed[t]) for t in group.candidates[key] if t in failed]
            if not right:
                group.found.append(Found(key, rejected=rejected, tried=len(rejected)))
                continue
            one = Search(key, right, ask, self.settings, self.exhaustive)
            one.found.rejected += rejected
            group.searches.append(one)
            leaders[key] = one.first()
        group.joining = self.joining(leaders, group.candidates)
        group.compiled, group.support = self._compile(node, group.joining), []

    def joining(self, leaders: Mapping[Key, list[Tiling]], candidates: Mapping[Key, Iterable[Tiling]]) -> dict[Key, tuple[Tiling, ...]]:
        """By key, what joins the searches of one group after their first rounds."""
        blocked = [b for k in leaders for b in self.blocked.get((k.backend, k.kernel), ())]
        few = PRIOR if all(len(tuple(candidates[k])) <= PRIOR + 2 for k in leaders) else JOINING
        return joining(leaders, candidates, self.device, min(few, self.count), blocked)

    def _measure(self, node: Node, group: _Group, ask: Recorded) -> None:
        """The second half; then the winners compile for the odd shape."""
        failed = self._failed(group)
        for one in group.searches:
            joining = group.joining[one.key]
            self.tell(Event("search", f"{len(one.alive)} candidates and {len(joining)} neighbours", one.key, node=node.name))
            found = one.finish(t for t in joining if t not in failed)
            found.rejected += [Rejected(t, "error", failed[t]) for t in joining if t in failed]
            for rejected in found.rejected:
                self.tell(Event("rejected", f"{rejected.tiling}: {rejected.kind}: {rejected.reason}", one.key, node=node.name))
            group.found.append(found)
        group.compiled = {}
        needed = {found.best.tiling: found.key for found in group.found if found.best}
        unknown = {t: k for t, k in needed.items() if self.journal.get("probe", k, t) is None}
        group.probes = node.compile([Job(k.backend, k.kernel, k.probe(), t, self.device, "bshd") for t, k in unknown.items()])

    def _finish(self, node: Node, group: _Group, ask: Recorded) -> None:
        judged: dict[Tiling, Key] = {}
        for found in group.found:
            if found.key in self._finished:
                continue  # a stop came in between
            for timed in found.ranking:  # the odd shape is the same for all buckets: one probe a tiling
                if (other := judged.get(timed.tiling)) and self.journal.get("probe", found.key, timed.tiling) is None:
                    self.journal.put(Record("probe", found.key, timed.tiling, self.journal.get("probe", other, timed.tiling)))
            before = len(found.rejected)
            chosen = probed(found, ask)
            judged |= {t: found.key for t in (chosen.tiling if chosen else None, *(r.tiling for r in found.rejected[before:])) if t}
            for one in found.rejected[before:]:
                self.tell(Event("rejected", f"{one.tiling}: {one.kind}: {one.reason}", found.key, node=node.name))
            outcome = Outcome(found.key, found, chosen)
            medians = {t.tiling: t.median_us for t in found.ranking}
            self.journal.finish(found.key, medians, [r.tiling for r in found.rejected])
            with self._lock:
                self._finished[found.key] = outcome
            self.tell(Event("key", key=found.key, outcome=outcome, node=node.name))
        with self._lock:
            self._under_way.discard(group.keys[0].group)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save()

    def _save(self) -> None:
        with self._lock:
            self._saved_at = time.monotonic()
            outcomes = list(self._finished.values())
        if outcomes:
            self.save(outcomes)
            self.tell(Event("saved", f"{len(outcomes)} keys are saved"))


def _peers(key: Key) -> list[tuple]:
    """Groups that differ from this key's in nothing but a dtype of the same size."""
    size = DTYPES[key.dtype].itemsize
    return [replace(key, dtype=name).group for name, dtype in DTYPES.items() if dtype.itemsize == size and name != key.dtype]
