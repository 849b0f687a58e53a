"""The HIP backend on a machine without a GPU: what is decided before a launch, and the arguments of a launch byte by byte."""

import ctypes
import itertools
import re
import struct
import subprocess
import sys
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from calls import Case, strided
from tools import require

from portable_flash.backends import Gradients, KernelPlan, Needs, Plan, hip, shared
from portable_flash.backends.hip import arguments, compiler, host, specialise
from portable_flash.backends.hip.specialise import ARCHES, MATRIX, Kernel, Placement, cut, dbias_tiling, lds_bytes, placement, settle, unfit
from portable_flash.device import cpu, named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS, Tiling

H200, MI300X, RX7900XTX, RX9070XT, RX6800, MI50, MI100, MI355X = map(
    named, ("h200", "mi300x", "rx7900xtx", "rx9070xt", "rx6800", "mi50", "mi100", "mi355x")
)
FOLDER = compiler.folder()
SOURCES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}


def problem(**sizes):
    defaults = dict(dtype=torch.float16, batch=2, heads_q=8, heads_k=2, seqlen_q=300, seqlen_k=500, head_dim=64, head_dim_v=64)
    return Problem(**{**defaults, **sizes})


def plan_of(problem, device=MI300X, tiling=None, **tilings):
    kernels = {name: KernelPlan(tilings.get(name, tiling or Tiling(64, 64, 4)), "argument") for name in KERNELS}
    return Plan(problem, device, "hip", MappingProxyType(kernels))


def launches(problem, device=MI300X, layout="bhsd", needs=None, **tilings):
    """Every launch of a call by name, from tensors without memory."""
    inputs, out, lse, grad_out = shared.meta_call(problem, layout)
    plan = plan_of(problem, device, **tilings)
    grads = shared.new_gradients(inputs, problem, needs or Needs(bias=problem.bias))
    found = host.forward_launches(inputs, plan, out, lse)
    found += host.backward_launches(inputs, plan, out, lse, grad_out, None, torch.empty_like(lse), grads)
    return {host._name(launch): launch for launch in found}


def macros(launch):
    return dict(launch.kernel.macros)


# ------------------------------------------------------------------ arguments
def fields(structure, prefix=""):
    for name, kind in structure._fields_:
        yield f"{prefix}{name}"
        if issubclass(kind, ctypes.Structure):
            yield from fields(kind, f"{prefix}{name}.")


def offset(structure, path):
    at = 0
    for name in path.split("."):
        field = getattr(structure, name)
        at, structure = at + field.offset, dict(structure._fields_)[name]
    return at, ctypes.sizeof(structure)


def test_the_structure_is_that_of_the_kernels(tmp_path):
    names = list(fields(arguments.Call))
    lines = "".join(f'printf("{n} %zu %zu\\n", offsetof(Call, {n}), sizeof(Call::{n.replace(".", "::")}));' for n in names if "." not in n)
    lines += "".join(f'printf("{n} %zu %zu\\n", offsetof(Call, {n}), size_t(8));' for n in names if "." in n)
    types = "using uint8 = unsigned char; using int32 = int; using int64 = long long;"
    source = f'#include <cstddef>\n#include <cstdio>\n{types}\n#include "call.h"\nint main() {{ printf("%zu\\n", sizeof(Call)); {lines} }}'
    (tmp_path / "layout.cpp").write_text(source)
    compiler = require("g++", "clang++")
    subprocess.run([compiler, "-std=c++17", f"-I{FOLDER}", "-o", tmp_path / "layout", tmp_path / "layout.cpp"], check=True)
    size, *rows = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(size) == ctypes.sizeof(arguments.Call)
    assert {name: (int(at), int(n)) for name, at, n in map(str.split, rows)} == {name: offset(arguments.Call, name) for name in names}
    body = re.sub(r"//.*", "", SOURCES["call.h"].split("struct Call {")[1].split("};")[0])
    assert [name for name in names if "." not in name] == re.findall(r"\b(\w+)(?=[,;])", body)


def test_the_pointers_are_in_the_kernels_order():
    parameters = re.findall(r"__restrict__ (\w+)", SOURCES["call.h"])
    assert tuple(parameters) == arguments.POINTERS and len(parameters) == 18


def test_packing():
    call = arguments.Call(scale=0.5, seqlen_q=7, key=arguments.Strides3(1, 2, 3))
    packed = arguments.pack({"key": 0x1000, "cu_seqlens_k": 0x2000}, call)
    assert len(packed) == arguments.SIZE and packed[144:] == bytes(call)
    assert struct.unpack("=18Q", packed[:144]) == (0, 0x1000, *[0] * 15, 0x2000)


