"""The halving, the gate and the choice, with a fake measurer in this process."""

import contextlib
import time
from dataclasses import replace

import pytest
from tune_fake import DEVICE, FakeNode, InProcess, microseconds, name

from portable_flash.tiling import Tiling
from portable_flash.tune.journal import Journal, JournalError
from portable_flash.tune.keys import Key, key_set
from portable_flash.tune.outcomes import blocked_of, updates_of
from portable_flash.tune.search import NodeLost, Recorded, Settings, Stopped, Timed, better, probed, search
from portable_flash.tune.session import Session
from portable_flash.tune.space import JOINING, joining, kind, neighbours, shortlist, space
from portable_flash.worker import WorkerError

KEY = Key("triton", "forward", "bf16", 128, True, 4096)
TRIED = shortlist(KEY, DEVICE)


def run(candidates=TRIED, exhaustive=False, journal=None, **options):
    worker, settings = InProcess(**options), Settings()
    ask = Recorded(worker, journal or Journal(None, {}), settings)
    return search(KEY, candidates, ask, settings, exhaustive), worker, ask


def truth(candidates=TRIED):
    return min(candidates, key=lambda t: microseconds(KEY, t))


def test_finds_the_fastest_and_measures_the_default_beside_it():
    found, worker, _ = run()
    assert found.best.tiling == truth()
    assert found.default.tiling == TRIED[0] and found.default.median_us >= found.best.median_us
    assert found.best.p20_us <= found.best.median_us <= found.best.p80_us


def test_halving_gives_most_candidates_little_time():
    _, worker, _ = run()
    sizes = [(len(a[1]), a[2]) for method, a in worker.requests if method == "time"]
    assert sizes[0][0] == len(TRIED) and sizes[-1][0] <= 3
    assert [n for n, _ in sizes] == sorted((n for n, _ in sizes), reverse=True) and sizes[-1][1] > sizes[0][1]
    quick = sum(n * rounds for n, rounds in sizes)
    _, slow, _ = run(space(KEY, DEVICE), exhaustive=True)
    exhaustive = sum(len(a[1]) * a[2] for method, a in slow.requests if method == "time")
    assert quick < exhaustive / 4


def test_the_same_choice_as_an_exhaustive_search_of_the_candidates():
    assert run()[0].best.tiling == run(exhaustive=True)[0].best.tiling


@pytest.mark.parametrize("how", ["wrong", "fault", "hang", "raise", "inaccurate", "fault_when_timed"])
def test_a_bad_candidate_is_rejected_with_its_reason_and_the_next_is_taken(how):
    best = truth()
    found, *_ = run(bad=[(name(best), how)])
    assert found.best.tiling == truth([t for t in TRIED if t != best])
    (rejected,) = [r for r in found.rejected if r.tiling == best]
    assert rejected.kind == {"raise": "error", "fault_when_timed": "fault"}.get(how, how) and rejected.reason


def test_the_fastest_is_found_one_step_from_a_leader_and_costs_less_than_a_quarter_of_trying_all():
    """Of the second candidate's kind, as in the exhaustive table of an H200 (benchmarks/results/h200_tune_quality.json)."""
    key = Key("triton", "backward_dq", "fp16", 128, False, 16384)
    tried, best = shortlist(key, DEVICE), Tiling(128, 64, 8, 3)
    assert best not in tried and best in space(key, DEVICE)
    second = next(t for t in tried[1:] if (t.block_m, t.block_n, t.num_warps) == (128, 64, 8))
    times = {t: 100.0 for t in (*tried, *space(key, DEVICE))} | {tried[0]: 55.8, second: 58.5, best: 53.0}

    class Table(InProcess):
        def call(self, method, *arguments, timeout_s):
            answer = super().call(method, *arguments, timeout_s=timeout_s)
            return [[times[t]] * arguments[2] for t in arguments[1]] if method == "time" else answer

    worker, settings = Table(), Settings()
    ask = Recorded(worker, Journal(None, {}), settings)
    found = search(key, tried, ask, settings, neighbours=lambda best: neighbours(key, DEVICE, best, tried))
    assert found.best.tiling == best and found.tried <= len(tried) + JOINING
    cost = lambda worker: sum(1 if m == "check" else len(a[1]) * a[2] for m, a in worker.requests)
    every = Table()
    search(key, space(key, DEVICE), Recorded(every, Journal(None, {}), settings), settings, exhaustive=True)
    assert cost(worker) < cost(every) / 4


