"""What a validation found, as data: one document a host, a part for each of its devices.

These dataclasses are the schema: `portable-flash validate` writes them as JSON, `portable-flash fleet` reads them back with their
types checked, and report.schema.json is made from them. A number that is not finite has no place in JSON: it is None, and the
text of the check says what it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

SCHEMA = 1  # a reader refuses documents of a schema that it does not know
LEVELS = ("quick", "standard", "soak")

Status = Literal["pass", "warn", "fail", "inconclusive", "unread", "skipped"]
Severity = Literal["critical", "major", "minor", "info"]
Outcome = Literal["pass", "fail", "no_verdict"]
EXIT_CODES: dict[str, int] = {"pass": 0, "fail": 1, "no_verdict": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question and its answer.

    id: stable and slash-separated, the group first: "accuracy/bf16-d128-causal/grad_key". Groups: accuracy, repeatability,
        agreement, backends, edges, memory, speed, signals, control.
    status: "inconclusive" has run and proves nothing, "unread" could not be read on this machine, "skipped" does not apply.
        None of the three is a pass.
    severity: of a failure: critical (wrong numbers), major (a property that was promised), minor (speed, health), info.
    measured, limit: in `unit`; what kind of bound the limit is, the unit says ("x PyTorch's error, at most").
    hint: what an operator should do about a status other than pass; empty for a pass.
    data: further plain numbers and texts of this check, such as the worst element's place and values.
    """

    id: str
    status: Status
    severity: Severity = "critical"
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    detail: str = ""
    hint: str = ""
    seconds: float = 0.0
    data: dict[str, str | int | float | bool | None | list[int]] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.id.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which device this is. None: not told by this machine's libraries. Sizes in bytes."""

    index: int | None  # in torch's count; None is the CPU
    name: str
    slug: str  # file of the tuning database, or the arch
    vendor: str
    arch: str
    compute_units: int
    memory_bytes: int
    pci_id: str | None = None  # vendor:device
    pci_address: str | None = None
    uuid: str | None = None
    serial: str | None = None
    partition: str | None = None  # MIG or AMD compute partition
    vbios: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions; None where absent."""

    portable_flash: str | None
    python: str
    torch: str
    runtime: str | None = None  # "cuda 13.0", "rocm 7.1"
    triton: str | None = None
    hip_python: str | None = None
    driver: str | None = None
    platform: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A kernel that ran, its code and its tiling. `fingerprint` is the backend's `space` hash of the kernel's code."""

    backend: str
    kernel: str
    fingerprint: str
    case: str
    tiling: str
    source: str  # rung of the look-up ladder: "h200.yaml", "rule", ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A reading of the device before and after the run. None: not readable, and `reason` says why; never a pass."""

    name: str  # "sm_clock", "temperature", "throttle_reasons", "ecc_uncorrected", ...
    unit: str
    before: float | str | None
    after: float | str | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """SHA-256 of the bytes of one result. Devices whose `key` is equal must agree.

    key: hash of device model, arch, driver, torch, triton, kernel fingerprint and tiling, see `golden`.
    """

    case: str
    tensor: str
    backend: str
    key: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Everything about one device. `reason` says why there is no verdict."""

    identity: Identity
    verdict: Outcome
    reason: str = ""
    driver: str | None = None
    checks: list[Check] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    kernels: list[Used] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    inputs_sha256: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run on one host."""

    schema: int = SCHEMA
    host: str
    verdict: Outcome
    level: str
    seed: int
    started: str  # ISO 8601, UTC
    seconds: float
    strict: bool
    command: list[str]
    software: Software
    devices: list[DeviceReport] = field(default_factory=list)


def verdict_of(checks: Iterable[Check], strict: bool = False) -> Outcome:
    """The verdict of one device.

    A failure fails. Otherwise it takes a negative control that was noticed and at least one other check that passed to be a
    pass: a critical check that proves nothing leaves no verdict. Warnings and unread signals fail only under `strict`.
    """
    checks = list(checks)
    if any(c.status == "fail" for c in checks) or (strict and any(c.status in ("warn", "unread") for c in checks)):
        return "fail"
    control = any(c.group == "control" and c.status == "pass" for c in checks)
    shown = any(c.group != "control" and c.status == "pass" for c in checks)
    open_ = any(c.severity == "critical" and c.status in ("inconclusive", "unread") for c in checks)
    return "pass" if control and shown and not open_ else "no_verdict"


def together(verdicts: Iterable[Outcome]) -> Outcome:
    """Of a host, or of a fleet: any failure fails; a pass takes a pass of every one, and at least one."""
    verdicts = list(verdicts)
    if "fail" in verdicts:
        return "fail"
    return "pass" if verdicts and all(v == "pass" for v in verdicts) else "no_verdict"


def to_json(report: Report) -> str:
    """The document. Raises ValueError for a number that is not finite."""
    return json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"