def test_a_launch_has_the_numbers_of_its_tensors():
    """Strides of views, positions in memory, and nothing of what is absent."""
    case = Case(bias="hk", mask="bq", alibi="h", softcap=3.0, window=(4, 5), sinks=True, layout="bshd", dtype=torch.float16, scale=0.25)
    call = case.draw()
    call.key, call.bias = strided(call.key, "sliced"), strided(call.bias, "transposed")
    inputs, p = call.inputs(), call.problem
    seen = []
    host.forward(inputs, plan_of(p), execute=lambda launch, plan: seen.append(launch))
    (launch,) = seen
    c, packed = launch.call, launch.arguments()
    pointers = dict(zip(arguments.POINTERS, struct.unpack("=18Q", packed[:144])))
    expected = {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "out": launch.tensors["out"], "lse": launch.tensors["lse"],
        "bias": inputs.bias, "mask": inputs.mask, "alibi_slopes": inputs.alibi_slopes, "sinks": inputs.sinks,
    }  # fmt: skip
    assert pointers == {name: expected[name].data_ptr() if name in expected else 0 for name in arguments.POINTERS}
    b, s, h, _ = inputs.key.stride()
    assert (c.key.batch, c.key.head, c.key.row) == (b, h, s)
    assert (c.query.batch, c.query.head, c.query.row) == (50 * 4 * 16, 16, 4 * 16)
    assert (c.bias.batch, c.bias.head, c.bias.row, c.bias.column) == (0, inputs.bias.stride(1), 0, inputs.bias.stride(3))
    assert (c.bias_rows, c.bias_columns, c.mask_rows, c.mask_columns) == (2**31 - 1, 70, 50, 2**31 - 1)
    assert (c.mask.batch, c.mask.head, c.mask.row, c.mask.column) == (50, 0, 1, 0)
    assert (c.alibi_batch, c.alibi_head, c.lse_batch, c.lse_head) == (0, 1, 200, 50)
    assert (c.scale, c.softcap, c.window_left, c.window_right) == (0.25, 3.0, 4, 5)
    assert (c.batch, c.heads_q, c.heads_k, c.group, c.seqlen_q, c.seqlen_k) == (2, 4, 2, 2, 50, 70)


# ------------------------------------------------------------------ variants
def test_kernels_have_every_macro_and_no_other():
    text = "\n".join(SOURCES.values())
    used = set(re.findall(r"\bPF_[A-Z0-9_]+\b", re.sub(r"//.*", "", text)))
    own = set(re.findall(r"#define (PF_[A-Z0-9_]+)", text)) | {"PF_HOST"}
    for launch in launches(problem(bias=True, varlen=True, total_q=9, total_k=9)).values():
        names = [name for name, _ in launch.kernel.macros]
        assert names == sorted(used - own)


def test_matrix_layers_are_those_of_the_kernels():
    defined = {name.lower(): int(value) for name, value in re.findall(r"#define PF_MATRIX_(\w+) (\d)", SOURCES["config.h"])}
    assert defined == MATRIX
    layers = {name: (arch.matrix, arch.wave) for name, arch in ARCHES.items()}
    assert layers["gfx906"] == ("fma", 64) and layers["gfx908"] == layers["gfx950"] == ("mfma", 64)
    assert layers["gfx1036"] == ("fma", 32) and layers["gfx1151"] == ("wmma11", 32) and layers["gfx1201"] == ("wmma12", 32)


@pytest.mark.parametrize("device, dtype, matrix, words", [
    (MI300X, torch.float16, "mfma", 2), (MI300X, torch.float32, "mfma", 1), (MI100, torch.bfloat16, "mfma", 1),
    (MI100, torch.float16, "mfma", 2), (MI355X, torch.bfloat16, "mfma", 4), (MI355X, torch.float32, "mfma", 1),
    (RX7900XTX, torch.bfloat16, "wmma11", 4), (RX7900XTX, torch.float32, "fma", 4), (RX9070XT, torch.float16, "wmma12", 4),
    (RX6800, torch.float16, "fma", 4), (MI50, torch.bfloat16, "fma", 4),
])  # fmt: skip
def test_the_layer_of_an_arch_and_a_type(device, dtype, matrix, words):
    found = macros(launches(problem(dtype=dtype), device)["forward"])
    assert (found["PF_MATRIX"], found["PF_MFMA_DWORDS"]) == (str(MATRIX[matrix]), str(words))
    assert found["PF_WAVE"] == str(device.wave_size)


