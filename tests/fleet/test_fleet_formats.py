"""Every form in which a comparison is written."""

import io
import json
import random
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import fleet_samples as samples
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tools import chromium

from portable_flash.fleet import cli, findings, formats, html, terminal, words
from portable_flash.fleet.compare import Fleet
from portable_flash.fleet.expected import Expected
from portable_flash.fleet.findings import FleetReport

SCHEMA = Path(findings.__file__).with_name("fleet.schema.json")
HOSTILE = "<script>document.title='owned'</script>\x1b]0;owned\x07[bold]{{ 7*7 }}\"'\\\nx \u202e" + "y" * 5000


def made() -> FleetReport:
    """Something of every kind."""
    random_ = random.Random(5)
    reports = [samples.sound(n, random_, slow=1.3 if n == 33 else 1.0) for n in range(96)]
    reports[4] = samples.with_other_bits(reports[4], "fp16-d64-full", "lse")
    reports[20] = samples.with_error(reports[20], "accuracy/fp32-d64-causal/out", 2.5)
    reports[5] = samples.with_failed_repeats(reports[5])
    reports[21] = samples.with_checks(reports[21], lambda c: replace(c, status="warn", measured=3.0) if c.id == "repeatability/cold" else c)
    reports[6] = replace(reports[6], software=replace(reports[6].software, torch="2.11.0"))
    silent = replace(reports[7].devices[0], checks=[], verdict="no_verdict", reason="its worker died")
    reports[7] = replace(reports[7], devices=[silent], verdict="no_verdict")
    fleet = Fleet()
    for report in [*reports, reports[8]]:
        fleet.add(report, f"reports/{report.host}.json")
    for n in (0, 1):  # two CPUs that differ
        device = samples.sound(0, random.Random(1)).devices[0]
        device = replace(device, digests=[replace(digest, key="of this CPU") for digest in device.digests])
        identity = replace(device.identity, index=None, name="Some CPU", vendor="cpu", uuid=None, serial=None, pci_address=None)
        other = samples.with_other_bits(
            replace(reports[0], host=f"cpu{n}", devices=[replace(device, identity=identity)]), "fp16-d64-full", "lse"
        )
        fleet.add(replace(other, devices=[replace(other.devices[0], checks=device.checks)]), f"cpu{n}.json")
    fleet.refuse("reports/bad.json", "truncated")
    hosts = {f"node{n:05d}": 1 for n in range(97)} | {"cpu0": None}
    return fleet.compare(Expected(hosts))


def hostile() -> FleetReport:
    """What reports and names of files say is text, wherever it appears."""
    reports = [samples.sound(4 + 16 * n, random.Random(n)) for n in range(4)]
    device = reports[0].devices[0]
    identity = replace(
        device.identity, name=HOSTILE, uuid=HOSTILE, serial=HOSTILE, vendor=HOSTILE, arch=HOSTILE, partition=HOSTILE, slug=HOSTILE
    )
    checks = [
        replace(c, id=f"{c.id}{HOSTILE}", detail=HOSTILE, status="fail" if c.group == "accuracy" else c.status) for c in device.checks
    ]
    digests = [
        replace(d, case=HOSTILE, tensor=HOSTILE, backend=HOSTILE, key=HOSTILE, sha256=HOSTILE + str(n))
        for n, d in enumerate(device.digests)
    ]
    kernels = [replace(k, backend=HOSTILE, kernel=HOSTILE, case=HOSTILE, tiling=HOSTILE + str(n)) for n, k in enumerate(device.kernels)]
    fleet = Fleet()
    for n in range(3):
        own = replace(
            device,
            identity=replace(identity, uuid=f"{n}{HOSTILE}"),
            checks=checks,
            digests=digests[n:],
            kernels=kernels[n:],
            verdict="fail",
            reason=HOSTILE,
        )
        software = replace(reports[0].software, torch=HOSTILE + str(n), triton=HOSTILE, driver=HOSTILE)
        fleet.add(replace(reports[0], host=HOSTILE + str(n), devices=[own], verdict="fail", software=software), HOSTILE)
    fleet.refuse(HOSTILE, HOSTILE)
    fleet.silence(HOSTILE, HOSTILE)
    return fleet.compare(Expected({HOSTILE[:30]: 1}, {HOSTILE[:30]: 2}))


SAMPLES = {"made": made, "hostile": hostile, "empty": lambda: Fleet().compare()}


@pytest.fixture(scope="module", params=SAMPLES)
def result(request) -> FleetReport:
    return SAMPLES[request.param]()


def test_the_sample_has_every_kind():
    kinds = {finding.kind for finding in made().findings}
    assert set(words.KINDS) == kinds


