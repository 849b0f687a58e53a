"""From facts to findings: one function for each thing that can be wrong in a fleet, with the advice that goes with it.

No advice here acts: portable-flash reports and never drains a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median

from ..validate.report import Outcome
from . import expected as expectations
from .drift import Held
from .expected import Expected
from .facts import DeviceFacts, Names
from .findings import DeviceName, Finding, Weight
from .robust import FEWEST, MEASURES, Sample, bound
from .votes import Votes, question_text, short

# Kinds whose finding is about the devices it lists, and not about a report or a host
ONE_DEVICE = frozenset({"failed", "minority", "error", "repeatability", "slow", "tie", "no_verdict"})
LISTED = 20  # devices or checks named in one finding


def again(name: DeviceName, level: str = "standard") -> str:
    """What an operator should do with a device under suspicion."""
    device = "cpu" if name.index is None else name.index
    return f"on {name.host}: portable-flash validate --level {level} --device {device}; if that fails too, drain the node"


def failed(devices: Sequence[DeviceFacts], models: Mapping[str, Sequence[int]], names: Names) -> Iterator[Finding]:
    """Devices that failed their own validation. What most of a model fails is hardly the hardware."""
    alike = {model: Counter(check for i in members for check in set(devices[i].failed)) for model, members in models.items()}
    for facts in devices:
        if facts.verdict != "fail":
            continue
        hint, others = again(facts.name), ""
        checks = [names[check] for check in dict.fromkeys(facts.failed)]
        if checks:
            same, of = alike[facts.name.model][facts.failed[0]], len(models[facts.name.model])
            others = f" (as on {same} of {of} devices of its model)" if same > 1 else ""
            if same >= FEWEST and 2 * same > of:
                hint = "most devices of its model fail this check: suspect the software or its tilings before the hardware"
        first = f"{checks[0]}{': ' if facts.detail else ''}{facts.detail}{others}" if checks else "its report says so"
        text = facts.reason or (f"{len(checks)} checks failed; first " if len(checks) > 1 else "") + first
        yield _one(facts, "failed", "fail", text, hint, checks[:LISTED])


def without_verdict(devices: Iterable[DeviceFacts], silent: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    for facts in devices:
        if facts.verdict == "no_verdict":
            text = facts.reason or "its checks prove nothing"
            yield _one(facts, "no_verdict", "no_verdict", text, f"on {facts.name.host}: portable-flash validate, and read its output")
    for what, reason in silent:
        yield Finding(kind="no_verdict", weight="no_verdict", subject=what, detail=reason, hint="look at the node, then validate it again")


def differing(devices: Sequence[DeviceFacts], votes: Votes, names: Names) -> Iterator[Finding]:
    """Devices whose bits differ from the majority's, and groups that have none."""
    for number, lost in sorted(votes.minority.items()):
        facts, (question, given, answer, favour, voters) = devices[number], lost[0]
        asked = sum(1 for q in facts.questions if q in votes.questions)
        text = (
            f"{len(lost)} of {asked} results have other bits than the majority's, such as {question_text(names, question)}: "
            f"{short(names, given)} against {short(names, answer)} of {favour} among {voters} devices"
        )
        cases = [question_text(names, q) for q, *_ in lost[:LISTED]]
        yield _one(facts, "minority", "fail", text, again(facts.name), cases, measured=float(len(lost)), limit=0.0, unit="results")
    for who, questions in sorted(votes.ties.items()):
        members = [devices[i].name for i in who]
        text = f"{len(questions)} results differ among these devices and no majority has the same bits, such as "
        yield Finding(
            kind="tie",
            weight="no_verdict",
            model=members[0].model,
            subject=_some(members),
            devices=members[:LISTED],
            count=len(members),
            detail=text + question_text(names, questions[0]),
            checks=[question_text(names, q) for q in questions[:LISTED]],
            hint="validate each with --level standard, or compare with more devices of this model and software",
        )