FEATURES = {
    "plain": ({}, set()),
    "causal": (dict(window_right=0), {"HAS_RIGHT"}),
    "top_left": (dict(window_right=0, top_left=True), {"HAS_RIGHT", "TOP_LEFT"}),
    "top_left_without_a_window": (dict(top_left=True), set()),
    "window": (dict(window_left=3, window_right=5), {"HAS_LEFT", "HAS_RIGHT"}),
    "packed": (dict(varlen=True, total_q=10, total_k=10), {"VARLEN"}),
    "scores": (dict(bias=True, alibi=True, softcap=True), {"HAS_BIAS", "HAS_ALIBI", "HAS_SOFTCAP"}),
    "mask": (dict(mask=True, sinks=True), {"HAS_MASK", "HAS_SINKS"}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_only_what_a_call_uses_is_compiled_in(name):
    sizes, expected = FEATURES[name]
    found = launches(problem(**sizes))
    switches = ("PF_HAS", "PF_TOP", "PF_VARLEN")
    on = lambda launch: {key[3:] for key, value in macros(launch).items() if key.startswith(switches) and value == "1"}
    assert on(found["forward"]) == expected
    assert on(found["backward_dkv"]) == on(found["backward_dq"]) == expected - {"HAS_SINKS"}
    assert on(found["backward_delta"]) == set()


def test_calls_share_variants():
    """Sizes are arguments; what a kernel does not use has one value."""
    variants = lambda **sizes: {name: launch.kernel for name, launch in launches(problem(**sizes)).items()}
    plain = variants()
    assert variants(batch=3, heads_q=4, heads_k=4, seqlen_q=1000, seqlen_k=77) == plain
    assert variants(sinks=True) | {"forward": None} == plain | {"forward": None}
    assert variants(window_right=0, softcap=True, alibi=True, mask=True)["backward_delta"] == plain["backward_delta"]
    assert variants(head_dim=128)["backward_delta"] == plain["backward_delta"]
    assert all(hash(kernel) for kernel in plain.values())


@pytest.mark.parametrize("how, wide", [("", True), ("transposed", True), ("sliced", False)])
def test_wide_loads_where_every_row_is_aligned(how, wide):
    call = Case(dtype=torch.float16, head_dim=32, seqlen_q=40, seqlen_k=40).draw()
    if how:
        call.value = strided(call.value, how)
    seen = []
    host.forward(call.inputs(), plan_of(call.problem), execute=lambda launch, plan: seen.append(launch))
    assert macros(seen[0])["PF_WIDE_LOADS"] == str(int(wide))


@pytest.mark.parametrize("sizes, wide", [
    (dict(head_dim=40), "1"), (dict(head_dim=36), "0"), (dict(head_dim_v=1), "0"), (dict(head_dim=36, dtype=torch.float32), "1"),
    (dict(head_dim=34, dtype=torch.float32), "0"),
], ids=str)  # fmt: skip
def test_wide_loads_need_rows_of_whole_pieces(sizes, wide):
    assert macros(launches(problem(**sizes))["forward"])["PF_WIDE_LOADS"] == wide


def test_strides_of_dimensions_of_size_1_do_not_matter():
    tensor = torch.empty(2048, dtype=torch.float16).as_strided((2, 1, 8, 64), (512, 3, 64, 1))
    assert host._wide(tensor) and not host._wide(tensor.as_strided((2, 1, 8, 64), (515, 3, 64, 1)))
    assert host._wide(torch.empty(1025, dtype=torch.float16)[1:].view(2, 1, 8, 64)) is False
    assert host._wide(None, torch.empty(0, 3, dtype=torch.float16))


def test_index_and_bias_types():
    p = problem(varlen=True, total_q=9, total_k=9, bias=True)
    inputs, out, lse, _ = shared.meta_call(p)
    inputs.bias, inputs.cu_seqlens_q = inputs.bias.float(), inputs.cu_seqlens_q.long()
    (launch,) = host.forward_launches(inputs, plan_of(p), out, lse)
    assert macros(launch)["PF_BIAS_DTYPE"] == "Float32" and macros(launch)["PF_INDEX"] == "int64"
    assert launch.tensors["cu_seqlens_q"].dtype == launch.tensors["cu_seqlens_k"].dtype == torch.int64  # of two kinds: both widened


# ------------------------------------------------------------------ cuts
def test_lds_by_hand():
    """fp16, head dims 64 and 80 (held as 96): two buffers of 32 keys; K and V of 64 keys, and 32 queries with lse and delta."""
    p = problem(head_dim_v=80)
    streamed = 32 * (64 + 96) * 2
    assert lds_bytes(cut("forward", Tiling(64, 32, 4, 2), p, MI300X), MI300X) == 2 * streamed
    assert lds_bytes(cut("forward", Tiling(64, 32, 4, 5), p, MI300X), MI300X) == 2 * streamed  # more stages are not used
    assert lds_bytes(cut("backward_dkv", Tiling(32, 64, 4), p, MI300X), MI300X) == streamed + 32 * 8
    wide = problem(dtype=torch.float32, head_dim=256, head_dim_v=256)
    assert lds_bytes(cut("backward_dkv", Tiling(16, 16, 1), wide, RX6800), RX6800) == 2 * 16 * 512 * 4 == 65536
    poor = replace(MI300X, registers_per_thread=100)  # of which no placement has enough: the one with the fewest
    assert lds_bytes(cut("forward", Tiling(64, 32, 4), p, poor), poor) == streamed + 64 * 64 * 2
    assert lds_bytes(cut("backward_dq", Tiling(64, 32, 4), p, poor), poor) == streamed + 64 * (64 + 96) * 2
    assert lds_bytes(cut("backward_dkv", Tiling(32, 64, 4), p, poor, need_dk=False), poor) == streamed + 32 * 8 + 64 * 64 * 2
    assert lds_bytes(cut("backward_dbias", Tiling(64, 32, 4, 2), p, MI300X), MI300X) == streamed + 64 * (64 + 96) * 2


def test_registers_hold_what_they_can():
    """First the stationary block leaves them for LDS, then the tile under way waits; where nothing helps they are spilled."""
    wide = problem(head_dim=128, head_dim_v=128)
    where = lambda tiling, p, device: placement(cut("backward_dkv", tiling, p, device), device)
    assert where(Tiling(32, 64, 4), wide, MI300X) == Placement(stationary_in_lds=False, prefetch=True)
    assert where(Tiling(16, 64, 4), wide, replace(RX7900XTX, registers_per_thread=280)) == Placement(stationary_in_lds=True, prefetch=True)
    assert where(Tiling(16, 64, 4), wide, RX7900XTX) == Placement(stationary_in_lds=True, prefetch=False)
    small = replace(RX7900XTX, shared_memory_bytes=16384)
    assert where(Tiling(16, 64, 4), wide, small) == Placement(stationary_in_lds=False, prefetch=False)
    assert placement(cut("backward_dbias", Tiling(32, 32, 2), wide, MI300X), MI300X).stationary_in_lds


def test_registers_grow_with_blocks_and_shrink_with_waves():
    p = problem()
    count = lambda kernel, *fields: specialise.registers(Tiling(*fields), kernel, p, MI300X)
    assert count("forward", 128, 64, 4) > count("forward", 64, 64, 4) > count("forward", 64, 32, 4)
    assert count("backward_dkv", 32, 128, 4) > count("backward_dkv", 32, 128, 8)
    both, one = Tiling(32, 64, 4), Tiling(32, 64, 4, split_dkv=True)
    assert specialise.registers(both, "backward_dkv", p, MI300X) > specialise.registers(one, "backward_dkv", p, MI300X)


@pytest.mark.parametrize("tiling, kernel, device, sizes, reason", [
    (Tiling(64, 64, 8), "forward", MI300X, {}, "block_m=64 cannot be cut into 8 waves of whole tiles of 16 rows"),
    (Tiling(64, 64, 8), "backward_dkv", MI300X, {}, "block_n=64 cannot be cut into 8 waves"),
    (Tiling(64, 64, 4, matrix_instr_nonkdim=32), "forward", MI300X, {}, "block_m=64 cannot be cut into 4 waves of whole tiles of 32 rows"),
    (Tiling(64, 64, 4, matrix_instr_nonkdim=32), "forward", MI300X, dict(head_dim_v=96), None),  # tiles of 32 need widths of 64
    (Tiling(64, 64, 4, matrix_instr_nonkdim=32), "forward", RX7900XTX, {}, None),
    (Tiling(64, 16, 4), "forward", MI300X, {}, "block_n=16 is no multiple of 32"),
    (Tiling(64, 16, 4), "forward", MI300X, dict(dtype=torch.float32), None),
    (Tiling(16, 64, 4), "backward_dkv", MI300X, {}, "block_m=16 is no multiple of 32"),
    (Tiling(64, 16, 4), "forward", RX9070XT, {}, None),
    (Tiling(64, 128, 4), "forward", RX9070XT, dict(mask=True), "block_n=128 is more than 64 rows"),
    (Tiling(64, 128, 4), "forward", RX9070XT, {}, None),
    (Tiling(64, 64, 4, tma=True), "forward", MI300X, {}, "tma=True needs NVIDIA sm_90 or newer, mi300x is gfx942"),
    (Tiling(1024, 32, 32), "forward", MI300X, {}, "32 waves of 64 are more than the 1024 work-items"),
    (Tiling(64, 256, 4), "forward", MI300X, dict(head_dim=256), "bytes of LDS, mi300x has 65536"),
    (Tiling(256, 32, 1), "forward", MI300X, dict(head_dim_v=256), "accumulator registers a lane, mi300x has 512"),
    (Tiling(64, 64, 4), "forward", H200, {}, "has no path for sm_90"),
])  # fmt: skip
def test_unfit_says_why(tiling, kernel, device, sizes, reason):
    found = unfit(tiling, kernel, problem(**sizes), device)
    assert found is None if reason is None else reason in found


def test_a_tiling_that_cannot_run_is_refused_before_it_is_compiled():
    for tiling, reason in ((Tiling(16, 32, 4), "block_m=16 cannot be cut into 4 waves"), (Tiling(64, 32, 4, tma=True), "for NVIDIA")):
        with pytest.raises(ValueError, match=f"the HIP backend cannot run forward with block_m=.*{reason}"):
            launches(problem(), forward=tiling)


def test_settle_gives_what_can_be_cut():
    tilings = [Tiling(m, n, w, s, tma=True, matrix_instr_nonkdim=k)
               for m, n, w, s, k in itertools.product((16, 32, 128), (16, 64, 256), (1, 4, 8), (1, 3), (0, 32))]  # fmt: skip
    for tiling, device, kernel in itertools.product(tilings, (MI300X, RX7900XTX, MI50), KERNELS):
        for p in (problem(), problem(mask=True), problem(dtype=torch.float32)):
            settled = settle(tiling, kernel, p, device)
            reason = unfit(settled, kernel, p, device)
            assert reason is None or "LDS" in reason or "accumulator" in reason, (tiling, settled, reason)
            assert settle(settled, kernel, p, device) == settled


def test_dbias_takes_dqs_tiling_as_far_as_lds_holds_both_blocks():
    assert dbias_tiling(Tiling(64, 32, 4, 2), problem(), MI300X) == Tiling(64, 32, 4, 1)
    assert dbias_tiling(Tiling(128, 32, 8), problem(head_dim=256, head_dim_v=256), MI300X) == Tiling(32, 32, 2)
    assert dbias_tiling(Tiling(64, 64, 4), problem(head_dim=16, head_dim_v=16), MI300X) == Tiling(64, 32, 4)  # its own tile is larger
    wide = problem(dtype=torch.float32, head_dim=256, head_dim_v=256, bias=True)
    assert dbias_tiling(Tiling(64, 64, 4), wide, RX6800) == Tiling(16, 16, 1)


# ------------------------------------------------------------------ launches
def test_order_and_number_of_programs():
    p = problem(bias=True)
    found = launches(p, backward_dkv=Tiling(32, 128, 4), backward_dq=Tiling(128, 32, 4))
    assert list(found) == ["forward", "backward_delta", "backward_dkv", "backward_dq", "backward_dbias"]
    programs = {name: launch.programs for name, launch in found.items()}
    assert programs == {
        "forward": 5 * 2 * 8, "backward_delta": 5 * 2 * 8, "backward_dkv": 4 * 2 * 2, "backward_dq": 3 * 2 * 8,
        "backward_dbias": 8 * 3 * 16,
    }  # fmt: skip
    call = found["backward_dkv"].call
    assert (call.num_blocks, call.num_heads) == (4, 4) and call.heads_per_group == 4
    call = found["backward_dbias"].call
    assert (call.m_tiles, call.n_tiles, call.bias_heads) == (3, 16, 8)
    assert all(launch.kernel.threads == 256 for launch in found.values())
    assert {launch.kernel.threads for launch in launches(p, RX9070XT).values()} == {128, 256}  # delta: four work-items a row


def test_packed_rows_are_one_sequence_for_delta():
    found = launches(problem(varlen=True, total_q=1000, total_k=900))
    call = found["backward_delta"].call
    assert (call.batch, call.seqlen_q, found["backward_delta"].programs) == (1, 1000, 16 * 8)
    assert (call.lse_batch, call.lse_head) == (0, 1000)


@pytest.mark.parametrize("needs, names", [
    (Needs(), ["delta", "dkv", "dq"]), (Needs(query=False), ["delta", "dkv"]), (Needs(key=False, value=False), ["delta", "dq"]),
    (Needs(False, False, False, bias=True), ["delta", "dbias"]), (Needs(False, False, False, sinks=True), ["delta"]),
    (Needs(key=False), ["delta", "dv", "dq"]), (Needs(value=False), ["delta", "dk", "dq"]),
])  # fmt: skip
def test_only_gradients_that_are_asked_for_are_launched(needs, names):
    found = launches(problem(bias=True, sinks=True), needs=needs)
    assert list(found) == ["forward", *(f"backward_{name}" for name in names)]


def test_dk_and_dv_in_one_launch_or_two():
    found = launches(problem(), backward_dkv=Tiling(64, 64, 4, split_dkv=True))
    dk, dv = found["backward_dk"], found["backward_dv"]
    assert [(macros(x)["PF_NEED_DK"], macros(x)["PF_NEED_DV"]) for x in (dk, dv)] == [("1", "0"), ("0", "1")]
    assert dk.kernel.name == dv.kernel.name == "backward_dkv"
    assert (dk.tensors["dvalue"], dv.tensors["dkey"]) == (None, None)


@pytest.mark.parametrize("names, sums, tiles", [
    ("bhqk", "0000", (5, 8)), ("", "1111", (1, 1)), ("h", "1011", (1, 1)), ("bq", "0101", (5, 1)), ("k", "1110", (1, 8)),
])  # fmt: skip
def test_bias_gradients_sum_where_bias_is_broadcast(names, sums, tiles):
    p = problem(bias=True)
    inputs, out, lse, grad_out = shared.meta_call(p)
    full = dict(b=2, h=8, q=300, k=500)
    inputs.bias = torch.empty([n if name in names else 1 for name, n in full.items()], dtype=torch.float16, device="meta")
    grads = shared.new_gradients(inputs, p, Needs(False, False, False, bias=True))
    _, launch = host.backward_launches(inputs, plan_of(p), out, lse, grad_out, None, torch.empty_like(lse), grads)
    assert "".join(macros(launch)[f"PF_SUM_{axis}"] for axis in ("BATCH", "HEADS", "ROWS", "COLUMNS")) == sums
    assert (launch.call.m_tiles, launch.call.n_tiles) == tiles and launch.call.bias_heads == inputs.bias.shape[1]
    assert launch.programs == inputs.bias.shape[0] * inputs.bias.shape[1] * tiles[0] * tiles[1]
    strides = [getattr(launch.call.dbias, name) for name in ("batch", "head", "row", "column")]
    assert strides == [0 if n == 1 else s for n, s in zip(grads.bias.shape, grads.bias.stride())] and grads.bias.dtype == torch.float32


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seqlen_q=0), dict(heads_q=0, heads_k=0)], ids=str)
def test_nothing_to_do_is_no_program(sizes):
    found = launches(problem(**sizes))
    assert found["forward"].programs == found["backward_dq"].programs == found["backward_delta"].programs == 0


