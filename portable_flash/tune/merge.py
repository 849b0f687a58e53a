"""Few entries for many keys: neighbouring buckets and head_dims, dtypes and masks share an entry where they share a tiling.

A key may have several tilings that are as good as its best (`Cell.choices`), and an entry takes one that all its keys have, so
that nothing is lost by sharing. The entries of a kernel form a decision list: the first whose conditions hold is used, bounds go
from small to large.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..database import Entry, When
from ..tiling import Tiling
from .keys import DEFAULT_BUCKETS, DEFAULT_HEAD_DIMS, Key
from .space import simplicity

OPEN = max(DEFAULT_BUCKETS)  # the last bucket has no upper bound


@dataclass(frozen=True)
class Choice:
    """A tiling that a key may use and the evidence for it. loss: its time over the fastest's. keys: how many measured keys it
    speaks for; one that is read from an entry of an older file (`entry`) may speak for several or, where another does, for none."""

    tiling: Tiling
    proof: Mapping[str, Any]
    loss: float = 1.0
    entry: int | None = None
    keys: int = 1

    @property
    def name(self) -> tuple:
        """What keys of one entry share: figures that were measured do not speak for those that were not."""
        return (self.tiling, self.proof.get("source"))


@dataclass(frozen=True, eq=False)
class Cell:
    """A key and what it may use, at least one."""

    key: Key
    choices: tuple[Choice, ...]

    @property
    def bound(self) -> int:
        return min(self.key.seqlen, OPEN)

    @functools.cached_property
    def by_name(self) -> dict[tuple, Choice]:
        return {choice.name: choice for choice in reversed(self.choices)}


@dataclass(frozen=True)
class _Rule:
    """An entry without its evidence: bounds, dtypes, masks and what to use."""

    head_dim: int
    bound: int
    dtypes: tuple[str, ...]
    causal: bool | None
    use: tuple  # Choice.name

    def __call__(self, cell: Cell) -> bool:
        key = cell.key
        return (
            key.head_dim <= self.head_dim and cell.bound <= self.bound and key.dtype in self.dtypes
            and (self.causal is None or key.causal == self.causal)
        )  # fmt: skip

    def when(self) -> When:
        s = None if self.bound >= OPEN else self.bound
        return When(self.dtypes, self.head_dim, self.head_dim, s, s, self.causal, varlen=False, mask_or_bias=False)

    @property
    def order(self) -> tuple:
        """Small before large; of one dtype and mask before those of several."""
        return (self.head_dim, self.bound, len(self.dtypes), self.causal is None, self.dtypes, bool(self.causal))


# ------------------------------------------------------------------ from an older file
def is_key(when: When) -> bool:
    """Whether an entry is for keys, as this module makes them."""
    dense = when.varlen is False and when.mask_or_bias is False
    return dense and None not in (when.dtype, when.head_dim_le) and when.seqlen_q_le == when.seqlen_k_le


def cells_of(entries: Sequence[Entry], backend: str, kernel: str, new: Iterable[Cell]) -> list[Cell]:
    """What the entries say of every key of the usual ones, on the grid of their bounds and the new cells', these cells left out."""
    new, own = list(new), [e for e in entries if is_key(e.when)]
    taken = {(c.key.dtype, c.key.head_dim, c.key.causal, c.bound) for c in new}
    head_dims = sorted({e.when.head_dim_le for e in own} | {c.key.head_dim for c in new} | set(DEFAULT_HEAD_DIMS))
    bounds = sorted({e.when.seqlen_q_le or OPEN for e in own} | {c.bound for c in new} | set(DEFAULT_BUCKETS))
    dtypes = dict.fromkeys(d for e in own for d in e.when.dtype)
    of_entry: dict[int, list[Key]] = {}
    for name in itertools.product(dtypes, head_dims, (False, True), bounds):
        key = Key(backend, kernel, *name)
        place = next((i for i, e in enumerate(entries) if e.when(key.problem())), None)
        if place is not None and is_key(entries[place].when):
            of_entry.setdefault(place, []).append(key)
    found = []
    for place, keys in of_entry.items():
        entry, corner = entries[place], max(keys, key=lambda k: (k.head_dim, k.seqlen, k))
        left = [k for k in keys if (k.dtype, k.head_dim, k.causal, k.seqlen) not in taken]
        spoken = min(entry.proof.get("keys", 1), len(left))
        for key in left:  # the largest, of which its figures are, speaks for all
            choice = Choice(entry.use, entry.proof, entry=place, keys=spoken if key == corner else 0)
            found.append(Cell(key, (choice,)))
    return found


