"""A report as JUnit XML, the format that CI systems read: a test suite a device, a test case a check.

It follows both schemas in use: Apache Ant's (github.com/windyroad/JUnit-Schema) and that of Jenkins' xUnit plugin (junit-10.xsd).

| status | JUnit |
|---|---|
| pass | passed |
| fail, and under --strict warn and unread | failure |
| inconclusive or unread, where that leaves no verdict (critical) | error |
| inconclusive or unread otherwise, skipped | skipped |
| warn | passed, and told in the suite's system-out |

The last case of each suite is the device's verdict, so that a suite is green only where the verdict is a pass.
"""

from __future__ import annotations

from datetime import timezone
from xml.etree import ElementTree

from . import summary
from .report import Check, DeviceReport, Report


def render(report: Report) -> str:
    """The XML document, UTF-8. Characters that XML does not allow are shown as escapes."""
    # the schema's time has no zone; it is UTC as in the report
    began = summary.started(report).astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    root = ElementTree.Element("testsuites")  # Ant's schema allows it no attributes
    for index, device in enumerate(report.devices):
        root.append(_suite(report, device, index, began))
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def kind(check: Check, strict: bool) -> str:
    """"passed", "failure", "error" or "skipped": report.verdict_of, for one check."""
    if check.status == "fail" or (strict and check.status in ("warn", "unread")):
        return "failure"
    if check.status in ("inconclusive", "unread"):
        return "error" if check.severity == "critical" else "skipped"
    return "skipped" if check.status == "skipped" else "passed"


def _suite(report: Report, device: DeviceReport, index: int, began: str) -> ElementTree.Element:
    clean = summary.clean
    suite = ElementTree.Element("testsuite", name=clean(summary.device_name(device), 200), id=str(index), package="portable_flash.validate")
    suite.set("hostname", clean(report.host, 200))
    suite.set("timestamp", began)
    suite.set("time", f"{device.seconds:.3f}")
    properties = ElementTree.SubElement(suite, "properties")
    run = [("level", report.level), ("seed", str(report.seed)), ("inputs_sha256", device.inputs_sha256)]
    for name, value in [*run, *summary.identity(device), *summary.software(report)]:
        ElementTree.SubElement(properties, "property", name=name, value=clean(value, 200))
    where = clean(f"{report.host}.{'cpu' if device.identity.index is None else f'gpu{device.identity.index}'}", 200)
    for check in device.checks:
        _case(suite, where, check.id, check.seconds, kind(check, report.strict), check)
    wanted = {"pass": "passed", "fail": "failure", "no_verdict": "error"}[device.verdict]
    verdict = Check(id="verdict", status="pass", detail=device.reason or summary.WORDS[device.verdict])
    _case(suite, where, "verdict", 0.0, wanted, verdict)
    warnings = [f"warn {clean(check.id, 400)}: {_text(check, ', ')}" for check in device.checks if check.status == "warn"]
    ElementTree.SubElement(suite, "system-out").text = "\n".join(warnings)
    ElementTree.SubElement(suite, "system-err").text = ""
    suite.set("tests", str(len(suite.findall("testcase"))))
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{tag}"))))
    return suite


def _case(suite: ElementTree.Element, where: str, name: str, seconds: float, result: str, check: Check) -> None:
    clean = summary.clean
    case = ElementTree.SubElement(suite, "testcase", classname=where, name=clean(name, 400), time=f"{seconds:.3f}")
    if result == "passed":
        return
    first = clean(check.detail or summary.measured(check) or check.status, 300)
    if check.status in ("inconclusive", "unread"):
        first = f"{check.status}: {first}"
    found = ElementTree.SubElement(case, result, message=first)
    if result != "skipped":
        found.set("type", check.severity)
        found.text = _text(check, "\n")


def _text(check: Check, between: str) -> str:
    lines = [summary.measured(check), check.detail, f"hint: {check.hint}" if check.hint else ""]
    return between.join(summary.clean(line) for line in lines if line)
