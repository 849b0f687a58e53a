"""A fake GPU behind the tuner's own interface: times come from a formula, faults and hangs are real ones of the process."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path

from portable_flash.device import named
from portable_flash.tiling import Tiling
from portable_flash.tune.compiling import Compiled
from portable_flash.tune.measure import Check
from portable_flash.tune.nodes import _Remote
from portable_flash.worker import WorkerError

DEVICE = named("h200")


class FakeMeasurer:
    """Microseconds by tiling; what `bad` names (block_m, block_n, num_warps, num_stages, tma) goes wrong in the way it says."""

    def __init__(self, bad=(), log=None, slow=0.0, odd=()):
        self.bad = {tuple(name): how for name, how in bad}
        self.odd = {tuple(name) for name in odd}
        self.log, self.slow = log, slow

    def launch(self, key, tiling):
        how = self.bad.get(name(tiling))
        if how == "fault":
            crash()
        if how == "hang":
            time.sleep(600)
        if how == "raise":
            raise RuntimeError("out of resources")
        return Check(True)

    def _note(self, *what):
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(json.dumps([str(w) for w in what]) + "\n")

    def check(self, key, tiling):
        self._note("check", key, tiling)
        how = self.bad.get(name(tiling))
        time.sleep(self.slow)
        if how == "wrong":
            return Check(False, "out: fail, largest error beyond its limit")
        return Check(True, "", 3.0 if how == "inaccurate" else 0.5, True)

    def probe(self, key, tiling):
        self._note("probe", key, tiling)
        return Check(name(tiling) not in self.odd, "out: fail" if name(tiling) in self.odd else "", 0.5)

    def time(self, key, tilings, rounds, budget_s):
        self._note("time", key, len(tilings), rounds)
        time.sleep(self.slow)
        for tiling in tilings:
            if self.bad.get(name(tiling)) == "fault_when_timed":
                crash()
        return [[microseconds(key, t) * (1 + 0.002 * i) for i in range(rounds)] for t in tilings]

    def prepare(self, key):
        pass


def crash():
    faulthandler.disable()  # a forked process inherits pytest's, which would print a traceback
    os.kill(os.getpid(), signal.SIGSEGV)


def name(tiling: Tiling) -> tuple:
    return (tiling.block_m, tiling.block_n, tiling.num_warps, tiling.num_stages, tiling.tma)


def microseconds(key, tiling: Tiling) -> float:
    """Some smooth truth with one optimum that differs from key to key."""
    best = 64 if key.head_dim <= 64 else 128
    off = abs(tiling.block_m - best) / 64 + abs(tiling.block_n - 64) / 32 + abs(tiling.num_stages - 2) / 4 + abs(tiling.num_warps - 4) / 8
    return key.seqlen / 10 * (1 + off + (0 if tiling.tma else 0.15) + (0.05 if tiling.split_dkv else 0))


class InProcess:
    """Asks a FakeMeasurer without a process; its faults and hangs are those that a Worker would report."""

    def __init__(self, **options):
        self.bad = {tuple(n): how for n, how in options.get("bad", ())}
        mild = [(n, how) for n, how in options.get("bad", ()) if "fault" not in how and how != "hang"]
        self.measurer = FakeMeasurer(**{**options, "bad": mild})
        self.requests, self.launches = [], 0  # the former without launches, which are no measurements

    def call(self, method, *arguments, timeout_s):
        if method == "prepare":
            return None
        if method == "launch":
            self.launches += 1
        else:
            self.requests.append((method, arguments))
        if method in ("launch", "check", "probe") and self.bad.get(name(arguments[1])) in ("fault", "hang"):
            how = self.bad[name(arguments[1])]
            raise WorkerError(how, f"it was a {how}")
        if method == "time" and any(self.bad.get(name(t)) == "fault_when_timed" for t in arguments[1]):
            raise WorkerError("fault", "its process died (signal 11)")
        try:
            return getattr(self.measurer, method)(*arguments)
        except RuntimeError as error:
            raise WorkerError("error", f"RuntimeError: {error}") from error

    def start(self):
        pass

    def close(self):
        pass


class Actor(_Remote):
    """What lives in a Ray actor, but the measurer is in its own process: one more takes seconds to start."""

    def __init__(self, jobs, factory, options):
        super().__init__(jobs, factory, options)
        self.node.worker = InProcess(**options)


class FakeNode:
    """`fails`: names of tilings that do not compile."""

    def __init__(self, worker=None, fails=(), **options):
        self.name, self.fails = "fake 0", {tuple(n) for n in fails}
        self.worker = worker or InProcess(**options)
        self.compiled = []

    def compile(self, jobs):
        futures = []
        for job in jobs:
            self.compiled.append(job)
            future = Future()
            future.set_result(Compiled(False, "does not compile: no") if name(job.tiling) in self.fails else Compiled(True))
            futures.append(future)
        return futures

    def close(self):
        self.worker.close()


def run_session(out, journal_path, resume, log, slow, keys, budget=None):
    """A whole run with a real worker process, as the command line makes it; for tests that kill it."""
    from portable_flash.tune.journal import Journal
    from portable_flash.tune.outcomes import updates_of
    from portable_flash.tune.session import Session
    from portable_flash.worker import Worker
    from portable_flash.tune.writer import path_of, update_file

    journal = Journal(journal_path, {"device": "h200"}, resume)
    node = FakeNode(Worker("tune_fake:FakeMeasurer", {"log": str(log), "slow": slow}))
    spaces = {(k.backend, k.kernel): "12345678" for k in keys}
    save = lambda outcomes: update_file(path_of(out, DEVICE), DEVICE, None, updates_of(outcomes, spaces, False), None)
    try:
        return Session(DEVICE, [node], journal, budget_s=budget, save=save, count=4).run(keys)
    finally:
        node.close()
