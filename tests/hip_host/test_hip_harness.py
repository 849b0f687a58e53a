"""The host harness of the HIP kernels itself, on kernels of a few lines (samples)."""

import pytest
import simt
import torch

from portable_flash.backends.hip.arguments import Call
from portable_flash.backends.hip.specialise import Kernel

SAMPLES = simt.HERE / "samples"
BUILDS = {"watched": simt.WATCHED, "address": simt.ADDRESS}
SCHEDULES = range(5)


def launch(name, programs, tensors, threads, lds=0, schedule=0, how=simt.WATCHED, faults=(), **macros):
    kernel = Kernel(name, "", tuple((f"PF_{key}", str(value)) for key, value in macros.items()), threads, lds)
    simt.run(simt.build(kernel, how, SAMPLES, faults), kernel, programs, bytes(Call()), tensors, schedule)


def sum_lanes(wave, schedule, how=simt.WATCHED, faults=()):
    n = 3 * 2 * wave
    tensors = dict(query=torch.randn(n), key=torch.randn(n), out=torch.full((n,), torch.nan), lse=torch.full((n,), torch.nan))
    launch("sum_lanes", 3, tensors, 2 * wave, 2 * wave * 4, schedule, how, faults, WAVE=wave)
    sums = tensors["query"].view(6, wave).sum(1, keepdim=True).expand(6, wave).flatten()
    torch.testing.assert_close(tensors["out"], sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(tensors["lse"], tensors["key"].view(3, -1).roll(1, 1).flatten())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("how", BUILDS)
def test_lanes_exchange_and_waves_meet(how, wave, schedule):
    sum_lanes(wave, schedule, BUILDS[how])


def test_a_missing_barrier_is_a_race():
    with pytest.raises(simt.Fault, match="race on shared memory"):
        sum_lanes(32, 0, faults=["SIMT_NO_BARRIER"])


def test_a_missing_barrier_shows_in_some_schedule():
    """Where races are not watched: the work-item before has not written yet."""
    with pytest.raises(AssertionError):
        sum_lanes(32, 1, simt.ADDRESS, ["SIMT_NO_BARRIER"])


MFMA = [(16, 16, "Float16"), (32, 8, "Float16"), (16, 32, "Float16"), (32, 16, "Float16"), (16, 4, "Float32"), (32, 2, "Float32")]
MFMA += [(16, 8, "BFloat16"), (32, 4, "BFloat16"), (16, 16, "BFloat16"), (32, 8, "BFloat16"), (16, 32, "BFloat16"), (32, 16, "BFloat16")]
UNITS = [(1, *shape) for shape in MFMA] + [(unit, 16, 16, dtype) for unit in (2, 3) for dtype in ("Float16", "BFloat16")]


def matrix_product(unit, side, depth, dtype, faults=()):
    typed = dict(Float16=torch.float16, BFloat16=torch.bfloat16, Float32=torch.float32)[dtype]
    a, b = torch.randint(-8, 9, (2, side, depth), dtype=torch.int32).to(typed) / 4  # products and sums are exact
    c, result = torch.randint(-8, 9, (side, side)).float(), torch.full((side, side), torch.nan)
    tensors, wave = dict(query=a, key=b, value=c, dquery=result), 64 if unit == 1 else 32
    launch("matrix_product", 1, tensors, wave, faults=faults, WAVE=wave, MATRIX=unit, SIDE=side, DEPTH=depth, DTYPE=dtype)
    assert torch.equal(result, a.float() @ b.float().mT + c)


@pytest.mark.parametrize("unit, side, depth, dtype", UNITS)
def test_matrix_instruction(unit, side, depth, dtype):
    matrix_product(unit, side, depth, dtype)


def test_wrong_lane_layout_is_seen():
    with pytest.raises(AssertionError):
        matrix_product(1, 16, 16, "Float16", ["SIMT_SWAPPED_ROWS"])


def test_conversions():
    """All binary16 numbers, and their neighbours and middles in binary32; v_perm_b32's selectors."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    exact = halves.view(torch.float16).float()
    other = torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int64, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    middle = torch.where(exact.isfinite(), (exact + exact.roll(-1)) / 2, exact)
    for floats in (exact, middle, middle.nextafter(exact), exact.nextafter(middle), other.view(torch.float32)):
        words = torch.tensor([0x07060504, 0x03020100, 0x0C050003], dtype=torch.int32)
        tensors = dict(query=floats, key=halves, value=words, out=torch.zeros(2**16, dtype=torch.uint16))
        tensors |= dict(dquery=torch.zeros(2**16), dkey=torch.zeros(2**16, dtype=torch.int32))
        launch("conversions", 2**10, tensors, 64, how=simt.ADDRESS, WAVE=32)
        actual, expected = tensors["out"].view(torch.float16), floats.half()
        assert torch.equal(actual.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
        assert torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.signbit(), expected.signbit())
        assert torch.equal(tensors["dquery"].nan_to_num(7.0, 8.0, 9.0), exact.nan_to_num(7.0, 8.0, 9.0))
        assert (tensors["dkey"] == 0x00050003).all()


FAULTS = [
    r"write of bytes 512 to 515 of shared memory, which has 512, at pc .*faults\.hip:11",
    r"read of bytes 508 to 511 of key, which has 508",
    r"write of bytes 512 to 515 of out, which has 512",
    r"race on shared memory.*faults\.hip:14.*faults\.hip:14",
    r"race on shared memory",
    r"race on shared memory.*read.*after the write",
    r"race on shared memory.*write.*after the write",
    r"part: .*lane_xor.* at line 18, .*lane_xor.* at line 18",
    r"part: end of the kernel.*lane_xor",
    r"part: barrier.*end of the kernel",
    r"part: end of the kernel.*barrier",
    r"differ in what is uniform",
    r"signed integer overflow",
    r"misaligned address",
    r"write to query",
    r"race on out",
    r"out of bounds",
    r"does not end",
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_fault_is_reported(fault, monkeypatch):
    monkeypatch.setattr(simt, "SECONDS", 3)
    tensors = dict(query=torch.ones(1, dtype=torch.int32), key=torch.zeros(127), out=torch.zeros(128))
    with pytest.raises(simt.Fault, match=f"(?s){FAULTS[fault]}"):
        launch("faults", 1, tensors, 128, 512, WAVE=64, FAULT=fault)


@pytest.mark.parametrize("fault", [0, 1, 2, 13, 16])
def test_fault_is_reported_by_the_sanitizers(fault):
    tensors = dict(query=torch.ones(1, dtype=torch.int32), key=torch.zeros(127), out=torch.zeros(128))
    with pytest.raises(simt.Fault, match="AddressSanitizer|runtime error"):
        launch("faults", 1, tensors, 128, 512, how=simt.ADDRESS, WAVE=64, FAULT=fault)
