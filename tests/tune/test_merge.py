"""Many keys in few entries: every key still gets a tiling that is as good as its own."""

import random

import pytest

from portable_flash.database import Entry, When
from portable_flash.tiling import Tiling
from portable_flash.tune.keys import Key, key_set
from portable_flash.tune.merge import Cell, Choice, cells_of, compress
from portable_flash.tune.outcomes import cells_of as cells_of_outcomes
from portable_flash.tune.outcomes import Outcome
from portable_flash.tune.search import Found, Timed

A, B, C, D = Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 2), Tiling(64, 32, 4, 3), Tiling(32, 32, 4, 1)
KEYS = key_set("triton", kernels=("forward",))


def cell(key, *tilings, loss=1.0, **figures):
    proof = {"source": "measured", "problem": str(key), "median_us": 100.0, "default_us": 110.0, **figures}
    return Cell(key, tuple(Choice(t, proof, loss if i else 1.0) for i, t in enumerate(tilings)))


def chosen(entries, key):
    return next((e.use for e in entries if e.when(key.problem())), None)


def test_what_is_the_same_everywhere_is_one_entry_that_says_how_many_keys_it_stands_for():
    (entry,) = compress([cell(k, A, default_us=100.0 + k.seqlen / 512) for k in KEYS])
    assert entry.when == When(("bf16", "fp16"), 256, 256, varlen=False, mask_or_bias=False) and entry.use == A
    assert entry.proof["keys"] == len(KEYS) and entry.proof["least_speedup"] == 1.01 and entry.proof["default_us"] == 132.0


@pytest.mark.parametrize("seed", range(2))
def test_every_key_gets_one_of_its_choices_and_entries_are_fewer_than_keys(seed):
    draw = random.Random(seed)
    of = {k: draw.sample((A, B, C, D), draw.choice((1, 1, 2, 3))) for k in KEYS if k.head_dim in (64, 128) and k.seqlen >= 2048}
    entries = compress([cell(k, *tilings) for k, tilings in of.items()])
    assert [k for k in of if chosen(entries, k) not in of[k]] == []
    assert sum(e.proof.get("keys", 1) for e in entries) == len(of) > len(entries)
    shuffled = draw.sample(list(of.items()), len(of))
    assert compress([cell(k, *tilings) for k, tilings in shuffled]) == entries  # whatever the order


def test_neighbours_share_an_entry_and_exceptions_keep_their_own():
    of = {k: B if k.head_dim <= 96 else C if k.causal and k.seqlen <= 1024 else A for k in KEYS}
    entries = compress([cell(k, t) for k, t in of.items()])
    assert [(e.when.head_dim_le, e.when.seqlen_q_le, e.when.causal, e.use) for e in entries] == [
        (96, None, None, B), (256, 1024, True, C), (256, None, None, A),
    ]  # fmt: skip
    assert [k for k in KEYS if chosen(entries, k) != of[k]] == []


def test_among_shared_choices_the_one_that_costs_least_is_taken():
    near, far = Key("triton", "forward", "bf16", 64, False, 512), Key("triton", "forward", "bf16", 64, False, 1024)
    (entry,) = compress([cell(near, A, B, loss=1.009), cell(far, B, A, loss=1.001)])
    assert entry.use == A


def test_a_dtype_or_mask_that_was_not_measured_is_not_spoken_for():
    (entry,) = compress([cell(k, A) for k in KEYS if k.dtype == "fp16" and k.causal])
    assert entry.when.dtype == ("fp16",) and entry.when.causal is True


def test_one_new_key_changes_that_key_only():
    before = compress([cell(k, A if k.head_dim < 128 else B) for k in KEYS])
    new = cell(next(k for k in KEYS if str(k) == "triton/forward/bf16/d128/causal/s2048"), D)
    after = compress([new, *cells_of(before, "triton", "forward", [new])])
    assert {k for k in KEYS if chosen(after, k) != chosen(before, k)} == {new.key} and chosen(after, new.key) == D
    assert sum(e.proof.get("keys", 1) for e in after) <= len(KEYS) and len(after) < 9


def test_measured_figures_do_not_speak_for_what_was_not_measured():
    static = Entry(KEYS[0].when(), A, {"source": "static"})
    new = cell(Key("triton", "forward", "bf16", 64, False, 1024), A)
    entries = compress([new, *cells_of([static], "triton", "forward", [new])])
    assert [e.proof["source"] for e in entries] == ["static", "measured"] and "keys" not in entries[1].proof


def outcome(key, *times):
    ranking = [Timed(t, us, us, us) for t, us in times]
    return Outcome(key, Found(key, ranking, ranking[-1]), ranking[0])


def test_a_key_shares_what_is_at_most_one_percent_slower_and_right_at_the_odd_shape():
    one, two, other = (Key("triton", "forward", "bf16", 64, False, s) for s in (512, 1024, 2048))
    first = outcome(one, (A, 100.0), (B, 100.9), (C, 100.5))
    cells = cells_of_outcomes([first, outcome(two, (B, 100.0)), outcome(other, (B, 100.0), (A, 101.1))])
    assert [[c.tiling for c in cell.choices] for cell in cells] == [[A, B], [B], [B]]  # C won nowhere, so nobody probed it; A is too slow
    (entry,) = compress(cells)
    assert entry.use == B and entry.proof["keys"] == 3 and entry.proof["least_speedup"] == round(100.5 / 100.9, 3)
