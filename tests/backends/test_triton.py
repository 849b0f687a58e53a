"""The Triton backend on a machine without a GPU: its kernels under the interpreter, and what it plans before a launch."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from portable_flash.backends import KernelPlan, Needs, Plan
from portable_flash.backends import triton as triton_backend
from portable_flash.backends.triton import host
from portable_flash.backends.triton.compile import meta_call
from portable_flash.device import cpu, named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS, Tiling

TESTS = Path(__file__).parents[1]
SUITE = sorted((TESTS / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("module", SUITE, ids=lambda path: path.stem)
def test_kernels_under_the_interpreter(module):
    """In a process of its own: this one has Triton's compiler. A failure shows the inner report."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--show-capture=no", "-W", "ignore"]
    result = subprocess.run([*command, module], cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    closing = (result.stdout.strip().splitlines() or [result.stderr])[-1]
    print(f"{module.name}: {closing}")
    assert result.returncode == 0, f"{result.stdout[-20000:]}\n{result.stderr[-2000:]}"
    assert " passed" in closing


# ------------------------------------------------------------------ what is planned before a launch
H200 = named("h200")
MI300X = named("mi300x")


def plan_of(problem, device=H200, **tilings):
    kernels = {name: KernelPlan(tilings.get(name, Tiling(64, 64, 4, 2)), "argument") for name in KERNELS}
    return Plan(problem, device, "triton", MappingProxyType(kernels))


def launches(problem, device=H200, layout="bhsd", **tilings):
    """Every Launch of a call by name, from tensors without memory."""
    inputs, out, lse, grad_out = meta_call(problem, layout)
    plan = plan_of(problem, device, **tilings)
    found = {"forward": host.plan_forward(inputs, plan), "delta": host.plan_delta(inputs, plan, out, grad_out, None)}
    found |= {"dkv": host.plan_dkv(inputs, plan, grad_out, True, True), "dq": host.plan_dq(inputs, plan, grad_out)}
    if problem.bias:
        found["dbias"] = host.plan_dbias(inputs, plan, grad_out)
    return {name: launch for name, (launch, _) in found.items()}


def problem(**sizes):
    defaults = dict(dtype=torch.float16, batch=2, heads_q=8, heads_k=2, seqlen_q=300, seqlen_k=500, head_dim=64, head_dim_v=64)
    return Problem(**{**defaults, **sizes})


@pytest.mark.parametrize("sizes", [
    dict(batch=65536, heads_q=1, heads_k=1, seqlen_q=4, seqlen_k=4), dict(batch=1, heads_q=65540, heads_k=65540, seqlen_q=4, seqlen_k=4),
    dict(batch=70000, heads_q=16, heads_k=16, seqlen_q=4096, seqlen_k=4096), dict(batch=70000, bias=True, seqlen_q=16, seqlen_k=16),
    dict(batch=70000, varlen=True, total_q=2**20, total_k=2**20),
], ids=str)  # fmt: skip
def test_only_the_first_grid_axis_grows(sizes):
    """y and z end at 65535 on both vendors, x at 2**31 - 1."""
    for name, launch in launches(problem(**sizes)).items():
        programs, y, z = launch.grid
        assert y == z == 1 and programs < 2**31, name
        assert programs > 65535 or name == "dbias", name  # which is as large as the bias, here of one batch


def test_a_launch_beyond_the_first_axis_is_refused():
    with pytest.raises(ValueError, match="the call needs 2147483648 programs, a launch has at most 2147483647: split the batch"):
        launches(problem(batch=2**20, heads_q=2**6, heads_k=2**6, seqlen_q=32 * 64, seqlen_k=16))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_beyond_32_bits_become_64_bit_arguments(layout):
    """Meta tensors of 2**33 elements: Triton takes an int above 2**31 - 1 as i64, so the numbers must arrive unclipped."""
    big = problem(batch=4, heads_q=16, heads_k=16, seqlen_q=2**21, seqlen_k=2**21)
    per_batch = 16 * 2**21 * 64
    assert per_batch == 2**31
    for name, launch in launches(big, layout=layout).items():
        assert launch.integers.count(per_batch) >= 2, name
        assert all(type(n) is int for n in launch.integers), name


def test_sizes_and_strides_are_those_of_the_tensors():
    """bshd views: each operand's own strides of batch, head and row come first, in that order."""
    p = problem()
    inputs, *_ = meta_call(p, "bshd")
    launch, _ = host.plan_forward(inputs, plan_of(p))
    assert launch.integers[:9] == (300 * 8 * 64, 64, 8 * 64, 500 * 2 * 64, 64, 2 * 64, 500 * 2 * 64, 64, 2 * 64)
    assert launch.grid == (5 * 2 * 8, 1, 1)
    assert launches(p)["dkv"].grid == (8 * 2 * 2, 1, 1) and launches(p)["dq"].grid == (5 * 2 * 8, 1, 1)


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seqlen_q=0), dict(heads_q=0, heads_k=0)], ids=str)
def test_nothing_to_do_is_no_launch(sizes):
    assert launches(problem(**sizes))["forward"].grid[0] == 0 and launches(problem(**sizes))["dq"].grid[0] == 0


