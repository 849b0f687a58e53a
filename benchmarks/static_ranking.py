"""How far the tuner's model of tilings can be trusted where nothing can be measured: its order beside times from an H200.

    python benchmarks/static_ranking.py        # reads results/h200_candidates.json, writes results/static_ranking.json

No GPU is needed. `offline.CLEARLY`, the share of the default's cost at which a tiling is preferred to the default without a
measurement, is set by the table `taken_at`.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from portable_flash.device import Device, named
from portable_flash.tiling import KERNELS, Tiling
from portable_flash.tune.keys import Key, parse_key
from portable_flash.tune.offline import CLEARLY
from portable_flash.tune.space import cost, default, space

RESULTS = Path(__file__).parent / "results"
SHARES = (0.45, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
NOISE = 0.02  # of a time: what counts as a win or a loss

Times = dict[Key, dict[Tiling, float]]


def read(path: Path) -> tuple[dict[str, Any], Times]:
    data = json.loads(path.read_text())
    tilings = [Tiling(**fields) for fields in data["tilings"]]
    times = {parse_key(key): {tilings[int(i)]: us for i, us in by_tiling.items()} for key, by_tiling in data["times_us"].items()}
    return data, times


def costs(key: Key, tilings: list[Tiling], device: Device) -> dict[Tiling, float]:
    """As `tune --offline` sees them: the causal call speaks for both masks."""
    problem = replace(key, causal=True).problem()
    return {t: cost(t, key.kernel, problem, device) for t in tilings}


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks. 0 where all of one side are equal: no order is no help."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    return statistics.correlation(ranks(a), ranks(b)) if len(set(a)) > 1 < len(set(b)) else 0.0


def summary(speedups: list[float]) -> dict[str, Any]:
    if not speedups:
        return {"keys": 0}
    mean = math.exp(statistics.fmean(math.log(s) for s in speedups))
    won, lost = sum(s > 1 + NOISE for s in speedups), sum(s < 1 - NOISE for s in speedups)
    extremes = {"worst": round(min(speedups), 3), "best": round(max(speedups), 3)}
    return {"keys": len(speedups), "won": won, "lost": lost, "geometric_mean": round(mean, 3), **extremes}


def of_kernel(kernel: str, times: Times, device: Device) -> dict[str, Any]:
    """Rank correlation, and the speed of the model's first choice over the default, for the keys where it is `share` ahead."""
    correlations, predicted, best = [], [], []
    for key, measured in times.items():
        if key.kernel != kernel:
            continue
        modelled, usual = costs(key, list(measured), device), default(key, device)
        correlations.append(spearman(list(modelled.values()), [measured[t] for t in modelled]))
        first = min(modelled, key=lambda t: (modelled[t], str(t)))
        best.append(measured[usual] / min(measured.values()))
        if first != usual:
            predicted.append((modelled[first] / modelled[usual], measured[usual] / measured[first]))
    taken = {str(share): summary([speed for ratio, speed in predicted if ratio <= share]) for share in SHARES}
    return {
        "keys": len(correlations), "rank_correlation_mean": round(statistics.fmean(correlations), 3),
        "rank_correlation_median": round(statistics.median(correlations), 3), "taken_at": taken, "fastest_over_default": summary(best),
    }  # fmt: skip


def places(path: Path, device: Device) -> list[dict[str, Any]]:
    """Where the model has the fastest tiling of each exhaustive search, counted from 1."""
    rows = []
    for row in json.loads(path.read_text())["rows"]:
        ordered = list(space(parse_key(row["key"]), device))
        fastest = Tiling(**row["best"])
        place = ordered.index(fastest) + 1 if fastest in ordered else None
        rows.append({"key": row["key"], "space": len(ordered), "fastest": str(fastest), "place": place})
    return rows


def main() -> None:
    data, times = read(RESULTS / "h200_candidates.json")
    device = named(data["device"])
    table = {
        "command": "python benchmarks/static_ranking.py", "device": device.name, "times": "h200_candidates.json",
        "measured_with": data["measured_with"], "clearly": CLEARLY, "noise": NOISE,
        "note": "speed of the model's first choice over the default's, of the dozen candidates measured for each key; taken_at: only "
        "where the model gives it at most that share of the default's cost. One term of the model (crowded) was found in these data.",
        "kernels": {kernel: of_kernel(kernel, times, device) for kernel in KERNELS},
        "exhaustive": places(RESULTS / "h200_tune_quality.json", device),
    }  # fmt: skip
    (RESULTS / "static_ranking.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
