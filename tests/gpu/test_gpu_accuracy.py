"""The default backend of a GPU against the float64 oracle: output, lse and every gradient, at real and at odd sizes."""

from dataclasses import replace

import pytest
import torch
from calls import Case, expanded, strided

import portable_flash
from portable_flash import Tiling
from portable_flash.device import detect

# a fallback to the CPU backend would pass every test without testing anything
pytestmark = pytest.mark.filterwarnings("error:portable_flash runs this call on its")

HAS_TMA = torch.cuda.is_available() and detect("cuda").has_tma
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HEAD_DIMS = [(8, 8), (16, 16), (32, 32), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256)]
ODD = dict(batch=2, heads_k=2, group=2, seqlen_q=709, seqlen_k=1021)  # longer than the short-sequence tilings, no multiples of blocks
EVEN = dict(batch=1, heads_k=2, group=1, seqlen_q=1024, seqlen_k=1024)
SMALL = dict(batch=2, heads_k=2, group=2, seqlen_q=150, seqlen_k=203)
PACKED = dict(lengths=((130, 241), (0, 70), (226, 0), (1, 300), (345, 122), (0, 0), (64, 64)), unused=37)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=lambda d: f"{d[0]}-{d[1]}")
def test_head_dim(head_dims, dtype):
    """bf16: causal, odd sizes; fp16: sizes that are multiples of every block."""
    sizes = dict(**ODD, causal=True) if dtype == BF16 else EVEN
    Case(**sizes, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype).draw("cuda").check()


@pytest.mark.parametrize("head_dims", [(16, 16), (40, 40), (64, 64), (128, 128), (192, 128), (256, 256)], ids=lambda d: f"{d[0]}-{d[1]}")
def test_float32(head_dims):
    Case(**SMALL, causal=True, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=F32).draw("cuda").check()


