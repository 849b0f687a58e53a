"""The checks, as tasks: what each asks, the ids that it will report, and how it is run.

To add one: write a function that yields Checks from a Context, list it as a Task in its module's `tasks`, and put its bounds
into levels.py. Its ids are then listed, selected, timed and reported like all others.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..context import Context
from ..report import Check

GROUPS = ("control", "accuracy", "repeatability", "agreement", "backends", "edges", "memory", "speed", "signals")
ALWAYS = "control"  # without it nothing can pass


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a validation that runs as one. ids: of the checks that it yields, in order; a trailing * where the machine decides."""

    ids: tuple[str, ...]
    asks: str
    run: Callable[[Context], Iterator[Check]]

    @property
    def group(self) -> str:
        return self.ids[0].partition("/")[0]

    @property
    def name(self) -> str:
        """What its ids have in common."""
        first, *others = (name.split("/") for name in self.ids)
        common = [part for i, part in enumerate(first) if all(other[i : i + 1] == [part] for other in others)]
        return "/".join(common or first[:-1])


def wanted(name: str, patterns: Iterable[str]) -> bool:
    """Whether an id (or a listed id with a trailing *) is selected: no pattern selects all; a group's name, all of that group."""
    patterns = tuple(patterns)
    if not patterns or name.partition("/")[0] == ALWAYS:
        return True
    known = lambda p: fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p.rstrip('/')}/*")
    return any(known(p) or (name.endswith("*") and fnmatch.fnmatchcase(p, name)) for p in patterns)


def tasks(context: Context) -> list[Task]:
    """Everything that the context's level asks of its device, in the order in which it runs.

    Speed comes while the device is warm from the repeats, the node's and the machine's own comparisons (agreement/node,
    speed/node, signals) after all devices are done; see session.
    """
    from . import accuracy, agreement, between, control, edges, memory, repeatability, speed

    speeds = [Task(("speed/*",), "is each kernel as fast as its record in the tuning database", speed.run)]
    parts = (control.tasks, accuracy.tasks, memory.tasks, edges.tasks, between.tasks, agreement.tasks, repeatability.tasks)
    return [task for part in parts for task in part(context)] + speeds
