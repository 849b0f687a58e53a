"""What a run found, as cells and `blocked` entries of the database file and as rows of a table."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..database import Blocked
from ..device import Device
from ..tiling import KERNELS, Tiling
from .journal import Journal
from .keys import Key, parse_key
from .measure import Check
from .merge import Cell, Choice
from .search import FINAL, Found, Rejected, Settings, Timed, better, timed
from .space import default
from .writer import Update

WORTH_A_LINE = ("wrong", "fault", "hang")  # of the reasons to reject: those that go into `blocked`
AS_GOOD = 1.01  # a key may share its neighbours' tiling where that takes at most this times its own
SLOWER_THAN_DEFAULT = 0.98  # no key may be below this


@dataclass(frozen=True)
class Outcome:
    """What is known of a finished key."""

    key: Key
    found: Found
    chosen: Timed | None

    @property
    def speedup(self) -> float | None:
        """The default's median over the chosen tiling's."""
        default = self.found.default
        return default.median_us / self.chosen.median_us if self.chosen and default else None


def from_journal(journal: Journal, device: Device, settings: Settings) -> list[Outcome]:
    """Outcomes of all keys whose final was measured, in order; nothing is measured."""
    finals: dict[str, dict[Tiling, list[float]]] = {}
    judged: dict[str, dict[tuple[str, Tiling], tuple[Check, str]]] = {}
    tried: dict[str, set[Tiling]] = {}
    for (kind, key, use, rung), value in journal.known.items():
        tiling = Tiling(**dict(use))
        tried.setdefault(key, set()).add(tiling)
        if kind == "time" and rung == FINAL:
            finals.setdefault(key, {})[tiling] = value
        elif kind != "time":
            judged.setdefault(key, {})[kind, tiling] = (Check(**value[0]), value[1])
    outcomes = []
    for name, samples in finals.items():
        key, known = parse_key(name), judged.get(name, {})
        usual, one = default(key, device), [timed(t, values) for t, values in samples.items()]
        found = Found(key, better(one, usual, settings.tie), next((t for t in one if t.tiling == usual), None))
        found.checks = {t: check for (kind, t), (check, _) in known.items() if kind == "check" and check.ok}
        found.rejected = [Rejected(t, kind, check.reason) for (_, t), (check, kind) in known.items() if not check.ok]
        found.finals = {t.tiling: t for t in one}
        found.tried = len(tried.get(name, ()))
        found.ranking = [t for t in found.ranking if t.tiling in found.checks]
        right = [t for t in found.ranking if (probe := known.get(("probe", t.tiling))) and probe[0].ok]
        outcomes.append(Outcome(key, found, right[0] if right else None))
    return sorted(outcomes, key=lambda o: (KERNELS.index(o.key.kernel), o.key))


# ------------------------------------------------------------------ the database file
def cells_of(outcomes: Iterable[Outcome]) -> list[Cell]:
    """Of every key that has a choice: that one, and those as good that another key of its group ended with: they are right at the
    odd shape, which is the same for all of a group."""
    outcomes = [o for o in outcomes if o.chosen is not None]
    probed: dict[tuple, set[Tiling]] = {}
    for outcome in outcomes:
        probed.setdefault(outcome.key.group, set()).add(outcome.chosen.tiling)
    cells = []
    for outcome in outcomes:
        limit, fastest = AS_GOOD * outcome.chosen.median_us, min(t.median_us for t in outcome.found.ranking)
        good = [t for t in outcome.found.ranking if t.tiling in probed[outcome.key.group] and t.median_us <= limit]
        good.sort(key=lambda t: t != outcome.chosen)
        cells.append(Cell(outcome.key, tuple(Choice(t.tiling, _proof(outcome, t), t.median_us / fastest) for t in good)))
    return cells


def _proof(outcome: Outcome, timed: Timed) -> dict[str, Any]:
    p, check, default = outcome.key.problem(), outcome.found.checks.get(timed.tiling), outcome.found.default
    shape = f"B{p.batch} H{p.heads_q} S{p.seqlen_q} D{p.head_dim} {'causal' if p.causal else 'full'} {p.dtype_name}"
    proof = {
        "source": "measured", "problem": shape, "median_us": timed.median_us, "p20_us": timed.p20_us, "p80_us": timed.p80_us,
        "default_us": default.median_us if default else None,
        "error_ratio": None if check is None or check.error_ratio is None else float(f"{check.error_ratio:.3g}"),
        "repeatable": check.repeatable if check else None,
    }  # fmt: skip
    return {name: value for name, value in proof.items() if value is not None}


def blocked_of(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], tuple[Blocked, ...]]:
    """By backend and kernel, the tilings that were wrong, faulted or hung, each with its reason."""
    found: dict[tuple[str, str], dict[Tiling, Blocked]] = {}
    for outcome in outcomes:
        for one in outcome.found.rejected:
            if one.kind in WORTH_A_LINE:
                reason = f"{one.kind} at {outcome.key}: {one.reason[:200]}"
                of_kernel = found.setdefault((outcome.key.backend, outcome.key.kernel), {})
                of_kernel.setdefault(one.tiling, Blocked(_named(one.tiling), reason))
    return {name: tuple(blocked.values()) for name, blocked in found.items()}


def _named(tiling: Tiling) -> dict[str, Any]:
    """All fields of a tiling, so that its neighbours are not blocked with it, but those hints that have no value."""
    return {name: getattr(tiling, name) for name in tiling.__slots__ if getattr(tiling, name) is not None}


def updates_of(outcomes: Iterable[Outcome], spaces: Mapping[tuple[str, str], str], block: bool) -> list[Update]:
    """What the outcomes add to the database, by backend and kernel in a fixed order."""
    outcomes = sorted(outcomes, key=lambda o: o.key)
    blocked = blocked_of(outcomes) if block else {}
    updates = []
    for name in sorted({(o.key.backend, o.key.kernel) for o in outcomes}):
        own = [o for o in outcomes if (o.key.backend, o.key.kernel) == name]
        updates.append(Update(*name, spaces[name], cells=tuple(cells_of(own)), blocked=blocked.get(name, ())))
    return updates


# ------------------------------------------------------------------ the table
def facts_of(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON types. Times in microseconds, gpu_s in seconds."""
    chosen, default = outcome.chosen, outcome.found.default
    return {
        "key": str(outcome.key), "use": chosen.tiling.as_dict() if chosen else None, "median_us": chosen.median_us if chosen else None,
        "p20_us": chosen.p20_us if chosen else None, "p80_us": chosen.p80_us if chosen else None,
        "default": default.tiling.as_dict() if default else None, "default_us": default.median_us if default else None,
        "speedup": round(outcome.speedup, 4) if outcome.speedup else None, "tried": outcome.found.tried,
        "rejected": [{"use": r.tiling.as_dict(), "kind": r.kind, "reason": r.reason} for r in outcome.found.rejected],
    }  # fmt: skip


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Speed-up over the default by kernel and over all: geometric mean, least and most. default_over_tuned is 1 / mean."""
    found = {}
    for kernel in (*dict.fromkeys(o.key.kernel for o in outcomes), "all"):
        ratios = [o.speedup for o in outcomes if o.speedup and kernel in (o.key.kernel, "all")]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            numbers = {"mean": mean, "least": min(ratios), "most": max(ratios), "default_over_tuned": 1 / mean}
            found[kernel] = {name: round(value, 4) for name, value in numbers.items()} | {"keys": len(ratios)}
    return found


def write_table(path: Path, outcomes: Sequence[Outcome], argv: Sequence[str], about: Mapping[str, Any]) -> None:
    """The table with the command that made it."""
    table = {"command": shlex.join(["portable-flash", "tune", *argv]), **about, "speedup": summary(outcomes)}
    head = json.dumps(table, indent=1, default=str)[:-2]
    rows = ",\n  ".join(json.dumps(facts_of(o)) for o in outcomes)  # a row a line, so that a diff shows keys
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')
    temporary.replace(path)
