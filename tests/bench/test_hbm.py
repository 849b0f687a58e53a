"""Nsight Compute's CSV, read from samples, and predictions by counting."""

import pytest
import torch

from portable_flash import bench
from portable_flash.bench import hbm
from portable_flash.bench.suite import Case, parse_shape

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(launch, metric, unit, value):
    launched = f'"{launch}","77","python3.12","host","attention_forward","1","7","(128, 1, 1)","(8, 1024, 1)","0","9.0"'
    return f'{launched},"Command line profiler metrics","{metric}","{unit}","{value}"'


def test_bytes_are_summed_over_kernels_and_units():
    text = [
        "==PROF== Connected to process 77 (/usr/bin/python3.12)",
        '==PROF== Profiling "attention_forward": 0%....50%....100% - 1 pass',
        HEADER,
        line(0, "dram__bytes_read.sum", "byte", "402,653,184"),
        line(0, "dram__bytes_write.sum", "byte", "134217728"),
        line(0, "gpu__time_duration.sum", "ns", "900"),
        line(1, "dram__bytes_read.sum", "Mbyte", "12.5"),
        line(1, "dram__bytes_write.sum", "Kbyte", "1.5"),
        "==PROF== Disconnected from process 77",
    ]
    assert hbm.sum_metrics(text) == (402_653_184 + 134_217_728 + 12_500_000 + 1_500, 2)


@pytest.mark.parametrize("value", ["n/a", ""])
def test_an_unread_counter_is_not_zero(value):
    with pytest.raises(ValueError, match="dram__bytes_read.sum of attention_forward"):
        hbm.sum_metrics([HEADER, line(0, "dram__bytes_read.sum", "byte", value)])


def test_no_kernel_is_not_zero():
    with pytest.raises(ValueError, match="no kernel.*Failed to prepare"):
        hbm.sum_metrics(["==ERROR== Failed to prepare kernel for profiling", HEADER])


def test_predictions_at_the_papers_setting():
    device = hbm.detect("cpu")
    predicted = hbm.predict(hbm.PAPER_CASE, torch.float16, device, {})
    assert predicted["unfused"] == pytest.approx(25.2e9, rel=0.05)
    assert predicted["floor"] == pytest.approx(1.61e9, rel=0.01)
    assert "ours" not in predicted


def test_the_child_is_given_the_same_shape():
    for case in (hbm.PAPER_CASE, Case(1, 4, 2, 8, 16, 32, 24, True)):
        assert parse_shape(hbm.shape_text(case)) == case


def test_without_ncu_predictions_remain_and_the_gap_is_said(monkeypatch):
    monkeypatch.setattr(hbm.shutil, "which", lambda name: None)
    report = hbm.HbmReport(Case(1, 2, 2, 128, 128, 64, 64), "fp16", {})
    hbm.measure_hbm(report, torch.float16, torch.device("cpu"))
    assert report.predicted_for == "NVIDIA H200"
    assert report.measured_bytes == {} and set(report.not_measured) == set(hbm.MEASURED)
    assert report.predicted_bytes["unfused"] > report.predicted_bytes["floor"]


def fake_ncu(folder, monkeypatch, script):
    path = folder / "ncu"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_child_is_started_with_arguments_that_it_reads(monkeypatch, tmp_path):
    csv = "\n".join([HEADER, line(0, "dram__bytes_read.sum", "byte", "10"), line(0, "dram__bytes_write.sum", "byte", "5")])
    (tmp_path / "canned.csv").write_text(csv)
    fake_ncu(
        tmp_path,
        monkeypatch,
        f"""printf '%s\\n' "$@" > {tmp_path}/arguments
        while [ "$1" != --log-file ]; do shift; done
        cat {tmp_path}/canned.csv > "$2"
        """,
    )
    case = Case(1, 4, 2, 8, 16, 32, 24, True)
    assert hbm._profile_child("sdpa_flash", case, "fp16", torch.device("cpu")) == (15, 1)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert ["--profile-from-start", "off"] == arguments[arguments.index("--profile-from-start") :][:2]
    worker = bench._parser().parse_args(arguments[arguments.index("portable_flash.bench") + 1 :])
    assert (worker.hbm_worker, worker.shape, worker.dtype, worker.device) == ("sdpa_flash", [case], "fp16", "cpu")


def test_what_the_child_says_reaches_the_report(monkeypatch, tmp_path):
    fake_ncu(tmp_path, monkeypatch, "echo '==ERROR== the counters are taken' >&2\nexit 9\n")
    with pytest.raises(RuntimeError, match="exited with 9.*counters are taken"):
        hbm._profile_child("ours", Case(1, 2, 2, 128, 128, 64, 64), "fp16", torch.device("cpu"))
