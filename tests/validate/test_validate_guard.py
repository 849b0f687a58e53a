"""Memory in which strays show: what is overwritten beside a tensor, and what nobody wrote in it."""

import pytest
import torch

from portable_flash.validate.guard import GUARD_BYTES, PATTERN, Guarded, guarded_allocations, unwritten

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (128,), (), (4, 0, 2)], ids=str)
def test_copies_hold_the_same_numbers_behind_the_same_strides(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    tensor = tensor.mT if tensor.dim() > 1 else tensor
    guarded = Guarded()
    copy = guarded.copy(tensor)
    assert torch.equal(copy, tensor) and copy.stride() == tensor.stride() and copy.dtype == dtype
    assert copy.data_ptr() % 64 == 0 or not copy.numel()
    assert not guarded.disturbed()


@pytest.mark.parametrize("offset", [-GUARD_BYTES // 2, -1, 50, 51, 50 + GUARD_BYTES // 2 - 1])
def test_a_word_beside_the_tensor_is_noticed_and_named(offset):
    guarded = Guarded()
    tensor = guarded.copy(torch.ones(50, dtype=torch.bfloat16), "value")
    words, size, _ = guarded.buffers[0]
    words[GUARD_BYTES // 2 + offset] = 7
    assert guarded.disturbed() == {"value": 1} and bool((tensor == 1).all()) and size == 100


def test_writing_all_of_the_tensor_is_no_stray():
    guarded = Guarded()
    for dtype in FLOATS:
        guarded.like(torch.empty(33, dtype=dtype)).fill_(1.0)
    assert not guarded.disturbed()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_new_memory_is_nan_and_filled_memory_is_filled(dtype):
    base = torch.zeros(2, 3, dtype=dtype)
    with guarded_allocations() as made:
        empties = [torch.empty(4, 5, dtype=dtype), base.new_empty(7), torch.empty_like(base)]
        empties.append(torch.empty_strided((2, 2), (1, 2), dtype=dtype))
        zeros, ones, sevens = torch.zeros(3, dtype=dtype), torch.ones_like(base), base.new_full((2,), 7.0)
    assert len(made.buffers) == 7 and not made.disturbed()
    for tensor in empties:
        assert bool(tensor.isnan().all()) and unwritten(tensor) == tensor.numel() and tensor.dtype == dtype
        tensor[1:] = torch.nan  # that arithmetic makes is not the pattern
        assert unwritten(tensor) == tensor[:1].numel()
    assert zeros.eq(0).all() and ones.eq(1).all() and sevens.eq(7).all() and not unwritten(zeros)


def test_copy_of_an_expanded_tensor():
    tensor = torch.arange(3.0).expand(4, 3)
    copy = Guarded().copy(tensor)
    assert torch.equal(copy, tensor) and copy.stride() == (0, 1)


def test_nothing_is_guarded_outside():
    with guarded_allocations() as made:
        pass
    torch.empty(3)
    assert not made.buffers


def test_pattern_is_no_number_in_any_type():
    words = torch.full((8,), PATTERN, dtype=torch.int16)
    assert all(bool(words.view(dtype).isnan().all()) for dtype in FLOATS)