# ------------------------------------------------------------------ compression
def compress(cells: Iterable[Cell]) -> tuple[Entry, ...]:
    """Entries for all cells of one kernel, in the order in which they are to be looked at."""
    cells = sorted(cells, key=lambda c: (c.key.head_dim, c.bound, c.key))
    if not cells:
        return ()
    rules = _pruned(_rules(cells), cells)
    while (shorter := _widened(rules, cells)) is not None:
        rules = shorter
    by_rule: dict[int, list[Cell]] = {i: [] for i in range(len(rules))}
    for cell in cells:
        by_rule[rules.index(_first(rules, cell))].append(cell)
    return tuple(Entry(rule.when(), rule.use[0], _proof(rule, by_rule[i])) for i, rule in enumerate(rules) if by_rule[i])


def _pruned(rules: list[_Rule], cells: list[Cell]) -> list[_Rule]:
    """In order, without those that the rules after them say as well."""
    rules = sorted(rules, key=lambda rule: rule.order)
    own: dict[_Rule, list[Cell]] = {}
    for cell in cells:
        own.setdefault(_first(rules, cell), []).append(cell)
    kept = list(rules)
    for rule in rules:
        later = kept[kept.index(rule) + 1 :]
        next_ones = {cell: _first(later, cell) for cell in own.get(rule, ())}
        if all(r is not None and r.use in cell.by_name for cell, r in next_ones.items()):
            kept.remove(rule)
            for cell, r in next_ones.items():
                own.setdefault(r, []).append(cell)
    return kept


def _widened(rules: list[_Rule], cells: list[Cell]) -> list[_Rule] | None:
    """Fewer rules, where one of them says it for more dtypes or both masks, behind the exceptions; None where none can."""
    dtypes, masks = tuple(sorted({c.key.dtype for c in cells})), {c.key.causal for c in cells}
    kinds, owner = {(c.key.dtype, c.key.causal) for c in cells}, {cell: _first(rules, cell) for cell in cells}
    for rule in rules:
        for wider in (replace(rule, causal=None), replace(rule, dtypes=dtypes), replace(rule, dtypes=dtypes, causal=None)):
            said = itertools.product(wider.dtypes, masks if wider.causal is None else {wider.causal})
            if wider == rule or (wider.causal is None and len(masks) < 2) or not kinds.issuperset(said):
                continue
            taken = (cell for cell in cells if wider.order < owner[cell].order and wider(cell))
            if any(wider.use not in cell.by_name for cell in taken):
                continue
            shorter = _pruned([wider, *(r for r in rules if r is not rule)], cells)
            if len(shorter) < len(rules) and all(_first(shorter, c).use in c.by_name for c in cells):
                return shorter
    return None


def _first(rules: list[_Rule], cell: Cell) -> _Rule | None:
    return next((rule for rule in rules if rule(cell)), None)


