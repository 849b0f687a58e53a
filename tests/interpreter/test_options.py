"""Every option of a call, alone and together, forward and backward, against the float64 oracle; several blocks each way."""

import pytest
import torch
from calls import Case

from portable_flash import Tiling, reference, tuning

F16, F32 = torch.float16, torch.float32
SMALL = dict(batch=1, heads_k=1, group=2, seqlen_q=35, seqlen_k=41)
WIDE = dict(SMALL, batch=2, heads_k=2, group=1, seqlen_q=19, seqlen_k=21)  # for what differs by batch and head
TALL = dict(SMALL, seqlen_q=41, seqlen_k=35)
PACKED = dict(lengths=((20, 19), (0, 7), (18, 0), (1, 20), (17, 9)), unused=5, heads_k=1)
TILINGS = [
    dict(forward=Tiling(16, 16), backward_dkv=Tiling(16, 16), backward_dq=Tiling(16, 16)),
    dict(forward=Tiling(32, 16), backward_dkv=Tiling(16, 32, split_dkv=True), backward_dq=Tiling(32, 16)),
    dict(forward=Tiling(16, 32), backward_dkv=Tiling(32, 16), backward_dq=Tiling(16, 32)),
]

OPTIONS = {
    "plain": {},
    "no_lse_gradient": dict(grad_lse=False),
    "causal": dict(causal=True),
    "causal_more_queries": dict(TALL, causal=True),
    "top_left": dict(causal="top_left"),
    "top_left_more_queries": dict(TALL, causal="top_left"),
    "window": dict(window=(9, 4)),
    "window_zero": dict(window=(0, 0)),
    "window_left": dict(TALL, window=(3, None)),
    "window_right": dict(window=(None, 2)),
    "window_causal": dict(window=(17, 5), causal=True),
    "window_top_left": dict(TALL, window=(5, 8), causal="top_left"),
    "window_unbounded": dict(TALL, window=(2**31 - 1, 2**31 - 1)),
    "scale_zero": dict(scale=0.0),
    "scale_negative": dict(scale=-0.4),
    "scale_large": dict(scale=2.0),
    "softcap": dict(softcap=1.5, scale=1.0),
    "softcap_negative_scale": dict(softcap=1.5, scale=-1.0, causal=True),
    "bias": dict(WIDE, bias="bhqk"),
    "bias_heads": dict(WIDE, bias="hqk"),
    "bias_batch": dict(WIDE, bias="bqk"),
    "bias_pairs": dict(WIDE, bias="qk"),
    "bias_keys": dict(WIDE, bias="bk"),
    "bias_queries": dict(WIDE, bias="q", seed=1),
    "bias_head": dict(WIDE, bias="h", seed=1),
    "bias_scalar": dict(WIDE, bias="", seed=1),
    "bias_causal": dict(bias="hqk", causal=True),
    "alibi": dict(WIDE, alibi="h"),
    "alibi_batch": dict(WIDE, alibi="bh", causal=True),
    "alibi_top_left": dict(TALL, alibi="h", causal="top_left"),
    "sinks": dict(WIDE, sinks=True),
    "sinks_rows_without_keys": dict(TALL, sinks=True, causal=True),
    "mask": dict(WIDE, mask="bhqk"),
    "mask_keys": dict(WIDE, mask="bk", causal=True),
    "mask_queries": dict(WIDE, mask="q"),
    "scores": dict(softcap=1.5, scale=1.0, bias="bhqk", alibi="bh"),
    "hiding": dict(causal=True, window=(20, None), mask="bqk", bias="hk", sinks=True),
    "everything": dict(window=(30, 3), softcap=2.0, bias="hqk", alibi="bh", sinks=True, mask="bhk"),
}
PACKED_OPTIONS = (
    "plain", "causal", "window", "top_left", "softcap", "bias", "bias_keys", "bias_queries", "alibi", "alibi_batch", "sinks", "mask",
    "hiding", "everything",
)  # fmt: skip


def check(case, tilings):
    call = case.draw()
    call.options["backend"] = "triton"
    with tuning(tilings):
        return call.check()


@pytest.mark.parametrize("options", OPTIONS)
def test_option(options):
    number = list(OPTIONS).index(options)
    case = Case(**{**SMALL, **OPTIONS[options]}, dtype=(F32, F16)[number % 2], layout=("bhsd", "bhsd", "bshd")[number % 3])
    check(case, TILINGS[number % 3])


