"""Outliers by median and median absolute deviation (MAD), which a minority of broken devices cannot move.

Iglewicz and Hoaglin, How to Detect and Handle Outliers (ASQC, 1993): modified z-score 0.6745 (x - median) / MAD, an outlier
beyond 3.5. 3.5 is meant for one sample; a fleet asks the question of thousands of values at once, so the bound is raised to the
quantile that `ALPHA` leaves after Bonferroni's correction. The MAD of a handful of devices can be 0, so it has a floor, and an
outlier must also differ by an amount that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

SCORE = 3.5
ALPHA = 0.01  # chance of one false alarm in a whole comparison, were the values normal
NORMAL = 1.4826  # MAD x this estimates a standard deviation; 0.6745 is its inverse
FEWEST = 3  # devices of a model below which no outlier is named


@dataclass(frozen=True)
class Measure:
    """When a value is far from its model's median, upwards. Floors are of the scale, in the value's unit and as a part of the median;
    `least` is the smallest difference that matters, likewise."""

    unit: str
    floor: float
    floor_part: float
    least: float
    least_part: float


# error: x PyTorch's own error, which varies with the seed by some per cent. slow: x the median time; below 10% is common between
# sound devices (clocks, cooling). repeatability: repeats that differed, of which a sound device has none.
MEASURES = {
    "error": Measure("x PyTorch's error", floor=0.05, floor_part=0.05, least=0.25, least_part=0.5),
    "repeatability": Measure("repeats that differ", floor=0.1, floor_part=0.0, least=0.5, least_part=0.0),
    "slow": Measure("x the time of its model", floor=0.0, floor_part=0.01, least=0.0, least_part=0.1),
}


@dataclass(frozen=True)
class Sample:
    """Median and scale of values of one kind."""

    median: float
    scale: float

    @staticmethod
    def of(values: Sequence[float], measure: Measure) -> Sample:
        middle = float(median(values))
        deviation = NORMAL * float(median([abs(v - middle) for v in values]))
        return Sample(middle, max(deviation, measure.floor, measure.floor_part * abs(middle), 1e-12))

    def score(self, value: float) -> float:
        return (value - self.median) / self.scale

    def limit(self, measure: Measure, bound: float) -> float:
        """The greatest value that is no outlier."""
        return self.median + max(bound * self.scale, measure.least, measure.least_part * abs(self.median))


def bound(values: int) -> float:
    """The modified z-score beyond which one of so many values is an outlier."""
    return max(SCORE, NormalDist().inv_cdf(1.0 - ALPHA / max(1, values)))


def quantiles(values: Sequence[float], most: int = 101) -> list[float]:
    """At most `most` of the sorted values, evenly spaced, with the least and the greatest."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]
