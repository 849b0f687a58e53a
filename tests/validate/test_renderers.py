"""A report at a terminal, as JUnit XML and as metrics: the verdict, every check that did not pass, and no hostile text obeyed."""

import io
import re
import sys
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from report_samples import SAMPLES, changed, checks, device, failing, hostile, no_verdict, report, soak
from tools import require_module

from portable_flash.validate import junit, prometheus, summary, terminal
from portable_flash.validate.report import EXIT_CODES, Check

WORDS = {"pass": "PASS", "fail": "FAIL", "no_verdict": "NO VERDICT"}


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


# ---------------------------------------------------------------- terminal
def through_rich(made, width: int, **options) -> str:
    require_module("rich")
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    terminal.render(made, console)
    return console.file.getvalue()


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "hostile"])
@pytest.mark.parametrize("width", [40, 70, 100, 160])
@pytest.mark.parametrize("form", [terminal.plain, through_rich], ids=["plain", "rich"])
def test_the_terminal_says_it_all(name, width, form):
    made = SAMPLES[name]()
    text = form(made, width)
    assert text.startswith(f"{WORDS[made.verdict]}  {made.host}")
    assert max(map(len, text.splitlines())) <= width
    said = squeezed(text)
    for each in made.devices:
        facts = [each.identity.name, each.identity.uuid, each.identity.serial, each.driver, each.reason]
        for fact in filter(None, facts):
            assert squeezed(fact) in said
        for check in each.checks:
            if check.status != "pass":
                for fact in (check.id, check.detail, check.hint):
                    assert squeezed(fact) in said, check.id
                if check.status != "skipped":
                    assert squeezed(f"{check.status.upper()}{check.id}({check.severity}){summary.measured(check)}") in said
        for members in summary.groups(each.checks).values():
            worst = summary.worst(members)
            if worst is not None:
                value = f"{summary.number(worst.measured)} of {summary.number(worst.limit)}, {worst.id.partition('/')[2]}"
                assert squeezed(value) in said
    assert squeezed(summary.NOT_COVERED) in said
    assert f"{len(made.devices[0].digests)} digest" in " ".join(text.split())


def test_counts_and_the_worst_of_each_group():
    row = next(line.split() for line in terminal.plain(failing(), 130).splitlines() if line.strip().startswith("accuracy "))
    assert row == "accuracy 33 1 - 1 - - 41.7 of 3, bf16-d128-causal/grad_key".split()
    head = next(line.split() for line in terminal.plain(failing(), 130).splitlines() if line.strip().startswith("group "))
    assert head[:7] == ["group", "pass", "fail", "warn", "inconclusive", "unread", "skipped"]


def test_colour_only_where_it_is_wanted(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mFAIL" in through_rich(failing(), 100, force_terminal=True, color_system="standard")
    assert "\x1b" not in through_rich(failing(), 100)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in through_rich(failing(), 100, force_terminal=True, color_system="standard")


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "90")
    terminal.render(failing())
    assert capsys.readouterr().out == terminal.plain(failing(), 90)


@pytest.mark.parametrize("form", [terminal.plain, through_rich], ids=["plain", "rich"])
def test_a_hostile_report_reaches_no_terminal(form):
    text = form(hostile(), 100)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "[bold red]markup[/bold red]" in text and "\\x1b[2J" in text  # shown, not obeyed
    assert len(text) < 60_000


def test_a_terminal_that_is_not_unicode():
    made = report([device(reason="h\u00e9 \u2713")])
    terminal.plain(made, encoding="ascii").encode("ascii")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    require_module("rich")
    from rich.console import Console

    terminal.render(made, Console(file=stream, width=100))
    terminal.render(made, stream)
    stream.flush()


