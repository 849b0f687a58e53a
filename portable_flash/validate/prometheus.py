"""A report as Prometheus metrics, for the textfile collector of node_exporter (text format 0.0.4).

Written here rather than with prometheus_client, so that the base install can do it; the tests read it back with that library.
Series keep their labels from run to run and change their value. Of a device, MAX_CHECKS checks get series of their own, what needs
attention first, and the number of those left out is a metric as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import summary
from .report import EXIT_CODES, Check, DeviceReport, Report

PREFIX = "portable_flash_validate"
MAX_CHECKS = 500  # of a device; a standard run has fewer
LABEL = 200  # characters of a label's value
CODES = {"pass": 0, "fail": 1, "inconclusive": 2, "warn": 3, "unread": 4, "skipped": 5}

HELP = {
    "verdict": "Verdict of a device as in the exit code: 0 pass, 1 fail, 2 no verdict.",
    "host_verdict": "Verdict of all devices together: 0 pass, 1 fail, 2 no verdict.",
    "checks": "Number of checks with this status.",
    "checks_left_out": "Number of checks without series of their own.",
    "check_status": "Status of a check: " + ", ".join(f"{code} {status}" for status, code in CODES.items()) + ".",
    "check_measured": "What a check measured, in the unit of its limit.",
    "check_limit": "Limit of what a check measured.",
    "error_ratio": "Largest error of a result against the float64 oracle, in multiples of PyTorch's own, over all accuracy checks.",
    "limit_used_ratio": "Largest share of its limit that a check of this group used; 1 is all of it.",
    "signal": "Reading of the device before and after the run; absent where it could not be read.",
    "signal_unread": "1 where a reading of the device could not be had before or after the run.",
    "run_timestamp_seconds": "Unix time at which the run ended.",
    "duration_seconds": "Seconds that the run took.",
    "info": "Versions and level of the run.",
    "device_info": "Identity of a device.",
}

Sample = tuple[str, dict[str, str], float]


def render(report: Report) -> str:
    """Text for a file that ends in .prom. One sample a label set; lines of a metric follow its HELP and TYPE."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in HELP}
    for name, labels, value in _samples(report):
        found[name].setdefault(tuple((key, _escaped(text)) for key, text in labels.items()), value)
    lines = []
    for name, samples in found.items():
        if samples:
            lines += [f"# HELP {PREFIX}_{name} {HELP[name]}", f"# TYPE {PREFIX}_{name} gauge"]
        for labels, value in samples.items():
            inside = ",".join(f'{key}="{text}"' for key, text in labels)
            lines.append(f"{PREFIX}_{name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _samples(report: Report) -> Iterator[Sample]:
    versions = report.software
    yield "host_verdict", {}, EXIT_CODES[report.verdict]
    yield "run_timestamp_seconds", {}, summary.started(report).timestamp() + report.seconds
    yield "duration_seconds", {}, report.seconds
    names = ("portable_flash", "python", "torch", "runtime", "triton", "hip_python", "driver")
    yield "info", {"level": report.level, **{name: getattr(versions, name) or "" for name in names}}, 1
    seen: dict[str, int] = {}
    for device in report.devices:
        name = "cpu" if device.identity.index is None else str(device.identity.index)
        seen[name] = seen.get(name, 0) + 1
        yield from _device(device, name if seen[name] == 1 else f"{name}#{seen[name]}")


def _device(device: DeviceReport, name: str) -> Iterator[Sample]:
    identity = device.identity
    facts = {key: getattr(identity, key) or "" for key in ("name", "slug", "arch", "uuid", "serial", "pci_address", "partition")}
    yield "device_info", {"device": name, **facts, "driver": device.driver or ""}, 1
    yield "verdict", {"device": name, "model": identity.slug}, EXIT_CODES[device.verdict]
    for status, count in summary.counts(device.checks).items():
        yield "checks", {"device": name, "status": status}, count
    for group, checks in summary.groups(device.checks).items():
        worst = summary.worst(checks)
        if worst is not None:
            yield "limit_used_ratio", {"device": name, "group": group}, summary.share(worst) or 0.0
    ratios: dict[str, float] = {}
    for check in device.checks:
        if check.group == "accuracy" and check.measured is not None:
            tensor = check.id.rpartition("/")[2]
            ratios[tensor] = max(check.measured, ratios.get(tensor, 0.0))
    for tensor, ratio in list(ratios.items())[:50]:
        yield "error_ratio", {"device": name, "tensor": tensor}, ratio
    for signal in device.signals[:200]:
        unread = signal.before is None or signal.after is None
        yield "signal_unread", {"device": name, "signal": signal.name}, int(unread)
        for when, value in (("before", signal.before), ("after", signal.after)):
            if isinstance(value, (int, float)):
                yield "signal", {"device": name, "signal": signal.name, "unit": signal.unit, "when": when}, value
    listed = _listed(device.checks)
    yield "checks_left_out", {"device": name}, len(device.checks) - min(len(listed), MAX_CHECKS)
    for check in listed[:MAX_CHECKS]:
        labels = {"device": name, "check": check.id}
        yield "check_status", {**labels, "group": check.group, "severity": check.severity}, CODES[check.status]
        if check.measured is not None:
            yield "check_measured", labels, check.measured
        if check.limit is not None:
            yield "check_limit", labels, check.limit


def _listed(checks: list[Check]) -> list[Check]:
    """One check an id, the worst of those that share it; what needs attention first."""
    worst: dict[str, Check] = {}
    for check in checks:
        known = worst.get(check.id)
        if known is None or summary.STATUSES.index(check.status) < summary.STATUSES.index(known.status):
            worst[check.id] = check
    first = summary.attention(worst.values())
    chosen = {check.id for check in first}
    return first + [check for check in worst.values() if check.id not in chosen]


def _escaped(text: str) -> str:
    return summary.clean(text, LABEL).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
