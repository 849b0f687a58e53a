"""Sizes, dtypes, layouts and strides: the Triton kernels against the float64 oracle."""

import pytest
import torch
from calls import Case, expanded, strided
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from portable_flash import Tiling, tuning

F16, F32 = torch.float16, torch.float32
SMALL = dict(batch=1, heads_k=1, group=2, seqlen_q=35, seqlen_k=41)
PACKED = dict(lengths=((20, 31), (0, 7), (18, 0), (1, 20)), unused=5, heads_k=1)
SQUARE = dict(forward=Tiling(16, 16), backward_dkv=Tiling(16, 16), backward_dq=Tiling(16, 16))
MIXED = dict(forward=Tiling(32, 16), backward_dkv=Tiling(16, 32), backward_dq=Tiling(16, 32))
TALL = dict(forward=Tiling(64, 16), backward_dkv=Tiling(64, 16), backward_dq=Tiling(64, 16))
SPLIT = dict(backward_dkv=Tiling(32, 16, split_dkv=True))


def draw(case):
    call = case.draw()
    call.options["backend"] = "triton"
    return call


def check(case, tilings=MIXED):
    with tuning(tilings):
        return draw(case).check()


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("head_dims", [(1, 1), (8, 8), (24, 24), (40, 40), (64, 64), (96, 96), (192, 128), (16, 24), (72, 8)], ids=str)
def test_head_dim(head_dims, dtype):
    check(Case(**SMALL, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype, causal=dtype == F16))


def test_widest_head_dim():
    check(Case(batch=1, heads_k=1, group=1, seqlen_q=17, seqlen_k=19, head_dim=256, dtype=F16))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads_k, group", [(1, 1), (2, 2), (2, 3), (1, 7)])
def test_group(heads_k, group, layout):
    check(Case(batch=2 if group < 3 else 1, heads_k=heads_k, group=group, seqlen_q=19, seqlen_k=21, layout=layout, causal=group == 3))


def test_group_packed():
    check(Case(**dict(PACKED, heads_k=2), group=3, causal=True))


@pytest.mark.parametrize("tilings", [SQUARE, MIXED, SPLIT, TALL], ids=["square", "mixed", "split", "tall"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(9, 4), softcap=2.0)], ids=["causal", "window"])
def test_tiling(tilings, options):
    check(Case(batch=1, heads_k=1, seqlen_q=67, seqlen_k=53, dtype=F16, **options), tilings)


