"""A report as one HTML page that loads nothing: templates/base.html is the frame, macros.html its parts, style.css its look."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from . import summary
from .report import Check, DeviceReport, Report

AXIS = 1.25  # an axis ends at this many limits; what lies beyond is drawn at its end
MOST_ROWS = 40  # of a chart; the table has the rest
MOST_LETTERS = 1000  # of a text
OPEN_DEVICES = 2  # with more devices than this those that passed are folded
SHORT = {"grad_query": "dq", "grad_key": "dk", "grad_value": "dv", "grad_bias": "dbias", "grad_sinks": "dsinks"}


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


@dataclass(frozen=True, slots=True)
class Cell:
    """Of the map of repeats: of `runs` runs `differ` had other bits. None: not told."""

    status: str
    differ: int | None
    runs: int | None


@dataclass(frozen=True, slots=True)
class Repeats:
    """The map of repeats: a row a kind of run and call, a column a result; None where a call has no such result."""

    columns: list[str]
    rows: list[tuple[str, list[Cell | None]]]


@dataclass(frozen=True, slots=True)
class Damage:
    """Where bits differed: a cell a bit (highest first, as numbers are written) and a lane; pairs of matrix and tile."""

    id: str
    bits: list[int]
    lanes: list[int]
    tiles: list[tuple[int, int]]
    tile_count: int


@dataclass(frozen=True, slots=True)
class View:
    """What the page shows of a device, beside the report itself."""

    device: DeviceReport
    open: bool
    accuracy: list[Track]
    backends: list[Track]
    edges: list[Track]
    speed: list[Track]
    speed_marks: list[Mark]
    repeats: Repeats | None
    damage: list[Damage]


def render(report: Report) -> str:
    """The page. Raises ModuleNotFoundError where there is no jinja2."""
    views = [_view(device, len(report.devices)) for device in report.devices]
    limit = [Mark(percent(1, AXIS), "limit", limit=True)]
    return environment().get_template("report.html").render(report=report, views=views, limit=limit, summary=summary)


@cache
def environment(*packages: str) -> Any:
    """Jinja's environment with escaping on, which keeps the compiled templates.

    packages: whose "templates" folders are searched before this one's.
    Raises ModuleNotFoundError, saying what to install, where there is no jinja2 (torch brings it).
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--html needs jinja2, which torch brings: pip install jinja2") from None

    def shown(value: Any) -> Any:
        return summary.clean(value, MOST_LETTERS) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in (*packages, "portable_flash.validate")]),
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=shown, auto_reload=False, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.globals.update(signs=summary.SIGNS, words=summary.WORDS, headlines=summary.HEADLINES)
    made.filters.update(number=summary.number, reading=_reading, datum=_datum)
    return made


def percent(value: float, end: float) -> float:
    """Where a value lies on an axis from 0 to `end`, kept on it: 0 to 100."""
    return round(100 * min(max(value / end, 0.0), 1.0), 2) if end > 0 else 0.0


def _reading(value: float | str | None) -> str:
    return "unread" if value is None else value if isinstance(value, str) else summary.number(value)


def _datum(value: Any) -> str:
    return summary.number(value) if isinstance(value, float) else str(value)


def _view(device: DeviceReport, devices: int) -> View:
    groups = summary.groups(device.checks)
    speed, marks = _speed(groups.get("speed", []))
    repeats = groups.get("repeatability", [])
    return View(
        device=device,
        open=devices <= OPEN_DEVICES or device.verdict != "pass",
        accuracy=_shares(groups.get("accuracy", [])),
        backends=_shares(groups.get("backends", [])),
        edges=_shares(groups.get("edges", [])),
        speed=speed,
        speed_marks=marks,
        repeats=_repeats(repeats),
        damage=[_damage(check) for check in repeats if isinstance(check.data.get("bits"), list)][:MOST_ROWS],
    )


def _split(check: Check) -> tuple[str, str]:
    """The case and the result that a check is of: all of its id after the group but the last part, and that; or a case alone."""
    rest = check.id.partition("/")[2]
    case, _, result = rest.rpartition("/")
    return (case, SHORT.get(result, result)) if case else (rest, "")


def _worst_first(checks: Iterable[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: (summary.STATUSES.index(check.status), -(summary.share(check) or 0.0)))


def _cut(tracks: list[tuple[Check, Track]]) -> list[Track]:
    """All rows, or the worst MOST_ROWS of them, in the order in which they ran."""
    kept = {id(check) for check in _worst_first(check for check, _ in tracks)[:MOST_ROWS]}
    return [track for check, track in tracks if id(check) in kept]


def _shares(checks: list[Check]) -> list[Track]:
    """A row a case, a dot for each of its results at the share of the limit that it uses."""
    cases: dict[str, list[Check]] = {}
    for check in checks:
        if check.status != "skipped":
            cases.setdefault(_split(check)[0], []).append(check)
    found = []
    for case, members in cases.items():
        worst = _worst_first(members)[0]
        points = [
            Point(percent(share, AXIS), check.status, f"{_split(check)[1]} {summary.measured(check)}".strip())
            for check in members
            if (share := summary.share(check)) is not None
        ]
        if points or worst.status != "pass":
            value = f"{worst.measured:.3g} of {worst.limit:.3g}" if summary.share(worst) is not None else worst.status
            found.append((worst, Track(case, f"{_split(worst)[1]} {value}".strip(), worst.status, points=points)))
    return _cut(found)


def _speed(checks: list[Check]) -> tuple[list[Track], list[Mark]]:
    """A bar for each time as a multiple of the recorded one."""
    known = [check for check in checks if check.measured is not None and check.status != "skipped"]
    limits = {check.limit for check in known if check.limit}
    end = AXIS * max([1.2, *limits])
    found = [
        (check, Track(check.id.partition("/")[2], f"{check.measured:.3f} x", check.status, bar=percent(check.measured, end)))
        for check in known
        if check.measured is not None
    ]
    marks = [Mark(percent(1, end), "the record")]
    if len(limits) == 1:
        only = limits.pop()
        marks.append(Mark(percent(only, end), f"limit: {summary.number(only)} x", limit=True))
    return _cut(found), marks


def _repeats(checks: list[Check]) -> Repeats | None:
    rows: dict[str, dict[str, Cell]] = {}
    columns: list[str] = []
    for check in checks:
        if check.status == "skipped":
            continue
        case, result = _split(check)
        runs = check.data.get("runs")
        differ = None if check.measured is None else int(check.measured)
        rows.setdefault(case, {})[result] = Cell(check.status, differ, runs if isinstance(runs, int) else None)
        if result not in columns:
            columns.append(result)
    if not rows:
        return None
    return Repeats(columns, [(case, [cells.get(column) for column in columns]) for case, cells in list(rows.items())[:MOST_ROWS]])


def _damage(check: Check) -> Damage:
    whole: Callable[[str], list[int]] = lambda name: value if isinstance(value := check.data.get(name), list) else []
    bits, lanes = set(whole("bits")), set(whole("lanes"))
    width = next((width for width in (16, 32, 64) if max(bits, default=0) < width), 64)
    count = check.data.get("tile_count")
    return Damage(
        id=check.id,
        bits=[int(bit in bits) for bit in range(width - 1, -1, -1)],
        lanes=[int(lane in lanes) for lane in range(32)],
        tiles=list(zip(whole("matrices"), whole("tiles"), strict=False))[:MOST_ROWS],
        tile_count=count if isinstance(count, int) else len(whole("tiles")),
    )