def test_json_fits_the_schema_that_is_shipped(result):
    assert SCHEMA.read_text() == findings.schema_text()
    schema = json.loads(SCHEMA.read_text())
    document = json.loads(findings.to_json(result))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"schema": 2}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"verdict": "fine"}, schema)


def test_terminal_says_everything_with_and_without_rich(result):
    plain, rich = io.StringIO(), io.StringIO()
    terminal.render(result, plain)
    terminal.render(result, Console(file=rich, width=160, force_terminal=False))
    for text in (plain.getvalue(), rich.getvalue()):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
        flat = "".join(text.split())
        assert {"pass": "PASS", "fail": "FAIL", "no_verdict": "NOVERDICT"}[result.verdict] in flat
        for finding in result.findings[:20]:
            for said in (finding.subject, finding.detail, finding.hint, words.KINDS[finding.kind]):
                assert "".join(said.split()) in flat


def test_terminal_is_bounded():
    fleet = Fleet()
    for n in range(3000):
        fleet.refuse(f"{n}.json", "truncated")
    out = io.StringIO()
    terminal.render(fleet.compare(), out)
    assert "and 2960 more" in out.getvalue() and len(out.getvalue().splitlines()) < 300
    page = html.render(fleet.compare())
    assert "and 2500 more" in page and len(page) < 1_000_000


def test_junit(result):
    root = xml.fromstring(formats.render("junit", result))
    cases = root.findall(".//testcase")
    assert len(cases) == len(result.findings) + len(root.findall("testsuite"))
    assert len(root.findall(".//failure")) == sum(f.weight == "fail" for f in result.findings)
    assert len(root.findall(".//error")) == sum(f.weight == "no_verdict" for f in result.findings)
    for suite in root.findall("testsuite"):
        assert int(suite.get("tests")) == len(suite.findall("testcase")) and int(suite.get("failures")) == len(suite.findall(".//failure"))


def test_prometheus(result):
    families = {family.name: family for family in text_string_to_metric_families(formats.render("prometheus", result))}
    (verdict,) = families["portable_flash_fleet_verdict"].samples
    assert verdict.value == {"pass": 0, "fail": 1, "no_verdict": 2}[result.verdict]
    assert sum(sample.value for sample in families["portable_flash_fleet_devices"].samples) == result.devices
    assert sum(sample.value for sample in families["portable_flash_fleet_findings"].samples) == len(result.findings)


def test_a_document_on_standard_output_is_alone_there(tmp_path, capsys):
    for n in range(3):
        (tmp_path / f"{n}.json").write_text(findings_input(n))
    assert cli.main(["compare", str(tmp_path), "--json", "-"]) == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["passed"] == 3 and "PASS" in errors
    assert cli.main(["compare", str(tmp_path), "--json", "-", "--html", "-"]) == 2
    out, errors = capsys.readouterr()
    assert out == "" and "--json and --html" in errors


def findings_input(n: int) -> str:
    from portable_flash.validate.report import to_json

    return to_json(samples.sound(4 + 16 * n, random.Random(n)))


# ------------------------------------------------------------------ the page
@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_loads_nothing_and_obeys_no_text(browser, result, tmp_path, width):
    path = tmp_path / "fleet.html"
    path.write_text(html.render(result), encoding="utf-8")
    metrics = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(path.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert max(browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")) <= width
    assert browser.get_log("browser") == []
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in requests if event["method"] == "Network.requestWillBeSent"}
    assert urls - {"data:,"} == {path.as_uri()}
    assert browser.title != "owned" and browser.find_elements("css selector", "script, img, [onerror]") == []
    said = "".join(browser.execute_script("return document.body.textContent").split())
    for finding in result.findings:
        assert "".join(finding.subject.split()) in said and "".join(finding.detail.split()) in said


def test_the_page_marks_outliers_and_hides_what_is_unchecked(browser, tmp_path):
    path = tmp_path / "fleet.html"
    path.write_text(html.render(made()), encoding="utf-8")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 850, "deviceScaleFactor": 1, "mobile": False})
    browser.get(path.as_uri())
    assert len(browser.find_elements("css selector", ".dot.s-pass")) > 150  # 96 devices, each in two charts
    titles = [dot.get_attribute("title") for dot in browser.find_elements("css selector", ".dot.s-fail")]
    assert [title.partition(":")[0] for title in titles] == ["node00020 gpu 0", "node00033 gpu 0"]
    found = browser.find_elements("css selector", ".finding.s-warn")
    assert found and all(part.is_displayed() for part in found)
    browser.find_element("css selector", "label[for=show-warn]").click()
    assert not any(part.is_displayed() for part in found)
