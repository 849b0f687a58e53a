"""Every finished measurement of a tuning run, one JSON line each, so that a run can go on where it was killed.

A line is written whole by one write and flushed to the disk before the next measurement starts; a last line that a crash tore
is dropped when the journal is read, which costs that one measurement.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tiling import Tiling
from .keys import Key

FORMAT = 1


class JournalError(ValueError):
    """A journal that cannot be used: names the file and why."""


class Journal:
    """Values by (kind, key, tiling, rung). Thread-safe.

    identity: what measurements depend on (device, kernels' spaces, versions); a journal of another identity is no help.
    Raises JournalError for a file that cannot be read or written, or that is of another identity with resume.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], resume: bool = False):
        self.path, self.known = path, {}
        self._lock = threading.Lock()
        self._stream: int | None = None
        if path is None:
            return
        header = json.loads(json.dumps({"journal": FORMAT, **identity}))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size = self._read(header) if resume and path.exists() else 0
            self._stream = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._stream, size)
            if size == 0:
                self._write(header)
        except OSError as error:
            raise JournalError(f"journal {path}: {error.strerror or error}") from error

    def _read(self, header: dict) -> int:
        """Fill `known`; returns the bytes of whole lines, which is where a torn last line starts."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        lines = data[:end].splitlines()
        if not lines:
            return 0
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    if record != header:
                        different = sorted(k for k in header.keys() | record.keys() if header.get(k) != record.get(k))
                        raise JournalError(
                            f"journal {self.path}: was made with another {', '.join(different)}: run without --resume to start afresh"
                        )
                    continue
                self.known[_name(record["kind"], record["key"], record["use"], record["rung"])] = record["value"]
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, JournalError):
                    raise
                raise JournalError(f"journal {self.path}: line {number} is no record: {error}") from error
        return end

    def get(self, kind: str, key: Key, tiling: Tiling | None = None, rung: int = 0) -> Any:
        """What was put, or None."""
        with self._lock:
            return self.known.get(_name(kind, str(key), None if tiling is None else tiling.as_dict(), rung))

    def put(self, kind: str, key: Key, value: Any, tiling: Tiling | None = None, rung: int = 0) -> None:
        """Remember a JSON value, on disk before this returns."""
        use = None if tiling is None else tiling.as_dict()
        with self._lock:
            self.known[_name(kind, str(key), use, rung)] = value
            if self._stream is not None:
                self._write({"kind": kind, "key": str(key), "use": use, "rung": rung, "value": value})

    def _write(self, record: dict) -> None:
        os.write(self._stream, (json.dumps(record, separators=(",", ":")) + "\n").encode())
        os.fsync(self._stream)

    def close(self) -> None:
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None


def _name(kind: str, key: str, use: Mapping[str, Any] | None, rung: int) -> tuple:
    return (kind, key, None if use is None else json.dumps(use, sort_keys=True), rung)
