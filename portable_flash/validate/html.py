"""A report as one HTML page that loads nothing: templates/base.html is the frame, macros.html its parts, style.css its look."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import summary
from .report import Check, DeviceReport, Report

AXIS = 1.5  # an axis ends at this many limits; what lies beyond is drawn at its end
REPEATS_SHOWN = 40  # rows of a chart


@dataclass(frozen=True, slots=True)
class Mark:
    """A line through all rows of a chart, `at` percent of the axis."""

    at: float
    label: str
    limit: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A dot, `at` percent of the axis; the title shows where a pointer rests on it."""

    at: float
    status: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a chart: a bar of `bar` percent of the axis, dots, or both; `text` says the value and `label` what it is of."""

    label: str
    text: str
    status: str
    bar: float | None = None
    points: list[Point] = field(default_factory=list)


def percent(value: float, end: float) -> float:
    """Where a value lies on an axis from 0 to `end`, kept on it: 0 to 100."""
    return round(100 * min(max(value / end, 0.0), 1.0), 2) if end > 0 else 0.0


def environment(*packages: str):
    """Jinja's environment with escaping on. `packages`: whose "templates" folders are searched before this one's.

    Raises ModuleNotFoundError, saying what to install, where there is no jinja2 (torch brings it).
    """
    try:
        import jinja2
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--html needs jinja2, which torch brings: pip install jinja2") from None
    loaders = [jinja2.PackageLoader(package) for package in (*packages, "portable_flash.validate")]
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False, auto_reload=False
    )
    made.globals.update(signs=summary.SIGNS, words=summary.WORDS, headlines=summary.HEADLINES)
    made.filters.update(number=summary.number)
    return made
