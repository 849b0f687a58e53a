"""Every option of a call on the HIP kernels, forward and backward, against the float64 oracle; run by the host harness."""

from dataclasses import replace

import pytest
import torch
from attention import Machine
from calls import Case

from portable_flash import Tiling, reference
from portable_flash.backends.hip.specialise import Placement

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SMALL = dict(batch=1, heads_k=1, group=2, seqlen_q=35, seqlen_k=41)
WIDE = dict(SMALL, batch=2, heads_k=2, group=1, seqlen_q=19, seqlen_k=37)  # for what differs by batch and head
TALL = dict(SMALL, seqlen_q=41, seqlen_k=35)
PACKED = dict(lengths=((20, 39), (0, 7), (38, 0), (1, 20), (17, 9)), unused=5, heads_k=1)
SPLIT = dict(
    forward=Tiling(16, 32, num_warps=1), backward_dkv=Tiling(32, 32, num_warps=2, split_dkv=True), backward_dq=Tiling(16, 64, num_warps=1)
)
# What Placement says: (stationary operands in LDS, prefetch).
REGISTERS, BOTH, LDS, NEITHER = Placement(False, True), Placement(True, True), Placement(True, False), Placement(False, False)
MACHINES = {  # layers of products; one or two stages, waves and tiles a wave; placements
    "mfma": Machine("mfma", Tiling(32, 32, num_warps=2), REGISTERS, schedule=2),
    "mfma_lds": Machine("mfma", Tiling(64, 32, num_warps=2, num_stages=2), BOTH, schedule=3),
    "wmma11": Machine("wmma11", Tiling(32, 32, num_warps=1, num_stages=2), REGISTERS, schedule=1),
    "wmma11_lds": Machine("wmma11", Tiling(32, 64, num_warps=2), LDS, schedule=4),
    "wmma12": Machine("wmma12", SPLIT, NEITHER, schedule=5),
    "fma64": Machine("fma64", Tiling(32, 32, num_warps=2, num_stages=2), REGISTERS, schedule=6),
    "fma32": Machine("fma32", Tiling(16, 16, num_warps=1), LDS, schedule=7),
}
LAYERS = {"mfma": F16, "wmma11": BF16, "wmma12": F16, "fma64": F32}
OPTIONS = {
    "plain": {},
    "plain_no_lse_gradient": dict(grad_lse=False),
    "plain_scale_zero": dict(scale=0.0),
    "plain_scale_negative": dict(scale=-0.4),
    "plain_scale_large": dict(scale=2.0),
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
# Of the first word of an option's name: those that share it share most of the compiled kernels.
FAMILIES = {
    "plain": ("wmma12", BF16), "causal": ("mfma", BF16), "top": ("fma32", F16), "window": ("wmma11", F16), "softcap": ("fma64", BF16),
    "bias": ("mfma_lds", F16), "alibi": ("fma32", F32), "sinks": ("wmma12", F16), "mask": ("wmma11_lds", BF16),
    "scores": ("mfma", F32), "hiding": ("mfma_lds", BF16), "everything": ("wmma11_lds", F16),
}  # fmt: skip
PACKED_OPTIONS = {
    "plain": ("fma32", F16), "causal": ("wmma11", F16), "window": ("wmma12", BF16), "top_left": ("mfma", BF16), "bias": ("wmma11_lds", F16),
    "bias_keys": ("mfma", F32), "bias_queries": ("fma64", F16), "alibi_batch": ("mfma_lds", F16), "sinks": ("wmma12", F16),
    "mask": ("mfma_lds", BF16), "hiding": ("fma32", BF16),
}  # fmt: skip


def packed(options):
    return {**PACKED, **{name: value for name, value in OPTIONS[options].items() if name not in (*SMALL, "seed")}}


@pytest.mark.parametrize("options", OPTIONS)
def test_option(options):
    machine, dtype = FAMILIES[options.split("_")[0]]
    layout = ("bhsd", "bshd")[list(OPTIONS).index(options) % 2]
    MACHINES[machine].check(Case(**{**SMALL, **OPTIONS[options]}, dtype=dtype, layout=layout).draw())


@pytest.mark.parametrize("options", ["hiding", "everything", "packed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer, options):
    """All families of options on each layer."""
    sizes = packed("everything") if options == "packed" else {**SMALL, **OPTIONS[options]}
    MACHINES[layer].check(Case(**sizes, dtype=LAYERS[layer]).draw())


@pytest.mark.parametrize("options", PACKED_OPTIONS)
def test_packed(options):
    machine, dtype = PACKED_OPTIONS[options]
    index = (torch.int32, torch.int64)[list(PACKED_OPTIONS).index(options) % 2]
    MACHINES[machine].check(Case(**packed(options), dtype=dtype, cu_dtype=index).draw())


@pytest.mark.parametrize(
    "machine, bias, dtype, bias_dtype",
    [("mfma", "bhqk", F16, F32), ("wmma11", "k", BF16, F32), ("fma64", "bhqk", F32, F16), ("wmma12", "k", F16, BF16)],
)
def test_bias_of_another_dtype(machine, bias, dtype, bias_dtype):
    _, _, grads = MACHINES[machine].check(Case(**SMALL, bias=bias, dtype=dtype, bias_dtype=bias_dtype).draw())
    assert grads.bias.dtype == bias_dtype


def same(actual, expected, names=("query", "key", "value", "bias", "sinks")):
    """Bit for bit."""
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    for name in names:
        of = lambda result: getattr(result[2], name)
        assert of(expected) is None or torch.equal(of(actual), of(expected)), name


@pytest.mark.parametrize(
    "machine, options",
    [
        ("mfma", dict(TALL, causal=True, sinks=True)), ("wmma11", dict(window=(1, 2), causal="top_left")),
        ("wmma12", dict(TALL, window=(3, 2))), ("fma64", dict(causal="top_left")), ("mfma", dict(mask="qk")), ("wmma11", dict(bias="qk")),
        ("wmma12", dict(mask="qk", bias="qk")), ("fma64", dict(bias="qk")), ("mfma_lds", dict(mask="k", window=(7, 0), sinks=True)),
        ("fma32", PACKED), ("wmma11_lds", dict(PACKED, mask="k", causal=True)),
    ],
)  # fmt: skip
def test_hidden_slots_may_hold_anything(machine, options):
    """Keys that nothing sees and queries that see nothing, NaN or infinity: bit for bit the same results."""
    call = Case(**{**SMALL, **options}, dtype=F16).draw()
    for tensor, hidden in ((call.mask, False), (call.bias, -torch.inf)):
        if tensor is not None:
            tensor[..., 3:6] = hidden
            if tensor.shape[2] > 1:
                tensor[..., -1:, :] = hidden
    clean = MACHINES[machine].run(call)
    for number in (torch.nan, torch.inf):
        same(MACHINES[machine].run(call.poisoned(number)), clean)
    if call.bias is not None and call.mask is not None:
        call.bias[~call.mask.expand_as(call.bias)] = torch.nan
        same(MACHINES[machine].run(call), clean)


@pytest.mark.parametrize(
    "machine, dtype, options",
    [
        ("mfma", F32, {}), ("fma64", BF16, dict(softcap=5e4)), ("wmma12", BF16, dict(sinks=True)), ("wmma11", BF16, dict(bias="k")),
        ("fma32", F32, dict(alibi="h")),
    ],
)  # fmt: skip
def test_huge_logits_stay_finite(machine, dtype, options):
    call = Case(**SMALL, **options, causal=True, dtype=dtype).draw()
    call.query, call.key = call.query * 1e4, call.key * 1e4
    out, lse, grads = MACHINES[machine].run(call)
    assert out.isfinite().all() and all(g.isfinite().all() for g in (grads.query, grads.key, grads.value))


@pytest.mark.parametrize("machine, dtype, bias_dtype", [("fma32", F32, F32), ("mfma", F16, F16), ("wmma11", F16, F32)])
def test_lowest_finite_bias_is_no_mask(machine, dtype, bias_dtype):
    call = Case(**SMALL, bias="hqk", dtype=dtype, bias_dtype=bias_dtype).draw()
    call.bias.zero_()[:, :, 3] = torch.finfo(bias_dtype).min
    out, lse, grads = MACHINES[machine].run(call)
    expected, expected_lse = reference.attend(call.inputs(), call.problem)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)
    if bias_dtype == dtype:  # a wider one is held at the end of float32 in units of log2: lse is then too, at 0.69 of it
        torch.testing.assert_close(lse, expected_lse.float())
    assert all(g.isfinite().all() for g in (grads.query, grads.key, grads.value, grads.bias))


def test_sink_of_minus_infinity_is_none():
    call = Case(**TALL, causal=True, sinks=True, dtype=F16).draw()
    call.sinks.fill_(-torch.inf)
    result = MACHINES["mfma"].run(call)
    plain = replace(call, sinks=None, problem=replace(call.problem, sinks=False))
    same(result, MACHINES["mfma"].run(plain), ("query", "key", "value"))
    assert not result[2].sinks.any()
