"""Sizes, dtypes, layouts, strides and tilings: the HIP kernels against the float64 oracle; run by the host harness."""

import random
from dataclasses import replace

import pytest
import simt
import torch
from attention import Machine
from calls import Case, expanded, strided
from test_hip_options import BOTH, LDS, MACHINES, NEITHER, PACKED, REGISTERS, SMALL, same

from portable_flash import Tiling
from portable_flash.backends import Needs

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "machine, dtype, head_dims",
    [
        ("mfma", F16, (1, 1)), ("wmma11", BF16, (8, 8)), ("wmma12", F16, (24, 40)), ("fma64", F32, (72, 8)), ("mfma", BF16, (64, 64)),
        ("wmma11", F16, (96, 64)), ("wmma12", BF16, (128, 128)), ("fma32", F16, (100, 33)), ("mfma", F32, (40, 40)),
        ("mfma", BF16, (192, 128)), ("fma32", F16, (256, 256)),
    ],
)  # fmt: skip
def test_head_dim(machine, dtype, head_dims):
    case = Case(**SMALL, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype, causal=dtype == F16)
    MACHINES[machine].check(case.draw())


TWO = dict(num_warps=2, num_stages=2)
TALL = dict(num_warps=1, matrix_instr_nonkdim=32)
TILINGS = {  # machine, dtype, tiling, placement, head_dim
    "32x32 instructions": ("mfma", F16, Tiling(64, 32, **TWO, matrix_instr_nonkdim=32), REGISTERS, 64),
    "32x32 instructions in float32": ("mfma", F32, Tiling(32, 32, **TALL), NEITHER, 32),
    "32x32 instructions, operands from LDS": ("mfma", BF16, Tiling(64, 32, **TALL), LDS, 64),
    "short 32x32 instructions": ("mfma_short", BF16, Tiling(32, 32, **TALL), BOTH, 64),
    "short instructions": ("mfma_short", BF16, Tiling(32, 32, **TWO), REGISTERS, 32),
    "long 32x32 instructions": ("mfma_long", BF16, Tiling(32, 64, **TALL), REGISTERS, 64),
    "long instructions": ("mfma_long", F16, Tiling(32, 32, **TWO), LDS, 32),
    "instructions without subnormals": ("mfma_flushing", F16, Tiling(32, 32, **TWO), REGISTERS, 32),
    "four waves, two tiles each": ("mfma", F16, Tiling(128, 32, num_warps=4, num_stages=2), NEITHER, 16),
    "four waves of 32": ("wmma11", F16, Tiling(64, 64, num_warps=4, num_stages=2), BOTH, 16),
    "four tiles a wave": ("wmma12", BF16, Tiling(64, 16, num_warps=1), REGISTERS, 16),
    "operands from LDS, wmma12": ("wmma12", BF16, Tiling(64, 32, **TWO), BOTH, 32),
    "operands from LDS, fma": ("fma64", F16, Tiling(32, 32, **TWO), BOTH, 32),
}


@pytest.mark.parametrize("name", TILINGS)
def test_tiling(name):
    gpu, dtype, tiling, where, head_dim = TILINGS[name]
    tilings = dict(forward=tiling, backward_dq=tiling, backward_dkv=tiling.replace(block_m=tiling.block_n, block_n=tiling.block_m))
    case = Case(batch=1, heads_k=1, seqlen_q=67, seqlen_k=83, head_dim=head_dim, dtype=dtype, window=(50, 4), softcap=2.0)
    Machine(gpu, tilings, where, schedule=3).check(case.draw())


@pytest.mark.parametrize("machine, group", [("mfma", 1), ("wmma11", 3), ("fma32", 7)])
def test_group(machine, group):
    for layout, batch, heads_k in (("bhsd", 2, 2), ("bshd", 1, 1), ("bshd", 3, 1)):
        case = Case(batch=batch, heads_k=heads_k, group=group, seqlen_q=19, seqlen_k=21, layout=layout, dtype=F16, causal=True)
        MACHINES[machine].check(case.draw())
    MACHINES[machine].check(Case(**dict(PACKED, heads_k=2), group=group, causal=True, dtype=F16).draw())


SIZES = [(1, 1), (1, 33), (33, 1), (16, 16), (32, 48), (64, 64), (17, 15), (3, 40), (31, 65)]


@pytest.mark.parametrize("machine, causal", [("mfma", False), ("mfma", True), ("wmma12", True), ("fma64", False)])
def test_sizes(machine, causal):
    for rows, keys in SIZES:
        MACHINES[machine].check(Case(batch=1, heads_k=1, seqlen_q=rows, seqlen_k=keys, causal=causal, dtype=F16).draw())


