"""Every fault is caught by the check that is for it, nothing else is blamed, and a clean device passes."""

import fnmatch
from dataclasses import replace

import faults
import pytest
import torch

from portable_flash.device import cpu
from portable_flash.reference import Verdict
from portable_flash.validate import session
from portable_flash.validate.checks import accuracy, agreement, control, memory, repeatability
from portable_flash.validate.context import Runner
from portable_flash.validate.report import DeviceReport, Digest, Identity


@pytest.fixture(autouse=True)
def one_thread_and_no_records(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def failed(report: DeviceReport) -> list[str]:
    return [check.id for check in report.checks if check.status == "fail"]


# What must be among the failures, and what alone may be: by accuracy's own tensor name where a fault has one
FAULTS = {
    "ScaledTile": (
        ["accuracy/bf16-d128-causal/out", "repeatability/units/*/out"], ["accuracy/*/out", "repeatability/units/*/out", "edges/*"],
    ),
    "StuckLane": (["accuracy/bf16-d128-causal/out", "accuracy/fp32-d64-causal/out"], ["accuracy/*/out", "edges/*"]),
    "NanRow": (["accuracy/bf16-d128-causal/out"], ["accuracy/*/out", "repeatability/units/*/out", "edges/*"]),
    "GradientsOnly": (
        ["accuracy/bf16-d128-causal/grad_key"], ["accuracy/*/grad_key", "repeatability/units/*/grad_key", "edges/*"],
    ),
    "LseOnly": (["accuracy/bf16-d128-causal/lse"], ["accuracy/*/lse", "repeatability/units/*/lse", "edges/*"]),
    "DroppedKeys": (["accuracy/bf16-d128-causal/out", "accuracy/fp16-d64-full/grad_value"], ["accuracy/*", "edges/*"]),
    "WrongHead": (["accuracy/bf16-d128-causal/out", "accuracy/bf16-d128-varlen-causal/out"], ["accuracy/*", "edges/*"]),
    "StrayWrite": (["memory/guards/bf16-d128-causal"], ["memory/guards/*"]),
    "Unwritten": (
        ["memory/unwritten/bf16-d128-causal", "accuracy/bf16-d128-causal/out", "edges/one-query"],
        ["memory/unwritten/*", "accuracy/*/out", "edges/*", "repeatability/*", "agreement/*"],
    ),
    "OtherBits": (["repeatability/units/*/out"], ["repeatability/units/*/out", "edges/layouts"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_at_quick_by_the_right_check(fault):
    needed, allowed = FAULTS[fault]
    report = faults.validate(getattr(faults, fault))
    found = failed(report)
    assert report.verdict == "fail"
    for pattern in needed:
        assert fnmatch.filter(found, pattern), f"{pattern} is not among {found}"
    assert not [name for name in found if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)]
    assert all(check.status == "pass" for check in report.checks if check.group == "control")
    assert all(check.hint and check.detail for check in report.checks if check.status == "fail")


@pytest.mark.parametrize("fault", ["ScaledTile", "StuckLane", "NanRow", "GradientsOnly", "LseOnly", "DroppedKeys", "WrongHead"])
def test_fault_is_caught_at_standard(fault):
    """Its own groups alone: standard's other groups are those of quick."""
    report = faults.validate(getattr(faults, fault), level="standard", only=("accuracy/bf16-d128-causal",))
    assert report.verdict == "fail" and fnmatch.filter(failed(report), FAULTS[fault][0][0])


def test_rare_flip_is_caught_at_standard():
    report = faults.validate(faults.RareFlip, level="standard", only=("repeatability/load",))
    found = {check.id: check for check in report.checks if check.status == "fail"}
    assert found and set(found) <= {f"repeatability/load/{case.name}/out" for case in repeatability.loaded_cases(_context("standard"))}
    check = found["repeatability/load/bf16-d128-causal/out"]
    assert 1 <= check.measured <= 3 and check.limit == 0 and check.data["runs"] >= 80
    assert check.data["bits"] == [0] and check.data["elements"] == 1 and check.data["tile_count"] == 1
    assert sum(c.data["runs"] for c in report.checks if c.id.endswith("/out") and "/load/" in c.id) >= 500


def _context(level="quick", runner=Runner):
    return session.context_of(runner(cpu()), session.Options(level=level, small=True))


@pytest.mark.parametrize("only", ["accuracy/fp16-d64-full", "edges/one-query"])
def test_unwritten_row_is_caught_also_where_memory_is_kind(only):
    assert any(name.startswith(only) for name in failed(faults.validate(faults.LuckyMemory, only=(only,))))


def test_digest_that_alternates_is_caught():
    report = faults.validate(faults.EverySecond, only=("agreement",))
    assert failed(report) and all(fnmatch.fnmatchcase(name, "agreement/digest/*") for name in failed(report))


@pytest.mark.parametrize("seed", [0, 4_000_000_000])
def test_clean_device_passes(seed):
    report = faults.validate(seed=seed)
    assert (report.verdict, report.reason, failed(report)) == ("pass", "", [])
    assert {check.status for check in report.checks} <= {"pass", "skipped"}
    groups = {check.group for check in report.checks if check.status == "pass"}
    assert groups >= {"control", "accuracy", "repeatability", "agreement", "backends", "edges", "memory"}
    assert len(report.inputs_sha256) == 64 and report.digests and report.kernels
    assert len({check.id for check in report.checks}) == len(report.checks)
    for check in report.checks:
        if check.status == "pass" and check.group in ("accuracy", "edges") and check.limit is not None:
            assert 0 <= check.measured <= check.limit


def test_inputs_follow_the_seed_and_digests_do_not():
    one, other = (faults.validate(seed=seed, only=("accuracy/fp16-d64-full", "agreement")) for seed in (1, 2))
    assert one.inputs_sha256 != other.inputs_sha256
    assert [(d.case, d.tensor, d.sha256) for d in one.digests] == [(d.case, d.tensor, d.sha256) for d in other.digests]


# ---------------------------------------------------------------- the judges themselves
def test_blind_judge_leaves_no_verdict(monkeypatch):
    """A validator that takes everything for right must not say pass."""
    blind = [Verdict(name, "pass") for name in ("out", "lse", "grad_query", "grad_key", "grad_value")]
    monkeypatch.setattr(accuracy, "judge", lambda call, found: blind)
    report = faults.validate(only=("accuracy/fp16-d64-full",))
    assert report.verdict == "no_verdict" and "control/accuracy/tile-scaled" in report.reason
    assert all(check.status == "pass" for check in report.checks if check.group == "accuracy")


@pytest.mark.parametrize("part, name, noticed", [
    (repeatability.Repeats, "runs", "repeatability/one-bit"), (agreement, "compare_node", "agreement/one-bit"),
    (control.Guarded, "disturbed", "memory/stray-write"),
])  # fmt: skip
def test_other_blind_judges_leave_no_verdict_either(part, name, noticed, monkeypatch):
    twins = {place: [control.Check(id="agreement/node/control", status="pass")] for place in range(3)}
    result = {"runs": 0, "compare_node": twins, "disturbed": {}}[name]
    monkeypatch.setattr(part, name, lambda *_: result)
    found = {check.id: check.status for check in control.check(_context())}
    assert found.pop(f"control/{noticed}") == "inconclusive" and set(found.values()) == {"pass"}


@pytest.mark.parametrize("how", control.CORRUPTIONS)
def test_controls_change_what_they_name(how):
    call = _context().draw(control.CASE)
    found = accuracy.computed(_context(), call, _context().plan(call))
    changed = {name for name, tensor in control.corrupted(how, found).items() if not torch.equal(tensor, found[name])}
    assert changed == {"lse" if how == "lse-shifted" else "grad_key" if how.startswith("gradient") else "out"}


def test_anatomy_of_a_stuck_lane():
    bits = torch.zeros(2, 3, 130, 64, dtype=torch.int16)
    bits[1, 2, 70:130, 7] = 0b101
    bits[1, 2, 70:130, 39] = 0b100
    found = repeatability.anatomy(bits)
    assert found["elements"] == 120 and found["bits"] == [0, 2] and found["lanes"] == [7] and found["same_position_modulo"] == 32
    assert list(zip(found["matrices"], found["tiles"])) == [(5, 1), (5, 2)] and found["first_index"] == [1, 2, 70, 7]


def test_anatomy_of_a_sign_bit():
    bits = torch.zeros(1, 1, 5, dtype=torch.int32)  # as lse
    bits[0, 0, 3] = torch.iinfo(torch.int32).min
    assert repeatability.anatomy(bits)["bits"] == [31]


def test_first_run_that_stands_alone_is_named():
    out = torch.randn(4, 8)
    repeats = repeatability.Repeats(out)
    for _ in range(3):
        repeats.add(out + 1)
    check = repeatability.as_check("repeatability/x", repeats, 3, 0.0)
    assert check.status == "fail" and "first run stands alone" in check.detail


# ---------------------------------------------------------------- a node of several devices
def _device(index: int, sha: str, key: str = "k") -> DeviceReport:
    identity = Identity(index=index, name="x", slug="x", vendor="nvidia", arch="sm_90", compute_units=1, memory_bytes=1)
    return DeviceReport(identity=identity, verdict="pass", digests=[Digest(case="c", tensor="out", backend="triton", key=key, sha256=sha)])


@pytest.mark.parametrize("shas, statuses", [
    ("aaa", ["pass"] * 3), ("aba", ["pass", "fail", "pass"]), ("ab", ["inconclusive"] * 2), ("a", ["skipped"]),
    ("aabb", ["inconclusive"] * 4), ("aabbc", ["inconclusive"] * 5), ("aaabc", ["pass", "pass", "pass", "fail", "fail"]),
])  # fmt: skip
def test_votes_of_a_node(shas, statuses):
    votes = agreement.compare_node([_device(i, sha) for i, sha in enumerate(shas)])
    assert [check.status for place in range(len(shas)) for check in votes[place]] == statuses
    if "fail" in statuses:
        minority = [i for i, status in enumerate(statuses) if status == "fail"]
        for place, checks in votes.items():
            assert ("this device" in checks[0].detail) == (place in minority)
            assert statuses[place] == "fail" or str(minority[0]) in checks[0].detail


def test_devices_with_other_software_are_not_compared():
    votes = agreement.compare_node([_device(0, "a", "k1"), _device(1, "b", "k2")])
    assert [checks[0].status for checks in votes.values()] == ["skipped", "skipped"]


def test_one_device_of_three_computes_other_bits():
    """All three run; the same wrong bit each time is below every limit of error, and the vote alone names the device."""
    wrong = iter([Runner, faults.OtherBits, Runner])

    def worker(device, options, threads, facts):
        runner = next(wrong)
        return faults.InProcess(device, replace(options, runner=f"{runner.__module__}:{runner.__name__}"), threads, facts)

    options = session.Options(small=True, only=("agreement",))
    report = session.validate([cpu()] * 3, options, worker=worker)
    assert [device.verdict for device in report.devices] == ["pass", "fail", "pass"] and report.verdict == "fail"
    assert {name.split("/")[1] for name in failed(report.devices[1])} == {"node"}


# ---------------------------------------------------------------- memory
def test_transfer_is_for_gpus_and_guards_for_all():
    names = [name for task in memory.tasks(_context()) for name in task.ids]
    assert "memory/transfer" not in names and "memory/guards/bf16-d128-causal" in names
