"""Keys, and which tilings are tried."""

import pytest

from portable_flash import backends
from portable_flash.device import named
from portable_flash.tiling import Tiling
from portable_flash.tune.keys import Key, key_set, parse_key
from portable_flash.tune.space import SHORTLIST, allows, cost, default, shortlist, space

H200 = named("h200")


def test_the_shipped_set_has_every_combination_once_with_the_keys_of_a_group_together():
    keys = key_set("triton")
    assert len(keys) == len(set(keys)) == 3 * 2 * 5 * 2 * 6
    groups = [key.group for key in keys]
    assert len([g for g, before in zip(groups, [None, *groups]) if g != before]) == len(set(groups)) == 60


def test_a_key_is_read_back_from_its_text():
    for key in key_set("hip", head_dims=(64, 192), buckets=(512, 16384)):
        assert parse_key(str(key)) == key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("triton/forward", "must be backend/kernel"), ("cuda/forward/bf16/d64/full/s512", "backend 'cuda': allowed are triton, hip"),
        ("triton/fwd/bf16/d64/full/s512", "kernel 'fwd'"), ("triton/forward/int8/d64/full/s512", "dtype 'int8'"),
        ("triton/forward/bf16/64/full/s512", "head_dim '64'"), ("triton/forward/bf16/d64/half/s512", "mask 'half'"),
        ("triton/forward/bf16/d64/full/s0", "seqlen 's0'"),
    ],
)  # fmt: skip
def test_a_wrong_key_says_which_part_and_what_is_allowed(text, says):
    with pytest.raises(ValueError, match=says):
        parse_key(text)


@pytest.mark.parametrize("slug", ["a100", "h200", "b200", "rtx4090", "mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt", "strix-halo"])
@pytest.mark.parametrize("kernel", ["forward", "backward_dkv", "backward_dq"])
def test_everything_tried_fits_and_the_default_is_first(slug, kernel):
    device = named(slug)
    for backend in ("triton", "hip") if device.vendor == "amd" else ("triton",):
        for head_dim in (64, 256):
            key = Key(backend, kernel, "bf16", head_dim, True, 4096)
            tried = shortlist(key, device)
            assert tried[0] == default(key, device) and len(set(tried)) == len(tried) <= SHORTLIST
            unfit = getattr(backends.load(backend), "unfit", Tiling.unfit)
            assert [t for t in (*tried[1:], *space(key, device)) if unfit(t, kernel, key.problem(), device)] == []
            assert len(space(key, device)) >= 1


def test_limits_prune_before_anything_is_compiled():
    key = Key("triton", "backward_dkv", "bf16", 256, False, 4096)
    assert not allows(key, Tiling(128, 128, 8, 3, tma=True), H200)  # shared memory
    assert not allows(key, Tiling(64, 128, 4, 1), H200)  # registers
    assert not allows(Key("triton", "forward", "bf16", 64, False, 512), Tiling(64, 64, tma=True), named("a100"))


def test_the_model_puts_what_won_on_an_h200_near_the_front():
    won = {
        ("forward", 64): Tiling(64, 128, 4, 2, tma=True), ("forward", 256): Tiling(128, 64, 8, 2, tma=True),
        ("backward_dq", 128): Tiling(64, 64, 4, 2, tma=True), ("backward_dq", 256): Tiling(128, 32, 8, 3, tma=True),
    }  # fmt: skip
    for (kernel, head_dim), tiling in won.items():
        ordered = space(Key("triton", kernel, "bf16", head_dim, False, 4096), H200)
        assert ordered.index(tiling) < 8, (kernel, head_dim)


def test_more_traffic_costs_more():
    key = Key("triton", "forward", "bf16", 128, False, 16384)
    small, large = (cost(Tiling(m, 64, 4, 2), "forward", key.problem(), named("mi300x")) for m in (16, 128))
    assert small > large