def _rules(cells: list[Cell]) -> list[_Rule]:
    """The fewest over all ways to cut the head_dims into runs (by dynamic programming) and the kinds of a run into groups."""
    head_dims = sorted({c.key.head_dim for c in cells})
    best: list[list[_Rule]] = [[]]
    for end in range(1, len(head_dims) + 1):
        runs = []
        for start in range(end):
            own = [c for c in cells if c.key.head_dim in head_dims[start:end]]
            if (rules := _rules_of_run(own, head_dims[end - 1])) is not None:
                runs.append(best[start] + rules)
        best.append(min(runs, key=len))  # a run of one head_dim always has rules
    return best[-1]


def _rules_of_run(cells: list[Cell], head_dim: int) -> list[_Rule] | None:
    kinds = sorted({(c.key.dtype, c.key.causal) for c in cells})
    ways = (_rules_of_groups(cells, groups, head_dim) for groups in _partitions(kinds) if all(map(_is_product, groups)))
    return min((way for way in ways if way is not None), key=len, default=None)


def _rules_of_groups(cells: list[Cell], groups: list[list[tuple]], head_dim: int) -> list[_Rule] | None:
    rules = []
    for group in groups:
        dtypes, masks = tuple(dict.fromkeys(d for d, _ in group)), {c for _, c in group}
        segments = _segments([c for c in cells if (c.key.dtype, c.key.causal) in group])
        if segments is None:
            return None
        causal = None if len(masks) == 2 else masks.pop()
        rules += [_Rule(head_dim, bound, dtypes, causal, use) for bound, use in segments]
    return rules


def _segments(cells: list[Cell]) -> list[tuple[int, tuple]] | None:
    """Runs of buckets that share a choice, each as long as can be, with the choice that costs them least; None where the cells
    of one bucket share none. The last run has no upper bound."""
    segments, own = [], []
    for bound, bucket in itertools.groupby(sorted(cells, key=lambda c: c.bound), key=lambda c: c.bound):
        bucket = list(bucket)
        if own and _common([*own, *bucket]):
            own += bucket
        elif not _common(bucket):
            return None
        else:
            if own:
                segments.append((own[-1].bound, _cheapest(own)))
            own = bucket
    return [*segments, (OPEN, _cheapest(own))]


def _common(cells: list[Cell]) -> set[tuple]:
    return functools.reduce(lambda a, b: a & b, (c.by_name.keys() for c in cells[1:]), set(cells[0].by_name))


def _cheapest(cells: list[Cell]) -> tuple:
    loss = lambda name: sum(math.log(c.by_name[name].loss) for c in cells)
    return min(_common(cells), key=lambda name: (round(loss(name), 6), simplicity(name[0]), str(name)))


def _partitions(items: list) -> Iterable[list[list]]:
    """All ways to put items into groups, those with few groups among them."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in _partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def _is_product(group: list[tuple]) -> bool:
    """Whether conditions can say it: all of these dtypes with all of these masks."""
    return len(group) == len({d for d, _ in group}) * len({c for _, c in group})


# ------------------------------------------------------------------ evidence
def _proof(rule: _Rule, cells: list[Cell]) -> dict[str, Any]:
    """The figures of the longest bucket of the largest head_dim, and of how many measured keys they are an example: `keys` (0: of none,
    the key was between measured ones in an older file), and the least `default_us / median_us` among them."""
    choices = [c.by_name[rule.use] for c in cells]
    measured = [choice for choice in choices if choice.entry is None] or choices
    proof = dict(measured[-1].proof)
    keys = min(len(choices), sum(choice.keys for choice in choices))
    speedups = [s for choice in choices if (s := _speedup(choice.proof)) is not None]
    proof.pop("least_speedup", None)
    proof.pop("keys", None)
    if keys != 1 and proof.get("source") == "measured":
        proof |= {"keys": keys} | ({"least_speedup": min(speedups)} if len(speedups) == len(choices) else {})
    return proof


def _speedup(proof: Mapping[str, Any]) -> float | None:
    if "least_speedup" in proof:
        return proof["least_speedup"]
    return round(proof["default_us"] / proof["median_us"], 3) if proof.get("default_us") and proof.get("median_us") else None