def test_a_launch_that_is_too_large_is_refused():
    """HIP counts work-items in 32 bits: 2**24 - 1 workgroups of 256."""
    with pytest.raises(ValueError, match="the call needs 2147483648 programs, a launch has at most 16777215: split the batch"):
        launches(problem(batch=2**20, heads_q=2**6, heads_k=2**6, seqlen_q=32 * 64, seqlen_k=16))


def test_strides_beyond_32_bits():
    found = launches(problem(batch=4, heads_q=16, heads_k=16, seqlen_q=2**21, seqlen_k=2**21))
    assert found["forward"].call.query.batch == found["backward_dkv"].call.dkey.batch == 2**31
    assert launches(problem(varlen=True, seqlen_q=2**40, heads_q=0, heads_k=0))["forward"].call.seqlen_q == 2**31 - 1  # a bound, not a size


# ------------------------------------------------------------------ forward and backward around the launches
def write(tensors, names, value):
    for name in names:
        if tensors.get(name) is not None:
            tensors[name].fill_(value)


def run(call, needs):
    """Output, lse, gradients and launches of a call whose kernels do nothing but delta, which writes 1, and dbias, which adds 2."""
    seen = []

    def execute(launch, plan):
        seen.append(launch)
        write(launch.tensors, {"backward_delta": ("delta",), "backward_dbias": ("dbias",)}.get(launch.kernel.name, ()), len(seen))

    plan, inputs = plan_of(call.problem), call.inputs()
    out, lse = host.forward(inputs, plan, execute=execute)
    lse.fill_(0.0)
    return out, lse, host.backward(inputs, plan, out, lse, call.grad_out, call.grad_lse, needs, execute=execute), seen


