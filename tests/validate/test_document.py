"""Reading and writing of reports: every type checked, every refusal by name, never half a file."""

import gzip
import json
import os
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import SAMPLES, checks, clean, device, failing, node, report
from tools import require_module

from portable_flash.validate import document, html, junit, terminal
from portable_flash.validate.report import to_json

TEXT = to_json(clean())


@pytest.fixture(autouse=True)
def _msgspec():
    require_module("msgspec")


# ---------------------------------------------------------------- reading
@pytest.mark.parametrize("name", SAMPLES)
def test_a_report_comes_back_as_it_was(name, tmp_path):
    made = SAMPLES[name]()
    path = tmp_path / "a report.json"
    path.write_text(to_json(made))
    (tmp_path / "r.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert document.read(path) == document.read(str(path)) == document.read(path.read_bytes()) == made
    assert document.read(tmp_path / "r.json.gz") == made


def test_fields_of_a_later_version_are_ignored():
    data = json.loads(TEXT)
    data["later"] = {"a": [1, 2]}
    data["devices"][0]["checks"][0]["later"] = 3
    assert document.read(json.dumps(data).encode()) == clean()


REFUSED = {
    "truncated": (TEXT[:-900], "truncated"),
    "empty": ("  \n", "empty"),
    "no JSON": ("hello", "malformed"),
    "a list": ("[]", "got `array`"),
    "another document": ('{"name": "x"}', "field schema is missing"),
    "a later schema": (TEXT.replace('"schema": 1', '"schema": 2'), "schema 2: this version reads 1"),
    "a later schema of another shape": ('{"schema": 7, "nodes": []}', "schema 7: this version reads 1"),
    "schema as text": (TEXT.replace('"schema": 1', '"schema": "1"'), "`schema`"),
    "schema as truth": (TEXT.replace('"schema": 1', '"schema": true'), "`schema`"),
    "wrong status": (TEXT.replace('"status": "pass"', '"status": "good"', 1), "'good' in `devices[0].checks[0].status`"),
    "text for a number": (TEXT.replace('"measured": 0.62', '"measured": "0.62"', 1), "`devices[0].checks[0].measured`"),
    "missing field": (TEXT.replace('"id": "acc', '"idx": "acc', 1), "field `id` in `devices[0].checks[0]`"),
    "NaN": (TEXT.replace("0.62", "NaN", 1), "malformed"),
    "infinity": (TEXT.replace("0.62", "1e999", 1), "out of range"),
    "nested list in data": (TEXT.replace('"rms_ratio": 1.01', '"rms_ratio": [[1]]', 1), "data"),
    "huge seed": (TEXT.replace("20260611", "9" * 400), "seed: an integer beyond 64 bits"),
    "huge size": (TEXT.replace('"compute_units": 132', '"compute_units": -' + "9" * 30), "devices[0].identity: an integer beyond"),
    "huge datum": (TEXT.replace('"runs": 5', '"runs": [1, ' + "9" * 400 + "]", 1), ".data: an integer beyond 64 bits"),
    "unknown level": (TEXT.replace('"level": "quick"', '"level": "lazy"'), "level 'lazy': allowed are quick, standard, soak"),
    "time without a zone": (TEXT.replace("+00:00", ""), "started '2026-11-30T09:15:02'"),
    "no time": (TEXT.replace("2026-11-30T09:15:02+00:00", "yesterday"), "started 'yesterday'"),
    "deep in a known field": (TEXT.replace('"command": [', '"command": [' + "[" * 100_000, 1), "nested too deeply"),
    "deep in an unknown field": ('{"schema": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "unpaired surrogate": (TEXT.replace("node-017", "\\ud800"), "malformed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what):
    text, words = REFUSED[what]
    with pytest.raises(document.ReportError) as caught:
        document.read(text.encode(), label="reports/node-3.json")
    assert str(caught.value).startswith("reports/node-3.json: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_no_text():
    with pytest.raises(document.ReportError, match="f.json: .*UTF-8"):
        document.read(TEXT.encode().replace(b"node-017", b"\xff\xfe"), "f.json")


def test_whatever_is_read_can_be_rendered():
    """One value of a document replaced by anything: it is refused by name, or every form can be made of it."""
    draw = random.Random(1)
    numbers = [-1, 0, 3, 2**63, -(2**64), 10**40, 0.5, -1e308, 1e-308]
    values = [*numbers, None, True, "", "x", "\x00\x1b\u202e", "pass", [], [1], ["x"], {}, {"x": 1}]
    found = [check for check in failing().devices[0].checks if check.group in ("repeatability", "speed", "control")]
    small = report([device(found=found[8:])])
    outcomes = Counter()
    for _ in range(200):
        data = json.loads(to_json(small))
        holder, key = draw.choice(list(leaves(data)))
        holder[key] = draw.choice(values)
        try:
            found = document.read(json.dumps(data).encode(), "f.json")
        except document.ReportError as error:
            assert str(error).startswith("f.json: ")
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        for render in (*document.formats().values(), terminal.plain):
            assert render(found)
    assert min(outcomes["read"], outcomes["refused"]) > 40, outcomes


def leaves(data):
    """(holder, key) of every value in a document."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, (dict, list)):
            yield from leaves(value)


@pytest.mark.parametrize("field", ['"status": "pass"', '"level": "quick"', '"started": "2026-11-30T09:15:02+00:00"'])
def test_errors_are_safe_to_print(field):
    name = field.partition(": ")[0]
    bad = '"\\u001b[2J\\n' + "y" * 5000 + '"'
    with pytest.raises(document.ReportError) as caught:
        document.read(TEXT.replace(field, f"{name}: {bad}", 1).encode())
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_size_is_bounded(tmp_path, packed):
    path = tmp_path / "large.json"
    raw = b" " * (document.MAX_BYTES + 1)
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.raises(document.ReportError, match="large.json: more than 16 MiB"):
        document.read(path)


def test_broken_gzip():
    with pytest.raises(document.ReportError, match="f.json.gz: gzip"):
        document.read(gzip.compress(TEXT.encode())[:-20], "f.json.gz")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would block
    for name, words in (("pipe", "not a regular file"), (".", "not a regular file"), ("none.json", "No such file")):
        with pytest.raises(document.ReportError, match=words) as caught:
            document.read(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(document.ReportError, match="null"):
        document.read("a\0b")


def test_counts_are_bounded(monkeypatch):
    monkeypatch.setattr(document, "MAX_DEVICES", 7)
    with pytest.raises(document.ReportError, match="8 devices: at most 7"):
        document.read(to_json(node(8)).encode())
    monkeypatch.setattr(document, "MAX_CHECKS", 10)
    with pytest.raises(document.ReportError, match=r"devices\[0\] has \d+ checks: at most 10"):
        document.read(TEXT.encode())


def test_a_verdict_that_the_checks_do_not_bear_out():
    found = failing().devices[0].checks
    for claim, made in (("pass", "fail"), ("no_verdict", "fail")):
        with pytest.raises(document.ReportError, match=rf"devices\[0\].verdict is {claim}, but its checks make it {made}"):
            document.read(to_json(report([device(found=found, verdict=claim)])).encode())
    with pytest.raises(document.ReportError, match="make it no_verdict"):
        document.read(to_json(report([device(found=[c for c in checks() if c.group != "control"], verdict="pass")])).encode())
    with pytest.raises(document.ReportError, match=r": verdict is pass, but its devices make it fail"):
        document.read(to_json(replace(failing(), verdict="pass")).encode())
    for changes in ({"verdict": "fail"}, {"verdict": "fail", "reason": "stopped"}, {"verdict": "no_verdict"}):  # all of them passed
        with pytest.raises(document.ReportError, match=rf"devices\[0\].verdict is {changes['verdict']}, but its checks make it pass"):
            document.read(to_json(report([device(**changes)])).encode())
    with pytest.raises(document.ReportError, match=r"devices\[0\].verdict is no_verdict, but its checks make it fail"):
        document.read(to_json(report([device(found=found, verdict="no_verdict", reason="stopped")])).encode())
    for claim in ("fail", "no_verdict"):
        with pytest.raises(document.ReportError, match=rf": verdict is {claim}, but its devices make it pass"):
            document.read(to_json(replace(clean(), verdict=claim)).encode())
    harsher = report([device(verdict="no_verdict", reason="stopped")])
    assert document.read(to_json(harsher).encode()) == harsher  # a run may say less than its checks would


def test_without_msgspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ModuleNotFoundError, match=r"msgspec: pip install \"portable-flash\[fleet\]\""):
        document.read(TEXT.encode())


# ---------------------------------------------------------------- schema
def test_schema_file_is_that_of_the_dataclasses():
    path = Path(document.__file__).with_name("report.schema.json")
    assert path.read_text() == document.schema_text(), "make it again: see the head of document.py"


def test_reports_follow_the_schema():
    require_module("jsonschema")
    import jsonschema

    validator = jsonschema.Draft202012Validator(document.schema())
    validator.check_schema(document.schema())
    for make in SAMPLES.values():
        validator.validate(json.loads(to_json(make())))
    for change in ({"schema": 2}, {"verdict": "good"}, {"level": "lazy"}, {"seconds": "1"}, {"devices": [{}]}):
        assert not validator.is_valid(json.loads(TEXT) | change), change
    assert not validator.is_valid({name: value for name, value in json.loads(TEXT).items() if name != "schema"})


# ---------------------------------------------------------------- writing
def test_every_format_of_a_file_that_was_read(tmp_path, capsys):
    (tmp_path / "r.json").write_text(to_json(failing()))
    outputs = {name: tmp_path / f"out.{name}" for name in document.formats()}
    assert list(outputs) == ["json", "junit", "prometheus", "html"]
    document.write(document.read(tmp_path / "r.json"), outputs)
    for name in ("junit", "prometheus", "html"):
        assert outputs[name].read_text() == document.formats()[name](failing())
    assert json.loads(outputs["json"].read_text()) == json.loads(to_json(failing()))  # an integer may have become 0.0
    document.write(failing(), {"json": "-"})
    assert capsys.readouterr().out == to_json(failing())
    with pytest.raises(ValueError, match="format 'pdf': allowed are json, junit, prometheus, html"):
        document.write(failing(), {"pdf": tmp_path / "x"})


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "r.prom"
    document.write_text(path, "old\n", "--prometheus")
    seen = []

    def refuse(source, target):
        seen.append(Path(source).read_text())
        assert Path(source).parent == tmp_path and not source.endswith(".prom")  # a collector must not read it
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(document.OutputError, match=r"--prometheus: cannot write .*r\.prom: No space left on device"):
            document.write_text(path, "new\n", "--prometheus")
    assert seen == ["new\n"] and path.read_text() == "old\n" and os.listdir(tmp_path) == ["r.prom"]
    document.write_text(path, "new\n", "--prometheus")
    assert path.read_text() == "new\n" and os.listdir(tmp_path) == ["r.prom"]


def test_others_may_read_what_is_written(tmp_path):
    before = os.umask(0o022)
    try:
        document.write_text(tmp_path / "r.prom", "x\n", "--prometheus")
    finally:
        os.umask(before)
    assert (tmp_path / "r.prom").stat().st_mode & 0o777 == 0o644


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "r.json")
    document.write_text(tmp_path / "link.json", "x\n", "--json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real" / "r.json").read_text() == "x\n"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        document.write_text(tmp_path / "pipe", "y\n", "--json")
        assert os.read(reader, 10) == b"y\n" and (tmp_path / "pipe").is_fifo()
    finally:
        os.close(reader)


def test_what_cannot_be_written_is_said_at_once(tmp_path, monkeypatch):
    for path, words in ((tmp_path, "it is a folder"), (tmp_path / "no" / "r.html", "there is no folder")):
        with pytest.raises(document.OutputError, match=rf"--html: cannot write .*: {words}"):
            document.check_writable(path, "--html")
        with pytest.raises(document.OutputError, match=words):
            document.write_text(path, "x", "--html")
    document.check_writable(tmp_path / "r.html", "--html")
    document.check_writable("-", "--html")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(document.OutputError, match="no permission"):
        document.check_writable(tmp_path / "r.html", "--html")


def test_outputs_overwrite_no_input_and_not_each_other(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "r.json")
    (tmp_path / "folder").symlink_to(tmp_path)
    os.link(tmp_path / "r.json", tmp_path / "hard")
    read = [("--from r.json", str(tmp_path / "r.json"))]
    for name in ("r.json", "link", "hard", "folder/r.json", "./r.json"):
        with pytest.raises(document.OutputError, match=r"--html .*: would overwrite what --from r.json reads"):
            document.check_outputs({"--html": f"{tmp_path}/{name}"}, read)
        with pytest.raises(document.OutputError, match="--json and --html: both are .*; each needs"):
            document.check_outputs({"--json": f"{tmp_path}/r.json", "--html": f"{tmp_path}/{name}"})
    with pytest.raises(document.OutputError, match="--json and --html: both are"):
        document.check_outputs({"--json": f"{tmp_path}/new", "--html": f"{tmp_path}/folder/new"})
    with pytest.raises(document.OutputError, match="--json and --html: only one fits on standard output"):
        document.check_outputs({"--json": "-", "--html": "-"})
    document.check_outputs({"--json": f"{tmp_path}/new", "--junit": f"{tmp_path}/other", "--html": "-"}, read)
    document.check_outputs({"--json": os.devnull, "--html": os.devnull}, [("--from -", "-")])
    assert sorted(os.listdir(tmp_path)) == ["folder", "hard", "link", "r.json"]


def test_one_format_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def broken(report):
        raise RuntimeError("no")

    monkeypatch.setattr(junit, "render", broken)
    outputs = {"junit": tmp_path / "r.xml", "prometheus": tmp_path / "no" / "r.prom", "json": tmp_path / "r.json"}
    with pytest.raises(RuntimeError, match="no"):
        document.write(clean(), outputs)
    assert os.listdir(tmp_path) == ["r.json"] and document.read(tmp_path / "r.json") == clean()


def test_html_without_jinja2_is_said_before_the_run(monkeypatch):
    document.check_writable("-", "--html")
    html.environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match="--html needs jinja2"):
        document.check_writable("-", "--html")
    document.check_writable("-", "--json")
