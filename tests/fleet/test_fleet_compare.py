"""What a comparison says of a fleet: exactly what is wrong in it."""

import json
import random
from dataclasses import replace

import fleet_samples as samples
import pytest

from portable_flash.fleet import expected, words
from portable_flash.fleet.compare import Fleet
from portable_flash.fleet.findings import FleetReport
from portable_flash.validate.report import Report, together

H200, A100 = 4, 0  # numbers of devices, modulo 16, are models


def fleet_of(*reports: Report, **options) -> FleetReport:
    fleet = Fleet()
    for place, report in enumerate(reports):
        fleet.add(report, f"{place}.json")
    return fleet.compare(**options)


def some(count: int, model: int = H200, seed: int = 7) -> list[Report]:
    """Sound devices of one model."""
    random_ = random.Random(seed)
    return [samples.sound(model + 16 * n, random_) for n in range(count)]


def named(result: FleetReport, *kinds: str) -> list[tuple[str, str]]:
    return [(f.kind, f.subject) for f in result.findings if not kinds or f.kind in kinds]


def test_2000_reports_give_exactly_what_is_wrong_within_30_s_and_500_mb(tmp_path):
    truth = samples.write(tmp_path / "fleet", 2000)
    document, cost = samples.timed(truth, tmp_path)
    assert samples.named(document) == truth.wrong
    assert cost["exit_code"] == 1 and document["verdict"] == "fail"
    assert (document["reports"], document["hosts"], document["missing"], len(document["models"])) == (2000, 2000, 2, 16)
    assert (document["failed"], document["passed"], document["no_verdict"]) == (4, 1996, 0)  # drift takes nobody's pass
    # one thread that never waits: its CPU time is what it takes on a machine with a core to spare
    assert cost["cpu_seconds"] < 30 and cost["peak_mb"] < 500, cost


def test_sound_fleets_are_never_accused():
    """12 fleets of 16 models with 3, 6 and 12 devices each: none may have a finding."""
    for seed in range(12):
        random_ = random.Random(1000 + seed)
        result = fleet_of(*(samples.sound(n, random_) for n in range(16 * (3, 6, 12)[seed % 3])))
        assert (result.verdict, named(result)) == ("pass", [])


# ------------------------------------------------------------------ outliers
def test_an_error_within_its_limit_but_far_from_its_kind():
    reports = some(12)
    id = "accuracy/fp32-d64-causal/out"
    result = fleet_of(*reports[:-1], samples.with_error(reports[-1], id, 2.4))
    (finding,) = result.findings
    assert (finding.kind, finding.subject, finding.checks) == ("error", f"{reports[-1].host} gpu 0", [id])
    assert finding.measured > finding.limit > finding.typical and finding.score > 3.5
    assert result.verdict == "fail" and result.models[0].failed == 1


def test_a_larger_error_of_a_whole_model_is_no_outlier():
    reports = [samples.with_error(r, "accuracy/fp32-d64-causal/out", 2.4) for r in some(12)]
    assert named(fleet_of(*reports)) == []


def test_models_are_not_measured_by_each_other():
    """A model with a larger error everywhere is not accused because of others."""
    id = "accuracy/bf16-d256-full/out"
    others = [samples.with_error(r, id, 2.6) for r in some(6, A100)]
    assert named(fleet_of(*some(12), *others)) == []


def test_two_devices_name_no_outlier():
    first, second = some(2)
    assert named(fleet_of(first, samples.with_error(second, "accuracy/fp32-d64-causal/out", 2.5))) == []


def test_slow_gpu_also_where_no_record_exists():
    def unrecorded(report: Report) -> Report:
        return samples.with_checks(report, lambda c: replace(c, status="skipped", measured=None, limit=None) if c.group == "speed" else c)

    random_ = random.Random(3)
    reports = [samples.sound(H200 + 16 * n, random_, slow=1.25 if n == 9 else 1.0) for n in range(12)]
    (finding,) = fleet_of(*map(unrecorded, reports)).findings
    assert (finding.kind, finding.subject) == ("slow", f"{reports[9].host} gpu 0")
    assert finding.measured == pytest.approx(1.25, abs=0.05)


def test_one_disturbed_timing_is_no_slow_gpu():
    reports = some(12)
    id = samples.SPEEDS[0]
    disturbed = samples.with_checks(reports[0], lambda c: replace(c, data=c.data | {"measured_us": 9e3}) if c.id == id else c)
    assert named(fleet_of(disturbed, *reports[1:])) == []


