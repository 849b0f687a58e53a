"""Files as they lie about: what is no report is refused by name, and the others are compared."""

import gzip
import io
import json
import os
import random
import sys

import fleet_samples as samples
import pytest

from portable_flash.fleet import cli, gather
from portable_flash.validate.report import to_json


@pytest.fixture
def folder(tmp_path):
    """Three sound reports."""
    (tmp_path / "in").mkdir()
    for n in range(3):
        report = samples.sound(4 + 16 * n, random.Random(n))
        (tmp_path / "in" / f"{report.host}.json").write_text(to_json(report))
    return tmp_path / "in"


def compared(folder, *arguments: str) -> tuple[int, dict]:
    out = folder.parent / "fleet.json"
    code = cli.main(["compare", *arguments, "--json", str(out)])
    return code, json.loads(out.read_text())


def changed(change) -> bytes:
    facts = json.loads(to_json(samples.sound(4 + 16 * 9, random.Random(9))))
    change(facts)
    return json.dumps(facts).encode()


BOMB = gzip.compress(b" " * (64 << 20), 1)
BAD = {
    "empty": (b"", "empty"),
    "truncated": (changed(lambda facts: None)[:-500], "truncated|malformed"),
    "future": (changed(lambda facts: facts.update(schema=2)), "schema 2"),
    "no-schema": (b'{"a": 1}', "schema"),
    "list": (b"[1, 2]", "object"),
    "nested": (b"[" * 200_000, "object"),
    "nested-field": (changed(lambda facts: None)[:-1] + b', "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested|malformed"),
    "nan": (changed(lambda facts: facts.update(seconds=float("nan"))), "malformed|invalid"),
    "huge-number": (changed(lambda facts: None).replace(b'"seconds": 24.8', b'"seconds": 1e999'), "range"),
    "wrong-type": (changed(lambda facts: facts["devices"][0]["checks"][3].update(measured="high")), "checks"),
    "wrong-status": (changed(lambda facts: facts["devices"][0]["checks"][3].update(status="ok")), "status"),
    "no-time": (changed(lambda facts: facts.update(started="yesterday")), "yesterday"),
    "false-pass": (changed(lambda facts: facts["devices"][0]["checks"][3].update(status="fail")), "verdict"),
    "binary": (bytes(range(256)) * 40, "malformed|invalid|UTF"),
    "bomb": (BOMB, "more than 16 MiB"),
    "not-gzip": (b"\x1f\x8b" + b"x" * 100, "gzip"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_report_is_refused_by_name_and_the_others_are_compared(folder, name):
    import re

    (folder / f"{name}.json").write_bytes(BAD[name][0])
    code, document = compared(folder, str(folder))
    (finding,) = document["findings"]
    assert (finding["kind"], finding["subject"]) == ("refused", str(folder / f"{name}.json"))
    assert re.search(BAD[name][1], finding["detail"]), finding["detail"]
    assert (code, document["passed"], document["refused"]) == (2, 3, 1)
    assert compared(folder, str(folder), "--allow-missing")[0] == 0


def test_a_file_that_claims_a_gigabyte_is_not_read(folder):
    with open(folder / "huge.json", "wb") as file:
        file.truncate(1 << 30)  # takes no room on the disk
    _, document = compared(folder, str(folder))
    assert [f["kind"] for f in document["findings"]] == ["refused"] and "MiB" in document["findings"][0]["detail"]


def test_files_that_cannot_be_read(folder, tmp_path):
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    (folder / "loop.json").symlink_to(folder / "loop.json")
    os.mkfifo(folder / "pipe.json")  # would wait for a writer for ever
    (folder / "inside").mkdir()
    (folder / "inside" / "up").symlink_to(folder)  # a loop of folders
    code, document = compared(folder, str(folder), str(folder / "never.json"))
    assert code == 2 and document["passed"] == 3
    assert {os.path.basename(f["subject"]) for f in document["findings"]} == {"gone.json", "loop.json", "pipe.json", "never.json"}
    if os.geteuid() != 0:
        (folder / "locked.json").write_text("{}")
        (folder / "locked.json").chmod(0)
        assert "locked.json" in str(compared(folder, str(folder))[1]["findings"])


def test_names_with_spaces_and_line_ends(folder, monkeypatch):
    reports = sorted(folder.iterdir())
    odd = [folder / "with space.json", folder / "line\nend.json.gz", folder / "#$(touch x)'\".json"]
    for path, name in zip(reports, odd):
        path.rename(name)
        if name.suffix == ".gz":
            name.write_bytes(gzip.compress(name.read_bytes()))
    assert compared(folder, str(folder))[1]["passed"] == 3
    listed = folder.parent / "names"
    listed.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in odd))
    assert compared(folder, f"@{listed}")[1]["passed"] == 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(listed.read_bytes())))
    assert compared(folder, "-")[1]["passed"] == 3
    (folder / "line\nend.json.gz").write_bytes(b"{")
    (finding,) = compared(folder, str(folder))[1]["findings"]
    assert "\n" not in finding["subject"] and "line end" in finding["subject"]


