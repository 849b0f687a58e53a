"""Figures of a results file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .memory import MemoryReport
from .peers import PEERS
from .records import SpeedReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: distinct under every common colour blindness; markers repeat the distinction without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vP*X"


def pyplot() -> Any:
    """matplotlib.pyplot without a display. Raises ModuleNotFoundError with the remedy where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install 'portable-flash[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot_speed(report: SpeedReport, path: str | Path) -> None:
    """TFLOP/s by sequence length: one panel a direction and head_dim, solid full, dashed causal."""
    plt = pyplot()
    labels = {result.peer: result.label for row in report.rows for result in row.results}
    head_dims = sorted({row.case.head_dim for row in report.rows})
    rows, columns = len(report.directions), len(head_dims)
    size = (1.5 + 3.8 * columns, 1.2 + 3.2 * rows)  # inches
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex="col", sharey="row", layout="constrained")
    handles: dict[str, Any] = {}
    for panels, direction in zip(axes, report.directions, strict=True):
        for panel, head_dim in zip(panels, head_dims, strict=True):
            for style, (peer, label) in enumerate(labels.items()):
                for causal in (False, True):
                    points = _points(report, peer, direction, head_dim, causal)
                    if points:
                        line = _draw(panel, points, style, causal)
                        handles.setdefault(label + (", causal" if causal else ""), line)
            _dress(panel, f"{direction}, head_dim {head_dim}", [row.case.seqlen_k for row in report.rows if row.case.head_dim == head_dim])
    for panel in axes[-1]:
        panel.set_xlabel("sequence length")
    for panels in axes:
        panels[0].set_ylabel("TFLOP/s")
        panels[0].set_ylim(bottom=0)  # last: a limit set before all panels of the row are drawn would hold them to it
    title = f"Attention on {report.identity['device']['name']}, {report.dtype}; bars: p20 to p80 of rounds\n{report.flops_convention}"
    figure.suptitle(title, fontsize=10)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


Point = tuple[int, float, float, float]  # sequence length, TFLOP/s, distance down to p80 time, distance up to p20 time


def _points(report: SpeedReport, peer: str, direction: str, head_dim: int, causal: bool) -> list[Point]:
    points: list[Point] = []
    for row in report.rows:
        for result in row.results:
            outcome = result.outcomes.get(direction)
            if result.peer != peer or outcome is None or row.case.head_dim != head_dim or row.case.causal != causal:
                continue
            if outcome.tflops is not None and outcome.median_us is not None and outcome.p20_us and outcome.p80_us:
                slow, fast = (outcome.tflops * outcome.median_us / time for time in (outcome.p80_us, outcome.p20_us))
                points.append((row.case.seqlen_k, outcome.tflops, outcome.tflops - slow, fast - outcome.tflops))
    return sorted(points)


def _draw(panel: Axes, points: list[Point], style: int, causal: bool) -> Any:
    seqlens, speeds, below, above = zip(*points, strict=True)
    return panel.errorbar(
        seqlens,
        speeds,
        yerr=(below, above),
        color=COLOURS[style % len(COLOURS)],
        marker=MARKERS[style % len(MARKERS)],
        markersize=5,
        markerfacecolor="white" if causal else None,
        linestyle="--" if causal else "-",
        linewidth=1.6,
        capsize=2,
    )


def _dress(panel: Axes, title: str, seqlens: list[int]) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xscale("log", base=2)
    ticks = sorted(set(seqlens))
    panel.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def plot_memory(report: MemoryReport, path: str | Path) -> None:
    """Peak extra memory by sequence length, both axes logarithmic: a linear need rises by one decade a decade."""
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for style, peer in enumerate(dict.fromkeys(point.peer for point in report.points)):
        own = [point for point in report.points if point.peer == peer]
        points = [(point.seqlen, point.extra_bytes / 1e6) for point in own if point.extra_bytes is not None]
        if points:
            panel.plot(*zip(*points, strict=True), color=COLOURS[style], marker=MARKERS[style], linewidth=1.6, label=PEERS[peer].label)
    results = sorted({(point.seqlen, point.results_bytes / 1e6) for point in report.points})
    panel.plot(*zip(*results, strict=True), color="#999999", linestyle=":", label="output and gradients alone")
    title = f"B{report.batch} H{report.heads} D{report.head_dim} {report.dtype}, {report.identity['device']['name']}"
    _dress(panel, title, [seqlen for seqlen, _ in results])
    panel.set_yscale("log")
    panel.set_xlabel("sequence length")
    panel.set_ylabel("peak memory of forward + backward\nbeyond the inputs, MB")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
