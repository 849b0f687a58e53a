"""The command line: what it refuses, what it writes, and its exit codes."""

import json
import os
import subprocess
import sys

import pytest
from faults import InProcess

from portable_flash.validate import cli, session


@pytest.fixture(autouse=True)
def in_process(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(session, "make_worker", InProcess)
    monkeypatch.setattr(session.validate, "__defaults__", (*session.validate.__defaults__[:-1], InProcess))


FEW = ["--small", "--device", "cpu", "--only", "edges/one-query"]


@pytest.mark.parametrize("arguments, words", [
    (["--level", "deep"], ["--level", "deep", "quick"]),
    (["--device", "7"], ["--device 7", "cpu"]),
    (["--device", "gpu"], ["--device gpu", "cpu"]),
    (["--device", "cpu,"], ["--device cpu,", "''"]),
    (["--backend", "cuda"], ["--backend", "cuda", "triton"]),
    (["--seed", "-1"], ["--seed", "-1"]),
    (["--seed", "4294967296"], ["--seed", "4294967296", "4294967295"]),
    (["--timeout", "0"], ["--timeout", "'0'", "positive"]),
    (["--timeout", "nan"], ["--timeout", "'nan'"]),
    (["--level", "soak", "--hours", "x"], ["--hours", "'x'"]),
    (["--hours", "2"], ["--hours 2", "soak"]),
    (["--replace"], ["--replace", "--record"]),
    (["--only", "acuracy"], ["--only acuracy", "accuracy"]),
    (["--json", "/nowhere/at/all.json"], ["--json", "/nowhere/at"]),
    (["--json", "-", "--junit", "-"], ["--json", "--junit", "standard output"]),
    (["--html", "/tmp/../tmp/new", "--json", "/tmp/new"], ["--json", "--html", "/tmp/new"]),
    (["--from", "/nowhere.json"], ["/nowhere.json"]),
    (["--from", "r.json", "--device", "cpu", "--quiet"], ["--device: ", "--from"]),
    (["--from", "r.json", "--level", "quick", "--only", "edges", "--json", "-"], ["--level, --only: ", "--from"]),
    (["--from", "r.json", "--strict"], ["--strict: ", "--from"]),
])  # fmt: skip
def test_wrong_arguments_exit_2_and_name_the_argument(arguments, words, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and all(word in error for word in words) and "Traceback" not in error


def test_pass_writes_every_format_and_exits_0(tmp_path, capsys):
    paths = {name: tmp_path / f"report.{name}" for name in cli.FORMATS}
    assert cli.main([*FEW, *(text for name, path in paths.items() for text in (f"--{name}", str(path)))]) == 0
    assert "edges" in capsys.readouterr().out
    report = json.loads(paths["json"].read_text())
    assert report["verdict"] == "pass" and report["command"][:4] == ["portable-flash", "validate", "--small", "--device"]
    assert all(path.stat().st_size > 200 for path in paths.values())
    again = tmp_path / "again.html"
    assert cli.main(["--from", str(paths["json"]), "--html", str(again)]) == 0
    assert again.read_text() == paths["html"].read_text()


def test_json_to_standard_output_is_alone_there(capsys):
    assert cli.main([*FEW, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["devices"][0]["verdict"] == "pass" and "1/" in err or "0/" in err


def test_fail_exits_1_and_no_verdict_2(monkeypatch, capsys):
    plain = session.Options
    monkeypatch.setattr(session, "Options", lambda **chosen: plain(**chosen, runner="faults:ScaledTile"))
    assert cli.main([*FEW, "--quiet"]) == 1
    monkeypatch.setattr(session, "Options", lambda **chosen: plain(**chosen, runner="test_validate_session:Full"))
    assert cli.main([*FEW, "--quiet"]) == 2
    assert capsys.readouterr().out == ""


def test_records_and_compares(tmp_path, capsys):
    chosen = ["--small", "--device", "cpu", "--only", "agreement", "--golden", str(tmp_path / "golden"), "--quiet"]
    assert cli.main([*chosen, "--record"]) == 0
    assert "recorded in" in capsys.readouterr().err
    assert cli.main([*chosen, "--json", str(tmp_path / "r.json")]) == 0
    checks = json.loads((tmp_path / "r.json").read_text())["devices"][0]["checks"]
    assert [c["status"] for c in checks if c["id"].startswith("agreement/golden/")].count("pass") >= 10


def test_other_bits_than_recorded_fail(tmp_path, monkeypatch, capsys):
    chosen = ["--small", "--device", "cpu", "--only", "agreement", "--golden", str(tmp_path / "golden"), "--quiet"]
    assert cli.main([*chosen, "--record"]) == 0
    plain = session.Options
    monkeypatch.setattr(session, "Options", lambda **chosen: plain(**chosen, runner="faults:OtherBits"))
    assert cli.main(chosen) == 1
    assert cli.main([*chosen, "--record"]) == 2 and "only what passed is recorded" in capsys.readouterr().err


def test_list_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(session, "validate", None)
    assert cli.main(["--list", "--device", "cpu", "--level", "standard", "--only", "edges"]) == 0
    out = capsys.readouterr().out
    assert "edges/far-offsets" in out and "control/accuracy/tile-scaled" in out and "accuracy/bf16" not in out


def test_the_tool_runs_with_a_real_process(tmp_path):
    tool = os.path.join(os.path.dirname(__file__), "..", "..", "tools", "validate")
    done = subprocess.run([sys.executable, tool, *FEW, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
