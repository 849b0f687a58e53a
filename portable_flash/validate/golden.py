"""Recorded results: digests, and times of kernels, that a GPU model has with a given driver, torch, Triton, kernel and tiling.

One YAML file a model, <folder>/<vendor>/<slug>.yaml, laid out like tuning_db so that a person can review it in a diff:

    schema: 1
    device: {vendor: nvidia, slug: h200}
    records:
      - key: "0f3a..."                    # of everything that the bits depend on, see `key`
        of: {backend: triton, name: "NVIDIA H200", driver: "580.159", torch: "2.11.0", ...}   # for people
        digests:
          "bf16-d128-causal":
            out: "9b1c..."
            lse: "77aa..."
        speed_us:
          "forward/b4-h16-s4096-d128-causal-bf16": 402.1

A file is plain data of bounded size, whoever wrote it: the reader of the tuning database reads it, and an error names file,
line and field.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..database import DatabaseError, _compose
from ..tuning import user_folder
from .report import Check, DeviceReport, Digest, Identity, Outcome, Report, Software, together, verdict_of

if TYPE_CHECKING:
    from ..database import _Cursor

SCHEMA = 1
MAX_BYTES = 8 << 20  # hundreds of records; a larger file is not one of these
VENDORS = ("nvidia", "amd", "cpu")
KEY_DIGITS = 32  # of SHA-256: 128 bits
RECORDED = "recorded results"  # what a check of speed calls a record from here
COMMENT = "# Made by `validate --record`: results that must be the same, to the bit, wherever the key is the same.\n"
HINT = "the bits are not those that this model has had with the same software: repeat, compare with another GPU, suspect this one"
_KEY, _SHA256 = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}"), re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")


class GoldenError(ValueError):
    """A file that cannot be used, or a recording that is refused: names what and why."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One key's results. digests: case -> tensor -> SHA-256 in hexadecimal. speed_us: name of a timed call -> microseconds."""

    of: Mapping[str, str]
    digests: Mapping[str, Mapping[str, str]]
    speed_us: Mapping[str, float]


def key(identity: Identity, software: Software, driver: str | None, fingerprint: str, tiling: str, backend: str) -> str:
    """Hash of everything that a result's bits depend on: devices whose keys are equal must agree.

    identity: its model, arch, unit count and partition; for the CPU the model and the instructions that it names.
    fingerprint, tiling: of all kernels that the result comes from.
    """
    parts = {
        "vendor": identity.vendor, "slug": identity.slug, "name": identity.name, "arch": identity.arch,
        "compute_units": identity.compute_units, "partition": identity.partition, "driver": driver, "torch": software.torch,
        "runtime": software.runtime, "triton": software.triton if backend == "triton" else None,
        "hip_python": software.hip_python if backend == "hip" else None, "backend": backend, "fingerprint": fingerprint,
        "tiling": tiling,
    }  # fmt: skip
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


# ------------------------------------------------------------------ files
def default_folder() -> Path:
    """The user's own: beside the user's tilings."""
    return user_folder().parent / "golden"


def path_of(folder: Path, vendor: str, slug: str) -> Path:
    """Raises GoldenError for a slug that is no file name."""
    if vendor not in VENDORS or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", slug):
        raise GoldenError(f"device {vendor!r}/{slug!r}: no name for a file of recorded results")
    return folder / vendor / f"{slug}.yaml"


def load(folder: Path, vendor: str, slug: str) -> dict[str, Golden]:
    """The records of a model by key; none where there is no file. Raises GoldenError that names file, line and field."""
    path = path_of(folder, vendor, slug)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise GoldenError(f"{path}: larger than {MAX_BYTES} bytes, so it is no file of recorded results")
    return parse(data, str(path), vendor, slug)


def parse(data: bytes | str, label: str, vendor: str, slug: str) -> dict[str, Golden]:
    """Check the text of a file of this model. Raises GoldenError."""
    try:
        top = _compose(data, label).mapping({"schema", "device", "records"}, required={"schema", "device", "records"})
        top["schema"].one_of(SCHEMA)
        device = top["device"].mapping({"vendor", "slug"}, required={"vendor", "slug"})
        device["vendor"].one_of(vendor)
        device["slug"].one_of(slug)
        found: dict[str, Golden] = {}
        for item in top["records"].items():
            parts = item.mapping({"key", "of", "digests", "speed_us"}, required={"key"})
            name = _matching(parts["key"], _KEY, f"{KEY_DIGITS} hexadecimal digits")
            if name in found:
                parts["key"].fail(f"{name!r}: given twice")
            found[name] = _golden(parts)
    except DatabaseError as error:
        raise GoldenError(str(error)) from error
    return found