def test_results_have_the_shapes_and_types_of_the_call():
    call = Case(dtype=torch.bfloat16, head_dim=32, head_dim_v=48, bias="hq", bias_dtype=torch.float32, sinks=True, layout="bshd").draw()
    out, lse, grads, seen = run(call, Needs(bias=True, sinks=True))
    assert out.shape == (2, 50, 4, 48) and out.dtype == torch.bfloat16 and lse.shape == (2, 4, 50) and lse.dtype == torch.float32
    for name in ("query", "key", "value", "bias", "sinks"):
        grad, tensor = getattr(grads, name), getattr(call, name)
        assert grad.shape == tensor.shape and grad.dtype == tensor.dtype and grad.is_contiguous()
    assert [launch.kernel.name for launch in seen] == ["forward", "backward_delta", "backward_dkv", "backward_dq", "backward_dbias"]
    assert (grads.bias == 5.0).all()
    # delta 2 in 2 * 50 rows of a head, whose lse is 0 here
    torch.testing.assert_close(grads.sinks, -call.sinks.exp() * 2.0 * 2 * 50)
    assert macros(seen[1])["PF_HAS_GRAD_LSE"] == "1"


def test_gradients_that_are_not_asked_for_are_none():
    call = Case(dtype=torch.float16, head_dim=32).draw()
    _, _, grads, seen = run(call, Needs(key=False, value=False))
    assert isinstance(grads, Gradients) and (grads.key, grads.value, grads.bias, grads.sinks) == (None,) * 4
    assert grads.query.shape == call.query.shape
    assert [launch.kernel.name for launch in seen] == ["forward", "backward_delta", "backward_dq"]  # and none was computed


