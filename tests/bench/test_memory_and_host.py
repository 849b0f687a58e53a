"""Peak memory by the allocator's own events, and host time, on the CPU."""

import json
import math

import pytest
import torch

from portable_flash import bench
from portable_flash.bench.host import CALLS
from portable_flash.bench.memory import measure_point, peak_extra_bytes
from portable_flash.bench.records import Outcome
from portable_flash.bench.report import plain_table, speed_cell
from portable_flash.bench.suite import Case

CPU = torch.device("cpu")


def test_peak_counts_what_is_alive_together():
    def call():
        first = torch.empty(1_000_000, dtype=torch.uint8)
        second = torch.empty(2_000_000, dtype=torch.uint8)
        del first, second
        return torch.empty(500_000, dtype=torch.uint8)

    assert peak_extra_bytes(call, CPU) == pytest.approx(3_000_000, rel=0.01)


def test_peak_sees_inside_custom_operators():
    library = torch.library.Library("portable_flash_bench_test", "DEF")
    library.define("scratch(Tensor x) -> Tensor")

    def scratch(x):
        torch.empty(1_000_000, dtype=torch.uint8)
        return x.clone()

    library.impl("scratch", scratch, "CPU")
    assert peak_extra_bytes(lambda: torch.ops.portable_flash_bench_test.scratch(torch.ones(8)), CPU) >= 1_000_000


def test_memory_grows_linearly_beside_quadratic(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, figure = tmp_path / "memory.json", tmp_path / "memory.png"
    argv = ["--memory", "--device", "cpu", "--shape", "1,2,2,1,1,32", "--lengths", "512,1024", "--out", str(out), "--plot", str(figure)]
    assert bench.main(argv) == 0
    points = {(point["peer"], point["seqlen"]): point["extra_bytes"] for point in json.loads(out.read_text())["points"]}
    exponent = {peer: math.log2(points[peer, 1024] / points[peer, 512]) for peer in ("ours", "unfused")}
    assert exponent["ours"] < 1.2 and exponent["unfused"] > 1.8, exponent
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "beyond results" in capsys.readouterr().out


def test_unfused_stops_before_it_fills_the_host(tmp_path):
    out = tmp_path / "memory.json"
    bench.main(["--memory", "--device", "cpu", "--shape", "1,1,1,1,1,16", "--lengths", "256", "--out", str(out)])
    assert all(point["extra_bytes"] for point in json.loads(out.read_text())["points"])
    point = measure_point("unfused", Case(1, 16, 16, 16384, 16384, 16, 16), torch.float32, CPU)
    assert point.extra_bytes is None and "GiB" in point.reason


def test_host_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CALLS, "cpu", 3)
    out = tmp_path / "host.json"
    assert bench.main(["--host", "--device", "cpu", "--shape", "1,2,2,16,16,16", "--dtype", "fp32", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert set(data["microseconds"]) == {"without_grad", "with_grad"}
    assert all(times["ours"] > 0 and times["sdpa"] > 0 for times in data["microseconds"].values())
    assert data["calls_per_batch"] == 3 and "best of 5 batches of 3" in capsys.readouterr().out


def test_plain_table_is_aligned():
    lines = plain_table("title", ["case", "x"], [["a", "1.0"], ["long name", "22.0"]], ["a note"]).splitlines()
    assert lines == ["title", "case          x", "a           1.0", "long name  22.0", "a note"]


def test_cells_show_three_digits_and_the_spread():
    def cell(tflops, ratio):
        return speed_cell(Outcome("ok", median_us=100.0, p20_us=80.0, p80_us=125.0, tflops=tflops, ratio=ratio))

    assert cell(600.0, 1.2345) == "600 (480-750) 1.23x"
    assert cell(0.004, None) == "0.00400 (0.00320-0.00500)"
    assert speed_cell(Outcome("refused", "no")) == "-" and speed_cell(Outcome("wrong", "no")) == "WRONG"
