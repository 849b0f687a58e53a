"""What a person sees while a validation runs, on standard error: a line for each device with rich, else plain lines."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, TextIO


class Plain:
    """One line when a task begins, at most every second for each device. Called from several threads."""

    EVERY_S = 1.0
    stream: Any

    def __init__(self, stream: TextIO | None = None):
        self.stream, self.began, self._lock = stream or sys.stderr, time.monotonic(), threading.Lock()
        self._last: dict[str, float] = {}

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __call__(self, device: str, task: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if done < total and now - self._last.get(device, 0.0) < self.EVERY_S:
                return
            self._last[device] = now
            try:
                print(f"{now - self.began:6.1f} s  {device}  {done}/{total}  {task}", file=self.stream, flush=True)
            except OSError:  # nobody reads it any more, which must not end a validation
                self.stream = _Nowhere()


class Live:
    """A bar for each device, on a terminal."""

    def __init__(self, console: Any):
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24), progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(), progress.TextColumn("{task.fields[what]}"),
        )  # fmt: skip
        self.progress, self.bars, self._lock = progress.Progress(*columns, console=console, transient=True), {}, threading.Lock()

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def __call__(self, device: str, task: str, done: int, total: int) -> None:
        with self._lock:
            if device not in self.bars:
                self.bars[device] = self.progress.add_task(device, total=total, what="")
            self.progress.update(self.bars[device], completed=done, total=total, what=task)


def display(quiet: bool = False) -> Plain | Live:
    """Live where standard error is a terminal and rich is installed."""
    if not quiet and sys.stderr.isatty():
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return Plain()
        return Live(Console(stderr=True))
    return Plain(_Nowhere() if quiet else None)


class _Nowhere:
    """A stream that nobody reads."""

    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...
