"""Every form that a comparison has as a file: JSON, a page, JUnit XML, Prometheus text."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from collections import Counter

from ..validate.report import EXIT_CODES
from ..validate.summary import clean
from . import findings, words
from .findings import FleetReport

HELP = {
    "json": "write the whole comparison",
    "html": "write a page for a browser",
    "junit": "write JUnit XML",
    "prometheus": "write metrics for node_exporter's textfile collector",
}


def render(name: str, report: FleetReport) -> str:
    """The text of one of HELP."""
    if name == "html":
        from . import html  # needs jinja2

        return html.render(report)
    return {"json": findings.to_json, "junit": junit, "prometheus": prometheus}[name](report)


def junit(report: FleetReport) -> str:
    """A suite a model and one for what has none; a case a finding, and one a suite for what was found in order."""
    root = xml.Element("testsuites", name="portable-flash fleet")
    for model in dict.fromkeys([*(m.name for m in report.models), *(f.model for f in report.findings if f.model), ""]):
        found = [f for f in report.findings if f.model == model]
        passed = sum(m.passed for m in report.models if m.name == model)
        kinds = Counter(f.weight for f in found)
        suite = xml.SubElement(
            root,
            "testsuite",
            name=clean(model or "fleet"),
            tests=str(len(found) + 1),
            failures=str(kinds["fail"]),
            errors=str(kinds["no_verdict"]),
            skipped=str(kinds["warn"] + kinds["info"]),
            timestamp=report.made,
            time="0",
        )
        xml.SubElement(
            suite, "testcase", classname=clean(model or "fleet"), name=f"{passed} devices passed" if model else "reports read", time="0"
        )
        for finding in found:
            case = xml.SubElement(
                suite,
                "testcase",
                classname=clean(model or "fleet"),
                name=clean(f"{words.KINDS[finding.kind]}: {finding.subject}"),
                time="0",
            )
            tag = {"fail": "failure", "no_verdict": "error"}.get(finding.weight, "skipped")
            xml.SubElement(case, tag, message=clean(finding.detail)).text = None if tag == "skipped" else clean(finding.hint)
    xml.indent(root)
    return xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def prometheus(report: FleetReport) -> str:
    """Counts by model and by kind of finding: as many series as there are models, however many devices there are."""
    lines: list[str] = []

    def metric(name: str, text: str, samples: list[tuple[dict[str, str], float]]) -> None:
        name = f"portable_flash_fleet_{name}"
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} gauge"))
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"{name}{{{inside}}} {value:g}" if inside else f"{name} {value:g}")

    metric("verdict", "0 pass, 1 fail, 2 no verdict", [({}, EXIT_CODES[report.verdict])])
    metric("hosts", "hosts that reported", [({}, report.hosts)])
    metric("reports_refused", "reports that could not be read", [({}, report.refused)])
    metric("missing", "hosts and models that were expected and did not report in full", [({}, report.missing)])
    by_model = [
        ({"model": m.name, "verdict": v}, n)
        for m in report.models
        for v, n in (("pass", m.passed), ("fail", m.failed), ("no_verdict", m.no_verdict))
    ]
    metric("devices", "devices by model and verdict", by_model)
    kinds = Counter((f.kind, f.model) for f in report.findings)
    metric("findings", "findings by kind and model", [({"kind": kind, "model": model}, n) for (kind, model), n in sorted(kinds.items())])
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return clean(label).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