FEATURES = {
    "plain": ({}, set()),
    "causal": (dict(window_right=0), {"HAS_RIGHT"}),
    "causal_more_queries": (dict(window_right=0, seqlen_q=600), {"HAS_RIGHT", "UNSEEN"}),
    "top_left": (dict(window_right=0, top_left=True), {"HAS_RIGHT", "TOP_LEFT", "UNSEEN"}),
    "window": (dict(window_left=3, window_right=5), {"HAS_LEFT", "HAS_RIGHT", "UNSEEN"}),
    "window_square": (dict(window_left=3, seqlen_q=500), {"HAS_LEFT"}),
    "packed": (dict(varlen=True, total_q=10, total_k=10), {"VARLEN", "UNSEEN"}),
    "scores": (dict(bias=True, alibi=True, softcap=True), {"HAS_BIAS", "HAS_ALIBI", "HAS_SOFTCAP"}),
    "mask": (dict(mask=True, sinks=True), {"HAS_MASK", "HAS_SINKS"}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_only_what_a_call_uses_is_compiled_in(name):
    sizes, expected = FEATURES[name]
    constexprs = launches(problem(**sizes))["forward"].constexprs
    switches = {"HAS_LEFT", "HAS_RIGHT", "TOP_LEFT", "UNSEEN", "VARLEN", "HAS_BIAS", "HAS_MASK", "HAS_ALIBI", "HAS_SOFTCAP", "HAS_SINKS"}
    assert {key for key in switches if constexprs[key]} == expected


def unseen_by_counting(p):
    i, j = torch.arange(p.seqlen_q)[:, None] + (0 if p.top_left else p.seqlen_k - p.seqlen_q), torch.arange(p.seqlen_k)
    visible = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool)
    visible &= torch.tensor(True) if p.window_left is None else j >= i - p.window_left
    visible &= torch.tensor(True) if p.window_right is None else j <= i + p.window_right
    return bool((~visible.any(0)).any() or (~visible.any(1)).any())


def test_unseen_slots_are_found_where_there_are_any():
    for rows, keys in itertools.product((1, 4, 9), (1, 4, 9)):
        for left, right in itertools.product((None, 0, 1, 3, 8, 20), repeat=2):
            for top_left in (False, True):
                p = problem(seqlen_q=rows, seqlen_k=keys, window_left=left, window_right=right, top_left=top_left)
                assert host.unseen_slots(p) or not unseen_by_counting(p), p  # more than there are costs speed, fewer costs NaN
                if left is None or right is None:
                    assert host.unseen_slots(p) == unseen_by_counting(p), p


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_only_for_float32_where_torch_allows_it(allowed):
    precision = lambda device, dtype: launches(problem(dtype=dtype), device)["forward"].constexprs["PRECISION"]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        assert precision(H200, torch.float32) == ("tf32" if allowed else "ieee")
        assert precision(H200, torch.float16) == precision(MI300X, torch.float32) == "ieee"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_vendor_hints_reach_only_their_vendor():
    tiling = Tiling(64, 64, 4, 2, maxnreg=128, waves_per_eu=2, matrix_instr_nonkdim=16)
    options = lambda device: launches(problem(), device, forward=tiling)["forward"].options
    assert options(H200) == dict(num_warps=4, num_stages=2, enable_fp_fusion=False, maxnreg=128)
    assert options(MI300X) == dict(num_warps=4, num_stages=2, enable_fp_fusion=False, waves_per_eu=2, matrix_instr_nonkdim=16)


@pytest.mark.parametrize("split, needs, passes", [
    (False, Needs(), [(True, True)]), (True, Needs(), [(True, False), (False, True)]), (True, Needs(key=False), [(False, True)]),
    (False, Needs(value=False), [(True, False)]),
])  # fmt: skip
def test_dk_and_dv_in_one_pass_or_two(split, needs, passes):
    assert host.dkv_passes(plan_of(problem(), backward_dkv=Tiling(64, 64, split_dkv=split)), needs) == passes


# ------------------------------------------------------------------ what it says of itself
def test_refusals():
    assert "fp64" in triton_backend.supports(problem(dtype=torch.float64), H200)
    assert "head_dim goes up to 256, here 257" == triton_backend.supports(problem(head_dim_v=257), H200)
    assert triton_backend.supports(problem(dtype=torch.bfloat16), H200) is None
    assert "integers" in triton_backend.supports(problem(dtype=torch.bfloat16), cpu())
    assert triton_backend.unavailable(H200) is None and triton_backend.unavailable(MI300X) is None
    assert "compute capability 8.0" in triton_backend.unavailable(replace(H200, arch="sm_75"))
    assert "no path for gfx906" in triton_backend.unavailable(replace(MI300X, arch="gfx906"))
    assert "TRITON_INTERPRET=1" in triton_backend.unavailable(cpu())


@pytest.mark.parametrize("old, new, same", [
    ("m = a + b", "m = a + b  # why", True), ("m = a + b", "m = (\n        a\n        + b\n    )", False), ("m = a + b", "m = a - b", False),
    ('"""What."""', '"""Something else."""', True), ("    m = a + b\n    return m", "    m = a + b\n\n    return m", True),
    ("m = a + b\n    return m", "m = a + b\n    if m:\n        return m\n    return a", False), ('"-inf"', '"inf"', False),
])  # fmt: skip
def test_the_hash_of_a_kernel_is_of_what_it_does(tmp_path, old, new, same):
    text = '"""Module."""\n\n\ndef kernel(a, b, c=float("-inf")):\n    """What."""\n    m = a + b\n    return m\n'
    for name, content in (("old.py", text), ("new.py", text.replace(old, new))):
        (tmp_path / name).write_text(content)
    assert old in text
    assert (triton_backend._code(tmp_path / "old.py") == triton_backend._code(tmp_path / "new.py")) is same