@pytest.mark.parametrize("machine", ["mfma", "fma32"])
def test_empty(machine):
    for sizes in (dict(batch=0), dict(heads_k=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(seqlen_q=0, seqlen_k=0)):
        for sinks in (False, True):
            out, lse, grads = MACHINES[machine].check(Case(**{**SMALL, **sizes}, sinks=sinks, causal=True, dtype=F16).draw())
            if sizes == dict(seqlen_k=0):
                assert not out.any() and not grads.query.any() and (sinks or (lse == -torch.inf).all())


@pytest.mark.parametrize("machine", ["mfma", "wmma11"])
def test_empty_packed(machine):
    for lengths in ((), ((0, 0),), ((0, 5), (5, 0)), ((3, 3), (0, 0))):
        out, lse, grads = MACHINES[machine].check(Case(lengths=lengths, unused=2, heads_k=1, causal=True, dtype=F16).draw())
        assert not out[-2:].any() and (lse[:, -2:] == -torch.inf).all()
        assert not any(g[-2:].any() for g in (grads.query, grads.key, grads.value))


def test_lengths_may_be_below_the_launch_bounds():
    """max_seqlen_q and max_seqlen_k size the launch only; keys and bias are looked up by the sequence's own lengths."""
    call = Case(**PACKED, causal=True, dtype=F16).draw()
    wider = replace(call, problem=replace(call.problem, seqlen_q=90, seqlen_k=100))
    same(MACHINES["mfma"].run(wider), MACHINES["mfma"].run(call))


@pytest.mark.parametrize("machine", ["mfma", "wmma11", "fma64"])
def test_wrong_packed_bounds_stay_inside_the_tensors(machine):
    call = Case(lengths=((20, 20), (12, 12)), heads_k=1, bias="hqk", mask="qk", causal=True, dtype=F16).draw()
    call.cu_seqlens_q = torch.tensor([0, 20, 2**30], dtype=torch.int32)
    for bounds in ([-(2**30), 20, 2**30], [2**30, -5, 32], [30, 2, 32], [0, 32, 32]):
        call.cu_seqlens_k = torch.tensor(bounds, dtype=torch.int32)
        out, lse, grads = MACHINES[machine].run(call)
        assert not any(t.isnan().any() for t in (out, lse, grads.query, grads.key, grads.value, grads.bias))


@pytest.mark.parametrize(
    "machine, layout, dtype", [("mfma", "bhsd", F16), ("wmma11_lds", "bshd", F16), ("wmma12", "packed", BF16), ("fma32", "bshd", F32)]
)
def test_strides(machine, layout, dtype):
    """Each tensor by its own strides: bit for bit what contiguous tensors give. Those that are slices are read element by element."""
    sizes = PACKED if layout == "packed" else dict(SMALL, layout=layout, heads_k=2, group=1)
    call = Case(**sizes, dtype=dtype, bias="hqk", mask="qk", causal=True).draw()
    expected = MACHINES[machine].run(call)
    for how in ("transposed", "sliced"):
        names = [n for n in ("query", "key", "value", "grad_out", "bias", "mask") if how != "sliced" or n != "mask"]
        actual = MACHINES[machine].run(replace(call, **{name: strided(getattr(call, name), how) for name in names}))
        call.judge(*actual)
        same(actual, expected)


def test_stride_zero():
    call = Case(**dict(SMALL, heads_k=2, group=1), bias="bhqk", mask="bhqk", dtype=F16).draw()
    for names in ("key value", "query grad_out", "bias mask"):
        MACHINES["mfma"].check(replace(call, **{name: expanded(getattr(call, name), 1) for name in names.split()}))


def test_gradients_with_odd_strides():
    """Expanded and permuted gradients arrive from sums and transpositions."""
    call = Case(**SMALL, dtype=BF16).draw()
    call.grad_out = call.grad_out[:, :, :1, :1].expand_as(call.grad_out)
    call.grad_lse = call.grad_lse.mT.contiguous().mT
    MACHINES["wmma12"].check(call)


def test_views_of_one_projection():
    call = Case(batch=2, heads_k=2, group=1, seqlen_q=19, seqlen_k=19, layout="bshd", causal=True, dtype=F16).draw()
    call.query, call.key, call.value = torch.stack([call.query, call.key, call.value], 2).unbind(2)
    MACHINES["mfma"].check(call)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sinks"])
def test_one_gradient_alone(wanted):
    """The same bits as when all are asked for."""
    call = Case(**SMALL, bias="hqk", sinks=True, dtype=F16).draw()
    everything = MACHINES["mfma"].run(call)[2]
    alone = MACHINES["mfma"].run(call, Needs(**{name: name == wanted for name in ("query", "key", "value", "bias", "sinks")}))[2]
    assert torch.equal(getattr(alone, wanted), getattr(everything, wanted))


FOUR, SINGLE = (
    dict(forward=t, backward_dq=t, backward_dkv=t.replace(block_m=32, block_n=64))
    for t in (Tiling(64, 32, num_warps=4, num_stages=2), Tiling(64, 32, num_warps=4))
)
RACING = {
    "mfma": Machine("mfma", FOUR, BOTH), "wmma11": Machine("wmma11", FOUR, REGISTERS), "wmma12": Machine("wmma12", SINGLE, LDS),
    "fma": Machine("fma64", SINGLE, NEITHER),
}  # fmt: skip
CROWD = dict(batch=1, heads_k=1, group=2, seqlen_q=70, seqlen_k=75, causal=True, bias="hk", dtype=F16)


@pytest.mark.parametrize("layer", RACING)
def test_order_of_waves_and_lanes_does_not_matter(layer):
    call = Case(**CROWD).draw()
    expected = RACING[layer].check(call)
    for schedule in (1, 2, 3):
        same(RACING[layer].replace(schedule=schedule).run(call), expected)


@pytest.mark.parametrize("layer", RACING)
def test_optimised_by_another_compiler_under_address_sanitizer(layer):
    RACING[layer].replace(how=simt.ADDRESS, schedule=2).check(Case(**dict(CROWD, bias=None)).draw())


@pytest.mark.parametrize("layer", RACING)
def test_missing_barriers_are_races(layer):
    with pytest.raises(simt.Fault, match="race on shared memory"):
        RACING[layer].replace(faults=("SIMT_NO_BARRIER",)).run(Case(**CROWD).draw())


def test_missing_barriers_show_in_results():
    """Where races are not watched, in another order of waves and lanes."""
    call, machine = Case(**CROWD).draw(), RACING["fma"].replace(how=simt.ADDRESS, faults=("SIMT_NO_BARRIER",), schedule=1)
    out, lse, _ = machine.run(call, Needs(query=False, key=False, value=False))
    with pytest.raises(AssertionError, match="fail"):
        call.judge(out, lse)


@pytest.mark.parametrize("how", [simt.WATCHED, simt.ADDRESS], ids=["watched", "address"])
def test_too_little_shared_memory_is_out_of_bounds(how):
    with pytest.raises(simt.Fault, match="shared memory, which has|use-after-poison"):
        RACING["wmma12"].replace(how=how, faults=("SIMT_MISSING_LDS=16",)).run(Case(**CROWD).draw())


@pytest.mark.parametrize("layer", ["mfma", "wmma11", "wmma12"])
def test_wrong_lane_layouts_fail(layer):
    with pytest.raises(AssertionError, match="fail"):
        RACING[layer].replace(faults=("SIMT_SWAPPED_ROWS",)).check(Case(**CROWD).draw())


@pytest.mark.parametrize("seed", range(10))
def test_drawn(seed):
    """Anything together with anything, small."""
    draw = random.Random(seed)
    pick = lambda *values: draw.choice(values)
    machine = list(MACHINES.values())[seed % len(MACHINES)]
    dtype = pick(F16, BF16, F32)
    packed = tuple((draw.randint(0, 30), draw.randint(0, 30)) for _ in range(draw.randint(0, 4)))
    sizes = dict(lengths=packed, unused=draw.randint(0, 3), cu_dtype=pick(torch.int32, torch.int64))
    if not packed:
        sizes = dict(batch=draw.randint(1, 2), seqlen_q=draw.randint(1, 70), seqlen_k=draw.randint(1, 70))
    case = Case(
        **sizes, heads_k=draw.randint(1, 2), group=draw.randint(1, 3), head_dim=draw.randint(1, 40), head_dim_v=draw.randint(1, 40),
        dtype=dtype, layout=pick("bhsd", "bshd"), causal=pick(False, True, "top_left"), window=(pick(None, 0, 9, 40), pick(None, 0, 9)),
        softcap=pick(None, 1.5), bias=pick(None, "hqk", "bk", "bhqk"), bias_dtype=pick(None, F32), mask=pick(None, "k", "hqk"),
        alibi=pick(None, "h", "bh"), sinks=pick(False, True), grad_lse=pick(False, True), seed=seed,
    )  # fmt: skip
    machine.replace(schedule=seed).check(case.draw())