def test_what_failed_is_told_once_and_a_failing_model_is_told_as_such():
    reports = some(8)
    (finding,) = fleet_of(*reports[:-1], samples.with_failed_repeats(reports[-1])).findings
    assert (finding.kind, finding.checks) == ("failed", ["repeatability/load"]) and "drain the node" in finding.hint
    result = fleet_of(*map(samples.with_failed_repeats, reports[:6]), *reports[6:])
    assert all(f.kind == "failed" and "6 of 8 devices" in f.detail and "software" in f.hint for f in result.findings)


# ------------------------------------------------------------------ votes
def test_minority_is_named_with_its_numbers():
    reports = some(5)
    bad = samples.with_other_bits(reports[2], "fp16-d64-full", "lse")
    result = fleet_of(*reports[:2], bad, *reports[3:])
    (finding,) = result.findings
    (device,) = finding.devices
    identity = bad.devices[0].identity
    assert (finding.kind, device.host, device.uuid, device.serial) == ("minority", bad.host, identity.uuid, identity.serial)
    assert finding.checks == ["fp16-d64-full/lse (triton)"] and "4 among 5" in finding.detail
    assert result.models[0].compared == 5 and result.models[0].questions == 20


def test_without_a_majority_nobody_is_right():
    first, second = some(2)
    result = fleet_of(first, samples.with_other_bits(second, "fp16-d64-full", "lse"))
    (finding,) = result.findings
    assert (finding.kind, finding.count, result.verdict, result.models[0].no_verdict) == ("tie", 2, "no_verdict", 2)
    three = [samples.with_other_bits(r, "fp16-d64-full", "lse") for r in some(4)[:2]]  # 1 + 1 + 2 of 4
    assert named(fleet_of(*three, *some(4)[2:]))[0][0] == "tie"


def test_only_equal_keys_vote():
    """Another driver makes another key: its bits are nobody's minority, and it counts as not compared."""
    reports = some(5)
    other = samples.sound(H200 + 16 * 9, random.Random(1), driver="565.10")
    result = fleet_of(*reports, samples.with_other_bits(other, "fp16-d64-full", "lse"))
    assert [f.kind for f in result.findings] == ["drift"]
    assert (result.models[0].devices, result.models[0].compared) == (6, 5)
    assert words.headline(result).endswith("1 device had no other to share bits with.")


def test_a_device_that_answers_twice_is_in_the_minority():
    reports = some(5)
    device = reports[0].devices[0]
    twice = replace(device, digests=[*device.digests, replace(device.digests[0], sha256="f" * 64)])
    result = fleet_of(replace(reports[0], devices=[twice]), *reports[1:])
    assert named(result) == [("minority", f"{reports[0].host} gpu 0")]
    assert "two answers" in result.findings[0].detail


# ------------------------------------------------------------------ drift, duplicates
def with_kernel(report: Report, **changes) -> Report:
    device = report.devices[0]
    return replace(report, devices=[replace(device, kernels=[replace(device.kernels[0], **changes), *device.kernels[1:]])])


def test_drift_of_packages_kernels_tilings_and_units():
    reports = some(12)
    identity = reports[5].devices[0].identity
    fewer = replace(reports[5], devices=[replace(reports[5].devices[0], identity=replace(identity, compute_units=128))])
    changed = [
        replace(reports[0], software=replace(reports[0].software, torch="2.11.0", triton="3.6.0")),
        with_kernel(reports[1], fingerprint="other123"),
        with_kernel(reports[2], tiling="64x64, 4 warps"),
        fewer,
    ]
    result = fleet_of(*changed, *reports[6:])
    texts = {f.subject: f.detail for f in result.findings}
    assert {f.kind for f in result.findings} == {"drift"} and len(texts) == 4
    assert texts[f"{reports[0].host} gpu 0"] == "torch 2.11.0, most have 2.12.0; triton 3.6.0, most have 3.7.1"
    assert "kernel triton forward other123" in texts[f"{reports[1].host} gpu 0"]
    assert "tiling triton forward" in texts[f"{reports[2].host} gpu 0"]
    assert "compute units 128, most have 132" in texts[f"{reports[5].host} gpu 0"]
    assert result.verdict == "pass"
    assert fleet_of(*changed, *reports[6:], strict=True).verdict == "fail"


def test_versions_without_a_majority_are_all_named():
    reports = some(4)
    older = [replace(r, software=replace(r.software, torch="2.11.0")) for r in reports[:2]]
    result = fleet_of(*older, *reports[2:])
    assert [(f.kind, f.count) for f in result.findings] == [("drift", 2), ("drift", 2)]
    assert {f.detail for f in result.findings} == {"torch 2.11.0, no majority", "torch 2.12.0, no majority"}