# ---------------------------------------------------------------- JUnit
def follows_the_schema(root: ElementTree.Element) -> None:
    """The rules of the XML schema of Ant's JUnit task, the stricter of those in use: names, required attributes, order, counts."""
    assert root.tag == "testsuites" and not root.attrib and {suite.tag for suite in root} <= {"testsuite"}
    for position, suite in enumerate(root):
        assert {"name", "timestamp", "hostname", "tests", "failures", "errors", "time", "package", "id"} <= set(suite.attrib)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp")) and suite.get("id") == str(position)
        assert suite.get("name").strip() and suite.get("hostname").strip()
        order = [child.tag for child in suite]
        assert order == ["properties"] + ["testcase"] * (len(order) - 3) + ["system-out", "system-err"]
        for one in suite.find("properties"):
            assert one.tag == "property" and one.get("name") and one.get("value") is not None
        for case in suite.iter("testcase"):
            assert case.get("name") and case.get("classname") and float(case.get("time")) >= 0
            assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"])
            assert all(child.get("type") for child in case if child.tag in ("failure", "error"))
        assert int(suite.get("tests")) == len(suite.findall("testcase"))
        for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(count)) == len(suite.findall(f"testcase/{tag}"))


def suites(made) -> ElementTree.Element:
    root = ElementTree.fromstring(junit.render(made).encode())
    follows_the_schema(root)
    return root


@pytest.mark.parametrize("name", SAMPLES)
def test_junit_is_green_only_for_a_pass(name):
    made = SAMPLES[name]()
    for each, suite in zip(made.devices, suites(made), strict=True):
        red = int(suite.get("failures")) > 0, int(suite.get("errors")) > 0
        assert (each.verdict == "fail") == red[0] and (each.verdict == "pass") == (red == (False, False))
        assert [case.get("name") for case in suite.iter("testcase")] == [summary.clean(c.id, 400) for c in each.checks] + ["verdict"]


@pytest.mark.parametrize(
    ("status", "severity", "strict", "kind"),
    [
        ("pass", "critical", False, None),
        ("fail", "minor", False, "failure"),
        ("warn", "major", False, None),
        ("warn", "major", True, "failure"),
        ("inconclusive", "critical", False, "error"),
        ("inconclusive", "minor", False, "skipped"),
        ("unread", "critical", False, "error"),
        ("unread", "info", False, "skipped"),
        ("unread", "info", True, "failure"),
        ("skipped", "critical", True, "skipped"),
    ],
)
def test_junit_of_each_status(status, severity, strict, kind):
    found = [c for c in checks() if c.status == "pass"]
    found.append(Check(id="edges/this", status=status, severity=severity, measured=2.5, limit=2, unit="x", detail="why", hint="do that"))
    suite = suites(report([device(found=found, strict=strict)], strict=strict))[0]
    case = next(case for case in suite.iter("testcase") if case.get("name") == "edges/this")
    assert [child.tag for child in case] == ([kind] if kind else [])
    if kind in ("failure", "error"):
        assert case[0].get("type") == severity and case[0].text == "2.5, limit 2 (x)\nwhy\nhint: do that"
    told = suite.find("system-out").text or ""
    assert told == ("warn edges/this: 2.5, limit 2 (x), why, hint: do that" if status == "warn" else "")
    if kind == "skipped":
        assert "why" in case[0].get("message")


def test_a_dead_worker_is_an_error_in_junit():
    case = suites(no_verdict())[0].findall("testcase")
    assert len(case) == 1 and case[0][0].tag == "error" and "SIGSEGV" in case[0][0].get("message")


