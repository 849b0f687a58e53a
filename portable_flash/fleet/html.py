"""A comparison as one HTML page that loads nothing; frame, parts and look are those of a report's page."""

from __future__ import annotations

from ..validate.html import Mark, Point, Track, environment, percent
from ..validate.summary import number
from . import words
from .findings import FleetReport, Model, Spread

MOST = 500  # findings of one weight on the page; the rest is counted
DOTS = 60  # of a model in a chart: quantiles, beside which every outlier is drawn


def render(report: FleetReport) -> str:
    """The page. Raises ModuleNotFoundError without jinja2."""
    shown = [(weight, words.STATUS[weight], found[:MOST], max(0, len(found) - MOST)) for weight, found in words.by_weight(report.findings)]
    template = environment("portable_flash.fleet").get_template("fleet.html")
    return template.render(
        report=report, words_=words, shown=shown, error=_chart(report, "error"), speed=_chart(report, "slow"),
        drifted={model.name: [v for v in model.versions if v.others] for model in report.models},
    )  # fmt: skip


def _chart(report: FleetReport, kind: str) -> tuple[list[Track], list[Mark]]:
    """A row of dots a model: quantiles of its devices, and each of its outliers as a dot of its own."""
    spreads = [(model, model.error if kind == "error" else model.speed) for model in report.models]
    known = [(model, spread) for model, spread in spreads if spread]
    if not known:
        return [], []
    outliers = {
        model.name: [f for f in report.findings if f.kind == kind and f.model == model.name and f.measured is not None]
        for model, _ in known
    }
    # an axis for the many: what lies far beyond is drawn at its end, and its number is in the text
    start = 0.0 if kind == "error" else 0.8
    end = 1.3 if kind == "slow" else 1.6 * max(spread.median + 3 * spread.scale for _, spread in known)
    tracks = []
    for model, spread in known:
        found = outliers[model.name]
        most = max((f.limit for f in found if f.limit is not None), default=None)
        points = [Point(_at(v, start, end), "pass", number(v)) for v in _thinned(spread) if most is None or v <= most]
        points += [Point(_at(f.measured, start, end), "fail", f"{f.subject}: {number(f.measured)}") for f in found]
        tracks.append(Track(_label(model), _text(spread, found), "fail" if found else "pass", None, points))
    unit = "x PyTorch's error" if kind == "error" else "x the model's median time"
    marks = [Mark(_at(1.0, start, end), f"1 {unit}")]
    return tracks, marks


def _at(value: float, start: float, end: float) -> float:
    return percent(value - start, end - start)


def _thinned(spread: Spread) -> list[float]:
    values = spread.quantiles
    return values if len(values) <= DOTS else [values[round(i * (len(values) - 1) / (DOTS - 1))] for i in range(DOTS)]


def _label(model: Model) -> str:
    return f"{model.name} ({model.devices})"


def _text(spread: Spread, found: list) -> str:
    names = ", ".join(f"{f.subject} {number(f.measured)}" for f in found[:2])
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return f"median {number(spread.median)}" + (f"; {names}{more}" if found else f", most {number(spread.quantiles[-1])}")