def _golden(parts: dict[str, _Cursor]) -> Golden:
    of = {n: str(v.scalar()) for n, v in parts["of"].mapping().items()} if "of" in parts else {}
    digests = {
        _named(case, name): {
            _named(value, tensor): _matching(value, _SHA256, "a SHA-256 of 64 hexadecimal digits")
            for tensor, value in case.mapping().items()
        }
        for name, case in (parts["digests"].mapping().items() if "digests" in parts else ())
    }
    speed = {_named(v, n): _positive(v) for n, v in (parts["speed_us"].mapping().items() if "speed_us" in parts else ())}
    return Golden(of, digests, speed)


def _positive(cursor: _Cursor) -> float:
    value = cursor.number()
    if value > 1e15:
        cursor.fail("too large for microseconds")
    return float(value)


def _named(cursor: _Cursor, name: str) -> str:
    if not _NAME.fullmatch(name):
        cursor.fail(f"{name!r}: a name has 1 to 200 printable characters")
    return name


def _matching(cursor: _Cursor, pattern: re.Pattern[str], what: str) -> str:
    value = cursor.text()
    if not pattern.fullmatch(value):
        cursor.fail(f"{value[:80]!r}: must be {what}, quoted")
    return value


# ------------------------------------------------------------------ compare
def checks(digests: Iterable[Digest], folder: Path, vendor: str, slug: str) -> list[Check]:
    """Read the model's file and compare. A file that cannot be used is an inconclusive check, and the run goes on."""
    try:
        return compare(digests, load(folder, vendor, slug))
    except GoldenError as error:
        hint = "repair the file, or name another folder with --golden"
        return [Check(id="agreement/golden", status="inconclusive", severity="critical", detail=str(error), hint=hint)]


def compare(digests: Iterable[Digest], golden: Mapping[str, Golden]) -> list[Check]:
    """A check for each digest, in group "agreement"; one alone where nothing is recorded for any of the keys."""
    digests = list(digests)
    no_record = "no record for this key (driver, torch, Triton, kernel, tiling); --record writes one"
    if not any(d.key in golden for d in digests):
        return [Check(id="agreement/golden", status="skipped", severity="info", detail=no_record)]
    found = []
    for one in digests:
        name = f"agreement/golden/{one.case}/{one.tensor}"
        expected = golden[one.key].digests.get(one.case, {}).get(one.tensor) if one.key in golden else None
        data: dict[str, Any] = {"backend": one.backend, "key": one.key, "sha256": one.sha256}
        if expected is None:
            found.append(Check(id=name, status="skipped", severity="info", detail=no_record, data=data))
        elif expected == one.sha256:
            found.append(Check(id=name, status="pass", severity="critical", detail="the recorded bits", data=data))
        else:
            detail = f"SHA-256 {one.sha256[:12]}..., recorded {expected[:12]}..."
            found.append(Check(id=name, status="fail", severity="critical", detail=detail, hint=HINT, data=data | {"recorded": expected}))
    return found


# ------------------------------------------------------------------ record
def record(report: Report, folder: Path, replace: bool = False) -> list[Path]:
    """Add the digests and times of a report that passed to its models' files; returns the files.

    Raises GoldenError for a report that did not pass, for devices of one key that differ, for a file that cannot be used and,
    unless `replace`, for a digest that differs from the recorded one. A file changes as a whole or not at all.
    """
    verdict = together(_apart_from_records(d, report.strict) for d in report.devices) if replace else report.verdict
    if verdict != "pass":
        raise GoldenError(f"--record: the verdict is {verdict}, and only what passed is recorded")
    models: dict[tuple[str, str], list[DeviceReport]] = {}
    for device in report.devices:
        if device.driver is None and device.identity.vendor != "cpu":
            raise GoldenError(f"--record: the driver of {device.identity.name} is not known, so that its bits have no key")
        models.setdefault((device.identity.vendor, device.identity.slug), []).append(device)
    new = {model: _collect(report, devices) for model, devices in models.items()}
    return [_add(path_of(folder, vendor, slug), vendor, slug, found, replace) for (vendor, slug), found in new.items() if found]


def _apart_from_records(device: DeviceReport, strict: bool) -> Outcome:
    """The verdict without the comparison with what is to be replaced."""
    if device.reason:
        return device.verdict
    return verdict_of((c for c in device.checks if not c.id.startswith("agreement/golden") and c.data.get("record") != RECORDED), strict)


