"""A comparison for a person at a terminal: verdict, findings with what to do, a row a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..validate import terminal
from ..validate.summary import WORDS
from ..validate.terminal import Grid, Line
from . import words
from .findings import Finding, FleetReport

WIDE = 110  # columns; a narrower terminal gets no distributions
MOST = 40  # findings of one weight; the rest is counted


def render(report: FleetReport, out: Any = None) -> None:
    """Print it. `out`: a rich Console, a text stream, or None for standard output (through rich where it is installed)."""
    terminal.show(lambda width: blocks(report, width), out)


def blocks(report: FleetReport, width: int) -> Iterator[Line | Grid]:
    yield Line(words.headline(report), report.verdict, WORDS[report.verdict].upper())
    yield Line(words.about(report), indent=2)
    if report.models:
        yield Line("")
        columns = len(words.MODEL_HEADERS) - (0 if width >= WIDE else 2)
        rows = [words.model_row(model)[:columns] for model in report.models]
        yield Grid(words.MODEL_HEADERS[:columns], rows, frozenset(range(1, 6)))
    for _, findings in words.by_weight(report.findings):
        yield Line("")
        for finding in findings[:MOST]:
            yield from _finding(finding)
        if len(findings) > MOST:
            yield Line(f"and {len(findings) - MOST} more of this kind: --json has them all", indent=2)
    yield Line("")
    yield Line(words.STATISTICS)


def _finding(finding: Finding) -> Iterator[Line]:
    model = f" ({finding.model})" if finding.model else ""
    status = words.STATUS[finding.weight]
    yield Line(f"{finding.subject}{model}: {words.KINDS[finding.kind]}", status, words.WEIGHTS[finding.weight].upper())
    for text in (finding.detail, words.identifiers(finding), f"hint: {finding.hint}"):
        if text:
            yield Line(text, indent=6)