def test_packed_rows_outside_all_sequences():
    """No program owns them: output and gradients are 0 and lse -inf before the launches."""
    call = Case(dtype=torch.float16, head_dim=32, lengths=((3, 5), (0, 2), (4, 0)), unused=6).draw()
    seen = []
    out, lse = host.forward(call.inputs(), plan_of(call.problem), execute=lambda launch, plan: seen.append(launch))
    assert (out == 0).all() and (lse == -torch.inf).all() and out.shape[0] == 13 and lse.shape == (4, 13)
    grads = host.backward(call.inputs(), plan_of(call.problem), out, lse, call.grad_out, call.grad_lse, Needs(), execute=lambda *_: None)
    assert not any(getattr(grads, name).any() for name in ("query", "key", "value"))
    assert seen[0].tensors["cu_seqlens_q"] is call.cu_seqlens_q


@pytest.mark.parametrize("how, copied", [("columns", True), ("transposed", False), ("sliced", False)])
def test_an_output_gradient_whose_rows_are_not_contiguous_is_copied(how, copied):
    call = Case(dtype=torch.float16, head_dim=32).draw()
    call.grad_out = strided(call.grad_out, how)
    seen = run(call, Needs())[3]
    for launch in seen[1:]:
        given = launch.tensors["grad_out"]
        assert (given is not call.grad_out) == copied and given.stride(-1) == 1
        assert launch.call.grad_out.row == given.stride(2)


