"""What a person sees of a run: a live display on a terminal where rich is installed, plain lines elsewhere, JSON lines on request."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, TextIO

from .outcomes import facts_of
from .session import Event


def line_of(event: Event) -> str:
    if event.kind == "key" and event.outcome is not None:
        chosen, speedup = event.outcome.chosen, event.outcome.speedup
        if chosen is None:
            return f"{event.key}: no candidate is right"
        against = f", {speedup:.2f}x of the default" if speedup else ""
        return f"{event.key}: {chosen.median_us:.1f} us{against}; {chosen.tiling}"
    return f"{event.key}: {event.text}" if event.key else event.text


class Display:
    """Plain lines on `stream`: finished keys, rejected candidates, notes; as JSON objects, one a line, with as_json."""

    def __init__(self, total: int, budget_s: float | None, stream: TextIO | None = None, as_json: bool = False):
        self.total, self.budget_s, self.as_json = total, budget_s, as_json
        self.stream = stream or (sys.stdout if as_json else sys.stderr)
        self.done, self.start = 0, time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.done += event.kind == "key"
            self.show(event)

    def show(self, event: Event) -> None:
        if self.as_json:
            facts: dict[str, Any] = {"event": event.kind, "text": event.text} | ({"key": str(event.key)} if event.key else {})
            print(json.dumps(facts | (facts_of(event.outcome) if event.outcome else {})), file=self.stream, flush=True)
        elif event.kind != "search":
            progress = f"[{self.done}/{self.total} {self._left()}] " if event.kind == "key" else "  "
            print(progress + line_of(event), file=self.stream, flush=True)

    def _left(self) -> str:
        """Time left: of the work, by what the finished keys took; no more than the budget has."""
        spent = time.monotonic() - self.start
        left = spent / self.done * (self.total - self.done) if self.done else 0.0
        if self.budget_s is not None:
            left = min(left, max(0.0, self.budget_s - spent))
        return f"{left:.0f} s left"


class LiveDisplay(Display):
    """rich: a bar, the keys under way by GPU, and the lines of what is finished above them."""

    def __init__(self, total: int, budget_s: float | None, console: Any = None):
        """console: rich's, of standard error unless given."""
        super().__init__(total, budget_s)
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = console or Console(stderr=True)
        columns = (TextColumn("tune"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("tune", total=total)
        self._group, self._under_way = Group, {}
        self._live = Live(self._bar, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        from rich.text import Text

        if event.kind == "search":
            self._under_way[event.node] = f"{event.node}: {event.key}, {event.text}"
        elif event.kind != "saved":
            self._live.console.print(Text(line_of(event)))
        self._bar.update(self._task, completed=self.done)
        self._live.update(self._group(*(Text(line) for line in self._under_way.values()), self._bar))


def display(total: int, budget_s: float | None, as_json: bool) -> Display:
    """The best that this terminal and this installation show."""
    if as_json or not sys.stderr.isatty():
        return Display(total, budget_s, as_json=as_json)
    try:
        return LiveDisplay(total, budget_s)
    except ImportError:  # rich is an extra
        return Display(total, budget_s)