OPTIONS = {
    "plain": {},
    "causal_more_queries": dict(causal=True, seqlen_q=203, seqlen_k=150),
    "top_left": dict(causal="top_left"),
    "window": dict(window=(19, 4)),
    "window_left": dict(window=(60, None), seqlen_q=203, seqlen_k=150),
    "window_causal_top_left": dict(window=(33, 4), causal="top_left", seqlen_q=203, seqlen_k=150),
    "window_zero": dict(window=(0, 0)),
    "scale_zero": dict(scale=0.0),
    "scale_negative": dict(scale=-0.2),
    "softcap": dict(softcap=1.5, scale=1.0),
    "bias": dict(bias="bhqk"),
    "bias_heads": dict(bias="hqk"),
    "bias_keys": dict(bias="bk"),
    "bias_queries": dict(bias="q"),
    "bias_float32": dict(bias="qk", bias_dtype=F32),
    "alibi": dict(alibi="h", causal=True),
    "alibi_batch": dict(alibi="bh"),
    "sinks": dict(sinks=True, causal=True),
    "mask": dict(mask="bhqk"),
    "mask_keys": dict(mask="bk", causal=True),
    "no_lse_gradient": dict(grad_lse=False),
    "scores": dict(softcap=1.5, scale=1.0, bias="bhqk", alibi="bh"),
    "hiding": dict(causal=True, window=(50, None), mask="bqk", bias="hk", sinks=True),
    "everything": dict(window=(90, 3), softcap=2.0, bias="hqk", alibi="bh", sinks=True, mask="bhk"),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_option(options):
    Case(**{**SMALL, **OPTIONS[options]}, head_dim=64, dtype=BF16).draw("cuda").check()


@pytest.mark.parametrize("options", ["window", "scores", "everything"])
def test_option_in_float32(options):
    Case(**{**SMALL, **OPTIONS[options]}, head_dim=40, dtype=F32).draw("cuda").check()


@pytest.mark.parametrize("options", ["plain", "window", "softcap", "alibi", "sinks", "everything"])
def test_option_in_long_sequences(options):
    """The tilings of long sequences, with tensor descriptors where the GPU and the call have them."""
    Case(**{**ODD, **OPTIONS[options]}, head_dim=128, dtype=BF16, layout="bshd").draw("cuda").check()


@pytest.mark.parametrize("options", ["plain", "alibi", "window", "softcap", "bias", "mask_keys", "sinks", "everything"])
def test_packed(options):
    options = {n: v for n, v in OPTIONS[options].items() if not n.startswith("seqlen")}
    Case(**PACKED, **options, head_dim=64, dtype=F16).draw("cuda").check()


def test_packed_at_a_real_size():
    generator = torch.Generator().manual_seed(0)
    lengths = tuple((n, n) for n in torch.randint(1, 1200, (24,), generator=generator).tolist())
    Case(lengths=lengths, causal=True, heads_k=2, group=4, head_dim=128, dtype=BF16, cu_dtype=torch.int64).draw("cuda").check()


@pytest.mark.parametrize("group", range(1, 17))
def test_group(group):
    """One compiled variant serves every number of query heads to a key head."""
    Case(**ODD | dict(group=group, heads_k=1), head_dim=64, dtype=F16, causal=True).draw("cuda").check()


@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 1000), (1000, 1), (3, 17), (16, 128), (127, 129), (513, 511), (2047, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(rows, keys, causal):
    Case(seqlen_q=rows, seqlen_k=keys, head_dim=64, dtype=F16, causal=causal, sinks=True).draw("cuda").check()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("how", ["transposed", "sliced", "columns"])
def test_strides(how, layout):
    """Bit for bit what contiguous tensors give, and right."""
    call = Case(**ODD, head_dim=64, dtype=F16, layout=layout).draw("cuda")
    expected = call.run()
    for name in ("query", "key", "value", "grad_out"):
        setattr(call, name, strided(getattr(call, name), how))
    out, lse, grads = call.check()
    if how != "sliced":  # loads of another width may come with another order of summation
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        assert all(torch.equal(getattr(grads, name), getattr(expected[2], name)) for name in ("query", "key", "value"))


@pytest.mark.parametrize("dim, names", [(0, "query key value grad_out"), (1, "query key value grad_out"), (2, "query grad_out")])
def test_stride_zero(dim, names):
    call = Case(**ODD, head_dim=64, dtype=F16).draw("cuda")
    for name in names.split():
        setattr(call, name, expanded(getattr(call, name), dim))
    call.check()


TILINGS = {
    "small": dict(forward=Tiling(16, 16, 1), backward_dkv=Tiling(16, 16, 1), backward_dq=Tiling(16, 16, 1)),
    "split": dict(backward_dkv=Tiling(32, 64, 4, 2, split_dkv=True)),
    "tma": dict.fromkeys(("forward", "backward_dkv", "backward_dq"), Tiling(64, 64, 4, 2, tma=True)),
    "tall": dict(forward=Tiling(128, 32, 4, 3), backward_dkv=Tiling(16, 128, 4, 1), backward_dq=Tiling(128, 16, 4, 2)),
}


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("name", TILINGS)
def test_tiling(name, head_dim):
    if name == "tma" and not HAS_TMA:
        pytest.skip("this GPU has no tensor memory accelerator")
    with portable_flash.tuning(TILINGS[name]):
        for options in (dict(causal=True), dict(window=(40, 10), sinks=True, softcap=3.0)):
            Case(**ODD, **options, head_dim=head_dim, dtype=BF16).draw("cuda").check()
            Case(**EVEN, **options, head_dim=head_dim, dtype=BF16, layout="bshd").draw("cuda").check()


def test_descriptors_and_pointers_alternate():
    """The same plan serves tensors that descriptors can address and tensors that they cannot."""
    if not HAS_TMA:
        pytest.skip("this GPU has no tensor memory accelerator")
    call = Case(**ODD, head_dim=64, dtype=BF16).draw("cuda")
    with portable_flash.tuning(TILINGS["tma"]):
        for _ in range(2):
            call.check()
            replace(call, query=strided(call.query, "sliced"), key=strided(call.key, "sliced"), value=strided(call.value, "sliced")).check()


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(40, 0)), dict(mask="k"), dict(bias="k"), PACKED], ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_hidden_slots_may_hold_anything(options, number):
    """Keys that nothing sees and queries that see nothing hold NaN or infinity: bit for bit the results without."""
    call = Case(**{**SMALL, "seqlen_q": 300, "seqlen_k": 203, **options}, head_dim=64, dtype=BF16).draw("cuda")
    if call.mask is not None:
        call.mask[..., 100:140] = False
    if call.bias is not None:
        call.bias[..., 100:140] = -torch.inf
    clean = call.run()
    dirty = call.poisoned(number).run()
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    assert all(torch.equal(getattr(dirty[2], name), getattr(clean[2], name)) for name in ("query", "key", "value"))
