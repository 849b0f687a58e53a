"""Shapes, their FLOPs, and the statistics of interleaved rounds, on a clock that the test sets."""

import pytest
import torch

from portable_flash.bench.suite import SUITES, Case, make_inputs, parse_shape
from portable_flash.bench.timing import Run, Samples, interleave


def test_shapes_are_read():
    assert parse_shape("1,64,8,8192,8192,128,causal") == Case(1, 64, 8, 8192, 8192, 128, 128, True)
    assert parse_shape("2,4,4,16,32,64,32") == Case(2, 4, 4, 16, 32, 64, 32, False)


BAD_SHAPES = ["1,2,3", "1,8,8,64,64,sixty", "1,8,8,64,64,0", "1,8,8,64,64,64,64,64", "1,8,8,64,64,64,Causal", "1,6,4,64,64,64"]


@pytest.mark.parametrize("text", BAD_SHAPES)
def test_a_bad_shape_is_named(text):
    with pytest.raises(ValueError, match=text):
        parse_shape(text)


def test_peers_suite_has_the_published_rows():
    names = [case.name for case in SUITES["peers"]]
    assert len(names) == len(set(names)) == 16
    assert names[0] == "B8 H32/32 S2048 D64 full" and names[-1] == "B4 H32/8 S4096 D128 causal"


@pytest.mark.parametrize("case", SUITES["peers"], ids=lambda case: case.name)
def test_flops_follow_the_convention_of_published_figures(case):
    expected = 4 * case.batch * case.heads_q * case.seqlen_q**2 * case.head_dim / (2 if case.causal else 1)
    assert case.flops("forward") == pytest.approx(expected, rel=1e-12)
    assert case.flops("backward") == pytest.approx(2.5 * expected, rel=1e-12)


def test_unequal_sequences_and_head_dims_are_counted_exactly():
    case = Case(1, 1, 1, 2, 4, 16, 8, causal=True)
    assert case.flops("forward") == 2 * (3 + 4) * (16 + 8)  # row 0 sees 3 keys, row 1 sees 4


def test_inputs_repeat_by_seed():
    case = Case(1, 4, 2, 8, 16, 32, 24)
    first, again, other = (make_inputs(case, torch.float32, torch.device("cpu"), seed) for seed in (0, 0, 1))
    assert [tuple(tensor.shape) for tensor in first] == [(1, 4, 8, 32), (1, 2, 16, 32), (1, 2, 16, 24), (1, 4, 8, 24)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


# ---------------------------------------------------------------------- statistics
class FakeClock:
    """Each step returns its own seconds; `drift` multiplies them more and more, like a card that heats up."""

    def __init__(self, drift: float = 0.0):
        self.drift, self.readings, self.order = drift, 0, []

    def seconds(self, step, calls):
        self.readings += 1
        self.order.append(step.__name__)
        return sum(step(i) for i in range(calls)) * (1 + self.drift * self.readings)


def named(name, seconds):
    def step(i):
        return seconds

    step.__name__ = name
    return Run(step)


def test_median_and_percentiles():
    samples = Samples([3.0, 1.0, 2.0, 5.0, 4.0])
    assert samples.median == 3.0
    assert samples.percentile(20) == pytest.approx(1.8)
    assert samples.percentile(80) == pytest.approx(4.2)
    assert Samples([7.0]).percentile(20) == 7.0


def test_ratio_is_the_median_of_ratios_within_rounds():
    own, baseline = Samples([1.0, 2.0, 4.0]), Samples([2.0, 6.0, 4.0])
    assert own.speedup_over(baseline) == 2.0  # of 2, 3 and 1; the ratio of medians would be 2 too
    assert Samples([1.0, 10.0, 100.0]).speedup_over(Samples([3.0, 10.0, 100.0])) == 1.0


def test_calls_fill_the_budget_and_one_is_the_least():
    samples = interleave({"fast": named("fast", 0.01), "slow": named("slow", 3.0)}, FakeClock(), rounds=3, budget_s=0.1)
    assert (samples["fast"].calls, samples["slow"].calls) == (10, 1)
    assert samples["fast"].seconds == pytest.approx([0.01] * 3)
    assert samples["slow"].seconds == pytest.approx([3.0] * 3)


def test_rounds_are_interleaved_and_the_order_turns():
    clock = FakeClock()
    interleave({name: named(name, 1.0) for name in "abc"}, clock, rounds=3, budget_s=1.0)
    assert "".join(clock.order[3:]) == "abc" "bca" "cab"  # a reading each went to the estimate


def test_a_drifting_machine_hardly_moves_the_ratio():
    samples = interleave({"half": named("half", 1.0), "base": named("base", 2.0)}, FakeClock(drift=0.02), rounds=9, budget_s=0.5)
    assert samples["base"].seconds[-1] > 1.1 * samples["base"].seconds[0]
    assert samples["half"].speedup_over(samples["base"]) == pytest.approx(2.0, rel=0.03)


def test_calls_run_inside_their_context():
    inside = []

    class Context:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *error):
            inside.pop()

    def step(i):
        assert inside
        return 1.0

    interleave({"a": Run(step, Context)}, FakeClock(), rounds=1, budget_s=1.0)
    assert not inside
