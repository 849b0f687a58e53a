"""The command line on a machine without a GPU."""

import errno
import json

import pytest
from tune_fake import DEVICE, FakeNode, name

from portable_flash.cli import main as portable_flash
from portable_flash.database import read
from portable_flash.device import named
from portable_flash.tune import cli, running, writer
from portable_flash.tune.compiling import Job, precompile, resources
from portable_flash.tune.keys import Key
from portable_flash.tune.space import default, shortlist

ONE = ["--kernels", "forward", "--dtypes", "bf16", "--head-dims", "64", "--seqlens", "512", "--causal", "no"]
MI300X = named("mi300x")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--device", "auto"], 2, "--offline"), (["--device", "h200"], 2, "this machine has no GPU; add --offline"),
        (["--device", "h900"], 2, "known are"), (["--device", "cpu"], 2, "no tilings"),
        (["--device", "h200", "--backend", "hip"], 2, "AMD"), (["--device", "h200", "--explain", "x"], 2, "must be backend/kernel"),
        (["--device", "h200", "--head-dims", "512", "--list"], 2, "1 to 256"),
        (["--device", "mi50", "--backend", "triton", "--list"], 2, "no path for gfx906"),
        (["--device", "h200", "--explain", "hip/forward/bf16/d128/causal/s4096"], 2, "runs on AMD GPUs"),
        (["--device", "mi300x", "--offline", "--resume"], 2, "--resume: needs measurements"),
        (["--device", "mi300x", "--offline", "--verify-quality", "x"], 2, "--verify-quality: needs measurements"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_is_wrong(argv, code, says, capsys, monkeypatch):
    monkeypatch.setattr(cli, "all_devices", lambda: (named("cpu"),))
    assert portable_flash(["tune", *argv]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--budget", "-1"], ["--budget", "x"], ["--jobs", "0"], ["--kernels", "fwd"], ["--list", "--stale"]])
def test_a_wrong_option_ends_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["--device", "h200", *argv])
    assert error.value.code == 2 and argv[0] in capsys.readouterr().err


def test_looking_measures_and_writes_nothing(tmp_path, capsys):
    for argv in (["--list"], ["--dry-run"], ["--stale"], ["--explain", "triton/forward/bf16/d64/full/s512"]):
        assert cli.main(["--device", "h200", "--out", str(tmp_path), *ONE, *argv, "--json"]) == 0
        for line in capsys.readouterr().out.splitlines():
            json.loads(line)
        assert cli.main(["--device", "h200", "--out", str(tmp_path), *ONE, *argv]) == 0
        assert capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def run_fake(tmp_path, monkeypatch, *argv, **options):
    """The command as on a machine with an H200 whose worker is a fake."""
    from dataclasses import replace

    monkeypatch.setattr(cli, "all_devices", lambda: (replace(DEVICE, index=0), named("cpu")))
    node = FakeNode(**options)
    monkeypatch.setattr(running, "nodes_of", lambda target, arguments: ([node], None))
    return cli.main(["--device", "auto", "--out", str(tmp_path), *argv]), node


def test_a_whole_run_writes_the_file_and_resumes_for_nothing(tmp_path, monkeypatch, capsys):
    bad = shortlist(Key("triton", "forward", "bf16", 64, False, 512), DEVICE)[1]
    code, node = run_fake(tmp_path, monkeypatch, *ONE, "--json", "--block", bad=[(name(bad), "wrong")])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0 and node.worker.requests and lines[-1]["event"] == "done" and lines[-1]["keys"] == 1
    record = read(tmp_path / "nvidia" / "h200.yaml")
    forward = record.kernels["triton"]["forward"]
    entry = next(e for e in forward.entries if e.when(Key("triton", "forward", "bf16", 64, False, 512).problem()))
    assert entry.proof["source"] == "measured" and entry.proof["median_us"] <= entry.proof["default_us"]
    assert any(b(bad) for b in forward.blocked) and record.measured_with["torch"]
    assert set(record.kernels["triton"]) >= {"forward", "backward_dkv", "backward_dq"}  # those of the shipped file stay
    code, node = run_fake(tmp_path, monkeypatch, *ONE, "--resume")
    assert code == 0 and not node.worker.requests and not node.worker.launches and not node.compiled
    assert "1 of 1 keys" in capsys.readouterr().err
    code, _ = run_fake(tmp_path, monkeypatch, "--diff")
    assert code == 0 and "of 360 keys differ" in capsys.readouterr().out


def test_table_plot_and_file_are_made_again_from_the_journal(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "table.json", tmp_path / "plot.png"
    code, _ = run_fake(tmp_path, monkeypatch, *ONE, "--table", str(table), "--plot", str(picture))
    path = tmp_path / "nvidia" / "h200.yaml"
    before, first = path.read_text(), json.loads(table.read_text())
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG") and first["rows"][0]["speedup"] >= 1
    assert first["speedup"]["all"]["keys"] == 1 and "--table" in first["command"] and first["measured_with"]["torch"]
    for file in (path, table, picture):
        file.unlink()
    code, node = run_fake(tmp_path, monkeypatch, *ONE, "--rebuild", "--table", str(table), "--plot", str(picture))
    assert code == 0 and not node.worker.requests and path.read_text() == before and picture.exists()
    assert json.loads(table.read_text())["rows"][0]["median_us"] == first["rows"][0]["median_us"]
    monkeypatch.setattr(running, "space_of", lambda backend, kernel: "00000000")
    code, _ = run_fake(tmp_path, monkeypatch, *ONE, "--rebuild")
    assert code == 1 and "was made with another forward" in capsys.readouterr().err and path.read_text() == before
    code, _ = run_fake(tmp_path, monkeypatch, *ONE, "--rebuild", "--journal", str(tmp_path / "none"))
    assert code == 1 and "does not exist" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_ends_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(writer.tempfile, "NamedTemporaryFile", read_only)
    code, node = run_fake(tmp_path, monkeypatch, *ONE)
    error = capsys.readouterr().err
    assert code == 1 and not node.worker.requests and "Read-only file system" in error and "--out" in error and str(tmp_path) in error


def test_a_folder_that_becomes_read_only_keeps_the_journal_and_the_old_file(tmp_path, monkeypatch, capsys):
    run_fake(tmp_path, monkeypatch, *ONE)
    path = tmp_path / "nvidia" / "h200.yaml"
    before = path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "replace", lambda *arguments: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
        code, _ = run_fake(tmp_path, patch, *ONE[:-4], "--seqlens", "1024", "--causal", "no")
    assert code == 1 and "h200.yaml: cannot be written: Read-only file system" in capsys.readouterr().err
    assert path.read_text() == before and [p.name for p in path.parent.iterdir() if p.suffix not in (".yaml", ".lock")] == []
    code, node = run_fake(tmp_path, monkeypatch, *ONE[:-4], "--seqlens", "1024", "--causal", "no", "--resume")
    assert code == 0 and not node.worker.requests and path.read_text() != before


def test_a_budget_that_is_too_short_ends_with_its_own_code(tmp_path, monkeypatch, capsys):
    code, _ = run_fake(tmp_path, monkeypatch, "--kernels", "forward", "--budget", "0.5", slow=0.05)
    assert code == 3 and "--resume" in capsys.readouterr().err


def test_quality_is_measured_against_an_exhaustive_search(tmp_path, monkeypatch, capsys):
    file = tmp_path / "quality.json"
    key = "triton/forward/bf16/d64/full/s512"
    code, node = run_fake(tmp_path, monkeypatch, "--verify-quality", str(file), "--keys", key, slow=0.001)
    table = json.loads(file.read_text())
    (row,) = table["rows"]
    assert row["slower_than_best"] >= 1 and row["tried_exhaustively"] > row["tried_by_search"]
    asked = [str(arguments[0]) for _, arguments in node.worker.requests]
    assert asked[0] != key and sum(a != b for a, b in zip(asked, asked[1:], strict=False)) == 3  # another key goes before each way
    assert "another key" in table["gpu_s_counts"]
    assert code == (0 if table["passed"] else 1) and "--verify-quality" in table["command"]


def test_compiling_ahead_fills_the_cache_and_reports_what_fails(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    key = Key("triton", "forward", "bf16", 64, False, 512)
    assert precompile(Job("triton", "forward", key.problem(), default(key, DEVICE), DEVICE)).ok
    wrong = precompile(Job("hip", "forward", key.problem(), default(key, DEVICE), DEVICE))
    assert not wrong.ok and "does not compile" in wrong.reason
    found = resources(Job("hip", "forward", key.problem(), default(Key("hip", "forward", "bf16", 64, False, 512), MI300X), MI300X))
    assert found.ok and found.registers > 0 and found.spilled == 0 and found.shared_memory_bytes > 0 or "clang" in found.reason
