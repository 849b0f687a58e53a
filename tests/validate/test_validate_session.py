"""Processes that die, hang, raise, run out of time or are interrupted: each costs its own device its verdict, and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import faults
import pytest
import torch

from portable_flash.device import cpu
from portable_flash.validate import session
from portable_flash.validate.checks import GROUPS, tasks, wanted
from portable_flash.validate.context import Runner
from portable_flash.validate.drive import Stop, run_device
from portable_flash.validate.levels import LEVELS
from portable_flash.validate.report import Check, DeviceReport, Identity, to_json
from portable_flash.worker import CONTINUES, FAULT, HANG, WorkerError

IDENTITY = Identity(index=None, name="x", slug="cpu", vendor="cpu", arch="cpu", compute_units=1, memory_bytes=1)
ONLY = ("accuracy/fp16-d64-full", "accuracy/bf16-d128-varlen-causal", "edges/one-query")


@pytest.fixture(autouse=True)
def no_records(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def options(runner=Runner, **chosen):
    return session.Options(**{"small": True, "only": ONLY, "runner": f"{runner.__module__}:{runner.__name__}"} | chosen)


def status(report: DeviceReport) -> dict[str, str]:
    return {check.id: check.status for check in report.checks}


class Raising(faults.InProcess):
    """What a task raises comes as a worker tells it."""

    def call(self, method, *arguments, timeout_s):
        try:
            return super().call(method, *arguments, timeout_s=timeout_s)
        except Exception as error:
            raise WorkerError(CONTINUES, f"{type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- real processes
def test_faults_hangs_and_errors_end_their_own_device(monkeypatch):
    """Four devices at once, two of them with a process of its own."""
    monkeypatch.setitem(LEVELS, "quick", replace(LEVELS["quick"], task_seconds=20.0))
    runners = iter([(session.make_worker, faults.Dies), (session.make_worker, faults.Hangs), (Raising, faults.Raises), (Raising, Runner)])

    def make(device, chosen, threads, facts):
        way, runner = next(runners)
        return way(device, options(runner), 1, facts)

    report = session.validate([cpu()] * 4, options(), worker=make)
    died, hung, raised, clean = report.devices
    packed = "accuracy/bf16-d128-varlen-causal/out"
    assert report.verdict == "fail"
    assert (died.verdict, status(died)[packed], status(died)["edges/one-query"]) == ("fail", "fail", "skipped")
    assert "signal 11" in died.reason and "varlen" in died.reason
    assert (hung.verdict, status(hung)[packed], status(hung)["edges/one-query"]) == ("no_verdict", "inconclusive", "skipped")
    assert "no answer within 20 s" in hung.reason
    assert (raised.verdict, status(raised)[packed], status(raised)["edges/one-query"]) == ("fail", "fail", "pass")
    assert "no kernel image" in next(check.detail for check in raised.checks if check.id == packed)
    assert (clean.verdict, set(status(clean).values())) == ("pass", {"pass"})
    for device in report.devices:  # what came before is kept
        assert status(device)["accuracy/fp16-d64-full/out"] == "pass"
    assert to_json(report)


def test_interrupted_run_reports_what_was_done(tmp_path):
    program = (
        "import signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it\n"
        "from portable_flash.device import cpu\n"
        "from portable_flash.validate import session, report\n"
        "tell = lambda device, task, done, total: print(task, flush=True)\n"
        "only = ('accuracy/fp16-d64-full', 'accuracy/bf16-d128-varlen-causal')\n"
        "options = session.Options(small=True, only=only, runner='faults:Hangs')\n"
        "found = session.validate([cpu()], options, tell=tell)\n"
        "open(sys.argv[2], 'w').write(report.to_json(found))\n"
        "sys.exit(report.EXIT_CODES[found.verdict])\n"
    )
    script = tmp_path / "run.py"
    script.write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in program.splitlines()))
    where = os.path.dirname(__file__)
    child = subprocess.Popen([sys.executable, script, where, tmp_path / "report.json"], stdout=subprocess.PIPE, text=True,
                             env=os.environ | {"PYTHONPATH": where})  # fmt: skip
    try:
        for line in child.stdout:
            if "varlen" in line:
                break
        time.sleep(0.5)  # inside the call that hangs
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 2
    finally:
        child.kill()
    from portable_flash.validate import document

    (device,) = document.read(tmp_path / "report.json").devices
    assert device.verdict == "no_verdict" and "interrupted" in device.reason
    assert status(device)["accuracy/fp16-d64-full/out"] == "pass" and status(device)["accuracy/bf16-d128-varlen-causal/out"] == "skipped"


# ---------------------------------------------------------------- time
def test_what_the_timeout_leaves_out_leaves_no_verdict():
    class Slow(faults.InProcess):
        def call(self, method, *arguments, timeout_s):
            if method == "run" and arguments[0] >= 1:
                raise WorkerError(HANG, f"no answer within {timeout_s:.0f} s")
            return super().call(method, *arguments, timeout_s=timeout_s)

    report = session.validate([cpu()], options(timeout_s=60.0), worker=Slow).devices[0]
    assert report.verdict == "no_verdict" and "--timeout" in report.reason
    assert {name.partition("/")[0] for name, what in status(report).items() if what == "pass"} == {"control"}
    assert status(report)["edges/one-query"] == "skipped"


class Instant:
    """Every task passes at once and takes 10 s of the clock."""

    def __init__(self, clock, hangs=None):
        self.clock, self.hangs = clock, hangs

    def call(self, method, *arguments, timeout_s):
        ids = ("control/a", "accuracy/b", "edges/c")
        if method == "listed":
            return [(name, (name,), "") for name in ids]
        self.clock[0] += 10.0
        if arguments[0] == self.hangs:
            raise WorkerError(HANG, f"no answer within {timeout_s:.0f} s")
        return session.Done([Check(id=ids[arguments[0]], status="pass")])

    def close(self): ...


@pytest.mark.parametrize("seconds, hangs, verdict, last", [(15.0, None, "no_verdict", "skipped"), (25.0, 2, "no_verdict", "skipped"),
                                                          (35.0, None, "pass", "pass")])  # fmt: skip
def test_a_pass_takes_all_checks_also_when_time_runs_out_between_two(seconds, hangs, verdict, last, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    facts = (IDENTITY, None, None)
    report = run_device(cpu(), facts, options(only=()), Instant(clock, hangs), Stop(), seconds, lambda *_: None)
    report = session.finished(report, session.Options())
    assert (report.verdict, status(report)["edges/c"]) == (verdict, last) and ("--timeout" in report.reason) == (last == "skipped")


def test_checks_get_the_time_that_is_left():
    seen = []

    class Watched(faults.InProcess):
        def call(self, method, *arguments, timeout_s):
            if method == "run":
                seen.append((arguments[1], timeout_s))
            return super().call(method, *arguments, timeout_s=timeout_s)

    session.validate([cpu()], options(timeout_s=50.0), worker=Watched)
    assert all(0 < left <= 50 and limit <= left + 1 for left, limit in seen)
    assert [left for left, _ in seen] == sorted((left for left, _ in seen), reverse=True)


def test_failure_before_the_time_is_over_stays_a_failure():
    class Slow(faults.InProcess):
        def call(self, method, *arguments, timeout_s):
            if method == "run" and arguments[0] >= 2:
                raise WorkerError(HANG, "")
            return super().call(method, *arguments, timeout_s=timeout_s)

    report = session.validate([cpu()], options(faults.ScaledTile, timeout_s=60.0), worker=Slow).devices[0]
    assert report.verdict == "fail" and "--timeout" in report.reason


def test_soak_repeats_with_new_seeds_until_its_hours_are_over(monkeypatch):
    seeds = []
    clock = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])

    class Fake:
        def call(self, method, *arguments, timeout_s):
            if method == "listed":
                return [("accuracy/x", ("accuracy/x/out",), ""), ("edges/y", ("edges/y",), "")]
            number, _, seed = arguments
            seeds.append((number, seed))
            clock[0] += 600.0
            wrong = len(seeds) == 5
            name = ("accuracy/x/out", "edges/y")[number]
            return session.Done([Check(id=name, status="fail" if wrong else "pass", measured=float(len(seeds)), limit=9.0, seconds=600.0)])

        def close(self): ...

    chosen = options(level="soak", hours=1.0, seed=2**32 - 1, only=())
    report = run_device(cpu(), (IDENTITY, None, None), chosen, Fake(), Stop(), None, lambda *_: None)
    assert seeds == [(0, 2**32 - 1), (1, 2**32 - 1), (0, 0), (0, 1), (0, 2), (0, 3)]
    checks = {check.id: check for check in report.checks}
    assert checks["accuracy/x/out"].status == "fail" and checks["accuracy/x/out"].data["rounds"] == 5  # the worst is kept
    assert checks["accuracy/x/out"].seconds == 3000.0


def test_worker_that_does_not_start():
    class Dead:
        def call(self, *_, timeout_s):
            raise WorkerError(FAULT, "did not start: OSError: no libcuda")

        def close(self): ...

    report = session.validate([cpu()], options(), worker=lambda *_: Dead())
    assert report.verdict == "no_verdict" and "no libcuda" in report.devices[0].reason


def test_validator_that_raises_is_no_verdict():
    class Broken:
        def call(self, *_, timeout_s):
            raise KeyError("oops")

        def close(self): ...

    report = session.validate([cpu()], options(), worker=lambda *_: Broken())
    assert report.verdict == "no_verdict" and "KeyError" in report.devices[0].reason


class Full(Runner):
    def forward(self, inputs, plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB")


def test_out_of_memory_is_no_verdict():
    report = faults.validate(Full, only=("accuracy/fp16-d64-full",))
    assert report.verdict == "no_verdict"
    assert status(report)["accuracy/fp16-d64-full/out"] == "inconclusive"


def test_unknown_backend_for_this_device_is_no_verdict():
    report = faults.validate(only=("accuracy/fp16-d64-full",), backend="hip")
    assert report.verdict == "no_verdict" and status(report)["accuracy/fp16-d64-full/out"] == "inconclusive"
    assert any("runs on AMD GPUs" in check.detail for check in report.checks)


# ---------------------------------------------------------------- selection, listing, order
def test_only_selects_and_controls_always_run():
    report = faults.validate(only=("edges/one-*", "accuracy/fp16-d64-full/lse"))
    names = set(status(report))
    assert {name for name in names if not name.startswith("control/")} == {"edges/one-query", "accuracy/fp16-d64-full/lse"}
    assert report.verdict == "pass"


@pytest.mark.parametrize("pattern, name, chosen", [
    ("edges", "edges/no-keys", True), ("edges/", "edges/no-keys", True), ("edges/no-*", "edges/no-keys", True),
    ("accuracy/x", "accuracy/x/out", True), ("*/out", "accuracy/x/out", True), ("speed/forward", "speed/*", True),
    ("edges", "accuracy/edges", False), ("acc", "accuracy/x", False), ("speed", "accuracy/x", False), ("edges", "control/x", True),
])  # fmt: skip
def test_patterns(pattern, name, chosen):
    assert wanted(name, [pattern]) == chosen


@pytest.mark.parametrize("level", ["quick", "standard"])
def test_listing_names_what_a_run_reports(level):
    context = session.context_of(Runner(cpu()), session.Options(level=level, small=True))
    listed = [name for task in tasks(context) for name in task.ids]
    assert len(listed) == len(set(listed)) and {name.partition("/")[0] for name in listed} <= set(GROUPS)
    if level == "quick":
        found = {check.id for check in faults.validate().checks}
        ours = {name for name in listed if not name.endswith("*")}
        assert ours <= found
        assert all(name.startswith(("speed/", "signals/", "agreement/node/", "agreement/golden")) for name in found - ours)


def test_checks_come_in_the_order_of_groups_and_a_missing_control_is_no_verdict():
    checks = [Check(id="edges/x", status="pass"), Check(id="accuracy/x", status="pass")]
    report = session.finished(DeviceReport(identity=IDENTITY, verdict="no_verdict", checks=checks), session.Options())
    assert [check.group for check in report.checks] == ["accuracy", "edges"]
    assert report.verdict == "no_verdict" and report.reason


def test_strict_makes_warnings_failures():
    checks = [Check(id="control/x", status="pass"), Check(id="accuracy/x", status="pass"), Check(id="edges/x", status="warn")]
    device = DeviceReport(identity=IDENTITY, verdict="no_verdict", checks=checks)
    assert [session.finished(device, session.Options(strict=strict)).verdict for strict in (False, True)] == ["pass", "fail"]


def test_devices_run_at_the_same_time():
    together = threading.Barrier(3, timeout=30)

    class Meets:
        def call(self, method, *arguments, timeout_s):
            together.wait()
            return []

        def close(self): ...

    report = session.validate([cpu()] * 3, options(), worker=lambda *_: Meets())
    assert [device.reason for device in report.devices] == ["no check could pass"] * 3