def test_what_is_prepared_once_is_not_counted_and_is_prepared_again_after_a_fault():
    calls = []

    class Slow(InProcess):
        def call(self, method, *arguments, timeout_s):
            calls.append(method)
            if method == "prepare":
                time.sleep(0.2)
            return super().call(method, *arguments, timeout_s=timeout_s)

    settings = Settings()
    ask = Recorded(Slow(bad=[(name(TRIED[1]), "fault")]), Journal(None, {}), settings)
    found = search(KEY, TRIED[:3], ask, settings)
    assert calls[:5] == ["prepare", "launch", "launch", "prepare", "launch"] and calls.count("prepare") == 2
    assert found.gpu_s < 0.2 < 0.4 <= ask.prepare_s + 0.01
    hurried = Settings(key_limit_s=0.19)  # of the search itself: what is prepared keeps nobody from joining
    assert search(KEY, TRIED[:3], Recorded(Slow(), Journal(None, {}), hurried), hurried, neighbours=lambda _: TRIED[3:5]).tried == 5


def test_few_are_checked_and_those_that_fail_are_replaced_by_the_next_in_order_of_speed():
    order = sorted(TRIED, key=lambda t: microseconds(KEY, t))
    checked = lambda worker: [a[1] for method, a in worker.requests if method == "check"]
    assert checked(run()[1])[0] == TRIED[0] and len(checked(run()[1])) <= 4
    fast = [t for t in order if t != TRIED[0]]
    found, worker, _ = run(bad=[(name(t), "wrong") for t in fast[:-2]])  # more than the first round keeps
    assert [t.tiling for t in found.ranking if t.tiling != TRIED[0]] == fast[-2:][: len(found.ranking) - 1]
    assert set(fast[:-2]) == {r.tiling for r in found.rejected} and len(found.ranking) > 1
    every, worker, _ = run(exhaustive=True, bad=[(name(fast[0]), "wrong")])
    assert len(checked(worker)) <= 4 and len(every.finals) == len(TRIED) and fast[0] not in [t.tiling for t in every.ranking]


@pytest.mark.parametrize("exhaustive", [False, True])
def test_the_limit_of_accuracy_is_that_of_the_most_accurate_one_checked(exhaustive):
    fast = sorted((t for t in TRIED if t != TRIED[0]), key=lambda t: microseconds(KEY, t))
    ratios = {TRIED[0]: 2.0, fast[0]: 3.0, fast[1]: 1.0, fast[2]: 2.1, fast[3]: 1.9}

    class Graded(InProcess):
        def call(self, method, *arguments, timeout_s):
            answer = super().call(method, *arguments, timeout_s=timeout_s)
            return replace(answer, error_ratio=ratios.get(arguments[1], 1.5)) if method == "check" else answer

    settings = Settings(far=10.0)
    found = search(KEY, TRIED, Recorded(Graded(), Journal(None, {}), settings), settings, exhaustive)
    # 3.0 was within twice the default's 2.0 until the next was checked
    assert found.best.tiling == fast[1] and {t.tiling for t in found.ranking} == {fast[1], fast[3], TRIED[0]}
    assert {r.tiling: r.kind for r in found.rejected} == {fast[0]: "inaccurate", fast[2]: "inaccurate"}
    assert all("limit here is 2" in r.reason for r in found.rejected)


def test_a_bad_default_leaves_the_others():
    found, *_ = run(bad=[(name(TRIED[0]), "wrong")])
    assert found.default is None and found.best.tiling == min(TRIED[1:], key=lambda t: microseconds(KEY, t))
    assert [(r.tiling, r.kind) for r in found.rejected] == [(TRIED[0], "wrong")]


def test_nothing_right_is_no_choice():
    found, *_ = run(candidates=TRIED[:2], bad=[(name(t), "wrong") for t in TRIED[:2]])
    assert found.best is None and len(found.rejected) == 2


def test_ties_go_to_the_default_and_then_to_the_simpler_tiling():
    simple, elaborate, default = Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 3, tma=True), Tiling(128, 64, 8, 3, tma=True)
    timed = [Timed(elaborate, 100.0, 99, 101), Timed(simple, 100.9, 99, 101), Timed(Tiling(32, 32), 102, 1, 2)]
    assert better(timed, default, 0.01)[0].tiling == simple
    assert better([*timed, Timed(default, 100.5, 99, 101)], default, 0.01)[0].tiling == default
    assert better([*timed, Timed(default, 101.5, 99, 101)], default, 0.01)[0].tiling == simple


def test_the_winner_must_be_right_at_an_odd_shape_too():
    found, worker, ask = run(odd=[name(truth())])
    wrong = found.best.tiling
    chosen = probed(found, ask)
    assert wrong == truth() and chosen.tiling != wrong and "odd shape" in found.rejected[-1].reason


def test_a_stop_is_between_two_measurements():
    worker, settings = InProcess(), Settings()
    asked = iter([False] * (len(TRIED) + 1) + [True])
    journal = Journal(None, {})
    with pytest.raises(Stopped):
        search(KEY, TRIED, Recorded(worker, journal, settings, lambda: next(asked)), settings)
    assert len(worker.requests) == 1 and len(journal.known) == len(TRIED)  # all launched, and timed in one request


