"""Tiling as data, its resource model and its prediction of memory traffic."""

import pytest
import torch

from portable_flash.device import named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS, Tiling, next_power_of_2, padded_head_dim


def problem(**changes):
    sizes = dict(dtype=torch.float16, batch=4, heads_q=16, heads_k=16, seqlen_q=2048, seqlen_k=2048, head_dim=64, head_dim_v=64)
    return Problem(**{**sizes, **changes})


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(block_m=100, block_n=64), "block_m=100: must be a power of two"),
        (dict(block_m=64, block_n=0), "block_n=0"),
        (dict(block_m=64, block_n=64.0), "block_n=64.0"),
        (dict(block_m=64, block_n=64, num_warps=3), "num_warps=3"),
        (dict(block_m=8, block_n=64), "at least 16"),
        (dict(block_m=64, block_n=64, num_stages=0), "num_stages=0: must be 1 to 8"),
        (dict(block_m=64, block_n=64, num_stages=9), "num_stages=9"),
    ],
)
def test_refuses_what_no_kernel_can_run(fields, message):
    with pytest.raises(ValueError, match=message):
        Tiling(**fields)


def test_as_dict_round_trips_and_shows_only_what_was_set():
    tiling = Tiling(128, 64, 4, 1, waves_per_eu=2)
    assert tiling.as_dict() == {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2}
    assert Tiling(**tiling.as_dict()) == tiling
    assert str(tiling.replace(waves_per_eu=0)) == "block_m=128 block_n=64 num_warps=4 num_stages=1"


def test_padding():
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [padded_head_dim(n) for n in (1, 8, 40, 64, 96, 192)] == [16, 16, 64, 64, 128, 256]


def test_shared_memory_by_hand():
    """forward, fp16, head_dim 128: Q 128 x 128 stays, two stages of K and V 64 x 128 each."""
    p = problem(head_dim=128, head_dim_v=128)
    assert Tiling(128, 64, 4, 2).shared_memory_bytes("forward", p) == 2 * (128 * 128 + 2 * 64 * 256) == 98304
    with pytest.raises(ValueError, match="allowed are forward, backward_dkv, backward_dq"):
        Tiling(64, 64).shared_memory_bytes("sideways", p)


@pytest.mark.parametrize("kernel", KERNELS)
def test_resources_grow_with_every_block_and_shrink_with_warps(kernel):
    p, small = problem(), Tiling(32, 32, 4, 1)
    for bigger in (small.replace(block_m=64), small.replace(block_n=64)):
        assert bigger.shared_memory_bytes(kernel, p) > small.shared_memory_bytes(kernel, p)
        assert bigger.accumulator_registers(kernel, p, 32) > small.accumulator_registers(kernel, p, 32)
    assert small.replace(num_stages=2).shared_memory_bytes(kernel, p) > small.shared_memory_bytes(kernel, p)
    assert small.replace(num_warps=8).accumulator_registers(kernel, p, 32) * 2 == small.accumulator_registers(kernel, p, 32)
    assert small.shared_memory_bytes(kernel, problem(dtype=torch.float32)) > small.shared_memory_bytes(kernel, p)


def test_unfit_names_the_resource():
    p = problem(head_dim=256, head_dim_v=256)
    assert "bytes of shared memory, rtx4090 has 101376" in Tiling(128, 128, 8, 2).unfit("forward", p, named("rtx4090"))
    assert "accumulator registers a thread, h200 has 255" in Tiling(128, 64, 1, 1).unfit("forward", p, named("h200"))
    assert "tma=True needs NVIDIA sm_90" in Tiling(64, 32, tma=True).unfit("forward", p, named("a100"))
    assert Tiling(64, 32, tma=True).unfit("forward", p, named("h200")) is None


def test_hbm_traffic_at_the_paper_setting():
    """FlashAttention (Dao et al. 2022), figure 2: GPT-2 medium, 1024 tokens, 16 heads of 64, batch 64, on A100.

    It measures 40.3 GB for attention with S and P written out (mask and dropout included, which are not counted here)
    and 4.4 GB for FlashAttention, forward and backward together.
    """
    p = problem(batch=64, seqlen_q=1024, seqlen_k=1024)
    fused = sum(Tiling(128, 64).hbm_bytes(d, p, named("a100")) for d in ("forward", "backward"))
    unfused = sum(p.unfused_hbm_bytes(d) for d in ("forward", "backward"))
    assert 0.4 * 4.4e9 < fused < 4.4e9
    assert 0.5 * 40.3e9 < unfused < 40.3e9
    assert unfused > 8 * fused


def test_hbm_traffic_is_linear_while_the_cache_holds_a_head_and_falls_with_block_m_beyond():
    h200, mi210 = named("h200"), named("mi210")
    short, twice = problem(seqlen_q=4096, seqlen_k=4096), problem(seqlen_q=8192, seqlen_k=8192)
    assert Tiling(128, 64).hbm_bytes("forward", twice, h200) == 2 * Tiling(128, 64).hbm_bytes("forward", short, h200)
    assert Tiling(128, 64).hbm_bytes("forward", short, h200) == sum(short.operand_bytes().values())  # each operand once
    long = problem(batch=1, seqlen_q=131072, seqlen_k=131072, head_dim=128, head_dim_v=128)
    traffic = [Tiling(m, 64).hbm_bytes("forward", long, mi210) for m in (64, 128, 256)]
    assert traffic == sorted(traffic, reverse=True) and traffic[0] > 1.5 * traffic[1]
    assert traffic[0] < long.unfused_hbm_bytes("forward")


@pytest.mark.parametrize("sizes", [(0, 0), (0, 128), (128, 0), (1, 1)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_hbm_traffic_of_empty_problems(direction, sizes):
    p = problem(seqlen_q=sizes[0], seqlen_k=sizes[1])
    assert Tiling(64, 64).hbm_bytes(direction, p, named("h200")) >= 0
