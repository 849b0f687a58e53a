"""The numbers that a validation feeds to attention: the same bytes on every machine, made by integer operations on the CPU.

Threefry-2x32-20 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter into 64 random bits with
additions, rotations and exclusive ors; 16 of them become one number. Nothing here depends on a math library, a thread count
or an order of evaluation.
"""

from __future__ import annotations

import ctypes
import hashlib
import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_CHUNK = 1 << 15  # counters at a time: their words stay in the cache
MAX_SEED = _WORD


def threefry(key: tuple[int, int], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Two words of 32 bits for each counter (low, high); all int64 tensors that hold unsigned words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = (low + keys[0]) & _WORD, (high + keys[1]) & _WORD
    for block in range(5):
        for bits in _ROTATIONS[block % 2]:
            x.add_(y).bitwise_and_(_WORD)
            upper = y << bits
            y = upper.bitwise_or_(y.bitwise_right_shift_(32 - bits)).bitwise_and_(_WORD).bitwise_xor_(x)
        x.add_(keys[(block + 1) % 3]).bitwise_and_(_WORD)
        y.add_(keys[(block + 2) % 3] + block + 1).bitwise_and_(_WORD)
    return x, y


def halves(seed: int, stream: str, count: int) -> Tensor:
    """`count` random integers of 16 bits (int64). Raises ValueError for a seed that is not one word.

    stream: names what they are for, so that every tensor of a run has numbers of its own.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed}: allowed are 0 to {MAX_SEED}")
    key = (seed, int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4], "little"))
    found = torch.empty(count, dtype=torch.int64)
    for start in range(0, -(-count // 4), _CHUNK):
        low = torch.arange(start, min(start + _CHUNK, -(-count // 4)), dtype=torch.int64)
        x, y = threefry(key, low, torch.zeros_like(low))
        part = torch.stack((x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16), -1).flatten()
        found[4 * start : 4 * start + len(part)] = part[: count - 4 * start]
    return found


def numbers(seed: int, stream: str, *shape: int, full: bool = False) -> Tensor:
    """float32 numbers, uniform in (-2, 2) but for a gap of 2**-7 around 0, that bfloat16 and float16 represent exactly.

    Each has a random sign, 8 random significant bits (as many as bfloat16 has) and an exponent that is one lower half as often,
    so that all bits of a multiplier and all shifts of an adder have work. full: 24 significant bits, the upper 8 the same, for
    calls in float32 or wider, whose multipliers have more to show.
    """
    count = math.prod(shape)
    bits = halves(seed, stream, count)
    upper = bits >> 8
    places = sum((upper >= (2 << k)).to(torch.int64) for k in range(7))  # position of the highest set bit
    magnitude = ((bits & 0x7F) | 0x80) << 16
    if full:
        magnitude |= halves(seed, f"{stream}/lower", count)
    magnitude.bitwise_left_shift_(places)
    signed = torch.where((bits & 0x80) != 0, -magnitude, magnitude)
    return signed.to(torch.float32).mul_(2.0**-30).view(shape)


def chances(seed: int, stream: str, of_256: int, *shape: int) -> Tensor:
    """Booleans, true of_256 times in 256."""
    return ((halves(seed, stream, math.prod(shape)) & 0xFF) < of_256).view(shape)


def sha256(*tensors: Tensor | None) -> str:
    """Of the tensors' bytes, one after another in memory order of a contiguous copy on the CPU; None adds nothing."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            whole = tensor.detach().cpu().contiguous()
            digest.update((ctypes.c_char * (whole.numel() * whole.element_size())).from_address(whole.data_ptr()))
    return digest.hexdigest()
