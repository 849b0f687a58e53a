"""Recorded digests and times: the key, the file, what it refuses, and the comparison."""

import multiprocessing
import time
from dataclasses import replace

import pytest

from portable_flash.tune import writer
from portable_flash.validate import golden
from portable_flash.validate.golden import GoldenError, checks, compare, key, load, path_of, record
from portable_flash.validate.report import Check, DeviceReport, Digest, Identity, Report, Software

IDENTITY = Identity(
    index=0, name="NVIDIA H200", slug="h200", vendor="nvidia", arch="sm_90", compute_units=132, memory_bytes=1, uuid="GPU-1"
)  # fmt: skip
SOFTWARE = Software(portable_flash="0.1.0", python="3.11", torch="2.11.0", runtime="cuda 13.0", triton="3.6.0")
KEY = key(IDENTITY, SOFTWARE, "580.159", "19368ae3", "block_m=64", "triton")
CONTROL = Check(id="control/bit", status="pass")
RIGHT = Check(id="accuracy/a/out", status="pass")


def sha(letter: str) -> str:
    return letter * 64


def digest(case="bf16-d128", tensor="out", sha256=sha("a"), where=KEY) -> Digest:
    return Digest(case=case, tensor=tensor, backend="triton", key=where, sha256=sha256)


def timed(microseconds=100.0, **data) -> Check:
    more = {"timed": "forward/x", "key": KEY, "backend": "triton", "measured_us": microseconds} | data
    return Check(id="speed/forward/x", status="skipped", severity="info", data=more)


def report(*digests, verdict="pass", identity=IDENTITY, extra=(), driver="580.159", devices=None) -> Report:
    one = DeviceReport(identity=identity, verdict=verdict, driver=driver, checks=[CONTROL, RIGHT, *extra], digests=list(digests))
    return Report(
        host="node7", verdict=verdict, level="quick", seed=0, started="2026-01-01T00:00:00+00:00", seconds=1.0, strict=False, command=[],
        software=SOFTWARE, devices=devices or [one],
    )  # fmt: skip


# ------------------------------------------------------------------ key
def test_key_is_stable():
    """Pinned: a key that changes voids every file that operators have recorded."""
    assert KEY == "de9e8714a5e35ed6e21a2de19066059f"


@pytest.mark.parametrize(
    "change",
    [
        {"identity": replace(IDENTITY, slug="h100")}, {"identity": replace(IDENTITY, partition="MIG 1g.18gb")},
        {"identity": replace(IDENTITY, compute_units=114)}, {"software": replace(SOFTWARE, torch="2.11.1")},
        {"software": replace(SOFTWARE, triton="3.7.0")}, {"software": replace(SOFTWARE, runtime="cuda 13.1")}, {"driver": "580.160"},
        {"driver": None}, {"fingerprint": "1daa156f"}, {"tiling": "block_m=128"}, {"backend": "hip"},
    ],
)  # fmt: skip
def test_key_holds_all_that_bits_depend_on(change):
    given = {"identity": IDENTITY, "software": SOFTWARE, "driver": "580.159", "fingerprint": "19368ae3", "tiling": "block_m=64"}
    assert key(**(given | {"backend": "triton"} | change)) != KEY


def test_key_is_the_same_for_twins():
    twin = replace(IDENTITY, index=5, uuid="GPU-2", serial="9", pci_address="0000:5d:00.0", vbios="other", memory_bytes=2)
    assert key(twin, replace(SOFTWARE, python="3.12", platform="x"), "580.159", "19368ae3", "block_m=64", "triton") == KEY
    hip = key(IDENTITY, SOFTWARE, "580.159", "f", "t", "hip")
    assert key(IDENTITY, replace(SOFTWARE, triton=None), "580.159", "f", "t", "hip") == hip  # what HIP does not use


# ------------------------------------------------------------------ record and compare
def test_recorded_results_are_found_again(tmp_path):
    digests = [digest(), digest(tensor="lse", sha256=sha("b")), digest(case="fp16-d64", sha256=sha("c"))]
    (path,) = record(report(*digests, extra=[timed(1234567.8)]), tmp_path)
    assert path == tmp_path / "nvidia" / "h200.yaml"
    found = load(tmp_path, "nvidia", "h200")[KEY]
    assert found.digests == {"bf16-d128": {"out": sha("a"), "lse": sha("b")}, "fp16-d64": {"out": sha("c")}}
    assert found.speed_us == {"forward/x": 1234567.8}
    assert found.of["driver"] == "580.159" and found.of["name"] == "NVIDIA H200" and found.of["backend"] == "triton"
    judged = checks(digests, tmp_path, "nvidia", "h200")
    assert [c.id for c in judged] == ["agreement/golden/bf16-d128/out", "agreement/golden/bf16-d128/lse", "agreement/golden/fp16-d64/out"]
    assert {(c.status, c.group) for c in judged} == {("pass", "agreement")}
    text = path.read_text()
    assert text.startswith("# Made by") and max(map(len, text.splitlines())) < 240  # to be read in a diff