def test_a_call_is_planned_once():
    call = Case(dtype=torch.float16, head_dim=32).draw()
    plan, inputs = plan_of(call.problem), call.inputs()
    out, lse = torch.empty_like(call.query), torch.empty(2, 4, 50)
    prepared = lambda inputs: host.forward_launches(inputs, plan, out, lse)[0].prepared
    first = prepared(inputs)
    assert prepared(inputs) is first
    assert prepared(replace(inputs, query=call.query.clone())) is first
    for other in (
        dict(scale=0.3), dict(softcap=0.1), dict(query=strided(call.query, "transposed")), dict(query=strided(call.query, "sliced")),
    ):  # fmt: skip
        assert prepared(replace(inputs, **other)) is not first
    assert host.forward_launches(inputs, replace(plan), out, lse)[0].prepared is not first


def test_memory_of_launches_is_bounded(monkeypatch):
    monkeypatch.setattr(host, "_MAX_PREPARED", 4)
    for n in range(1, 20):
        launches(problem(seqlen_k=n))
        assert len(host._PREPARED) <= 4


def test_a_gpu_launch_loads_a_kernel_once(monkeypatch):
    """On the plan's device and torch's current stream, with the packed arguments; nothing for a launch without programs."""
    calls, loads = [], []
    runtime = pytest.importorskip("portable_flash.backends.hip.runtime")
    monkeypatch.setattr(runtime, "function", lambda kernel, index: loads.append((kernel, index)) or "function")
    monkeypatch.setattr(runtime, "launch", lambda *call: calls.append(call))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: type("Stream", (), {"cuda_stream": 40 + index}))
    plan = Plan(problem(), replace(MI300X, index=2), "hip", plan_of(problem()).kernels)
    inputs, out, lse, _ = shared.meta_call(problem())
    for _ in range(3):
        (launch,) = host.forward_launches(inputs, plan, out, lse)
        host.launch_on_gpu(launch, plan)
    assert loads == [(launch.kernel, 2)] and calls == [("function", 80, launch.arguments(), 42)] * 3
    empty = problem(batch=0)
    (launch,) = host.forward_launches(*[shared.meta_call(empty)[0], plan_of(empty), *shared.meta_call(empty)[1:3]])
    host.launch_on_gpu(launch, plan_of(empty))
    assert len(calls) == 3


# ------------------------------------------------------------------ one tiling for all backends
DRIVEN = {
    "plain": {}, "causal": dict(window_right=0), "group": dict(heads_q=32, heads_k=4), "bias": dict(bias=True, mask=True),
    "packed": dict(varlen=True, total_q=700, total_k=900), "wide": dict(head_dim=192, head_dim_v=128),
    "float32": dict(dtype=torch.float32), "short": dict(seqlen_q=1),
}  # fmt: skip