class Outliers:
    """Devices beyond the bounds of robust.py, among those of their model that ran the same check at the same level."""

    def __init__(self, devices: Sequence[DeviceFacts], models: Mapping[str, Sequence[int]], names: Names):
        self.devices, self.models, self.names = devices, models, names
        self._values: dict[tuple[str, str], dict[tuple[str, int], dict[int, float]]] = {}
        for model, members in models.items():
            for kind in MEASURES:
                table = self._values[model, kind] = {}
                for number in members:
                    checks, values = devices[number].numbers.get(kind, ((), ()))
                    for check, value in zip(checks, values):
                        cell = table.setdefault((devices[number].level, check), {})
                        cell[number] = max(value, cell.get(number, value))
        self._speeds = {model: self._speed(model) for model in models}

    def spread(self, model: str, kind: str) -> tuple[float, float, list[float]] | None:
        """Median, scale and values, one a device: its relative time, or its greatest error. None without values."""
        if kind == "slow":
            values = list(self._speeds[model].values())
        else:
            greatest: dict[int, float] = {}
            for cell in self._values[model, kind].values():
                for number, value in cell.items():
                    greatest[number] = max(value, greatest.get(number, value))
            values = list(greatest.values())
        if not values:
            return None
        sample = Sample.of(values, MEASURES[kind])
        return sample.median, sample.scale, values

    def findings(self) -> Iterator[Finding]:
        for kind in ("error", "repeatability"):
            yield from self._checks(kind)
        yield from self._slow()

    def _speed(self, model: str) -> dict[int, float]:
        """Median over the checks of a device's time relative to its model's. One disturbed timing moves it little; what a GPU loses
        in clocks or power it loses everywhere."""
        ratios: dict[int, list[float]] = {}
        for cell in self._values[model, "slow"].values():
            middle = median(cell.values())
            if len(cell) >= FEWEST and middle > 0:
                for number, value in cell.items():
                    ratios.setdefault(number, []).append(value / middle)
        return {number: float(median(values)) for number, values in ratios.items()}

    def _checks(self, kind: str) -> Iterator[Finding]:
        measure = MEASURES[kind]
        cells = [
            (model, cell, values) for model in self.models for cell, values in self._values[model, kind].items() if len(values) >= FEWEST
        ]
        beyond = bound(sum(len(values) for _, _, values in cells))
        devices_failed = [set(facts.failed) for facts in self.devices]  # what failed is told already
        found: dict[int, list[tuple[float, float, float, float, int]]] = {}
        for _, (_, check), values in cells:
            sample = Sample.of(list(values.values()), measure)
            limit = sample.limit(measure, beyond)
            for number, value in values.items():
                if value > limit and check not in devices_failed[number]:
                    found.setdefault(number, []).append((sample.score(value), value, sample.median, limit, check))
        for number, hits in sorted(found.items()):
            score, value, typical, limit, check = max(hits)
            facts = self.devices[number]
            text = f"{self.names[check]}: {value:.3g}, median of its model {typical:.3g}" + (
                f"; {len(hits)} such checks" if len(hits) > 1 else ""
            )
            checks = [self.names[h[4]] for h in sorted(hits, reverse=True)[:LISTED]]
            yield _one(
                facts,
                kind,
                "fail",
                text,
                again(facts.name),
                checks,
                measured=value,
                typical=typical,
                limit=limit,
                score=score,
                unit=measure.unit,
            )

    def _slow(self) -> Iterator[Finding]:
        measure = MEASURES["slow"]
        beyond = bound(sum(len(values) for values in self._speeds.values()))
        for values in self._speeds.values():
            if len(values) < FEWEST:
                continue
            sample = Sample.of(list(values.values()), measure)
            limit = sample.limit(measure, beyond)
            for number, value in sorted(values.items()):
                if value > limit:
                    facts = self.devices[number]
                    text = f"takes {value:.2f}x the time of its model, median of {len(facts.numbers['slow'][0])} checks"
                    hint = f"look at its clocks, power cap, temperature and other jobs; then {again(facts.name)}"
                    yield _one(
                        facts, "slow", "fail", text, hint,
                        measured=value, typical=sample.median, limit=limit, score=sample.score(value), unit=measure.unit,
                    )  # fmt: skip


def drifted(devices: Sequence[DeviceFacts], held: Mapping[str, Held], names: Names) -> Iterator[Finding]:
    """One finding for each set of devices that has other versions than most of its model: what comes together is told together."""
    for model, found in held.items():
        groups: dict[tuple[int, ...], list[tuple[int, int, int | None]]] = {}
        for aspect, value, majority, who in found.drifted():
            groups.setdefault(tuple(who), []).append((aspect, value, majority))
        for who, aspects in groups.items():
            texts = []
            for aspect, value, majority in sorted(aspects, key=lambda a: _rank(names[a[0]])):
                most = "no majority" if majority is None else f"most have {names[majority]}"
                texts.append(f"{names[aspect]} {names[value]}, {most}")
            members = [devices[i].name for i in who]
            text = "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more differences" if len(texts) > 3 else "")
            yield Finding(
                kind="drift", weight="warn", model=model, subject=_some(members), devices=members[:LISTED], count=len(members), detail=text,
                hint="bring the node to its model's versions; until then its bits are compared with nobody's", checks=texts[:LISTED],
            )  # fmt: skip


