"""Reports as files: reading them with every type checked, and writing each format so that a reader never sees half a file.

    python -m portable_flash.validate.document > portable_flash/validate/report.schema.json

makes the schema file again after a change of report.py.

Reading is for documents of unknown origin: the size is bounded, fields must have their types, and a verdict that the statuses of the
checks do not bear out, for better or worse, is refused. Fields that this version does not know are ignored, so that one may be added
without a new schema number.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import summary
from .report import LEVELS, SCHEMA, Report, to_json, together, verdict_of

MAX_BYTES = 16 << 20  # of a document; a run with every check on a host of 8 devices takes about 1 MB
MAX_DEVICES = 1024  # of a host
MAX_CHECKS = 20_000  # of a device
MAX_INTEGER = 2**64  # JSON has no bound, and what is larger is no count, size or index


class ReportError(ValueError):
    """A document that is no report, or not one that this version reads. The text names the file and the field."""


class OutputError(OSError):
    """A file that cannot be written. The text names the option and the file."""


def read(source: str | os.PathLike[str] | bytes, label: str | None = None) -> Report:
    """The report in a file (.json, or compressed with gzip) or in bytes; `label` names it in errors, by default its path.

    Raises ReportError, also for a file that cannot be read, and ModuleNotFoundError where msgspec is not installed.
    """
    msgspec = _msgspec()
    label = label or ("report" if isinstance(source, bytes) else os.fspath(source))
    raw = _bounded(source, label)
    try:
        head = msgspec.json.decode(raw, type=msgspec.defstruct("Head", [("schema", int | None, None)]))
        if head.schema is None:
            raise ReportError(f"{label}: field schema is missing: no report of portable-flash validate")
        if head.schema != SCHEMA:
            raise ReportError(f"{label}: schema {head.schema}: this version reads {SCHEMA}")
        report = msgspec.json.decode(raw, type=Report)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ReportError(f"{label}: {_plain(str(error))}") from None
    except RecursionError:
        raise ReportError(f"{label}: nested too deeply") from None
    _check(report, label)
    return report


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a report, made from the dataclasses."""
    made = _msgspec().json.schema(Report)
    top = made["$defs"]["Report"]
    top["properties"]["schema"] = {"const": SCHEMA}
    top["properties"]["level"] = {"enum": list(LEVELS)}
    top["required"] = ["schema", *top["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Report of portable-flash validate", **made}


def schema_text() -> str:
    """Text of report.schema.json."""
    return json.dumps(schema(), indent=1) + "\n"


def formats() -> dict[str, Callable[[Report], str]]:
    """Every format that goes to a file, by the name of its option."""
    from . import html, junit, prometheus

    return {"json": to_json, "junit": junit.render, "prometheus": prometheus.render, "html": html.render}


def write(report: Report, outputs: Mapping[str, str | os.PathLike[str]]) -> None:
    """Write a report in each format asked for, {"html": path, ...}; the path "-" is standard output.

    A format that fails does not keep the others from being written: its error, such as OutputError, is raised after them.
    """
    known = formats()
    unknown = sorted(set(outputs) - set(known))
    if unknown:
        raise ValueError(f"format {unknown[0]!r}: allowed are {', '.join(known)}")
    errors = []
    for name, path in outputs.items():
        try:
            write_text(path, known[name](report), f"--{name}")
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def check_writable(path: str | os.PathLike[str], option: str) -> None:
    """Raise now rather than after a long run: OutputError, or for "--html" ModuleNotFoundError where there is no jinja2."""
    if option == "--html":
        from . import html

        html.environment()
    if os.fspath(path) == "-":
        return
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise OutputError(f"{option}: cannot write {path}: it is a folder")
    if not os.path.isdir(folder):
        raise OutputError(f"{option}: cannot write {path}: there is no folder {folder}")
    where = target if os.path.exists(target) and not os.path.isfile(target) else folder
    if not os.access(where, os.W_OK):
        raise OutputError(f"{option}: cannot write {path}: no permission")


def check_outputs(outputs: Mapping[str, str], inputs: Iterable[tuple[str, str]] = ()) -> None:
    """Refuse outputs that would overwrite an input or each other, whatever links lead to them, and what cannot be written at all.

    outputs: option -> path, {"--html": "x.html"}. inputs: (argument, path) of what is read. Raises OutputError that names both
    arguments, or what check_writable raises.
    """
    used: dict[Any, str] = {}
    for option, path in outputs.items():
        if (place := _place(path)) is None:
            continue
        if place in used:
            where = "only one fits on standard output" if path == "-" else f"both are {path}"
            raise OutputError(f"{used[place]} and {option}: {where}; each needs a file of its own")
        used[place] = option
    for argument, path in inputs if used else ():
        if path != "-" and (option := used.get(_place(path))) is not None:
            raise OutputError(f"{option} {outputs[option]}: would overwrite what {argument} reads")
    for option, path in outputs.items():
        check_writable(path, option)


def _place(path: str) -> Any:
    """What two paths of one file have in common; None for what is no regular file, such as /dev/null, which any number may write to."""
    if path == "-":
        return path
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return os.path.realpath(path) if "\0" not in path else path
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def write_text(path: str | os.PathLike[str], text: str, option: str) -> None:
    """Write a whole file or nothing, UTF-8, with the permissions that a new file gets. "-" is standard output; what is no regular
    file, such as /dev/null, is written to as it is. Raises OutputError, which names `option`."""
    if os.fspath(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = os.path.realpath(path)  # a link stays a link
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            Path(target).write_text(text, encoding="utf-8")
            return
        temporary = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "x", encoding="utf-8", newline="\n") as file:  # not mkstemp: others may have to read it
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
    except OSError as error:
        check_writable(path, option)  # says it better where it knows
        raise OutputError(f"{option}: cannot write {path}: {error.strerror or error}") from None


def _msgspec() -> Any:
    try:
        import msgspec
    except ModuleNotFoundError:
        raise ModuleNotFoundError('reading reports needs msgspec: pip install "portable-flash[fleet]"') from None
    return msgspec


def _bounded(source: str | os.PathLike[str] | bytes, label: str) -> bytes:
    """The bytes of a document, unpacked, and no more than MAX_BYTES of them."""
    if isinstance(source, bytes):
        raw = source
    else:
        try:
            if not stat.S_ISREG(os.stat(source).st_mode):  # a pipe would block, a device need not end
                raise ReportError(f"{label}: not a regular file")
            with open(source, "rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, ReportError):
                raise
            raise ReportError(f"{label}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if raw[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                raw = file.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ReportError(f"{label}: gzip: {error}") from None
    if len(raw) > MAX_BYTES:
        raise ReportError(f"{label}: more than {MAX_BYTES >> 20} MiB: no report")
    if not raw.strip():
        raise ReportError(f"{label}: empty")
    return raw


def _plain(message: str) -> str:
    """msgspec's words for a person: the field without its root, and not all of a long value. What it quotes, it quotes with escapes."""
    message = message.replace("- at `$.", "in `").replace("- at `$", "in `document")
    return message if len(message) <= 300 else f"{message[:200]} ... {message[-90:]}"


def _check(report: Report, label: str) -> None:
    """What types cannot say."""
    if report.level not in LEVELS:
        raise ReportError(f"{label}: level {report.level[:40]!r}: allowed are {', '.join(LEVELS)}")
    try:
        summary.started(report)
    except ValueError:
        raise ReportError(f"{label}: started {report.started[:40]!r}: no ISO 8601 time with a time zone") from None
    if len(report.devices) > MAX_DEVICES:
        raise ReportError(f"{label}: {len(report.devices)} devices: at most {MAX_DEVICES}")
    _bound(label, "seed", (report.seed,))
    for index, device in enumerate(report.devices):
        where = f"devices[{index}]"
        if len(device.checks) > MAX_CHECKS:
            raise ReportError(f"{label}: {where} has {len(device.checks)} checks: at most {MAX_CHECKS}")
        identity = device.identity
        _bound(label, f"{where}.identity", (identity.index or 0, identity.compute_units, identity.memory_bytes))
        for position, check in enumerate(device.checks):
            _bound(label, f"{where}.checks[{position}].data", check.data.values())
        borne = verdict_of(device.checks, report.strict)
        stopped = device.verdict == "no_verdict" and borne == "pass" and device.reason  # a run may say less than its checks would
        if device.verdict != borne and not stopped:
            raise ReportError(f"{label}: {where}.verdict is {device.verdict}, but its checks make it {borne}")
    if report.verdict != (borne := together(device.verdict for device in report.devices)):
        raise ReportError(f"{label}: verdict is {report.verdict}, but its devices make it {borne}")


def _bound(label: str, where: str, values: Iterable[Any]) -> None:
    for value in values:
        whole = (min(value, default=0), max(value, default=0)) if type(value) is list else (value,) if type(value) is int else ()
        if any(abs(each) >= MAX_INTEGER for each in whole):
            raise ReportError(f"{label}: {where}: an integer beyond 64 bits")


if __name__ == "__main__":
    sys.stdout.write(schema_text())