@pytest.mark.parametrize("device", [MI300X, RX9070XT], ids=lambda d: d.slug)
@pytest.mark.parametrize("name", DRIVEN)
def test_one_tiling_drives_triton_and_hip(name, device):
    """The same instance gives both backends the same blocks, warps, programs and order of programs, and one prediction of traffic."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from portable_flash.backends.triton.host import plan_dbias, plan_delta, plan_dkv, plan_dq, plan_forward

    p = problem(**DRIVEN[name])
    tilings = {"forward": Tiling(64, 32, 4, 2), "backward_dkv": Tiling(32, 32, 2), "backward_dq": Tiling(32, 32, 2, 2)}
    assert all(unfit(tiling, kernel, p, device) is None for kernel, tiling in tilings.items())
    kernels = MappingProxyType({kernel: KernelPlan(tiling, "argument") for kernel, tiling in tilings.items()})
    plans = {backend: Plan(p, device, backend, kernels) for backend in ("hip", "triton")}
    plan = plans["triton"]
    inputs, out, lse, grad_out = shared.meta_call(p)
    theirs = {
        "forward": plan_forward(inputs, plan), "backward_delta": plan_delta(inputs, plan, out, grad_out, None),
        "backward_dkv": plan_dkv(inputs, plan, grad_out, True, True), "backward_dq": plan_dq(inputs, plan, grad_out),
    }  # fmt: skip
    if p.bias:
        theirs["backward_dbias"] = plan_dbias(inputs, plan, grad_out)
    ours = launches(p, device, **tilings)
    assert ours.keys() == theirs.keys()
    for kernel, (theirs_launch, _) in theirs.items():
        launch, constexprs = ours[kernel], theirs_launch.constexprs
        assert launch.programs == theirs_launch.grid[0], kernel
        assert launch.kernel.threads == macros_int(launch, "WAVES") * device.wave_size
        if kernel == "backward_delta":
            continue
        assert (macros_int(launch, "BLOCK_M"), macros_int(launch, "BLOCK_N")) == (constexprs["BLOCK_M"], constexprs["BLOCK_N"])
        assert macros_int(launch, "WAVES") == theirs_launch.options["num_warps"]
        if kernel != "backward_dbias":
            assert macros_int(launch, "STAGES") == constexprs["NUM_STAGES"] and macros_int(launch, "XCDS") == constexprs["NUM_XCDS"]
            order = (launch.call.num_blocks, launch.call.num_heads, launch.call.heads_per_group)
            assert any(order == theirs_launch.integers[i : i + 3] for i in range(len(theirs_launch.integers)))
    for direction, kernel in (("forward", "forward"), ("backward", "backward_dq")):
        predicted = {b: plan.kernels[kernel].tiling.hbm_bytes(direction, p, device) for b, plan in plans.items()}
        assert predicted["hip"] == predicted["triton"] > 0


def macros_int(launch, name):
    return int(macros(launch)[f"PF_{name}"])


def test_kernels_of_a_problem_without_tensors():
    p = problem(bias=True)
    found = host.kernels_of(p, MI300X)
    assert list(found) == ["forward", "backward_delta", "backward_dkv", "backward_dq", "backward_dbias"]
    assert all(isinstance(kernel, Kernel) and kernel.arch == "gfx942" for kernel in found.values())
    assert list(host.kernels_of(replace(p, needs_grad=False), RX6800)) == ["forward"]
    split = {name: KernelPlan(Tiling(64, 64, 4, split_dkv=True), "test") for name in KERNELS}
    assert "backward_dk" in host.kernels_of(p, MI300X, split) and "backward_dv" in host.kernels_of(p, MI300X, split)


# ------------------------------------------------------------------ what it says of itself
def test_refusals(monkeypatch):
    assert "fp64" in hip.supports(problem(dtype=torch.float64), MI300X)
    assert hip.supports(problem(head_dim_v=257), MI300X) == "head_dim goes up to 256, here 257"
    assert hip.supports(problem(dtype=torch.bfloat16, bias=True, mask=True, varlen=True, sinks=True), MI300X) is None
    assert hip.unavailable(H200) == hip.unavailable(cpu()) == "runs on AMD GPUs"
    assert "has no path for gfx803; it has for gfx906, gfx908," in hip.unavailable(replace(MI50, arch="gfx803"))
    assert hip.unavailable(MI50) is None  # of the catalogue: planned for whatever this machine has
    monkeypatch.setattr(hip, "_missing", lambda: "hip-python is not installed")
    assert hip.unavailable(replace(MI50, index=0)) == "hip-python is not installed" and hip.unavailable(MI50) is None


def test_space_is_that_of_the_code(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(compiler, "folder", lambda: tmp_path)
    spaces = lambda: {kernel: hip.space.__wrapped__(kernel) for kernel in KERNELS}
    before = spaces()
    assert len(set(before.values())) == 3
    (tmp_path / "forward.hip").write_text("// more\n\n/* of\nit */" + SOURCES["forward.hip"].replace("\n    ", "\n        "))
    assert spaces() == before
    (tmp_path / "forward.hip").write_text(SOURCES["forward.hip"] + "int more;\n")
    changed = spaces()
    assert changed["forward"] != before["forward"] and changed["backward_dq"] == before["backward_dq"]
    (tmp_path / "scores.h").write_text(SOURCES["scores.h"] + "int more;\n")
    assert all(spaces()[kernel] != changed[kernel] for kernel in KERNELS)


def test_comments_are_told_from_strings():
    assert hip._code('a // b\n\n  c /* d\n e */ f("// g") "h\\"/*"\n') == 'a\nc   f("// g") "h\\"/*"'


def test_hip_does_not_import_triton():
    script = "import sys, torch; from portable_flash.backends.hip import host; assert not {'triton', 'hip'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
