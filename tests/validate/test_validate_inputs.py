"""The generator's published vectors, and the bytes that every machine must make."""

import pytest
import torch

from portable_flash.validate import inputs
from portable_flash.validate.cases import accuracy_cases, fixed_cases
from portable_flash.validate.levels import CPU, GPU, SMALL

# Random123's known answers for threefry2x32 with 20 rounds: counter, key, result
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_generator_gives_the_published_words(counter, key, words):
    found = inputs.threefry(key, *(torch.tensor([word]) for word in counter))
    assert tuple(word.item() for word in found) == words


PINNED = {
    "numbers": "b4e5bfb9b38a0652f4f6618d8a4771f05e995af2e1831845b1dad67357bb9b6c",
    "full": "02931d2612da8c3838ef237eeb62ecd5ea032b5a22424ab528f4634382a9e276",
    "chances": "281a62ae682dcf3231a82de9b9769fc1d76e17f2edd374211ffed28a633a7074",
    "bf16-d128-causal": "8c483ccae1a1f1848e32d76d5b6e8e5f8fc480ade624a57f54776b546fa17c6c",
    "fp16-d96-bias-alibi-mask": "1def3bef2361d755f5c18d1e2dcecbcdbb24a3aa23c90a969bb3634ac4ee830a",
    "bf16-d128-varlen-causal": "9350b88290f94f06f7c278e64ec4bae7a5bb13684951764a4037e198f83f39c4",
}


def digest_of(what: str) -> str:
    if what in ("numbers", "full"):
        return inputs.sha256(inputs.numbers(1, "known", 7, 20011, full=what == "full"))
    if what == "chances":
        return inputs.sha256(inputs.chances(1, "known", 24, 140077))
    case = next(case for case in accuracy_cases(SMALL) if case.name == what)
    return case.sized(SMALL).draw(12).sha256()


@pytest.mark.parametrize("what", PINNED)
def test_bytes_are_the_same_on_every_machine(what):
    assert digest_of(what) == PINNED[what]


def test_bytes_do_not_depend_on_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert digest_of("numbers") == PINNED["numbers"]
    finally:
        torch.set_num_threads(threads)


def test_numbers_are_exact_in_16_bits_and_use_all_of_them():
    found = inputs.numbers(3, "x", 100_000)
    assert torch.equal(found.bfloat16().float(), found) and torch.equal(found.half().float(), found)
    assert found.abs().min() >= 2**-7 and found.abs().max() < 2
    assert abs(found.mean()) < 0.02 and abs(found.std() - 1.155) < 0.02  # uniform in (-2, 2)
    patterns = found.bfloat16().view(torch.int16) & 0xFF  # significant bits and the lowest of the exponent
    assert len(patterns.unique()) == 256
    full = inputs.numbers(3, "x", 100_000, full=True)
    assert (full - found).abs().max() < 2**-7 and not torch.equal(full.half().float(), full)
    assert all(bool((full.view(torch.int32) >> bit & 1).any()) for bit in range(23))


def test_chances():
    assert abs(inputs.chances(0, "x", 64, 100, 1000).float().mean() - 0.25) < 0.01
    assert not inputs.chances(0, "x", 0, 1000).any() and inputs.chances(0, "x", 256, 1000).all()


def test_streams_and_seeds_are_apart():
    drawn = [inputs.halves(seed, stream, 1000) for seed in (0, 1, inputs.MAX_SEED) for stream in ("a", "b")]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert (one == other).sum() < 10
    with pytest.raises(ValueError, match="seed=-1"):
        inputs.halves(-1, "a", 1)


def test_a_longer_draw_begins_with_the_shorter():
    assert torch.equal(inputs.halves(5, "a", 200_003)[:77], inputs.halves(5, "a", 77))


@pytest.mark.parametrize("sizes", [SMALL, CPU, GPU], ids=["small", "cpu", "gpu"])
def test_names_of_cases_are_unique(sizes):
    names = [case.name for case in (*accuracy_cases(sizes), *fixed_cases(sizes))]
    assert len(names) == len(set(names))


def test_sha256_sees_every_tensor_and_its_order():
    a, b = torch.arange(8.0), torch.ones(3, dtype=torch.bool)
    assert len({inputs.sha256(a), inputs.sha256(b), inputs.sha256(a, b), inputs.sha256(b, a), inputs.sha256(a[1:])}) == 5
    assert inputs.sha256(a.view(2, 4).T) == inputs.sha256(a.view(2, 4).T.contiguous()) and inputs.sha256(None, a) == inputs.sha256(a)


def test_tensors_move_with_what_lies_around_them():
    """On a GPU too a view stays a view: unaligned where it was, between the same numbers."""
    from portable_flash.validate.cases import moved

    view = torch.arange(1000.0).as_strided((3, 4, 5), (70, 11, 1), 13)
    for tensor in (view, torch.ones(1, 4, 1).expand(2, 4, 3), torch.empty(0, 3)):
        there = moved(tensor, torch.device("meta"))
        assert (there.shape, there.stride(), there.storage_offset()) == (tensor.shape, tensor.stride(), tensor.storage_offset())
        assert there.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
