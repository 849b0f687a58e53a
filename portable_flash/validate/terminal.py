"""A report for a person at a terminal: with rich where it is installed, else the same as plain lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from . import summary
from .report import Check, DeviceReport, Report

STYLES = {
    "pass": "bold green", "warn": "bold yellow", "fail": "bold red", "inconclusive": "bold magenta", "no_verdict": "bold magenta",
    "unread": "bold blue", "skipped": "dim",
}  # fmt: skip
WIDE = 100  # columns; a narrower terminal gets the worst checks below the table
NARROW = 68  # columns; a narrower terminal gets lines for the table


@dataclass(frozen=True, slots=True)
class Line:
    """A line; `word`, in the style of `status`, comes before the text."""

    text: str
    status: str = ""
    word: str = ""
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; columns of `numbers` are aligned right."""

    headers: list[str]
    rows: list[list[str]]
    numbers: frozenset[int]


Blocks = Callable[[int], Iterable[Line | Grid]]


def render(report: Report, out: Any = None) -> None:
    """Print a report. `out`: a rich Console, a text stream, or None for standard output (through rich where it is installed).

    Colour: as rich decides, so none where NO_COLOR is set or the output is no terminal; never in plain lines.
    """
    show(lambda width: _blocks(report, width), out)


def show(blocks: Blocks, out: Any = None) -> None:
    """Print lines and tables, to `out` as for render(). `blocks` makes them for a width in columns."""
    if out is None:
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            out = sys.stdout
        else:
            out = Console(highlight=False)
    if hasattr(out, "is_terminal"):
        _rich(blocks, out)
    else:
        out.write(_plain(blocks, shutil.get_terminal_size((100, 24)).columns, getattr(out, "encoding", None) or "utf-8"))


def plain(report: Report, width: int = 100, encoding: str = "utf-8") -> str:
    """The text without rich: no colour, lines of at most `width` columns where words allow it."""
    return _plain(lambda columns: _blocks(report, columns), width, encoding)


def _plain(blocks: Blocks, width: int, encoding: str) -> str:
    lines: list[str] = []
    for block in blocks(width):
        if isinstance(block, Grid):
            lines += _columns(block, width)
        else:
            text = f"{block.word}  {block.text}" if block.word else block.text
            lines += _wrapped(text, width, block.indent)
    return _encodable("\n".join(lines) + "\n", encoding)


def _rich(blocks: Blocks, console: Any) -> None:
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def text(value: str, style: str = "") -> Text:  # a Text, so that brackets in a report are no markup
        return Text(_encodable(value, console.encoding), style=style, overflow="fold")

    for block in blocks(console.width):
        if isinstance(block, Line):
            if not block.text:
                console.print()
                continue
            line = text(f"{block.word}  " if block.word else "", STYLES.get(block.status, "")) + text(block.text)
            console.print(Padding(line, (0, 0, 0, block.indent), expand=False))
            continue
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim", padding=(0, 1, 0, 0))
        for index, name in enumerate(block.headers):
            style = STYLES.get(name, "") if index in block.numbers else ""
            last = index == len(block.headers) - 1
            table.add_column(name, justify="right" if style else "left", no_wrap=not last, overflow="fold", style=style)
        for row in block.rows:
            table.add_row(*(text(value, "dim" if value == "-" else "") for value in row))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _blocks(report: Report, width: int) -> Iterator[Line | Grid]:
    clean = summary.clean
    yield Line(f"{clean(report.host, 80)}, {clean(summary.headline(report), 200)}", report.verdict, summary.WORDS[report.verdict].upper())
    about = f"{report.level}, {report.seconds:.1f} s, started {clean(report.started, 40)}, seed {report.seed}"
    yield Line(about + (", strict" if report.strict else ""), indent=2)
    yield Line(", ".join(f"{name} {clean(value, 80)}" for name, value in summary.software(report)), indent=2)
    for device in report.devices if len(report.devices) > 1 else ():
        name = clean(summary.device_name(device), 100)
        yield Line(f"{name}: {summary.tally(device.checks)}", device.verdict, summary.WORDS[device.verdict].upper(), indent=2)
    for device in report.devices:
        yield Line("")
        yield from _device(device, width)
    yield Line("")
    yield Line(summary.NOT_COVERED)