# ------------------------------------------------------------------ journal
def test_resume_repeats_no_finished_measurement(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"device": "x"})
    first, worker, _ = run(journal=journal)
    with path.open("a") as file:
        file.write('{"op_code": 8, "torn')  # what a crash leaves
    again, silent, _ = run(journal=Journal(path, {"device": "x"}, resume=True))
    assert worker.requests and worker.launches and not silent.requests and not silent.launches
    assert again.ranking == first.ranking


def test_a_run_stopped_anywhere_goes_on_where_it_was(tmp_path):
    whole = [(m, str(a)) for m, a in run()[1].requests]
    for after in range(0, len(whole) + 1):
        path = tmp_path / f"{after}.jsonl"
        journal, settings = Journal(path, {}), Settings()
        before, rest = InProcess(), InProcess()
        stop = lambda before=before, after=after: len(before.requests) == after
        with pytest.raises(Stopped) if after < len(whole) else contextlib.nullcontext():
            search(KEY, TRIED, Recorded(before, journal, settings, stop), settings)
        search(KEY, TRIED, Recorded(rest, Journal(path, {}, resume=True), settings), settings)
        assert [(m, str(a)) for m, a in (*before.requests, *rest.requests)] == whole


NEAR = [TRIED[0], *sorted(TRIED[1:], key=lambda t: microseconds(KEY, t))[:7]]


@pytest.mark.parametrize("way", ["late", "fault_when_timed", "fault_in_the_second_round"])
def test_a_key_that_was_late_and_one_that_ended_the_worker_are_resumed_for_nothing(way):
    class Later(InProcess):
        def call(self, method, *arguments, timeout_s):
            second = method == "time" and arguments[2] == Settings().second.rounds
            if way == "fault_in_the_second_round" and second and truth() in arguments[1]:
                raise WorkerError("fault", "its process died")
            return super().call(method, *arguments, timeout_s=timeout_s)

    journal, bad = Journal(None, {}), [(name(truth()), "fault_when_timed")] if way == "fault_when_timed" else []
    settings, neighbours = Settings(key_limit_s=-1.0 if way == "late" else 10.0), lambda leaders: [t for t in TRIED if t not in NEAR][:4]
    once = search(KEY, NEAR, Recorded(Later(bad=bad), journal, settings), settings, neighbours=neighbours)
    silent = Later(bad=bad)
    again = search(KEY, NEAR, Recorded(silent, journal, Settings()), Settings(), neighbours=neighbours)
    assert not silent.requests and not silent.launches and again.ranking == once.ranking
    assert again.tried == once.tried == (8 if way == "late" else 12)
    assert again.rejected == once.rejected and len(once.rejected) == (way != "late")


def test_without_resume_the_journal_starts_afresh_and_another_identity_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"triton": "3.6"})
    run(journal=journal)
    with pytest.raises(JournalError, match="another triton"):
        Journal(path, {"triton": "3.7"}, resume=True)
    assert not Journal(path, {"triton": "3.6"}).known
    for foreign in ('{"journal": 1, "triton": "3.6"}\n', "[1]\n", "x\ny\n"):
        path.write_text(foreign)
        with pytest.raises(JournalError, match="without --resume"):
            Journal(path, {"triton": "3.6"}, resume=True)


# ------------------------------------------------------------------ a run of many keys
def few_keys(**changes):
    return key_set("triton", **{"kernels": ("forward",), "head_dims": (64, 128), "buckets": (512, 4096), "causal": (False,), **changes})


def session(node, **options):
    return Session(DEVICE, [node], Journal(None, {}), **options)


def test_every_key_gets_its_outcome_and_other_dtypes_start_from_what_was_found():
    node, saved = FakeNode(), []
    report = session(node, save=lambda outcomes: saved.append(len(outcomes))).run(few_keys())
    assert len(report.outcomes) == 8 and not report.left and saved == [8]
    tried = {o.key: o.found.tried for o in report.outcomes}
    for key, count in tried.items():
        if key.dtype == "fp16":
            assert count <= 10 < 14 < tried[replace(key, dtype="bf16")]  # 5, perhaps a default of its own, and 4 neighbours
    for outcome in report.outcomes:
        assert outcome.speedup >= 0.99


