"""Every finished measurement of a tuning run, so that a run can go on where it was killed and runs can share what they found.

On disk it is a journal of Optuna's: a study for each key, a trial for each candidate, a rung's median as the trial's value at
that step, so that Optuna's own tools can show it. Every measurement is handed to the file system before the next starts, under a
lock file that also works on NFS, so that a killed process loses none (a machine that loses power: those of the last second). A last
line that a crash tore is cut off when the journal is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..tiling import Tiling
from .keys import Key

FORMAT = 2
IDENTITY = "identity"  # name of the study whose attributes say what the measurements depend on
SYNC_EVERY_S = 1.0
LOCK_GRACE_S = 10  # a lock older than this was left by a process that was killed


class JournalError(ValueError):
    """A journal that cannot be used: names the file and why."""


@dataclass(frozen=True, slots=True)
class Record:
    """kind: "check", "probe" or "time"; value: JSON types; rung: of a "time"."""

    kind: str
    key: Key
    tiling: Tiling
    value: Any
    rung: int = 0

    @property
    def name(self) -> tuple:
        return _name(self.kind, str(self.key), self.tiling.as_dict(), self.rung)


class Journal:
    """Values by (kind, key, tiling, rung). Thread-safe.

    path: None keeps everything in memory. identity: what measurements depend on (device, kernels' spaces, versions); a journal of
    another identity is no help. about: what else is worth knowing of it (driver, date).

    Raises JournalError for a file that cannot be used, or that is of another identity with resume; RuntimeError where a path is
    given and Optuna is not installed.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], resume: bool = False, about: Mapping[str, Any] | None = None
    ):  # fmt: skip
        self.path, self.known = path, {}
        self._lock = threading.Lock()
        self._store: _Store | None = None
        if path is not None:
            with _as_journal_errors(path):
                self._store = _Store(path, {"journal": FORMAT, **identity}, resume, about or {})
                self._store.read_into(self.known)

    def get(self, kind: str, key: Key, tiling: Tiling, rung: int = 0) -> Any:
        """What was put, or None."""
        with self._lock:
            return self.known.get(_name(kind, str(key), tiling.as_dict(), rung))

    def put(self, *records: Record) -> None:
        """Remember them; written before this returns."""
        with self._lock:
            self.known.update((record.name, record.value) for record in records)
            if self._store is not None:
                with _as_journal_errors(self.path):
                    self._store.write(records)

    def finish(self, key: Key, medians: Mapping[Tiling, float], failed: Iterable[Tiling]) -> None:
        """The key is done: trials of `medians` (microseconds in the final) are complete, those of `failed` have failed, the
        others were pruned. Only for those who look at the journal: nothing here reads it."""
        with self._lock:
            if self._store is not None:
                with _as_journal_errors(self.path):
                    self._store.finish(str(key), medians, set(failed))

    def refresh(self) -> None:
        """Learn what other runs have written into the same file since."""
        with self._lock:
            if self._store is not None and self._store.backend.grown_by_others():
                with _as_journal_errors(self.path):
                    self._store.read_into(self.known)


def reopen(path: Path) -> tuple[Journal, dict[str, Any], dict[str, Any]]:
    """A journal as it is, its identity and what it says about itself. Raises JournalError and RuntimeError like Journal."""
    if not path.is_file():
        raise JournalError(f"journal {path}: does not exist")
    journal = Journal(None, {})
    journal.path = path
    with _as_journal_errors(path):
        store = _Store(path, None, True, {})
        store.read_into(journal.known)
    return journal, store.identity, store.about


def _name(kind: str, key: str, use: Mapping[str, Any], rung: int) -> tuple:
    return (kind, key, tuple(sorted(use.items())), rung)


