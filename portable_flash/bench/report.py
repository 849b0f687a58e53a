"""Tables for people; the same figures as the JSON file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .hbm import HbmReport
from .host import BATCHES, HostReport
from .memory import MemoryReport
from .records import OK, REFUSED, Outcome, Row, SpeedReport


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """With rich where it is installed, else aligned text. The first column is text, the others are figures."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain_table(title, header, rows, notes))
        return
    table = Table(header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style="bold red" if cell == "WRONG" else "") for cell in row))
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, needed)  # squeezed into 80 columns it would lose figures
    for line in (title, table, *notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [title]
    for first, *figures in (header, *rows):
        lines.append("  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True))]))
    return "\n".join([*lines, *notes])


# ---------------------------------------------------------------------- speed
def print_speed(report: SpeedReport) -> None:
    machine = report.identity["device"]["name"]
    labels = {result.peer: result.label for row in report.rows for result in row.results}
    for direction in report.directions:
        rows = [[row.case.name, *(speed_cell(_outcome(row, peer, direction)) for peer in labels)] for row in report.rows]
        title = f"{direction}, {report.dtype}, {machine}: TFLOP/s, median (p20-p80) of rounds, speed over {_baseline(report, labels)}"
        print_table(f"{title}\n{report.flops_convention}", ["case", *labels.values()], rows)
    rows = [[row.case.name, *(_memory_cell(row, peer) for peer in labels)] for row in report.rows]
    print_table("peak memory of forward + backward beyond the inputs, MB", ["case", *labels.values()], rows, speed_notes(report))


def _baseline(report: SpeedReport, labels: dict[str, str]) -> str:
    names = sorted({row.baseline for row in report.rows if row.baseline})
    return " or ".join(labels[name] for name in names) or "nothing (no baseline ran)"


def _outcome(row: Row, peer: str, direction: str) -> Outcome | None:
    for result in row.results:
        if result.peer == peer:
            return result.outcomes.get(direction)
    return None


def speed_cell(outcome: Outcome | None) -> str:
    if outcome is None or outcome.status == REFUSED:
        return "-"
    if outcome.status != OK:
        return outcome.status.upper()
    if outcome.median_us is None or outcome.p20_us is None or outcome.p80_us is None or outcome.tflops is None:
        return "-"
    work = outcome.tflops * outcome.median_us  # slowest time is lowest speed
    ratio = f" {outcome.ratio:.2f}x" if outcome.ratio is not None else ""
    digits = max(0, 2 - math.floor(math.log10(outcome.tflops)))  # three that matter, from a laptop to a data centre
    return f"{outcome.tflops:.{digits}f} ({work / outcome.p80_us:.{digits}f}-{work / outcome.p20_us:.{digits}f}){ratio}"


def _memory_cell(row: Row, peer: str) -> str:
    for result in row.results:
        if result.peer == peer and result.peak_extra_bytes is not None:
            return f"{result.peak_extra_bytes / 1e6:.1f}"
    return "-"


def speed_notes(report: SpeedReport) -> list[str]:
    """Why something was not timed, and what else a reader must know; each said once."""
    notes = {f"{peer}: not here, {reason}": None for peer, reason in report.absent.items()}
    for row in report.rows:
        for result in row.results:
            if result.note:
                notes[f"{result.label}: {result.note}" + (f" ({row.case.name})" if "repeated" in result.note else "")] = None
            for direction, outcome in result.outcomes.items():
                if outcome.status != OK:
                    notes[f"{result.label}, {row.case.name}, {direction}: {outcome.status}, {outcome.reason}"] = None
    return list(notes)


# ---------------------------------------------------------------------- memory, HBM, host
def print_memory(report: MemoryReport) -> None:
    peers = list(dict.fromkeys(point.peer for point in report.points))
    lengths = sorted({point.seqlen for point in report.points})
    at = {(point.peer, point.seqlen): point for point in report.points}
    rows = []
    for seqlen in lengths:
        cells = [str(seqlen)]
        for peer in peers:
            point = at.get((peer, seqlen))
            cells.append("-" if point is None or point.extra_bytes is None else f"{point.extra_bytes / 1e6:.1f}")
            cells.append("-" if point is None or point.overhead_percent is None else f"{point.overhead_percent:.2f}%")
        rows.append(cells)
    header = ["sequence", *(text for peer in peers for text in (f"{peer} MB", "beyond results"))]
    shape = f"B{report.batch} H{report.heads} D{report.head_dim} {'causal' if report.causal else 'full'}, {report.dtype}"
    title = (
        f"peak memory of forward + backward beyond query, key, value and grad_out: {shape}, {report.identity['device']['name']}\n"
        "beyond results: less output and gradients, in per cent of query + key + value"
    )
    notes = [f"{point.peer} at {point.seqlen}: {point.reason}" for point in report.points if point.reason]
    print_table(title, header, rows, notes)


def print_hbm(report: HbmReport) -> None:
    names = list(dict.fromkeys([*report.predicted_bytes, *report.measured_bytes]))

    def cells(values: dict[str, int], name: str) -> tuple[str, str]:
        gigabytes = f"{values[name] / 1e9:.2f}" if name in values else "-"
        return gigabytes, f"{values['unfused'] / values[name]:.1f}x" if name in values and "unfused" in values else "-"

    rows = [[name, *cells(report.measured_bytes, name), *cells(report.predicted_bytes, name)] for name in names]
    title = f"HBM bytes of forward + backward: {report.case.name}, {report.dtype}; predicted for {report.predicted_for}"
    if report.measured_bytes:
        title += f", measured on {report.identity['device']['name']} with empty caches before each kernel"
    notes = [f"{name}: not measured, {reason}" for name, reason in report.not_measured.items()]
    print_table(title, ["", "measured GB", "fewer than unfused", "predicted GB", "fewer than unfused"], rows, notes)


def print_host(report: HostReport) -> None:
    rows = []
    for mode, times in report.microseconds.items():
        rows.append([mode.replace("_", " "), f"{times['ours']:.1f}", f"{times['sdpa']:.1f}", f"{report.ratio[mode]:.2f}x"])
    what = "host time" if report.identity["device"]["vendor"] != "cpu" else "whole time (a CPU call returns when it is done)"
    title = f"{what} of one eager forward call, microseconds: {report.case.name}, {report.dtype}"
    print_table(f"{title}; best of {BATCHES} batches of {report.calls_per_batch}", ["", "ours", "SDPA", "ours / SDPA"], rows)