def _device(device: DeviceReport, width: int) -> Iterator[Line | Grid]:
    clean = summary.clean
    yield Line(clean(summary.device_name(device), 200), device.verdict, summary.WORDS[device.verdict].upper())
    yield Line(", ".join(f"{name} {clean(value, 80)}" for name, value in summary.identity(device)), indent=2)
    if device.reason:
        yield Line(clean(device.reason), indent=2)
    groups = summary.groups(device.checks)
    if groups and width >= NARROW:
        yield _grid(groups, with_worst=width >= WIDE)
    for group, checks in groups.items() if width < WIDE else ():
        worst = _worst(checks)
        if width < NARROW:
            yield Line(f"{clean(group, 40)}: {summary.tally(checks)}{worst and f', worst {worst}'}", indent=2)
        elif worst:
            yield Line(f"worst of {clean(group, 40)}: {worst}", indent=2)
    for check in summary.attention(device.checks):
        yield Line(clean(f"{check.id} ({check.severity})", 400), check.status, check.status.upper(), indent=2)
        for value in (summary.measured(check), check.detail, check.hint and f"hint: {check.hint}"):
            if value:
                yield Line(clean(value, 500), indent=6)
    for reason, ids in summary.skipped(device.checks).items():
        yield Line(f"{clean(reason, 200)}: {clean(', '.join(ids), 2000)}", "skipped", "skipped", indent=2)
    unread = sum(signal.before is None or signal.after is None for signal in device.signals)
    facts = [
        f"{summary.plural(len(device.kernels), 'kernel')} ran",
        summary.plural(len(device.digests), "digest"),
        summary.plural(len(device.signals), "signal") + (f" ({unread} unread)" if unread else ""),
        f"inputs {clean(device.inputs_sha256[:12]) or 'not hashed'}",
        f"{device.seconds:.1f} s",
    ]
    yield Line(", ".join(facts), indent=2)


def _worst(checks: list[Check]) -> str:
    """The check of a group that uses most of its limit."""
    worst = summary.worst(checks)
    if worst is None:
        return ""
    return summary.clean(f"{summary.number(worst.measured)} of {summary.number(worst.limit)}, {worst.id.partition('/')[2]}", 160)


def _grid(groups: dict[str, list[Check]], with_worst: bool) -> Grid:
    """Counts by group and status, of the statuses that some check has."""
    total = summary.counts(check for checks in groups.values() for check in checks)
    shown = ["pass", *(status for status in summary.STATUSES if status != "pass" and total[status])]
    rows = []
    for group, checks in groups.items():
        found = summary.counts(checks)
        row = [summary.clean(group, 40), *(str(found[status] or "-") for status in shown)]
        rows.append([*row, _worst(checks)] if with_worst else row)
    return Grid(["group", *shown, *(["worst, of its limit"] if with_worst else [])], rows, frozenset(range(1, len(shown) + 1)))


def _columns(grid: Grid, width: int) -> list[str]:
    """A table as lines; what is too long in the last column goes on below."""
    table = [grid.headers, *grid.rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(grid.headers))]
    found = []
    for row in table:
        cells = [value.rjust(widths[i]) if i in grid.numbers else value.ljust(widths[i]) for i, value in enumerate(row)]
        head = "  " + "  ".join(cells[:-1]) + "  "
        last = [cells[-1]]
        if len(head + cells[-1]) > width:
            last = textwrap.wrap(row[-1], max(width - len(head), 20), break_on_hyphens=False) or [""]
        found += [(head + last[0]).rstrip(), *(" " * len(head) + line for line in last[1:])]
    return found


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    lines = textwrap.wrap(text, max(width - indent, 20), break_on_hyphens=False)
    return [" " * indent + line for line in lines] or [""]


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)