def test_arguments_files_patterns_and_lists_name_each_report_once(folder):
    first = sorted(folder.iterdir())[0]
    listed = folder.parent / "names"
    listed.write_text("".join(f"{path}\n" for path in folder.iterdir()))
    code, document = compared(folder, str(first), str(folder / "*.json"), str(folder), f"@{listed}")
    assert (code, document["reports"], document["findings"]) == (0, 3, [])


@pytest.mark.parametrize("argument", ["nothing*.json", "@no-such-list", ""])
def test_arguments_that_name_nothing(folder, argument, capsys):
    argument = argument or str(folder.parent / "void")
    (folder.parent / "void").mkdir()
    assert cli.main(["compare", argument]) == 2
    assert argument in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_work_begins(folder, capsys):
    assert cli.main(["compare", str(folder / "never.json"), "--html", "/no/such/folder/x.html"]) == 2
    assert "--html" in capsys.readouterr().err


def test_outputs_overwrite_no_input(folder, capsys):
    report, names, hosts = sorted(folder.iterdir())[0], folder.parent / "names.json", folder.parent / "hosts"
    names.write_text(f"{report}\n")
    hosts.write_text("")
    before = report.read_bytes()
    for arguments, words in (
        ([str(report), "--json", str(report)], (f"--json {report}", f"comparison of {report}")),
        ([str(folder), "--html", str(folder / ".." / "in" / report.name)], ("--html", str(report))),
        ([f"@{names}", "--json", str(names)], ("--json", f"@{names}")),
        ([str(folder), "--expect", str(hosts), "--junit", str(hosts)], ("--junit", f"--expect {hosts}")),
        ([str(folder), "--html", str(folder / "new"), "--junit", str(folder / "new")], ("--html", "--junit")),
    ):
        assert cli.main(["compare", *arguments]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
    assert report.read_bytes() == before and names.read_text() == f"{report}\n" and hosts.read_text() == ""
    out = folder.parent / "kept"
    out.mkdir()
    (out / "link").symlink_to(out)
    for name in ("kept/x.json", "kept/link/x.json"):
        assert cli.main(["validate", "--ray", "127.0.0.1:1", "--out", str(out), "--json", str(folder.parent / name)]) == 2
        assert "--out" in (error := capsys.readouterr().err) and "--json" in error


def test_wrong_usage_exits_2_and_names_what_is_allowed(capsys):
    for arguments in (
        [],
        ["compare"],
        ["compare", "x.json", "--json"],
        ["validate"],
        ["validate", "--ray", "auto", "--level", "fast"],
        ["merge"],
    ):
        with pytest.raises(SystemExit) as error:
            cli.main(arguments)
        assert error.value.code == 2
    assert "quick" in capsys.readouterr().err
    assert cli.main(["compare", "x.json", "--expect", "/no/such/list"]) == 2
    assert "--expect /no/such/list" in capsys.readouterr().err


def test_memory_does_not_grow_with_the_size_of_reports():
    """Of a report of 2 MB, what stays is some ten kB."""
    import tracemalloc
    from dataclasses import replace

    from portable_flash.fleet.compare import Fleet

    fleet, kept = Fleet(), []
    for n in range(6):
        report = samples.sound(4 + 16 * n, random.Random(n))
        report = samples.with_checks(report, lambda c: replace(c, detail="x" * 30_000))
        if n == 1:
            tracemalloc.start()
        fleet.add(report, f"{n}.json")
        del report
        if n:
            kept.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (kept[-1] - kept[0]) / 4 < 40_000


def test_reports_need_msgspec(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert cli.main(["compare", str(folder)]) == 2
    assert 'pip install "portable-flash[fleet]"' in capsys.readouterr().err


def test_depth_of_folders_is_bounded(tmp_path):
    deep = tmp_path.joinpath(*["d"] * (gather.DEEPEST + 5))
    deep.mkdir(parents=True)
    (deep / "x.json").write_text("{}")
    with pytest.raises(gather.SourceError, match="no .json"):
        list(gather.names([str(tmp_path)]))