def test_what_joins_is_one_choice_for_all_buckets():
    """They share compiled code: what joined in one of them only would be compiled and loaded for that one."""
    keys = few_keys(kernels=("backward_dkv",), head_dims=(128,), dtypes=("bf16",), buckets=(512, 2048, 4096, 16384))
    few = session(FakeNode()).candidates(keys)
    kinds = list({kind(t): t for t in few[keys[0]]}.values())  # a leader of another kind in each bucket
    leaders = {k: [few[k][0], kinds[i + 1]] for i, k in enumerate(keys)}
    joins = joining(leaders, few, DEVICE)
    assert len(set(joins.values())) == 1 and len(joins[keys[0]]) == JOINING, joins
    assert not set(joins[keys[0]]) & set(few[keys[0]])
    assert any(kind(t) == kind(few[keys[0]][0]) for t in joins[keys[0]]), "the most frequent leader's neighbours are among them"
    assert joining({**leaders, keys[0]: []}, few, DEVICE)[keys[0]] == () and not any(joining(dict.fromkeys(keys, []), few, DEVICE).values())

    class Various(InProcess):
        def call(self, method, *arguments, timeout_s):
            answer = super().call(method, *arguments, timeout_s=timeout_s)
            if method == "time":  # another winner in each bucket
                answer = [[1.0] * len(s) if kind(t) == kind(leaders[arguments[0]][1]) else s for t, s in zip(arguments[1], answer)]
            return answer

    node = FakeNode(Various())
    assert len(session(node).run(keys).outcomes) == len(keys)
    compiled = {job.tiling for job in node.compiled if job.kernel == "backward_dkv"}
    assert len(compiled) <= len({t for tilings in few.values() for t in tilings}) + JOINING, len(compiled)


def test_the_budget_stops_cleanly_and_keeps_what_is_done():
    report = session(FakeNode(slow=0.02), budget_s=1.5, count=4).run(few_keys(head_dims=(64, 96, 128, 192, 256), causal=(False, True)))
    assert report.outcomes and report.left and report.stopped == "the budget is spent" and report.wall_s < 6


def test_what_does_not_compile_is_not_launched():
    key = few_keys()[0]
    bad = shortlist(key, DEVICE)[1]
    node = FakeNode(fails=[name(bad)])
    report = session(node).run([key])
    assert not [a for m, a in node.worker.requests if m == "check" and a[1] == bad]
    assert any(r.tiling == bad and "does not compile" in r.reason for r in report.outcomes[0].found.rejected)


def test_several_gpus_share_the_keys():
    nodes = [FakeNode(slow=0.005) for _ in range(3)]
    report = Session(DEVICE, nodes, Journal(None, {})).run(few_keys(head_dims=(64, 96, 128, 192, 256), causal=(False, True)))
    assert len(report.outcomes) == 40 and all(node.worker.requests for node in nodes)
    one = session(FakeNode()).run(few_keys(head_dims=(64, 96, 128, 192, 256), causal=(False, True)))
    choices = lambda outcomes: [o.chosen.tiling for o in outcomes if o.key.dtype == "bf16"]
    assert choices(one.outcomes) == choices(report.outcomes)


def test_the_keys_of_a_node_that_is_lost_go_to_the_others():
    class Lost(InProcess):
        def call(self, method, *arguments, timeout_s):
            if len(self.requests) == 20:
                raise NodeLost("gpu 1")
            return super().call(method, *arguments, timeout_s=timeout_s)

    keys = few_keys(head_dims=(64, 96, 128, 192, 256))
    report = Session(DEVICE, [FakeNode(Lost()), FakeNode(slow=0.002)], Journal(None, {})).run(keys)
    assert [o.key for o in report.outcomes] == keys and not report.left
    assert not any(o.found.rejected for o in report.outcomes)


@pytest.mark.parametrize("how", ["wrong", "fault", "hang"])
def test_bad_tilings_are_blocked_with_the_reason_on_request(how):
    key = few_keys()[0]
    bad = min(shortlist(key, DEVICE)[1:], key=lambda t: microseconds(key, t))  # only what is fast is checked
    report = session(FakeNode(bad=[(name(bad), how)])).run([key])
    (update,) = updates_of(report.outcomes, {("triton", "forward"): "0"}, block=True)
    (blocked,) = update.blocked
    assert blocked(bad) and how in blocked.reason and not blocked(bad.replace(num_stages=1 + bad.num_stages % 3))
    assert not updates_of(report.outcomes, {("triton", "forward"): "0"}, block=False)[0].blocked
    assert blocked_of(report.outcomes)


def test_an_error_of_the_run_is_raised_after_what_is_done_was_saved():
    class Broken(InProcess):
        def call(self, method, *arguments, timeout_s):
            if method == "check" and arguments[0].head_dim == 128:
                raise KeyError("a bug")
            return super().call(method, *arguments, timeout_s=timeout_s)

    saved = []
    with pytest.raises(KeyError):
        session(FakeNode(Broken()), save=saved.append).run(few_keys(dtypes=("bf16",)))
