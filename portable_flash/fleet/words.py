"""What every form of a fleet's report says in the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..validate.summary import number, plural
from .findings import WEIGHTS as ORDER
from .findings import Finding, FleetReport, Model

KINDS = {
    "failed": "failed its validation", "minority": "other bits than its kind", "error": "larger error than its kind",
    "repeatability": "does not repeat", "slow": "slow", "tie": "bits differ, no majority", "no_verdict": "no verdict", "missing": "missing",
    "refused": "report refused", "drift": "drifted", "unexpected": "not expected", "duplicate": "reported more than once",
}  # fmt: skip
WEIGHTS = {"fail": "fail", "no_verdict": "no verdict", "warn": "warn", "info": "note"}
# How a finding's weight is drawn: the statuses of a check, whose signs and colours exist
STATUS = {"fail": "fail", "no_verdict": "inconclusive", "warn": "warn", "info": "skipped"}
STATISTICS = (
    "An outlier is a device whose modified z-score (Iglewicz and Hoaglin 1993: distance from its model's median over 1.4826 x the "
    "median absolute deviation) exceeds 3.5, or more where many values are compared, and whose difference matters in size; no "
    "outlier is named among fewer than 3 devices. A majority is more than half of the devices that had to give the same bits."
)


def headline(report: FleetReport) -> str:
    """One sentence under the verdict."""
    parts = [
        f"{count} {text}"
        for count, text in ((report.failed, "failed"), (report.no_verdict, "without a verdict"), (report.passed, "passed"))
        if count
    ]
    text = f"{plural(report.devices, 'device')} on {plural(report.hosts, 'host')}: {', '.join(parts) or 'none was validated'}."
    extra = [f"{report.missing} missing"] if report.missing else []
    extra += [f"{plural(report.refused, 'report')} refused"] if report.refused else []
    alone = report.devices - sum(model.compared for model in report.models)
    return (
        text
        + (f" {', '.join(extra)}." if extra else "")
        + (f" {plural(alone, 'device')} had no other to share bits with." if alone else "")
    )


def about(report: FleetReport) -> str:
    options = "".join(f", {name}" for name, on in (("strict", report.strict), ("missing allowed", report.allow_missing)) if on)
    read, took = plural(report.reports, "report"), number(round(report.seconds, 1))
    return f"{read} read, compared {report.made} in {took} s{options}, portable_flash {report.portable_flash}"


def by_weight(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    for weight in ORDER:
        found = [f for f in findings if f.weight == weight]
        if found:
            yield weight, found


MODEL_HEADERS = ["model", "devices", "pass", "fail", "none", "compared", "error, median to worst", "time, x median"]


def model_row(model: Model) -> list[str]:
    """Cells for MODEL_HEADERS: none is without a verdict, compared is how many had bits that another device must share."""
    error = f"{number(model.error.median)} to {number(model.error.quantiles[-1])}" if model.error else "-"
    speed = f"{number(model.speed.quantiles[0])} to {number(model.speed.quantiles[-1])}" if model.speed else "-"
    return [model.name, *(str(n) for n in (model.devices, model.passed, model.failed, model.no_verdict, model.compared)), error, speed]


def identifiers(finding: Finding) -> str:
    """Numbers that tell the devices of a finding from others: uuid, serial, PCI address of the first one."""
    if len(finding.devices) != 1:
        return ""
    name = finding.devices[0]
    parts = (("uuid", name.uuid), ("serial", name.serial), ("PCI", name.pci_address), ("report", name.source))
    return ", ".join(f"{label} {value}" for label, value in parts if value)
