"""Real processes: what faults or hangs ends a worker and nothing else; a run that is killed goes on where it was."""

import json
import multiprocessing
import os
import signal
import time

import pytest
from tune_fake import DEVICE, FakeNode, crash, microseconds, name, run_session

from portable_flash import worker as worker_module
from portable_flash.database import read
from portable_flash.tiling import Tiling
from portable_flash.tune.compiling import Compiled, CompilePool, Job
from portable_flash.tune.journal import Journal
from portable_flash.tune.keys import Key, key_set
from portable_flash.tune.search import Settings
from portable_flash.tune.session import Session
from portable_flash.tune.space import shortlist
from portable_flash.worker import Worker, WorkerError
from portable_flash.tune.writer import path_of

HERE = "fork" if os.name == "posix" else "spawn"  # a spawned process takes seconds to import torch, which no fake needs
KEY = Key("triton", "forward", "bf16", 128, False, 4096)


def test_faults_and_hangs_cost_their_process_only(monkeypatch):
    monkeypatch.setattr(worker_module, "START_METHOD", HERE)
    tried = shortlist(KEY, DEVICE)
    best = sorted(tried, key=lambda t: microseconds(KEY, t))
    ways = ("wrong", "fault", "hang", "raise", "fault_when_timed")  # what is wrong is found so where it is fast
    bad = [(name(t), how) for t, how in zip([t for t in best if t != tried[0]], ways, strict=False)]
    worker = Worker("tune_fake:FakeMeasurer", {"bad": bad})
    try:
        report = Session(DEVICE, [FakeNode(worker)], Journal(None, {}), settings=Settings(check_timeout_s=1.0)).run([KEY])
    finally:
        worker.close()
    (outcome,) = report.outcomes
    assert {r.tiling: r.kind for r in outcome.found.rejected} == {
        t: {"raise": "error", "fault_when_timed": "fault"}.get(how, how) for t in tried for n, how in bad if name(t) == n
    }
    good = [t for t in tried if name(t) not in dict(bad)]
    assert name(outcome.chosen.tiling) not in dict(bad)
    assert microseconds(KEY, outcome.chosen.tiling) <= min(microseconds(KEY, t) for t in good)  # a neighbour may be faster still
    assert worker.starts >= 4  # the fault, the hang and the fault in a timing of several each ended one
    reasons = {r.kind: r.reason for r in outcome.found.rejected}
    assert "signal 11" in reasons["fault"] and "1 s" in reasons["hang"] and "out of resources" in reasons["error"]


def _compile_or_crash(job):
    if job.tiling.num_stages == 3:
        crash()
    return Compiled(True, job.tiling.num_stages)


def test_a_compiler_that_crashes_fails_its_own_job_only(monkeypatch):
    monkeypatch.setattr(worker_module, "START_METHOD", HERE)
    pool = CompilePool(2, _compile_or_crash)
    try:
        jobs = [Job("triton", "forward", KEY.problem(), Tiling(64, 64, 4, stages), DEVICE) for stages in (1, 3, 2)]
        found = [future.result(120) for future in [pool.submit(job) for job in jobs]]
        assert [f.ok for f in found] == [True, False, True] and "crashed" in found[1].reason
        assert pool.submit(jobs[0]).result(60).ok
    finally:
        pool.shutdown()


def test_a_worker_that_does_not_start_says_why():
    with pytest.raises(WorkerError, match="did not start: ModuleNotFoundError"):
        Worker("no_such_module_anywhere:X").call("check", timeout_s=5)


def _child(tmp, resume, slow, keys):
    os.setpgrp()  # so that the test can kill the worker with it
    worker_module.START_METHOD = HERE
    run_session(tmp, tmp / "journal.jsonl", resume, tmp / "log", slow, keys)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_resumes_without_repeating_a_measurement(how, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "START_METHOD", HERE)
    keys = key_set("triton", kernels=("forward",), dtypes=("bf16",), head_dims=(64, 128), buckets=(512, 4096), causal=(False,))
    context = multiprocessing.get_context(HERE)
    child = context.Process(target=_child, args=(tmp_path, False, 0.1, keys))
    child.start()
    deadline = time.monotonic() + 90
    while (not (tmp_path / "log").exists() or len((tmp_path / "log").read_text().splitlines()) < 12) and time.monotonic() < deadline:
        time.sleep(0.05)
    if how == signal.SIGKILL:
        os.killpg(child.pid, how)
    else:
        os.kill(child.pid, how)
    child.join(60)
    path = path_of(tmp_path, DEVICE)
    if path.exists():
        read(path)  # whole, whatever was under way
    recorded = [name for name in Journal(tmp_path / "journal.jsonl", {"device": "h200"}, resume=True).known if name[0] == "check"]
    before = len((tmp_path / "log").read_text().splitlines())
    report = run_session(tmp_path, tmp_path / "journal.jsonl", True, tmp_path / "log", 0.0, keys)
    assert len(report.outcomes) == len(keys) and not report.left
    log = (tmp_path / "log").read_text().splitlines()
    repeated = [line for line in log[before:] if line in log[:before]]
    checks = [line for line in log[:before] if json.loads(line)[0] == "check"]
    assert len(repeated) <= 1 and checks and len(recorded) >= len(checks) - 1  # at most the one that was under way
    entries = read(path).kernels["triton"]["forward"].entries
    uses = {key: next(e.use for e in entries if e.when(key.problem())) for key in keys}
    assert uses == {o.key: o.chosen.tiling for o in report.outcomes}