def test_other_bits_under_the_same_key_fail(tmp_path):
    record(report(digest()), tmp_path)
    bad = checks([digest(sha256=sha("f")), digest(case="new")], tmp_path, "nvidia", "h200")
    assert [(c.status, c.severity) for c in bad] == [("fail", "critical"), ("skipped", "info")]
    assert bad[0].hint and bad[0].data["recorded"] == sha("a") and "no record" in bad[1].detail


def test_another_key_is_no_failure(tmp_path):
    record(report(digest()), tmp_path)
    other = checks([digest(sha256=sha("f"), where="0" * 32)], tmp_path, "nvidia", "h200")
    assert [(c.id, c.status) for c in other] == [("agreement/golden", "skipped")] and "--record" in other[0].detail
    assert compare([], {})[0].status == "skipped"


def test_only_what_passed_is_recorded(tmp_path):
    for verdict in ("fail", "no_verdict"):
        with pytest.raises(GoldenError, match=verdict):
            record(report(digest(), verdict=verdict), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_gpu_without_a_known_driver_is_not_recorded(tmp_path):
    with pytest.raises(GoldenError, match="driver of NVIDIA H200"):
        record(report(digest(), driver=None), tmp_path)


def test_a_recorded_digest_is_replaced_only_when_asked(tmp_path):
    (path,) = record(report(digest(), extra=[timed(100.0)]), tmp_path)
    before = path.read_text()
    with pytest.raises(GoldenError, match="bf16-d128/out is recorded with other bits.*--replace"):
        record(report(digest(sha256=sha("d")), digest(case="more")), tmp_path)
    assert path.read_text() == before  # nothing of a refused recording
    record(report(digest(case="more"), extra=[timed(150.0)]), tmp_path)
    found = load(tmp_path, "nvidia", "h200")[KEY]
    assert set(found.digests) == {"bf16-d128", "more"} and found.speed_us == {"forward/x": 100.0}  # a record is not worn down
    differs = checks([digest(sha256=sha("d"))], tmp_path, "nvidia", "h200")
    failing = report(digest(sha256=sha("d")), verdict="fail", extra=[*differs, timed(150.0)])
    with pytest.raises(GoldenError, match="fail"):
        record(failing, tmp_path)
    record(failing, tmp_path, replace=True)
    found = load(tmp_path, "nvidia", "h200")[KEY]
    assert found.digests["bf16-d128"]["out"] == sha("d") and found.speed_us == {"forward/x": 150.0}


def test_replacing_excuses_no_other_failure(tmp_path):
    wrong = Check(id="accuracy/b/out", status="fail")
    with pytest.raises(GoldenError, match="fail"):
        record(report(digest(), verdict="fail", extra=[wrong]), tmp_path, replace=True)
    slow = replace(timed(300.0), status="fail")
    with pytest.raises(GoldenError, match="fail"):
        record(report(digest(), verdict="fail", extra=[slow]), tmp_path, replace=True)
    slow = replace(timed(300.0, record=golden.RECORDED), status="fail")
    record(report(digest(), verdict="fail", extra=[slow]), tmp_path, replace=True)


def test_devices_of_one_report_must_agree(tmp_path):
    def device(index, bits, microseconds):
        who = replace(IDENTITY, index=index)
        found = [CONTROL, RIGHT, timed(microseconds)]
        return DeviceReport(identity=who, verdict="pass", driver="580.159", checks=found, digests=[digest(sha256=bits)])

    with pytest.raises(GoldenError, match="differs among the devices"):
        record(report(devices=[device(0, sha("a"), 1.0), device(1, sha("b"), 1.0)]), tmp_path)
    record(report(devices=[device(i, sha("a"), us) for i, us in enumerate((90.0, 100.0, 170.0))]), tmp_path)
    assert load(tmp_path, "nvidia", "h200")[KEY].speed_us == {"forward/x": 100.0}


def test_names_that_yaml_would_read_as_something_else(tmp_path):
    names = ["yes", "1.5", 'quo"te: {', "null", "a: b", "#x", "-"]
    record(report(*(digest(case=name) for name in names)), tmp_path)
    assert set(load(tmp_path, "nvidia", "h200")[KEY].digests) == set(names)


# ------------------------------------------------------------------ files
GOOD = f'schema: 1\ndevice: {{vendor: nvidia, slug: h200}}\nrecords:\n  - key: "{KEY}"\n    digests:\n      c: {{out: "{sha("a")}"}}\n'


def test_the_documented_form_is_read():
    assert golden.parse(GOOD, "f", "nvidia", "h200")[KEY].digests == {"c": {"out": sha("a")}}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "empty"),
        ("schema: 2\ndevice: {}\nrecords: []\n", r":1: schema: 2: allowed are 1"),
        ("schema: 1\nrecords: []\n", "lacks device"),
        (GOOD.replace("h200", "h100"), r":2: device.slug: 'h100': allowed are h200"),
        (GOOD.replace("key:", "kee:"), r":4: records\[0\]\.kee: unknown field"),
        (GOOD.replace(KEY, "0xzz"), r":4: records\[0\]\.key: '0xzz': must be 32 hexadecimal digits"),
        (GOOD.replace(sha("a"), "abc"), r":6: records\[0\]\.digests\.c\.out: 'abc': must be a SHA-256"),
        (GOOD + GOOD.partition("records:\n")[2], r":7: records\[1\]\.key: .*given twice"),
        (GOOD + "    speed_us: {forward/x: -3}\n", r":7: records\[0\]\.speed_us\.forward/x: must be a positive number"),
        (GOOD + "    speed_us: {forward/x: .nan}\n", "must be a positive number"),
        (GOOD + f"    speed_us: {{forward/x: 1{'0' * 400}}}\n", "too large"),
        (GOOD.replace("records:", "records: &a"), "anchors and aliases"),
        (GOOD.replace('"' + KEY, '!!python/object/apply:os.system "' + KEY), "tags are not allowed"),
        ("schema: 1\ndevice: " + "[" * 5000, "nested deeper|nesting depth"),  # newer libyaml has a limit of its own
        (GOOD[: len(GOOD) // 2], "not YAML"),
        ("schema: 1\ndevice: {vendor: nvidia, slug: h200}\nrecords: {a: 1}\n", "must be a list"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_line_and_field(tmp_path, text, message):
    path = path_of(tmp_path, "nvidia", "h200")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(GoldenError, match=message) as caught:
        load(tmp_path, "nvidia", "h200")
    assert str(path) in str(caught.value)
    (check,) = checks([digest()], tmp_path, "nvidia", "h200")  # the run goes on, without a pass
    assert (check.id, check.status, check.severity) == ("agreement/golden", "inconclusive", "critical") and str(path) in check.detail
    with pytest.raises(GoldenError):
        record(report(digest()), tmp_path)
    assert path.read_text() == text


def test_files_that_are_no_text_or_too_large(tmp_path, monkeypatch):
    path = path_of(tmp_path, "nvidia", "h200")
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert checks([digest()], tmp_path, "nvidia", "h200")[0].status == "inconclusive"
    monkeypatch.setattr(golden, "MAX_BYTES", 100)
    path.write_text(GOOD)
    with pytest.raises(GoldenError, match="larger than 100 bytes"):
        load(tmp_path, "nvidia", "h200")
    path.unlink()
    with pytest.raises(GoldenError, match="remove records of old drivers"):
        record(report(digest()), tmp_path)
    assert not path.exists()
    path.mkdir()
    with pytest.raises(GoldenError, match="cannot be read"):
        load(tmp_path, "nvidia", "h200")


def test_a_slug_is_no_path(tmp_path):
    for slug in ("../x", "a/b", "", ".hidden"):
        with pytest.raises(GoldenError, match="no name for a file"):
            load(tmp_path, "nvidia", slug)
    assert load(tmp_path, "cpu", "cpu") == {}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GoldenError, match=r"--golden .*file: cannot be written"):
        record(report(digest()), tmp_path / "file")


def test_a_recording_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    (path,) = record(report(digest()), tmp_path)
    before = path.read_text()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.os, "replace", fails)
    with pytest.raises(GoldenError, match="No space left"):
        record(report(digest(case="more")), tmp_path)
    assert path.read_text() == before and not list(path.parent.glob(".h200*"))


def record_slowly(case, folder, barrier):
    """In a process of its own: all read before one writes, if nothing keeps them apart."""

    def reading(*arguments):
        found = load(*arguments)
        time.sleep(0.1)
        return found

    golden.load = reading
    barrier.wait(60)
    record(report(digest(case=case)), folder)


def test_recordings_at_the_same_time_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    jobs = [context.Process(target=record_slowly, args=(f"case{i}", tmp_path, barrier)) for i in range(6)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 6
    assert set(load(tmp_path, "nvidia", "h200")[KEY].digests) == {f"case{i}" for i in range(6)}


def test_default_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert golden.default_folder() == tmp_path / "portable_flash" / "golden"