@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 33), (33, 1), (16, 16), (32, 48), (17, 15), (3, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(rows, keys, causal):
    check(Case(batch=1, heads_k=1, seqlen_q=rows, seqlen_k=keys, causal=causal))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("how", ["transposed", "sliced", "columns"])
def test_strides(how, layout):
    """Each tensor by its own strides: bit for bit what contiguous tensors give."""
    sizes = PACKED if layout == "packed" else dict(SMALL, layout=layout, heads_k=2, group=1)
    call = draw(Case(**sizes, dtype=F16, bias="hqk", mask="qk", causal=True))
    with tuning(MIXED):
        expected = call.run()
        for name in ("query", "key", "value", "grad_out", "bias", "mask"):
            tensor = getattr(call, name)
            if how != "sliced" or name != "mask":
                setattr(call, name, strided(tensor, how))
        actual = call.run()
    call.judge(*actual)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert all(torch.equal(getattr(actual[2], n), getattr(expected[2], n)) for n in ("query", "key", "value", "bias"))


@pytest.mark.parametrize("names", ["key value", "query grad_out", "bias mask"])
def test_stride_zero(names):
    call = draw(Case(**dict(SMALL, heads_k=2, group=1), bias="bhqk", mask="bhqk"))
    for name in names.split():
        setattr(call, name, expanded(getattr(call, name), 1))
    with tuning(MIXED):
        call.check()


def test_gradients_with_odd_strides():
    """Expanded and permuted gradients arrive from sums and transpositions."""
    call = draw(Case(**SMALL))
    call.grad_out = call.grad_out[:, :, :1, :1].expand_as(call.grad_out)
    call.grad_lse = call.grad_lse.mT.contiguous().mT
    with tuning(MIXED):
        call.check()


def test_views_of_one_projection():
    call = draw(Case(batch=2, heads_k=2, group=1, seqlen_q=19, seqlen_k=19, layout="bshd", causal=True, dtype=F16))
    call.query, call.key, call.value = torch.stack([call.query, call.key, call.value], 2).unbind(2)
    with tuning(MIXED):
        call.check()


EMPTY = [dict(batch=0), dict(heads_k=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(seqlen_q=0, seqlen_k=0)]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sizes", EMPTY, ids="-".join)
def test_empty(sizes, sinks, layout):
    out, lse, grads = check(Case(**{**SMALL, **sizes}, layout=layout, sinks=sinks, causal=True))
    if sizes == dict(seqlen_k=0):
        assert not out.any() and not grads.query.any() and (sinks or (lse == -torch.inf).all())


@pytest.mark.parametrize("lengths", [(), ((0, 0),), ((0, 5), (5, 0)), ((3, 3), (0, 0))], ids=str)
def test_empty_packed(lengths):
    call = draw(Case(lengths=lengths, unused=2, heads_k=1, causal=True))
    out, lse, grads = call.check()
    assert not out[-2:].any() and (lse[:, -2:] == -torch.inf).all() and not any(g[-2:].any() for g in (grads.query, grads.key, grads.value))


def test_lengths_may_be_below_the_launch_bounds():
    """max_seqlen_q and max_seqlen_k size the launch only; keys and bias are looked up by the sequence's own lengths."""
    call = draw(Case(**PACKED, causal=True))
    expected = call.run()
    call.problem = type(call.problem)(**{n: getattr(call.problem, n) for n in call.problem.__slots__} | dict(seqlen_q=50, seqlen_k=64))
    actual = call.run()
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[2].key, expected[2].key)


def test_wrong_packed_bounds_stay_inside_the_tensors(monkeypatch):
    """What is not validated is clamped: rows outside the tensors are neither read nor written."""
    from portable_flash import functional

    monkeypatch.setattr(functional, "_check_lengths", lambda *_: None)  # as on a GPU without validate=True
    call = draw(Case(lengths=((20, 20), (12, 12)), heads_k=1))
    call.cu_seqlens_q = torch.tensor([0, 20, 2**30], dtype=torch.int32)
    call.cu_seqlens_k = torch.tensor([-(2**30), 20, 2**30], dtype=torch.int32)
    out, lse, grads = call.run()
    assert out.isfinite().all() and lse.isfinite().all() and all(g.isfinite().all() for g in (grads.query, grads.key, grads.value))


def test_repeats_bitwise():
    call = draw(Case(**SMALL, bias="k", sinks=True, dtype=F16))
    first, second = call.run(), call.run()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(getattr(first[2], n), getattr(second[2], n)) for n in ("query", "key", "value", "bias", "sinks"))


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sinks"])
def test_one_gradient_alone(wanted):
    """The same bits as when all are asked for."""
    call = draw(Case(**SMALL, bias="hqk", sinks=True))
    everything, alone = call.run()[2], call.run(needs=(wanted,))[2]
    assert torch.equal(getattr(alone, wanted), getattr(everything, wanted))


TILES = st.sampled_from([16, 32, 64])


@settings(max_examples=16, deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drawn(data):
    """Anything together with anything, small."""
    pick = lambda *values: data.draw(st.sampled_from(values))
    number = lambda low, high: data.draw(st.integers(low, high))
    reach = lambda: data.draw(st.none() | st.integers(0, 40))
    names = data.draw(st.none() | st.sets(st.sampled_from("bhqk")))
    packed = data.draw(st.just([]) | st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4))
    sizes = dict(lengths=tuple(packed), unused=number(0, 3))
    if not packed:
        sizes = dict(batch=number(1, 2), seqlen_q=number(1, 40), seqlen_k=number(1, 40))
    case = Case(
        **sizes, heads_k=number(1, 2), group=number(1, 3), head_dim=number(1, 40), head_dim_v=number(1, 40), dtype=pick(F16, F32),
        layout=pick("bhsd", "bshd"), causal=pick(False, True, "top_left"), window=(reach(), reach()), softcap=pick(None, 1.5),
        bias=None if names is None else "".join(sorted(names)), mask=pick(None, "k", "hqk"), alibi=pick(None, "h", "bh"),
        sinks=pick(False, True), grad_lse=pick(False, True), seed=number(0, 9),
    )  # fmt: skip
    tiling = lambda split=False: Tiling(data.draw(TILES), data.draw(TILES), split_dkv=split)
    call = draw(case)
    if call.bias is not None:  # few elements: all -inf would leave nothing to judge
        call.bias.nan_to_num_(neginf=0.5) if call.bias.numel() < 20 else None
    with tuning(forward=tiling(), backward_dkv=tiling(pick(False, True)), backward_dq=tiling()):
        call.check()
