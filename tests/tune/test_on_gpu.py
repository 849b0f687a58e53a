"""The real thing: needs a GPU that Triton has a path for."""

import json
from dataclasses import replace

import pytest
import torch

from portable_flash.database import read
from portable_flash.device import detect
from portable_flash.tiling import Tiling
from portable_flash.tune import cli
from portable_flash.tune.compiling import CompilePool, Job
from portable_flash.tune.journal import Journal
from portable_flash.tune.keys import Key
from portable_flash.tune.nodes import GPU
from portable_flash.tune.outcomes import Outcome, updates_of
from portable_flash.tune.search import Recorded, Settings, search
from portable_flash.tune.space import default
from portable_flash.worker import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KEY = Key("triton", "forward", "bf16", 64, True, 1024)


def test_what_is_wrong_faults_or_hangs_on_the_gpu_is_rejected_and_nothing_is_compiled_where_it_is_measured(tmp_path, monkeypatch):
    """Compiled ahead, no launch takes a compiler: the caches that the one fills are those that the other looks in."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    candidates = [Tiling(64, 32, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 128, 4, 1), Tiling(64, 16, 4, 2), Tiling(32, 32, 4, 2)]
    pool, device = CompilePool(3), detect(0)
    try:
        jobs = [pool.submit(Job("triton", "forward", KEY.problem(), t, device)) for t in (*candidates, default(KEY, device))]
        failed = [job.result(120).reason for job in jobs if not job.result(120).ok]
    finally:
        pool.shutdown()
    assert not failed, failed
    kernels = lambda: sorted(str(p.relative_to(tmp_path)) for ending in ("cubin", "hsaco") for p in tmp_path.rglob(f"*.{ending}"))
    before = kernels()
    worker = Worker("tune_gpu_fake:Sabotaged", {"how": {64: "wrong", 128: "hang", 16: "fault"}})
    settings = Settings(check_timeout_s=12.0)
    try:
        found = search(KEY, candidates, Recorded(worker, Journal(None, {}), settings), settings)
    finally:
        worker.close()
    said = {t: (r.kind, r.reason) for t in candidates for r in found.rejected if r.tiling == t}
    expected = dict(zip(candidates[1:4], ("wrong", "hang", "fault"), strict=True))
    assert {t: kind for t, (kind, _) in said.items()} == expected, said
    assert found.best and found.best.tiling in (candidates[0], candidates[4]), (found.ranking, said)
    assert worker.starts == 3, (worker.starts, said)
    (update,) = updates_of([Outcome(KEY, found, found.best)], {("triton", "forward"): "0"}, block=True)
    assert len(update.blocked) == 3 and all(b.reason for b in update.blocked), update.blocked
    assert before and kernels() == before, (before, kernels())


def test_in_whatever_order_kernels_are_compiled_ahead_a_backward_launch_finds_them(tmp_path, monkeypatch):
    """A process that compiles begins with the kernel that is tuned, the one that measures with the forward kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    key, device = Key("triton", "backward_dkv", "bf16", 64, True, 512), detect(0)
    before_it = replace(key, kernel="forward")
    pool = CompilePool(1)
    try:
        jobs = [pool.submit(Job("triton", k.kernel, k.problem(), default(k, device), device)) for k in (key, before_it)]
        failed = [job.result(120).reason for job in jobs if not job.result(120).ok]
    finally:
        pool.shutdown()
    assert not failed, failed
    kernels = lambda: sorted(str(p.relative_to(tmp_path)) for ending in ("cubin", "hsaco") for p in tmp_path.rglob(f"*.{ending}"))
    before, worker = kernels(), Worker(GPU)
    try:
        assert worker.call("launch", key, default(key, device), timeout_s=120).ok
    finally:
        worker.close()
    assert len(before) >= 3 and kernels() == before, (before, kernels())


def test_a_run_on_this_gpu_is_right_and_resumes_for_nothing(tmp_path, capsys):
    other = "triton/backward_dkv/fp16/d128/full/s512"
    argv = ["--device", "auto", "--out", str(tmp_path), "--keys", str(KEY), other, "--json", "--candidates", "4", "--jobs", "4"]
    code, told = cli.main(argv), capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    rows = {line["key"]: line for line in lines if line["event"] == "key"}
    assert code == 0 and set(rows) == {str(KEY), other}, (code, told)
    for row in rows.values():
        assert row["median_us"] and row["speedup"] and row["speedup"] > 0.97, row
    device = detect(0)
    record = read(tmp_path / device.vendor / f"{device.slug}.yaml")
    entry = next(e for e in record.kernels["triton"]["forward"].entries if e.when(KEY.problem()))
    assert entry.proof["source"] == "measured" and entry.proof["repeatable"] is True, entry
    code, told = cli.main([*argv, "--resume"]), capsys.readouterr()
    done = json.loads(told.out.splitlines()[-1])
    assert code == 0 and done["keys"] == 2 and done["gpu_s"] == 0, (code, told)
