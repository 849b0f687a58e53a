"""Nothing but one dictionary hit where a problem has been seen: the database is neither read nor searched on the hot path."""

import builtins
import importlib
import time

import pytest

from portable_flash import database
from portable_flash.device import catalogue, named
from portable_flash.tune.keys import key_set

tuning = importlib.import_module("portable_flash.tuning")  # the package has a function of that name
H200 = named("h200")
CALLS = 20_000


def test_a_problem_that_was_seen_costs_one_dictionary_hit(monkeypatch):
    problems = [(k.kernel, k.problem()) for k in key_set("triton", head_dims=(64, 128), buckets=(512, 4096))]
    first = [tuning.lookup(kernel, problem, H200) for kernel, problem in problems]
    before = tuning._lookup.cache_info()

    def forbidden(*arguments, **options):
        raise AssertionError("on the hot path")

    for owner, what in ((database.When, "__call__"), (tuning, "_rungs"), (tuning, "rule"), (database, "read"), (builtins, "open")):
        monkeypatch.setattr(owner, what, forbidden)
    again = [tuning.lookup(kernel, problem, H200) for kernel, problem in problems]
    monkeypatch.undo()
    after = tuning._lookup.cache_info()
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert (after.hits - before.hits, after.misses - before.misses) == (len(problems), 0)


def test_it_costs_about_what_hashing_its_arguments_costs(record_property):
    kernel, problem = "forward", key_set("triton")[0].problem()
    tuning.lookup(kernel, problem, H200)
    table = {(kernel, problem, H200, None, "triton"): 1}

    def nanoseconds(call):
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best = min(best, time.perf_counter() - start)
        return best / CALLS * 1e9

    looked = nanoseconds(lambda: tuning.lookup(kernel, problem, H200))
    hit = nanoseconds(lambda: table[(kernel, problem, H200, None, "triton")])
    record_property("lookup_ns", round(looked))
    record_property("dictionary_ns", round(hit))
    assert looked < 4 * hit, f"{looked:.0f} ns, a dictionary hit of the same key takes {hit:.0f}"


@pytest.mark.parametrize("kernel", ["forward", "backward_dkv", "backward_dq"])
def test_the_shipped_file_answers_every_key_of_the_h200_with_a_measured_tiling(kernel):
    record = catalogue()["h200"].kernels["triton"][kernel]
    for key in key_set("triton", kernels=(kernel,)):
        entry = next(e for e in record.entries if e.when(key.problem()))
        assert entry.proof["source"] == "measured" and entry.use.unfit(kernel, key.problem(), H200) is None
    assert len(record.entries) <= 40
