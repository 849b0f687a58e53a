"""What a comparison of many reports found, as data: the dataclasses are the schema of the fleet's document.

`portable-flash fleet compare --json` writes them. After a change

    python -m portable_flash.fleet.findings > portable_flash/fleet/fleet.schema.json

makes the schema file again. A number that is not finite is None.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..validate.report import Outcome

SCHEMA = 1

Kind = Literal[
    "failed", "minority", "error", "repeatability", "slow", "tie", "no_verdict", "missing", "refused", "drift", "unexpected", "duplicate"
]
Weight = Literal["fail", "no_verdict", "warn", "info"]
WEIGHTS: tuple[Weight, ...] = ("fail", "no_verdict", "warn", "info")  # the heaviest first


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceName:
    """Which device, and which report spoke of it. index: in torch's count; None is the CPU. None elsewhere: not told."""

    host: str
    index: int | None
    model: str
    uuid: str | None = None
    serial: str | None = None
    pci_address: str | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.host} " + ("cpu" if self.index is None else f"gpu {self.index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that an operator should know.

    kind: failed (by its own validation), minority (bits differ from those of most of its kind), error, repeatability, slow
        (outlier among the devices of its model), tie (bits differ and there is no majority), no_verdict, missing, refused (a report
        that could not be read), drift (other software or tiling than most of its model), unexpected (a host that no list names),
        duplicate (several reports of one device: the newest counted).
    weight: fail and no_verdict decide the verdict; warn counts only under --strict; info never.
    devices: those concerned, at most 20 of `count`. subject: the same as one short text, also where no device is known.
    measured, typical, limit: of an outlier, in `unit`: its value, the median of its model, and what would still have been no finding.
    score: the modified z-score of `measured`.
    """

    kind: Kind
    weight: Weight
    subject: str
    detail: str
    hint: str
    model: str = ""
    devices: list[DeviceName] = field(default_factory=list)
    count: int = 1
    measured: float | None = None
    typical: float | None = None
    limit: float | None = None
    score: float | None = None
    unit: str = ""
    checks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a quantity is distributed over the devices of a model. quantiles: at most 101, evenly spaced, from least to greatest."""

    count: int
    median: float
    scale: float  # 1.4826 x the median absolute deviation, not below the floor: the standard deviation of a normal distribution
    quantiles: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What most devices of a model have. devices: how many do; others: how many have something else."""

    aspect: str
    value: str
    devices: int
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """All devices of one model. passed + failed + no_verdict = devices.

    compared: devices with a digest that another device has to share; of the rest nobody knows the right bits.
    questions: digests asked of two devices or more. error: the greatest error of each device, x PyTorch's own.
    speed: time of each device, x the median of its model.
    """

    name: str
    vendor: str
    arch: str
    hosts: int
    devices: int
    passed: int
    failed: int
    no_verdict: int
    compared: int
    questions: int
    versions: list[Version] = field(default_factory=list)
    error: Spread | None = None
    speed: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """One comparison. made: ISO 8601, UTC. reports: how many were read; refused ones not counted."""

    schema: int = SCHEMA
    verdict: Outcome
    made: str
    seconds: float
    strict: bool
    allow_missing: bool
    portable_flash: str
    reports: int
    refused: int
    hosts: int
    devices: int
    passed: int
    failed: int
    no_verdict: int
    missing: int
    models: list[Model] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def to_json(report: FleetReport) -> str:
    """The document. Raises ValueError for a number that is not finite."""
    return json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the document. Needs msgspec."""
    import msgspec

    made = msgspec.json.schema(FleetReport)
    top = made["$defs"]["FleetReport"]
    top["properties"]["schema"] = {"const": SCHEMA}
    top["required"] = ["schema", *top["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Comparison by portable-flash fleet", **made}


def schema_text() -> str:
    """Text of fleet.schema.json."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
