"""The validator on a real GPU: a clean one passes, every fault is caught by its check, and kernels are compiled ahead as launched."""

import fnmatch
import glob
import os
import subprocess
import sys
import time

import pytest
import torch

from portable_flash.device import detect
from portable_flash.validate import ahead, session

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "validate"))
import faults  # noqa: E402


@pytest.fixture(autouse=True)
def no_records(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def validate(runner=None, **options):
    return faults.validate(runner, devices=[detect("cuda")], **{"small": False} | options).devices[0]


def bad(report):
    return [(c.id, c.status, c.detail) for c in report.checks if c.status in ("fail", "inconclusive")]


def test_quick_passes_in_a_process_of_its_own():
    began = time.monotonic()
    (report,) = session.validate([detect("cuda")]).devices
    assert report.verdict == "pass", (report.reason, bad(report))
    assert time.monotonic() - began < 120  # with kernels to compile; the level's bound is a minute
    assert {kernel.kernel for kernel in report.kernels} >= {"forward", "backward_dkv", "backward_dq"}
    groups = {check.group for check in report.checks if check.status == "pass"}
    assert groups >= {"control", "accuracy", "repeatability", "agreement", "backends", "edges", "memory"}


@pytest.mark.parametrize("seed", [1, 77, 4_294_967_295])
def test_clean_runs_raise_no_alarm(seed):
    report = validate(seed=seed)
    assert report.verdict == "pass", (report.reason, bad(report))


FAULTS = {
    "ScaledTile": "accuracy/*/out", "StuckLane": "accuracy/*/out", "NanRow": "accuracy/*/out", "GradientsOnly": "accuracy/*/grad_key",
    "LseOnly": "accuracy/*/lse", "DroppedKeys": "accuracy/*/grad_value", "WrongHead": "accuracy/*/out", "StrayWrite": "memory/guards/*",
    "Unwritten": "memory/unwritten/*", "OtherBits": "repeatability/units/*/out", "RareFlip": "repeatability/load/*/out",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_at_quick(fault):
    """A rare flip only by its luck, with the repeats that quick has time for: at least 50 on this GPU."""
    only = (FAULTS[fault].partition("/")[0],)
    report = validate(getattr(faults, fault), only=only)
    found = [check.id for check in report.checks if check.status == "fail"]
    assert report.verdict == "fail" and fnmatch.filter(found, FAULTS[fault]), found


def test_rare_flip_is_caught_at_standard():
    report = validate(faults.RareFlip, level="standard", only=("repeatability/load",))
    found = [check for check in report.checks if check.status == "fail"]
    assert found and all(fnmatch.fnmatchcase(check.id, "repeatability/load/*/out") and check.data["bits"] == [0] for check in found)
    assert sum(c.data["runs"] for c in report.checks if c.id.endswith("/out")) >= 500


def test_slow_gpu_is_caught():
    report = validate(faults.Slow, only=("speed",))
    speeds = [check for check in report.checks if check.group == "speed" and check.status != "skipped"]
    if not speeds:
        pytest.skip("no record of speed for this GPU and software")
    assert report.verdict == "fail" and {check.status for check in speeds} == {"fail"}


def test_kernels_compiled_ahead_are_those_that_are_launched(tmp_path):
    """With an empty cache: what one process compiles without the GPU, another finds when it launches."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.path.dirname(faults.__file__)}
    only = ("accuracy/fp16-d64-full", "accuracy/bf16-d64-window-softcap-sinks", "edges/strides")
    program = (
        "from portable_flash.device import detect\n"
        "from portable_flash.validate import ahead, session\n"
        f"options = session.Options(only={only!r})\n"
    )
    compile_ = program + "print([ahead.compile_task(detect('cuda'), options, n) for n in range(1, 4)])"
    launch = program + "import faults; print(faults.validate(devices=[detect('cuda')], small=False, only=options.only).verdict)"
    run = lambda text: subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=300)
    done = run(compile_)
    assert "[True, True, True]" in done.stdout, done.stderr[-2000:]
    kernels = lambda: {os.path.basename(os.path.dirname(p)) for p in glob.glob(str(tmp_path / "*" / "*_kernel.json"))}
    before = kernels()
    done = run(launch)
    assert "pass" in done.stdout, done.stderr[-2000:]
    new = kernels() - before
    # four each of the probe and of the control's call were not asked for; the three tasks' own must have been there
    assert len(before) >= 12 and len(new) <= 8, sorted(new)


def test_ahead_leaves_no_process_behind():
    with ahead.Ahead([detect("cuda")], session.Options(only=("edges/one-query",)), cores=4) as compiling:
        pool = compiling.pool
        assert pool is not None
    pool.join()
    torch.cuda.synchronize()
