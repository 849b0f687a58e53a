"""Sizes that a Problem derives, against counting by hand."""

import pytest
import torch

from portable_flash.problem import Problem


def problem(**changes):
    sizes = dict(dtype=torch.float16, batch=2, heads_q=8, heads_k=2, seqlen_q=5, seqlen_k=7, head_dim=64, head_dim_v=32)
    return Problem(**{**sizes, **changes})


def visible(p):
    """The definition, pair by pair."""
    shift = 0 if p.top_left else p.seqlen_k - p.seqlen_q
    left = float("inf") if p.window_left is None else p.window_left
    right = float("inf") if p.window_right is None else p.window_right
    return sum(i + shift - left <= j <= i + shift + right for i in range(p.seqlen_q) for j in range(p.seqlen_k))


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("left", [None, 0, 2, 100])
@pytest.mark.parametrize("right", [None, 0, 1, 100])
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (1, 9), (9, 1), (0, 4), (4, 0)])
def test_visible_pairs(sizes, left, right, top_left):
    p = problem(seqlen_q=sizes[0], seqlen_k=sizes[1], window_left=left, window_right=right, top_left=top_left)
    assert p.visible_pairs() == visible(p)


def test_causal_is_a_window():
    assert problem(window_right=0).causal
    assert not problem().causal and not problem(window_right=1).causal


def test_flops():
    p = problem()
    pairs = 2 * 8 * 5 * 7
    assert p.flops("forward") == 2 * pairs * (64 + 32)
    assert p.flops("backward") == 2 * pairs * (64 * 3 + 32 * 2)
    square = problem(head_dim_v=64)
    assert square.flops("backward") == 2.5 * square.flops("forward")
    full, causal = problem(seqlen_q=64, seqlen_k=64), problem(seqlen_q=64, seqlen_k=64, window_right=0)
    assert causal.flops("forward") * 128 == 65 * full.flops("forward")
    with pytest.raises(ValueError, match="'forward' and 'backward'"):
        p.flops("sideways")


def test_operand_bytes():
    rows_q, rows_k = 2 * 5 * 8, 2 * 7 * 2  # batch x length x heads
    expected = {"q": rows_q * 64 * 2, "k": rows_k * 64 * 2, "v": rows_k * 32 * 2, "o": rows_q * 32 * 2, "lse": rows_q * 4}
    assert problem().operand_bytes() == expected
    packed = problem(varlen=True, total_q=6, total_k=9).operand_bytes()
    assert packed["q"] == 6 * 8 * 64 * 2 and packed["k"] == 9 * 2 * 64 * 2 and packed["lse"] == 6 * 8 * 4


def test_names_and_groups():
    assert problem().group == 4
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    assert {dtype: problem(dtype=dtype).dtype_name for dtype in names} == names
    assert len({problem(), problem(), problem(batch=3)}) == 2  # a key of caches
