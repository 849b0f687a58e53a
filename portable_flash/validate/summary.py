"""What every form of a report says in the same words: order, signs, headline, and what needs attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from .report import Check, DeviceReport, Report

# The order in which a person wants to see them
STATUSES = ("fail", "warn", "inconclusive", "unread", "skipped", "pass")
SEVERITIES = ("critical", "major", "minor", "info")
COUNTING = ("control", "repeatability", "agreement", "memory")  # groups whose numbers are counts
SIGNS = {
    "pass": "\u2713", "warn": "!", "fail": "\u2717", "inconclusive": "?", "unread": "\u25cb", "skipped": "\u2013", "no_verdict": "?",
}  # fmt: skip
WORDS = {"pass": "pass", "fail": "fail", "no_verdict": "no verdict"}
HEADLINES = {"pass": "Pass", "fail": "Fail", "no_verdict": "No verdict"}

NOT_COVERED = (
    "A pass covers the checks listed here, on the shapes they ran, at the time they ran. It says nothing about other kernels, about "
    "memory and units that these checks do not touch, about links between GPUs, or about faults that come later or too rarely."
)


def counts(checks: Iterable[Check]) -> dict[str, int]:
    """How many checks have each status, in the order of STATUSES; statuses that none has count 0."""
    found = Counter(check.status for check in checks)
    return {status: found[status] for status in STATUSES}


def tally(checks: Iterable[Check]) -> str:
    """"1 fail, 75 pass"; "no checks"."""
    return ", ".join(f"{count} {status}" for status, count in counts(checks).items() if count) or "no checks"


def groups(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """Checks by group, in the order in which groups come first."""
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.group, []).append(check)
    return found


def attention(checks: Iterable[Check]) -> list[Check]:
    """Checks that are no pass and apply here, worst first: by status, then severity, then in the order in which they ran."""
    listed = [check for check in checks if check.status not in ("pass", "skipped")]
    return sorted(listed, key=lambda check: (STATUSES.index(check.status), SEVERITIES.index(check.severity)))


def skipped(checks: Iterable[Check]) -> dict[str, list[str]]:
    """Ids of the checks that do not apply, by the reason given."""
    found: dict[str, list[str]] = {}
    for check in checks:
        if check.status == "skipped":
            found.setdefault(check.detail or "does not apply", []).append(check.id)
    return found


def share(check: Check) -> float | None:
    """How much of its limit a check uses, 1.0 being all of it: the measured value over the limit, or the other way round where the
    unit says "at least". None where there is no such ratio, as with a limit of 0."""
    measured, limit = check.measured, check.limit
    if measured is None or limit is None:
        return None
    if "at least" in check.unit:
        measured, limit = limit, measured
    return measured / limit if limit > 0 and measured >= 0 else None


def worst(checks: Iterable[Check]) -> Check | None:
    """The check that uses most of its limit; None where none has such a ratio. Counts are left out: "1 of 1" is no near miss."""
    known = [(ratio, check) for check in checks if check.group not in COUNTING and (ratio := share(check)) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def number(value: float | None) -> str:
    """Four significant digits; integers in full."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def measured(check: Check) -> str:
    """"1.02, limit 2 (x PyTorch's error, at most)"; empty where nothing was measured."""
    parts = [number(check.measured)] if check.measured is not None else []
    if check.limit is not None:
        parts.append(f"limit {number(check.limit)}")
    if not parts or not check.unit:
        return ", ".join(parts)
    return f"{', '.join(parts)} ({check.unit})" if check.limit is not None else f"{parts[0]} {check.unit}"


def device_name(device: DeviceReport) -> str:
    """"GPU 0: NVIDIA H200", "CPU: ...", as told apart on one host."""
    identity = device.identity
    return f"{'CPU' if identity.index is None else f'GPU {identity.index}'}: {identity.name}"


def clean(text: str, most: int = 2000) -> str:
    """A text of a report, harmless in a terminal and legal in XML: control characters, unpaired surrogates and marks that turn the
    direction of writing are shown as escapes, line ends become spaces, and what is beyond `most` characters is left out."""
    text = " ".join(text.split("\n")) if "\n" in text else text
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more)"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def started(report: Report) -> datetime:
    """When the run began. Raises ValueError for a text that is no ISO 8601 time with a time zone."""
    time = datetime.fromisoformat(report.started.replace("Z", "+00:00"))
    if time.tzinfo is None:
        raise ValueError(f"{report.started!r} has no time zone")
    return time


def headline(report: Report) -> str:
    """One sentence under the verdict."""
    total = len(report.devices)
    if not total:
        return "No device was validated."
    if total == 1:
        return f"{device_name(report.devices[0])}: {tally(report.devices[0].checks)}."
    by = Counter(device.verdict for device in report.devices)
    parts = [f"{by[key]} {text}" for key, text in (("fail", "failed"), ("no_verdict", "without a verdict"), ("pass", "passed")) if by[key]]
    return f"{plural(total, 'device')}: {', '.join(parts)}."


def software(report: Report) -> list[tuple[str, str]]:
    """Names and versions of what is there."""
    versions = report.software
    pairs = [
        ("portable_flash", versions.portable_flash),
        ("torch", versions.torch),
        ("runtime", versions.runtime),
        ("triton", versions.triton),
        ("hip-python", versions.hip_python),
        ("driver", versions.driver),
        ("Python", versions.python),
        ("platform", versions.platform),
    ]
    return [(name, value) for name, value in pairs if value]


def identity(device: DeviceReport) -> list[tuple[str, str]]:
    """What tells this device from others."""
    facts = device.identity
    gib = facts.memory_bytes / 2**30
    pairs = [
        ("model", facts.slug),
        ("arch", facts.arch),
        ("units", str(facts.compute_units)),
        ("memory", f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"),
        ("uuid", facts.uuid),
        ("serial", facts.serial),
        ("PCI", " ".join(part for part in (facts.pci_address, facts.pci_id and f"[{facts.pci_id}]") if part)),
        ("partition", facts.partition),
        ("vbios", facts.vbios),
        ("driver", device.driver),
    ]
    return [(name, value) for name, value in pairs if value]