def duplicates(older: Mapping[str, list[tuple[DeviceName, Outcome]]], kept: Mapping[str, DeviceFacts]) -> Iterator[Finding]:
    """Reports that a newer one of the same device made void: together, but for those that failed or came from another host."""
    plain: list[DeviceName] = []
    for key, others in older.items():
        facts = kept[key]
        hosts = sorted({name.host for name, _ in others} - {facts.name.host})
        if hosts:
            text = f"this device is also in reports of {', '.join(hosts[:LISTED])}; the newest counts, {facts.name.source}"
            hint = "a board that moved, or machines that tell the same uuid or serial number"
            yield _one(facts, "duplicate", "warn", text, hint)
        elif any(verdict == "fail" for _, verdict in others) and facts.verdict != "fail":
            sources = [name.source for name, verdict in others if verdict == "fail"]
            text = f"an older report of it failed ({sources[0]}), the newest, {facts.name.source}, did not"
            yield _one(facts, "duplicate", "warn", text, "a fault that comes and goes: validate it with --level soak")
        else:
            plain.append(facts.name)
    if plain:
        yield Finding(
            kind="duplicate", weight="info", subject=_some(plain), devices=plain[:LISTED], count=len(plain),
            detail="several reports of the same device; the newest counts", hint="compare one run at a time to leave them out",
        )  # fmt: skip


def absent(
    expected: Expected, devices: Sequence[DeviceFacts], hosts: Collection[str], slugs: Mapping[str, str], allowed: bool
) -> Iterator[Finding]:
    weight: Weight = "info" if allowed else "no_verdict"
    by_host = dict.fromkeys(hosts, 0)
    by_model: dict[str, int] = {}
    for facts in devices:
        by_host[facts.name.host] = by_host.get(facts.name.host, 0) + 1
        by_model[facts.name.model] = by_model.get(facts.name.model, 0) + 1
    for host, what in expectations.missing_hosts(expected, by_host):
        hint = "is the node up, and did its validation run?"
        yield Finding(kind="missing", weight=weight, subject=host, detail=f"expected, {what}", hint=hint)
    for model, what in expectations.missing_models(expected, [(m, slugs.get(m, ""), n) for m, n in by_model.items()]):
        hint = "name the hosts with --expect to learn which"
        yield Finding(kind="missing", weight=weight, subject=model, model=model, detail=f"expected, {what}", hint=hint)
    strangers = expectations.unexpected_hosts(expected, hosts)
    if strangers:
        text = f"{len(strangers)} hosts that --expect does not name reported: {', '.join(sorted(strangers)[:LISTED])}"
        yield Finding(
            kind="unexpected",
            weight="info",
            subject=f"{len(strangers)} hosts",
            count=len(strangers),
            detail=text,
            hint="add them to the list",
        )


def refused(reports: Iterable[tuple[str, str]], allowed: bool) -> Iterator[Finding]:
    for source, reason in reports:
        hint = "gather it again; a report of a newer schema needs a newer portable-flash here"
        yield Finding(kind="refused", weight="info" if allowed else "no_verdict", subject=source, detail=reason, hint=hint)


def _one(facts: DeviceFacts, kind, weight: Weight, detail: str, hint: str, checks: Sequence[str] = (), **numbers) -> Finding:
    return Finding(
        kind=kind, weight=weight, subject=str(facts.name), model=facts.name.model, devices=[facts.name], detail=detail, hint=hint,
        checks=list(checks), **numbers,
    )  # fmt: skip


def _some(names: Sequence[DeviceName]) -> str:
    shown = ", ".join(str(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _rank(aspect: str) -> tuple[int, str]:
    """Drivers and packages explain fingerprints, which explain tilings."""
    return (("kernel ", "tiling ").index(aspect[:7]) + 1 if aspect[:7] in ("kernel ", "tiling ") else 0, aspect)