@contextlib.contextmanager
def _as_journal_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(f"journal {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:  # what Optuna raises for lines that are no operations
        if isinstance(error, JournalError):
            raise
        why = f"{type(error).__name__}: {error}"
        raise JournalError(f"journal {path}: cannot be read ({why}): run without --resume to start afresh") from error


# ------------------------------------------------------------------ Optuna
class _Store:
    """The journal's file. Operations go through Optuna's storage; those of one call are one append under one lock."""

    def __init__(self, path: Path, header: Mapping[str, Any] | None, resume: bool, about: Mapping[str, Any]):
        """header: None takes the journal as it is."""
        try:
            import optuna
        except ImportError as error:
            raise RuntimeError('a tuning run needs the package optuna: pip install "portable-flash[tune]"') from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        self.backend = _backend(path)
        self.storage = optuna.storages.JournalStorage(self.backend)
        self.studies: dict[str, int] = {}
        self.trials: dict[tuple, int] = {}  # that are not finished, by key and tiling
        self.identity: dict[str, Any] = {}
        self.about: dict[str, Any] = {}
        self._identify(path, header, about)

    def _identify(self, path: Path, header: Mapping[str, Any] | None, about: Mapping[str, Any]) -> None:
        header, about = (json.loads(json.dumps(given, default=str)) for given in (header, about))
        found = {study.study_name: study for study in self.storage.get_all_studies()}
        recorded = dict(found[IDENTITY].user_attrs) if IDENTITY in found else {}
        self.about = recorded.pop("about", {}) | about
        self.identity = recorded if header is None else header
        foreign = header is None or path.stat().st_size > 0
        if (found or foreign) and (recorded != self.identity or not recorded):
            names = ", ".join(sorted(k for k in self.identity.keys() | recorded.keys() if self.identity.get(k) != recorded.get(k)))
            raise JournalError(f"journal {path}: was made with another {names or 'program'}: run without --resume to start afresh")
        study = self._study(IDENTITY)
        with self.backend.one_append():
            for name, value in ({} if found else self.identity).items():
                self.storage.set_study_user_attr(study, name, value)
            if about:
                self.storage.set_study_user_attr(study, "about", self.about)

    def _study(self, name: str) -> int:
        if name not in self.studies:
            try:
                self.studies[name] = self.storage.create_new_study([self.optuna.study.StudyDirection.MINIMIZE], name)
            except self.optuna.exceptions.DuplicatedStudyError:
                self.studies[name] = self.storage.get_study_id_from_name(name)
        return self.studies[name]

    def read_into(self, known: dict[tuple, Any]) -> None:
        for study in self.storage.get_all_studies():
            if study.study_name == IDENTITY:
                continue
            self.studies[study.study_name] = study._study_id
            for trial in self.storage.get_all_trials(study._study_id, deepcopy=False):
                for attribute, value in trial.user_attrs.items():
                    kind, _, rung = attribute.partition(" ")
                    known.setdefault(_name(kind, study.study_name, trial.params, int(rung or 0)), value)
                if not trial.state.is_finished():
                    self.trials.setdefault((study.study_name, tuple(sorted(trial.params.items()))), trial._trial_id)

    def write(self, records: Iterable[Record]) -> None:
        with self.backend.one_append():
            for record in records:
                place = (str(record.key), record.name[2])
                try:
                    self._write(self._trial(place, record.tiling), record)
                except self.optuna.exceptions.UpdateFinishedTrialError:  # another run finished this trial
                    del self.trials[place]
                    self._write(self._trial(place, record.tiling), record)

    def _write(self, trial: int, record: Record) -> None:
        if record.kind == "time":
            self.storage.set_trial_intermediate_value(trial, record.rung, statistics.median(record.value))
        name = f"time {record.rung}" if record.kind == "time" else record.kind
        self.storage.set_trial_user_attr(trial, name, record.value)

    def _trial(self, place: tuple, tiling: Tiling) -> int:
        if place not in self.trials:
            params = tiling.as_dict()
            distributions = {name: self._distribution(value) for name, value in params.items()}
            running = self.optuna.trial.TrialState.RUNNING
            trial = self.optuna.trial.create_trial(state=running, params=params, distributions=distributions)
            self.trials[place] = self.storage.create_new_trial(self._study(place[0]), trial)
        return self.trials[place]

    def _distribution(self, value: Any) -> Any:
        d = self.optuna.distributions
        return d.CategoricalDistribution((False, True)) if isinstance(value, bool) else d.IntDistribution(0, 1024)

    def finish(self, key: str, medians: Mapping[Tiling, float], failed: set[Tiling]) -> None:
        states = self.optuna.trial.TrialState
        of = lambda tiling: (key, tuple(sorted(tiling.as_dict().items())))
        complete, lost = {of(t): us for t, us in medians.items()}, {of(t) for t in failed}
        with self.backend.one_append():
            for place in [place for place in self.trials if place[0] == key]:
                median, trial = complete.get(place), self.trials.pop(place)
                state = states.COMPLETE if median is not None else states.FAIL if place in lost else states.PRUNED
                with contextlib.suppress(self.optuna.exceptions.UpdateFinishedTrialError):
                    self.storage.set_trial_state_values(trial, state, None if median is None else [median])


def _backend(path: Path) -> Any:
    """Optuna's file, cut to whole lines, whose appends within `one_append` share a lock and a flush."""
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class Backend(JournalFileBackend):
        def __init__(self) -> None:
            self.lock = JournalFileOpenLock(str(path), grace_period=LOCK_GRACE_S)
            super().__init__(str(path), self.lock)
            self.stream: IO[bytes] | None = None  # while one append is being made
            with self._locked(), path.open("r+b") as stream:
                _cut(stream)
            self.size = 0  # when this process looked last
            self.synced_at = time.monotonic()

        def grown_by_others(self) -> bool:
            return path.stat().st_size != self.size

        def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
            if self.stream is None:
                self.size = path.stat().st_size
            return super().read_logs(log_number_from)

        @contextlib.contextmanager
        def _locked(self) -> Iterator[None]:
            self.lock.acquire()
            try:
                yield
            finally:
                with contextlib.suppress(RuntimeError):  # taken over after its grace: what was appended is whole all the same
                    self.lock.release()

        @contextlib.contextmanager
        def one_append(self) -> Iterator[None]:
            with self._locked(), path.open("ab", buffering=0) as stream:
                own = stream.tell() == self.size
                self.stream = stream
                try:
                    yield
                finally:
                    self.stream = None
                    if time.monotonic() - self.synced_at > SYNC_EVERY_S:
                        os.fsync(stream.fileno())
                        self.synced_at = time.monotonic()
                    if own:  # nobody else has written since
                        self.size = stream.tell()

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            if self.stream is None:
                return super().append_logs(logs)
            self.stream.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())

    return Backend()


def _cut(stream: Any) -> None:
    """Drop what follows the last line's end: a process died while it wrote it."""
    size, tail = stream.seek(0, os.SEEK_END), b""
    end = size
    while end and b"\n" not in tail:
        end = max(0, end - 65536)
        stream.seek(end)
        tail = stream.read(size - end)
    whole = end + tail.rfind(b"\n") + 1
    if whole < size:
        stream.truncate(whole)
