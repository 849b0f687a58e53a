"""What a benchmark found, as data that goes to JSON and back."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .suite import Case
from .timing import Samples

SCHEMA = 1
OK, WRONG, REFUSED = "ok", "wrong", "refused"
UNVERIFIED = "unverified"  # the oracle's yardstick gave no verdict


@dataclass
class Outcome:
    """One implementation in one direction. Times are microseconds a call; None unless status is "ok"."""

    status: str
    reason: str = ""  # why it is wrong or refused
    errors: dict[str, float | None] = field(default_factory=dict)
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    calls_per_round: int = 0
    rounds: int = 0
    tflops: float | None = None  # by suite.FLOPS_CONVENTION
    ratio: float | None = None  # speed over the baseline's: median of the per-round ratios

    def add_times(self, samples: Samples, flops: float, baseline: Samples | None) -> None:
        self.median_us = samples.median * 1e6
        self.p20_us, self.p80_us = (samples.percentile(percent) * 1e6 for percent in (20, 80))
        self.calls_per_round, self.rounds = samples.calls, len(samples.seconds)
        self.tflops = flops / samples.median * 1e-12
        self.ratio = samples.speedup_over(baseline) if baseline is not None else None


@dataclass
class Result:
    """One implementation on one case."""

    peer: str
    label: str
    note: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by direction
    peak_extra_bytes: int | None = None  # forward + backward, beyond the inputs and grad_out


@dataclass
class Row:
    case: Case
    input_sets: int  # rotated among, so that small shapes do not run from cache
    baseline: str | None  # peer that ratios refer to
    results: list[Result] = field(default_factory=list)


@dataclass
class SpeedReport:
    dtype: str
    directions: list[str]
    flops_convention: str
    absent: dict[str, str]  # peers left out, and why
    identity: dict[str, Any]  # machine, versions, command line
    rows: list[Row] = field(default_factory=list)
    schema: int = SCHEMA
    kind: str = "speed"


def speed_report_from_dict(data: dict[str, Any]) -> SpeedReport:
    """Inverse of dataclasses.asdict, for tools that read a results file."""
    if (data.get("kind"), data.get("schema")) != ("speed", SCHEMA):
        raise ValueError(f"kind={data.get('kind')!r}, schema={data.get('schema')!r}: allowed are kind='speed', schema={SCHEMA}")
    rows = []
    for row in data["rows"]:
        results = []
        for result in row["results"]:
            outcomes = {direction: Outcome(**outcome) for direction, outcome in result["outcomes"].items()}
            results.append(Result(**{**result, "outcomes": outcomes}))
        rows.append(Row(**{**row, "case": Case(**row["case"]), "results": results}))
    return SpeedReport(**{**data, "rows": rows})


def write_json(path: str | Path, data: Any) -> None:
    """Write a dataclass or dict; the file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(data if isinstance(data, dict) else asdict(data), indent=1)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(content + "\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