def _collect(report: Report, devices: list[DeviceReport]) -> dict[str, Golden]:
    """By key, what the devices of one model have in common."""
    of: dict[str, dict[str, str]] = {}
    digests: dict[str, dict[str, dict[str, str]]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for device in devices:
        for one in device.digests:
            of.setdefault(one.key, _of(report, device, one.backend))
            earlier = digests.setdefault(one.key, {}).setdefault(one.case, {}).setdefault(one.tensor, one.sha256)
            if earlier != one.sha256:
                raise GoldenError(f"--record: {one.case}/{one.tensor} differs among the devices of this report: none is recorded")
        for check in device.checks:
            name, where, backend = (check.data.get(field) for field in ("timed", "key", "backend"))
            microseconds = check.data.get("measured_us")
            if isinstance(name, str) and isinstance(where, str) and isinstance(microseconds, (int, float)) and microseconds > 0:
                of.setdefault(where, _of(report, device, str(backend)))
                times.setdefault(where, {}).setdefault(name, []).append(float(microseconds))
    medians = {k: {name: round(statistics.median(values), 2) for name, values in by_name.items()} for k, by_name in times.items()}
    return {k: Golden(of[k], digests.get(k, {}), medians.get(k, {})) for k in of}


def _of(report: Report, device: DeviceReport, backend: str) -> dict[str, str]:
    software, identity = report.software, device.identity
    facts = {
        "backend": backend, "name": identity.name, "partition": identity.partition, "driver": device.driver, "torch": software.torch,
        "runtime": software.runtime, "triton": software.triton, "hip_python": software.hip_python,
        "portable_flash": software.portable_flash, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    return {name: str(value) for name, value in facts.items() if value is not None}


def _add(path: Path, vendor: str, slug: str, new: Mapping[str, Golden], replace: bool) -> Path:
    from ..tune.writer import WriteError, locked, replace_file  # here: a reader needs no locks

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            old = load(path.parent.parent, vendor, slug)
            text = _text(vendor, slug, _merged(old, new, replace, path))
            parse(text, str(path), vendor, slug)  # what is put in place can be read
            if len(text.encode()) > MAX_BYTES:
                raise GoldenError(f"{path}: would be larger than {MAX_BYTES} bytes: remove records of old drivers and versions")
            replace_file(path, text)
    except WriteError as error:
        raise GoldenError(f"--golden: {error}") from error
    except OSError as error:
        raise GoldenError(f"--golden {path.parent.parent}: cannot be written: {error.strerror or error}") from error
    return path


def _merged(old: Mapping[str, Golden], new: Mapping[str, Golden], replace: bool, path: Path) -> dict[str, Golden]:
    merged = dict(old)
    for name, fresh in new.items():
        before = old.get(name)
        if before is None:
            merged[name] = fresh
            continue
        digests = {case: dict(tensors) for case, tensors in before.digests.items()}
        for case, tensors in fresh.digests.items():
            for tensor, value in tensors.items():
                if digests.setdefault(case, {}).setdefault(tensor, value) != value:
                    if not replace:
                        what = f"{case}/{tensor} is recorded with other bits under key {name}"
                        raise GoldenError(f"{path}: {what}; --replace overwrites it")
                    digests[case][tensor] = value
        speed = {**before.speed_us, **fresh.speed_us} if replace else {**fresh.speed_us, **before.speed_us}
        merged[name] = Golden(fresh.of if replace else before.of, digests, speed)
    return merged


def _text(vendor: str, slug: str, records: Mapping[str, Golden]) -> str:
    from ..tune.writer import _flow, _scalar

    def flow(values: Mapping[str, Any]) -> str:
        return _flow({_scalar(name): value for name, value in values.items()})

    lines = [COMMENT, f"schema: {SCHEMA}\n", f"device: {flow({'vendor': vendor, 'slug': slug})}\n"]
    lines.append("records:\n" if records else "records: []\n")
    for name, one in records.items():
        lines.append(f'  - key: "{name}"\n    of: {flow(one.of)}\n')
        if one.digests:
            lines.append("    digests:\n")
        for case, tensors in one.digests.items():
            lines.append(f"      {_scalar(case)}:\n")
            lines += [f'        {_scalar(tensor)}: "{value}"\n' for tensor, value in tensors.items()]
        if one.speed_us:
            lines.append("    speed_us:\n")
        lines += [f"      {_scalar(call)}: {round(value, 2)}\n" for call, value in one.speed_us.items()]
    return "".join(lines)
