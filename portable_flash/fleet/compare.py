"""Many reports side by side: who failed, who differs from its kind, who is slow, who drifted, who is missing.

    fleet = Fleet()
    for source, report in gather.reports(paths): fleet.add(report, source) or fleet.refuse(source, reason)
    result = fleet.compare()

Each report is reduced as it comes (facts.py), so memory grows by some kilobytes a device and not by the size of its report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

from .. import __version__
from ..validate.report import Outcome, Report
from . import judges
from .drift import Held, held
from .expected import Expected
from .facts import DeviceFacts, Names, clean, identity_key, reduce
from .findings import WEIGHTS, DeviceName, Finding, FleetReport, Model, Spread, Version
from .robust import quantiles
from .votes import Votes, vote

LONGEST_SUBJECT, LONGEST_DETAIL = 400, 600  # characters; made of several texts of reports


class Fleet:
    """Collects reports. Of several reports of one device the newest counts; among equally old ones that which was added last."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.names = Names()
        self.reports = 0
        self.hosts: set[str] = set()
        self.refused: list[tuple[str, str]] = []  # (source, reason)
        self.silent: list[tuple[str, str]] = []  # (what gave no verdict, reason)
        self._devices: dict[str, DeviceFacts] = {}
        self._slugs: dict[str, str] = {}
        self._older: dict[str, list[tuple[DeviceName, Outcome]]] = {}

    def add(self, report: Report, source: str) -> None:
        """Take in one report; `source` names it. Raises ValueError where its time cannot be read."""
        taken: set[str] = set()
        for facts, device in zip(reduce(report, source, self.names), report.devices):
            key = identity_key(facts.name)
            while key in taken:  # two devices of one report are never one device, whatever their numbers say
                key += f" and {facts.name.index}"
            taken.add(key)
            self._slugs.setdefault(facts.name.model, clean(device.identity.slug, 60))
            kept = self._devices.get(key)
            if kept is not None:
                older, facts = (kept, facts) if facts.started >= kept.started else (facts, kept)
                self._older.setdefault(key, []).append((older.name, older.verdict))
            self._devices[key] = facts
        host = clean(report.host) or "(no name)"
        self.hosts.add(host)
        self.reports += 1
        if not report.devices:
            self.silence(host, "its report names no device")

    def refuse(self, source: str, reason: str) -> None:
        """Note a report that could not be read."""
        self.refused.append((clean(source, 500), clean(reason, 500)))

    def silence(self, what: str, reason: str) -> None:
        """Note a host or a device that was asked and gave no report."""
        self.silent.append((clean(what), clean(reason, 500)))

    def compare(self, expected: Expected = Expected(), strict: bool = False, allow_missing: bool = False) -> FleetReport:
        """Judge what was collected. `allow_missing`: what is missing or refused is named and takes no verdict away."""
        devices = list(self._devices.values())
        models: dict[str, list[int]] = {}
        for number, facts in enumerate(devices):
            models.setdefault(facts.name.model, []).append(number)
        votes = vote(devices)
        held_by = {model: held(devices, members) for model, members in models.items()}
        outliers = judges.Outliers(devices, models, self.names)
        findings = [
            *judges.failed(devices, models, self.names),
            *judges.without_verdict(devices, self.silent),
            *judges.differing(devices, votes, self.names),
            *outliers.findings(),
            *judges.drifted(devices, held_by, self.names),
            *judges.duplicates(self._older, self._devices),
            *judges.absent(expected, devices, self.hosts, self._slugs, allow_missing),
            *judges.refused(self.refused, allow_missing),
        ]
        findings = [replace(f, subject=clean(f.subject, LONGEST_SUBJECT), detail=clean(f.detail, LONGEST_DETAIL)) for f in findings]
        findings.sort(key=lambda f: (WEIGHTS.index(f.weight), f.model, f.subject, f.kind))
        verdicts = _verdicts(devices, findings)
        counts = [verdicts.count(v) for v in ("pass", "fail", "no_verdict")]
        return FleetReport(
            verdict=_verdict(findings, counts, strict), made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.began, 3), strict=strict, allow_missing=allow_missing, portable_flash=__version__,
            reports=self.reports, refused=len(self.refused), hosts=len(self.hosts), devices=len(devices), passed=counts[0],
            failed=counts[1], no_verdict=counts[2], missing=sum(f.count for f in findings if f.kind == "missing"),
            models=[
                _model(name, members, devices, verdicts, votes, held_by[name], outliers.spread, self.names)
                for name, members in sorted(models.items())
            ],
            findings=findings,
        )  # fmt: skip


def _verdicts(devices: list[DeviceFacts], findings: list[Finding]) -> list[Outcome]:
    """Of every device: the worse of its own verdict and of what the comparison says of it."""
    verdicts: dict[DeviceName, Outcome] = {facts.name: facts.verdict for facts in devices}
    for finding in findings:
        if finding.kind in judges.ONE_DEVICE and finding.weight in ("fail", "no_verdict"):
            for name in finding.devices:
                if verdicts[name] != "fail":
                    verdicts[name] = "fail" if finding.weight == "fail" else "no_verdict"
    return [verdicts[facts.name] for facts in devices]


def _verdict(findings: list[Finding], counts: list[int], strict: bool) -> Outcome:
    weights = {f.weight for f in findings}
    if "fail" in weights or (strict and "warn" in weights):
        return "fail"
    return "pass" if counts[0] and not counts[2] and "no_verdict" not in weights else "no_verdict"


def _model(
    name: str, members: list[int], devices: list[DeviceFacts], verdicts: list[Outcome], votes: Votes, held: Held,
    spread: Callable[[str, str], tuple[float, float, list[float]] | None], names: Names,
) -> Model:  # fmt: skip
    first = devices[members[0]]
    own = [verdicts[i] for i in members]
    inside = set(members)
    versions = []
    for aspect in held.holders:
        counts = held.counts(aspect)
        value, most = counts.most_common(1)[0]
        others = sum(counts.values()) - most
        if others or not names[aspect].startswith(("kernel ", "tiling ")):  # what all share of the long lists is left out
            versions.append(Version(aspect=names[aspect], value=names[value], devices=most, others=others))
    spreads = {}
    for kind in ("error", "slow"):
        found = spread(name, kind)
        spreads[kind] = found and Spread(count=len(found[2]), median=found[0], scale=found[1], quantiles=quantiles(found[2]))
    return Model(
        name=name, vendor=first.vendor, arch=first.arch, hosts=len({devices[i].name.host for i in members}), devices=len(members),
        passed=own.count("pass"), failed=own.count("fail"), no_verdict=own.count("no_verdict"),
        compared=len(votes.compared & inside), questions=sum(1 for who in votes.questions.values() if inside.intersection(who)),
        versions=versions, error=spreads["error"], speed=spreads["slow"],
    )  # fmt: skip