@pytest.mark.parametrize("options", PACKED_OPTIONS)
def test_packed(options):
    number = PACKED_OPTIONS.index(options)
    options = {name: value for name, value in OPTIONS[options].items() if name not in (*SMALL, "seed")}
    case = Case(**PACKED, **options, dtype=(F16, F32)[number % 2], cu_dtype=(torch.int32, torch.int64)[number // 2 % 2])
    check(case, TILINGS[number % 3])


@pytest.mark.parametrize("bias", ["bhqk", "k"])
@pytest.mark.parametrize("dtype, bias_dtype", [(F16, F32), (F32, F16)], ids=str)
def test_bias_of_another_dtype(bias, dtype, bias_dtype):
    _, _, grads = check(Case(**SMALL, bias=bias, dtype=dtype, bias_dtype=bias_dtype), TILINGS[0])
    assert grads.bias.dtype == bias_dtype


NUMBERS = [torch.nan, torch.inf]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "options",
    [
        dict(causal="top_left"), dict(TALL, causal=True), dict(TALL, window=(3, 2)), dict(window=(1, 2), causal="top_left"),
        dict(mask="qk"), dict(bias="qk"), dict(mask="k", window=(7, 0), sinks=True), PACKED, dict(PACKED, mask="k", causal=True),
    ],
    ids=["top_left", "causal", "window", "window_top_left", "mask", "bias", "mask_window", "packed", "packed_mask"],
)  # fmt: skip
def test_hidden_slots_may_hold_anything(options, number):
    """Keys that nothing sees and queries that see nothing, NaN or infinity: bit for bit the same results."""
    call = Case(**{**SMALL, **options}).draw()
    call.options["backend"] = "triton"
    if call.mask is not None:
        call.mask[..., 3:6] = call.mask[..., -1:, :] = False
    if call.bias is not None:
        call.bias[..., 3:6] = call.bias[..., -1:, :] = -torch.inf
    with tuning(TILINGS[NUMBERS.index(number)]):
        clean, dirty = call.run(), call.poisoned(number).run()
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    for name in ("query", "key", "value", "bias"):
        assert getattr(call, name) is None or torch.equal(getattr(dirty[2], name), getattr(clean[2], name)), name


def test_nan_in_bias_and_mask_are_hidden_together():
    call = Case(**SMALL, bias="qk", mask="qk").draw()
    call.options["backend"] = "triton"
    with tuning(TILINGS[0]):
        clean = call.run()
        call.bias[~call.mask.expand_as(call.bias)] = torch.nan
        dirty = call.run()
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[2].bias, clean[2].bias)


@pytest.mark.parametrize("options", [{}, dict(softcap=5e4), dict(sinks=True), dict(bias="k"), dict(alibi="h")], ids="-".join)
def test_huge_logits_stay_finite(options):
    call = Case(**SMALL, **options, causal=True).draw()
    call.options["backend"] = "triton"
    call.query, call.key = call.query * 1e4, call.key * 1e4
    out, lse, grads = call.run()
    assert out.isfinite().all() and all(g.isfinite().all() for g in (grads.query, grads.key, grads.value))


@pytest.mark.parametrize("dtype, bias_dtype", [(F32, F32), (F16, F16), (F16, F32)], ids=str)
def test_lowest_finite_bias_is_no_mask(dtype, bias_dtype):
    call = Case(**SMALL, bias="hqk", dtype=dtype, bias_dtype=bias_dtype).draw()
    call.options["backend"] = "triton"
    call.bias.zero_()[:, :, 3] = torch.finfo(bias_dtype).min
    out, lse, grads = call.run()
    expected, expected_lse = reference.attend(call.inputs(), call.problem)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)
    if bias_dtype == dtype:  # a wider one is held at the end of float32 in units of log2: lse is then too, at 0.69 of it
        torch.testing.assert_close(lse, expected_lse.float())
    assert all(g.isfinite().all() for g in (grads.query, grads.key, grads.value, grads.bias))
    if dtype == F32:  # logits are below the rounding error of such a sum: all keys weigh the same
        torch.testing.assert_close(out[:, :, 3], call.value.mean(2).expand(out[:, :, 3].shape), atol=1e-5, rtol=1e-4)


@pytest.mark.xfail(strict=True, reason="P = exp(S - lse) forgets the sum over keys where |lse| exceeds 2**24")
def test_gradients_of_a_row_with_the_lowest_bias():
    call = Case(**SMALL, bias="hqk").draw()
    call.options["backend"] = "triton"
    call.bias.zero_()[:, :, 3] = torch.finfo(F32).min
    call.check()


def test_sink_of_minus_infinity_is_none():
    call = Case(**TALL, causal=True, sinks=True).draw()
    call.options["backend"] = "triton"
    call.sinks.fill_(-torch.inf)
    out, lse, grads = call.run()
    call.sinks = None
    plain = call.run()
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1]) and torch.equal(grads.query, plain[2].query)
    assert not grads.sinks.any()