def test_of_two_reports_the_newest_counts_and_the_fact_is_told():
    reports = some(4)
    old = replace(samples.with_failed_repeats(reports[0]), started="2026-11-29T09:15:02+00:00")
    for order in ((old, reports[0]), (reports[0], old)):
        result = fleet_of(*order, *reports[1:])
        (finding,) = result.findings
        assert (finding.kind, finding.weight, result.verdict, result.devices) == ("duplicate", "warn", "pass", 4)
        assert "older report of it failed" in finding.detail
    result = fleet_of(reports[0], *reports)
    assert named(result) == [("duplicate", f"{reports[0].host} gpu 0")] and result.findings[0].weight == "info"
    moved = replace(reports[0], host="elsewhere", started="2026-11-30T09:16:02Z")
    assert "also in reports of" in fleet_of(*reports, moved).findings[0].detail


def test_devices_of_one_report_are_never_one_device():
    """Not even where a virtual machine tells the same uuid for all."""
    report = some(1)[0]
    device = report.devices[0]
    result = fleet_of(replace(report, devices=[device, replace(device, identity=replace(device.identity, index=1))]))
    assert (result.devices, named(result)) == (2, [])
    without = replace(device.identity, uuid="GPU-00000000-0000", serial=None, pci_address=None)
    apart = [replace(r, devices=[replace(r.devices[0], identity=replace(without, uuid="00000000-0000"))]) for r in some(3)]
    assert fleet_of(*apart).devices == 3


# ------------------------------------------------------------------ missing, silent, verdicts
def test_missing_hosts_and_devices(tmp_path):
    hosts = tmp_path / "hosts.txt"
    first, second = some(2)
    hosts.write_text(f"# fleet\n{first.host}.cluster.local 2\n\n{second.host}  # short\nnode99999\n")
    wanted = expected.read([str(hosts)], ["h200=3", "NVIDIA H200=2", "mi300x=1"])
    result = fleet_of(first, second, expected=wanted)
    assert named(result) == [
        ("missing", f"{first.host}.cluster.local"),
        ("missing", "node99999"),
        ("missing", "h200"),
        ("missing", "mi300x"),
    ]
    assert [f.detail for f in result.findings][:3] == [
        "expected, 1 of 2 devices reported",
        "expected, no report",
        "expected, 2 of 3 devices reported",
    ]
    assert (result.verdict, result.missing) == ("no_verdict", 4)
    assert fleet_of(first, second, expected=wanted, allow_missing=True).verdict == "pass"
    hosts.write_text(first.host)
    (stranger,) = fleet_of(first, second, expected=expected.read([str(hosts)], [])).findings
    assert (stranger.kind, stranger.weight) == ("unexpected", "info") and second.host in stranger.detail


@pytest.mark.parametrize("text", ["node1 x", "node1 2 3"])
def test_bad_list_of_hosts(tmp_path, text):
    (tmp_path / "hosts.txt").write_text(f"node0\n{text}\n")
    with pytest.raises(expected.ExpectationError, match="line 2: .*a line is HOST or HOST DEVICES"):
        expected.read([str(tmp_path / "hosts.txt")], [])


@pytest.mark.parametrize("text", ["h200", "=3", "h200=", "h200=-1", "h200=x"])
def test_bad_count(text):
    with pytest.raises(expected.ExpectationError, match="expected MODEL=N"):
        expected.read([], [text])


def test_verdicts():
    reports = some(4)
    silent = replace(reports[0].devices[0], checks=[], verdict="no_verdict", reason="its worker died")
    dead = replace(reports[0], devices=[silent], verdict=together([silent.verdict]))
    result = fleet_of(dead, *reports[1:])
    assert (result.verdict, named(result), result.findings[0].detail) == (
        "no_verdict", [("no_verdict", f"{dead.host} gpu 0")], "its worker died",
    )  # fmt: skip
    assert fleet_of(dead, *reports[1:], allow_missing=True).verdict == "no_verdict"  # it did report
    assert fleet_of(dead, *map(samples.with_failed_repeats, reports[1:2]), *reports[2:]).verdict == "fail"
    empty = replace(reports[0], devices=[], verdict="no_verdict")
    assert named(fleet_of(empty, *reports[1:])) == [("no_verdict", empty.host)]
    wanted = expected.Expected({empty.host: None})
    assert ("missing", empty.host) in named(fleet_of(empty, *reports[1:], expected=wanted))
    assert fleet_of().verdict == "no_verdict"
    fleet = Fleet()
    fleet.add(reports[0], "0.json")
    fleet.refuse("1.json", "truncated")
    assert (fleet.compare().verdict, fleet.compare(allow_missing=True).verdict) == ("no_verdict", "pass")


def test_numbers_at_the_end_of_their_range_stay_numbers():
    reports = some(4)
    result = fleet_of(*reports[:3], samples.with_error(reports[3], "accuracy/bf16-d256-full/out", 1e307))
    from portable_flash.fleet.findings import to_json

    assert json.loads(to_json(result))["findings"][0]["kind"] == "error"
