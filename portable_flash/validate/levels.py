"""How much each level asks, as data: sizes, repeats, times. Limits of errors are not here but in portable_flash.reference.

Times are of one device. A time bound of a check that repeats something is what it may use, not what it must.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device


@dataclass(frozen=True, slots=True)
class Level:
    """cold: repeats with the device idle before each; loaded: repeats that follow one another with all units busy."""

    cold: int
    loaded: int  # aimed at, of all cases together
    loaded_seconds: float  # stop then, though not before `loaded_least`
    loaded_least: int
    units_runs: int  # runs in which all units compute the same head
    units_seconds: float
    speed_seconds: float
    task_seconds: float  # a task that has not answered by then hangs; the first of a process compiles kernels


# 500 repeats at standard: what goes wrong in 1 of 50 is missed once in 24,000 validations
LEVELS = {
    "quick": Level(
        cold=5, loaded=200, loaded_seconds=3.0, loaded_least=20, units_runs=5, units_seconds=2.0, speed_seconds=3.0, task_seconds=180.0
    ),
    "standard": Level(
        cold=20, loaded=4000, loaded_seconds=60.0, loaded_least=500, units_runs=100, units_seconds=15.0, speed_seconds=20.0,
        task_seconds=900.0,
    ),
    "soak": Level(
        cold=20, loaded=40000, loaded_seconds=300.0, loaded_least=500, units_runs=1000, units_seconds=60.0, speed_seconds=20.0,
        task_seconds=1800.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the cases of one kind of device. Sequences are no multiples of a block, but for the large ones."""

    batch: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    large: int  # sequence length where all units are to be busy
    large_heads: int


SMALL = Sizes(batch=1, heads_k=2, seqlen_q=37, seqlen_k=53, large=64, large_heads=2)
CPU = Sizes(batch=1, heads_k=2, seqlen_q=155, seqlen_k=203, large=256, large_heads=8)
GPU = Sizes(batch=2, heads_k=2, seqlen_q=389, seqlen_k=517, large=2048, large_heads=0)  # 0: by the number of units


def sizes_for(device: Device, small: bool) -> Sizes:
    return SMALL if small else CPU if device.vendor == "cpu" else GPU


def busy_heads(device: Device, sizes: Sizes) -> int:
    """Heads of a large call whose blocks of 128 rows are at least four for each unit, so that none idles."""
    return sizes.large_heads or max(16, -(-4 * device.compute_units * 128 // sizes.large))