# ---------------------------------------------------------------- Prometheus
def metrics(made) -> dict:
    """{name: [(labels, value)]}, as Prometheus' own parser reads it; a label set may come once."""
    require_module("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families as parse

    text = prometheus.render(made)
    assert text.endswith("\n") and all(letter.isprintable() or letter == "\n" for letter in text)
    families = list(parse(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("portable_flash_validate_") and family.type == "gauge" and family.documentation
        repeated = [key for key, count in Counter((s.name, *sorted(s.labels.items())) for s in family.samples).items() if count > 1]
        assert not repeated and all(s.timestamp is None for s in family.samples)  # node_exporter refuses both
    return {f.name.removeprefix("portable_flash_validate_"): [(s.labels, s.value) for s in f.samples] for f in families}


@pytest.mark.parametrize("name", SAMPLES)
def test_prometheus_reads_the_verdict_and_every_check(name):
    made = SAMPLES[name]()
    found = metrics(made)
    assert found["host_verdict"] == [({}, EXIT_CODES[made.verdict])]
    assert [value for _, value in found["verdict"]] == [EXIT_CODES[each.verdict] for each in made.devices]
    for position, each in enumerate(made.devices):
        label = "cpu" if each.identity.index is None else str(each.identity.index)
        assert found["verdict"][position][0]["device"] == label
        by_status = {labels["status"]: value for labels, value in found["checks"] if labels["device"] == label}
        assert by_status == summary.counts(each.checks)
        listed = {labels["check"]: value for labels, value in found.get("check_status", []) if labels["device"] == label}
        left_out = next(value for labels, value in found["checks_left_out"] if labels["device"] == label)
        assert len(listed) + left_out == len(each.checks) and len(listed) <= prometheus.MAX_CHECKS
        for check in each.checks if not left_out else summary.attention(each.checks):
            assert listed[summary.clean(check.id, prometheus.LABEL)] == prometheus.CODES[check.status]


def test_prometheus_values():
    found = metrics(failing())
    value = lambda name, **labels: next(v for held, v in found[name] if labels.items() <= held.items())
    assert value("error_ratio", tensor="grad_key") == 41.7 and value("error_ratio", tensor="out") == pytest.approx(1.16)
    assert value("limit_used_ratio", group="accuracy") == pytest.approx(41.7 / 3)
    assert value("check_measured", check="accuracy/bf16-d128-causal/grad_key") == 41.7
    assert value("check_limit", check="accuracy/bf16-d128-causal/grad_key") == 3
    assert value("signal", signal="sm_clock", when="after") == 1980
    assert value("signal_unread", signal="temperature_memory") == 1 and value("signal_unread", signal="sm_clock") == 0
    assert not any(labels["signal"] == "temperature_memory" for labels, _ in found["signal"])  # unread is no value
    assert value("run_timestamp_seconds") == 1796030126.8 and value("duration_seconds") == 24.8  # 09:15:26.8 UTC
    assert value("info", torch="2.11.0+cu130", triton="3.6.0", portable_flash="0.1.0", hip_python="", level="quick") == 1
    assert found["device_info"][0][0]["serial"] == "1653224000000"


def test_prometheus_is_bounded_and_puts_failures_first():
    made = soak()
    late = replace(made.devices[0].checks[-1], status="fail")
    crowded = report([device(found=[*made.devices[0].checks[:-1], late])])
    listed = metrics(crowded)["check_status"]
    assert len(listed) == prometheus.MAX_CHECKS and listed[0] == (
        {"device": "0", "check": late.id, "group": "control", "severity": "critical"}, 1,
    )  # fmt: skip


def test_prometheus_takes_the_worst_of_checks_that_share_an_id():
    once = Check(id="edges/same", status="fail")
    found = metrics(report([device(found=[replace(once, status="pass"), once, replace(once, status="warn")]), device(index=0)]))
    assert [v for labels, v in found["check_status"] if labels["check"] == "edges/same"] == [1]
    assert [labels["device"] for labels, _ in found["verdict"]] == ["0", "0#2"]
    assert [v for labels, v in found["checks_left_out"]] == [2, 0]


# ---------------------------------------------------------------- what they share
def test_the_share_of_a_limit():
    check = Check(id="speed/x", status="pass", measured=80.0, limit=100.0, unit="GB/s, at least")
    assert summary.share(check) == 1.25 and summary.share(replace(check, unit="us, at most")) == 0.8
    for nothing in (dict(limit=None), dict(measured=None), dict(unit="", limit=0.0), dict(measured=0.0)):
        assert summary.share(replace(check, **nothing)) is None
    assert summary.worst([check, replace(check, measured=50.0), replace(check, limit=None)]).measured == 50.0
    assert summary.worst([replace(check, id="control/noticed", measured=1, limit=1)]) is None


def test_what_needs_attention_comes_worst_first():
    found = changed(checks(), "signals/ecc_uncorrected", status="fail", severity="minor")
    found = changed(found, "edges/strides", status="fail", severity="critical")
    found = changed(found, "edges/layouts", status="warn")
    listed = [(c.id, c.status) for c in summary.attention(found)]
    assert listed == [
        ("edges/strides", "fail"), ("signals/ecc_uncorrected", "fail"), ("edges/layouts", "warn"), ("signals/temperature_memory", "unread"),
    ]  # fmt: skip
