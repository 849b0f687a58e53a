"""A picture of what tuning gave: default against tuned, a panel a kernel."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from ..bench.plot import COLOURS, pyplot
from ..device import Device
from ..tiling import KERNELS
from .outcomes import Outcome, summary


def plot(outcomes: Sequence[Outcome], device: Device, path: Path) -> None:
    """Write a PNG, PDF or SVG, by the suffix: the speed-up over the default of every key, by head_dim, mask and bucket of lengths.
    Raises ModuleNotFoundError where matplotlib is not installed, ValueError where there is
    nothing to show."""
    plt = pyplot()
    timed = [o for o in outcomes if o.speedup]
    kernels = [kernel for kernel in KERNELS if any(o.key.kernel == kernel for o in timed)]
    if not kernels:
        raise ValueError(f"--plot {path}: no key has both a default and a tuned time")
    lengths, totals = sorted({o.key.seqlen for o in timed}), summary(timed)
    figure, panels = plt.subplots(1, len(kernels), figsize=(4.6 * len(kernels), 4.2), sharey=True, squeeze=False, layout="constrained")
    head_dims = sorted({o.key.head_dim for o in timed})
    for panel, kernel in zip(panels[0], kernels, strict=True):
        for head_dim, colour in zip(head_dims, itertools.cycle(COLOURS)):
            for causal, style, marker in ((False, "-", "o"), (True, "--", "^")):
                for dtype in dict.fromkeys(o.key.dtype for o in timed):
                    kind = (kernel, dtype, head_dim, causal)
                    own = sorted((o.key.seqlen, o.speedup) for o in timed if (o.key.kernel, *_kind(o)) == kind)
                    label = f"head_dim {head_dim}" if not causal and dtype == timed[0].key.dtype else None
                    places = [lengths.index(seqlen) for seqlen, _ in own]
                    panel.plot(places, [s for _, s in own], style, marker=marker, ms=3.5, lw=1, color=colour, alpha=0.75, label=label)
        panel.axhline(1.0, color="black", lw=0.8)
        panel.set(title=f"{kernel}: {totals[kernel]['mean']:.2f}x in the mean", xlabel="sequence length")
        panel.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("default time / tuned time")
    panels[0][-1].legend(fontsize=8)
    dtypes = ", ".join(dict.fromkeys(o.key.dtype for o in timed))
    figure.suptitle(f"{device.name}: tuned against the analytic default ({dtypes}; solid full, dashed causal)", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)
    plt.close(figure)


def _kind(outcome: Outcome) -> tuple[str, int, bool]:
    return outcome.key.dtype, outcome.key.head_dim, outcome.key.causal
