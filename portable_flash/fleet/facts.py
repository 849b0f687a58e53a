"""A report reduced to what a comparison needs: some kilobytes a device, so that thousands of reports fit in memory.

Everything that came from a file is text of a stranger: `clean` makes it harmless before anything else sees it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..validate import summary
from ..validate.report import Check, DeviceReport, Outcome, Report
from .findings import DeviceName

SEPARATOR = " | "  # between key, case, tensor and backend of a digest
LONGEST_NAME = 400  # of what is made of several of them
LONGEST = 200  # characters of any text that a report brings
GREATEST = 1e12  # a number beyond it says no more than it does, and its square is still finite
RATED = ("pass", "warn", "fail")  # statuses whose number was measured


def clean(text: str | None, most: int = LONGEST) -> str:
    """Printable, on one line and short; "" for None."""
    return summary.clean(text or "", most)


class Names:
    """Texts, made clean, as small numbers: most devices of a fleet share most of theirs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def number(self, text: str) -> int:
        found = self._numbers.get(text)
        if found is None:
            harmless = clean(text, LONGEST_NAME)
            found = self._numbers.get(harmless)
            if found is None:
                found = self._numbers[harmless] = len(self._texts)
                self._texts.append(harmless)
        return found

    def __getitem__(self, number: int) -> str:
        return self._texts[number]


@dataclass(slots=True)
class DeviceFacts:
    """One device. Numbers and digests are pairs of arrays: a name's number in Names, and the value."""

    name: DeviceName
    vendor: str
    arch: str
    level: str
    started: float  # seconds since the epoch
    verdict: Outcome
    reason: str
    failed: array = field(default_factory=lambda: array("i"))  # checks
    detail: str = ""  # of the first of them
    numbers: dict[str, tuple[array, array]] = field(default_factory=dict)  # kind of robust.MEASURES -> (checks, values)
    versions: array = field(default_factory=lambda: array("i"))  # aspect, value, aspect, value, ...
    questions: array = field(default_factory=lambda: array("i"))
    answers: array = field(default_factory=lambda: array("i"))


def reduce(report: Report, source: str, names: Names) -> Iterator[DeviceFacts]:
    """The facts of every device of a report that document.read has let through."""
    started = summary.started(report).timestamp()
    for device in report.devices:
        yield _device(report, device, clean(source, 500), started, names)


def identity_key(name: DeviceName) -> str:
    """What makes two reports those of one device: the hardware's own numbers where they are told, else its place."""
    for kind, number in (("uuid", name.uuid), ("serial", name.serial)):
        if number and number.strip("0-: "):
            # one board may carry several GPUs under one serial number
            return f"{kind} {number}" if kind == "uuid" else f"{kind} {number} {name.index}"
    return f"place {name.host} {name.pci_address or name.index}"


def _device(report: Report, device: DeviceReport, source: str, started: float, names: Names) -> DeviceFacts:
    told = device.identity
    partition = f" [{clean(told.partition, 40)}]" if told.partition else ""
    facts = DeviceFacts(
        name=DeviceName(
            host=clean(report.host) or "(no name)", index=told.index, model=(clean(told.name) or "(no name)") + partition,
            uuid=clean(told.uuid) or None, serial=clean(told.serial) or None, pci_address=clean(told.pci_address) or None, source=source,
        ),
        vendor=clean(told.vendor, 40), arch=clean(told.arch, 40), level=clean(report.level, 20), started=started,
        verdict=device.verdict, reason=clean(device.reason),
    )  # fmt: skip
    for check in device.checks:
        if check.status == "fail":
            facts.detail = facts.detail or clean(check.detail)
            facts.failed.append(names.number(check.id))
        kind, question, value = _number(check, device.identity.vendor)
        if kind:
            checks, values = facts.numbers.setdefault(kind, (array("i"), array("d")))
            checks.append(names.number(question))
            values.append(min(max(value, -GREATEST), GREATEST))
    for aspect, value in _versions(report, device):
        facts.versions.extend((names.number(aspect), names.number(value)))
    for digest in device.digests:
        facts.questions.append(names.number(SEPARATOR.join((digest.key, digest.case, digest.tensor, digest.backend))))
        facts.answers.append(names.number(digest.sha256))
    return facts


def _number(check: Check, vendor: str) -> tuple[str, str, float]:
    """Which measure of robust.MEASURES this check's number belongs to ("": none), what it is comparable with, and the number."""
    if check.group == "speed":
        # a time is of use to its peers also where no record exists; a CPU's is not, for it depends on all that runs there
        time = check.data.get("measured_us")
        if vendor != "cpu" and not check.id.startswith("speed/node/") and isinstance(time, (int, float)) and time > 0:
            return "slow", f"{check.id} {check.data.get('tiling')}", float(time)
    elif check.status in RATED and check.measured is not None and "at least" not in check.unit:
        if check.group in ("accuracy", "backends"):
            return "error", check.id, check.measured
        if check.group == "repeatability":
            return "repeatability", check.id, check.measured
    return "", "", 0.0


def _versions(report: Report, device: DeviceReport) -> Iterator[tuple[str, str]]:
    software, told = report.software, device.identity
    yield "driver", device.driver or software.driver or "(not told)"
    for aspect in ("portable_flash", "torch", "runtime", "triton", "hip_python"):
        yield aspect, getattr(software, aspect) or "(none)"
    yield "compute units", str(told.compute_units)
    yield "vbios", told.vbios or "(not told)"
    for used in device.kernels:
        yield f"kernel {clean(used.backend)} {clean(used.kernel)}", used.fingerprint
        yield f"tiling {clean(used.backend)} {clean(used.kernel)} {clean(used.case)}", used.tiling
