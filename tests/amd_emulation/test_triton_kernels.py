"""The Triton kernels as AMD machine code, run instruction by instruction on a CPU and judged against the float64 oracle."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from portable_flash.backends import Gradients, Inputs, KernelPlan
from portable_flash.device import named
from portable_flash.problem import Problem
from portable_flash.reference import compare_call
from portable_flash.tiling import KERNELS, Tiling

pytest.importorskip("triton")
REPO = os.environ.get("TINYGRAD_REPO")
if not REPO or not (Path(REPO) / "test" / "mockgpu" / "amd" / "emu.py").is_file():
    pytest.skip("TINYGRAD_REPO does not name a checkout of github.com/tinygrad/tinygrad", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("under TRITON_INTERPRET nothing is compiled", allow_module_level=True)

from emu import run_code_object  # noqa: E402  (beside this file; imports the checkout when it is first used)

GPUS = ("mi300x", "mi355x", "rx7900xtx", "rx9070xt")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_NUMPY = {BF16: torch.int16, FP16: torch.float16, FP32: torch.float32, torch.bool: torch.uint8, torch.int32: torch.int32}


@dataclass(frozen=True)
class Case:
    """A call and the tilings that it runs with. lengths: of packed sequences (query, key), which leave rows unused at the end."""

    dtype: torch.dtype = FP16
    batch: int = 1
    heads_q: int = 1
    heads_k: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    head_dim: int = 32
    head_dim_v: int = 32
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    mask: bool = False
    bias: bool = False
    lengths: tuple[tuple[int, int], ...] = ()
    forward: Tiling = Tiling(32, 32, 2)
    backward_dkv: Tiling = Tiling(32, 32, 2)
    backward_dq: Tiling = Tiling(32, 32, 2)
    grad: bool = True

    def problem(self) -> Problem:
        total = {"varlen": True, "total_q": sum(q for q, _ in self.lengths) + 5, "total_k": sum(k for _, k in self.lengths) + 7}
        return Problem(
            self.dtype, len(self.lengths) or self.batch, self.heads_q, self.heads_k, self.seqlen_q, self.seqlen_k,
            self.head_dim, self.head_dim_v, window_left=self.left, window_right=self.right, softcap=self.softcap > 0,
            sinks=self.sinks, alibi=self.alibi, mask=self.mask, bias=self.bias, needs_grad=self.grad, **(total if self.lengths else {}),
        )  # fmt: skip


CASES = {
    "fp16": Case(seqlen_q=64, seqlen_k=96, head_dim=64, head_dim_v=64),
    "bf16 causal odd": Case(BF16, seqlen_q=71, seqlen_k=71, right=0),
    "fp16 causal, more keys, grouped": Case(
        heads_q=4, heads_k=2, seqlen_q=43, seqlen_k=75, head_dim=64, head_dim_v=32, right=0, forward=Tiling(64, 32, 4),
        backward_dkv=Tiling(16, 64, 4, split_dkv=True), backward_dq=Tiling(64, 16, 4),
    ),
    "bf16 larger tiles": Case(
        BF16, seqlen_q=100, seqlen_k=100, head_dim=64, head_dim_v=64, right=0, forward=Tiling(64, 64, 4, matrix_instr_nonkdim=16),
        backward_dkv=Tiling(32, 64, 4, matrix_instr_nonkdim=16), backward_dq=Tiling(64, 32, 4, matrix_instr_nonkdim=16),
    ),
    "fp16 two stages": Case(
        seqlen_q=64, seqlen_k=128, head_dim=64, head_dim_v=64, forward=Tiling(64, 32, 4, 2), backward_dkv=Tiling(32, 32, 4, 2),
        backward_dq=Tiling(32, 32, 4, 2),
    ),
    "bf16 window softcap": Case(BF16, heads_q=2, seqlen_q=65, seqlen_k=65, head_dim=40, head_dim_v=24, left=20, right=3, softcap=5.0),
    "fp16 sinks alibi": Case(FP16, batch=2, heads_q=2, heads_k=1, seqlen_q=40, seqlen_k=60, right=0, sinks=True, alibi=True),
    "bf16 mask over NaN": Case(BF16, batch=2, heads_q=2, heads_k=2, seqlen_q=50, seqlen_k=41, mask=True),
    "fp16 bias": Case(FP16, batch=2, heads_q=2, heads_k=1, seqlen_q=45, seqlen_k=52, right=0, bias=True),
    "fp16 packed": Case(FP16, heads_q=2, heads_k=1, seqlen_q=48, seqlen_k=64, right=0, lengths=((40, 40), (0, 3), (17, 52), (5, 0))),
    "fp32 causal": Case(
        FP32, seqlen_q=40, seqlen_k=40, right=0, forward=Tiling(16, 16, 2), backward_dkv=Tiling(16, 16, 2), backward_dq=Tiling(16, 16, 2)
    ),
}  # fmt: skip


# ---------------------------------------------------------------- a call's tensors
@dataclass
class Call:
    """Inputs, the gradient that comes in, and results full of NaN wherever a kernel has to write."""

    inputs: Inputs
    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grads: Gradients
    delta: torch.Tensor
    ran: list[str] = field(default_factory=list)


def draw(case: Case, problem: Problem, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(case.dtype)
    p = problem
    rows = lambda heads, length, total, width: (total, heads, width) if p.varlen else (p.batch, heads, length, width)
    query = normal(*rows(p.heads_q, p.seqlen_q, p.total_q, p.head_dim))
    key = normal(*rows(p.heads_k, p.seqlen_k, p.total_k, p.head_dim))
    value = normal(*rows(p.heads_k, p.seqlen_k, p.total_k, p.head_dim_v))
    grad_out = normal(*rows(p.heads_q, p.seqlen_q, p.total_q, p.head_dim_v))
    inputs = Inputs(query, key, value, scale=p.head_dim**-0.5, softcap=case.softcap)
    if case.sinks:
        inputs.sinks = torch.tensor([0.5, -1.0])
    if case.alibi:
        inputs.alibi_slopes = torch.rand(p.batch, p.heads_q, generator=generator) * 0.2
    if case.bias:
        inputs.bias = normal(1, p.heads_q, p.seqlen_q, p.seqlen_k)
        inputs.bias[0, 0, 3, :20] = -torch.inf
    if case.mask:  # keys that nothing sees and queries that see nothing hold NaN
        inputs.mask = torch.rand(p.batch, 1, p.seqlen_q, p.seqlen_k, generator=generator) < 0.7
        inputs.mask[:, :, :, 30:34] = False
        inputs.mask[:, :, 7] = False
        key[:, :, 30:34] = value[:, :, 30:34] = torch.nan
        query[:, :, 7] = grad_out[:, :, 7] = torch.nan
    unwritten = lambda tensor, *shape, dtype=None: tensor.new_full(shape, torch.nan, dtype=dtype)
    out = unwritten(query, *rows(p.heads_q, p.seqlen_q, p.total_q, p.head_dim_v))
    lse = unwritten(query, *((p.heads_q, p.total_q) if p.varlen else (p.batch, p.heads_q, p.seqlen_q)), dtype=FP32)
    grads = Gradients(*(unwritten(t, *t.shape) for t in (query, key, value)))
    if case.bias:
        grads.bias = unwritten(query, *inputs.bias.shape, dtype=FP32)
    if p.varlen:  # rows past the last sequence belong to no program: the host has set them
        ends = [torch.tensor([0, *(length[i] for length in case.lengths)]).cumsum(0) for i in (0, 1)]
        inputs.cu_seqlens_q, inputs.cu_seqlens_k = (e.to(torch.int32) for e in ends)
        lse[:, ends[0][-1] :] = -torch.inf
        for tensor, end in ((out, ends[0][-1]), (grads.query, ends[0][-1]), (grads.key, ends[1][-1]), (grads.value, ends[1][-1])):
            tensor[end:] = 0
    return Call(inputs, grad_out, out, lse, grads, torch.full_like(lse, torch.nan))


# ---------------------------------------------------------------- running
def execute(case: Case, gpu: str, altered: dict[str, float] | None = None) -> tuple[Problem, Call]:
    """Compile the kernels of a case for a GPU and run them in order on the emulator; `altered` replaces scalar arguments."""
    from portable_flash.backends.triton.compile import compile_problem

    device, problem = named(gpu), case.problem()
    call = draw(case, problem)
    names = KERNELS if case.grad else KERNELS[:1]
    kernels = compile_problem(problem, device, {name: KernelPlan(getattr(case, name), "test") for name in names})
    inputs, grads = call.inputs, call.grads
    tensors = {
        "Q": inputs.query, "K": inputs.key, "V": inputs.value, "O": call.out, "LSE": call.lse, "DO": call.grad_out, "DELTA": call.delta,
        "DQ": grads.query, "DK": grads.key, "DV": grads.value, "DBIAS": grads.bias, "BIAS": inputs.bias, "MASK": inputs.mask,
        "ALIBI": inputs.alibi_slopes, "SINKS": inputs.sinks, "CU_SEQLENS_Q": inputs.cu_seqlens_q, "CU_SEQLENS_K": inputs.cu_seqlens_k,
    }  # fmt: skip
    scalars = {"scale": inputs.scale, "softcap": inputs.softcap, **(altered or {})}  # the others are the problem's sizes
    arrays = {name: t.view(_NUMPY[t.dtype]).numpy() for name, t in tensors.items() if t is not None}
    for name, kernel in kernels.items():
        metadata = kernel.binary.metadata
        arguments = []
        for argument, kind, value in kernel.arguments:
            arguments.append(arrays[argument] if kind.startswith("*") else (_SCALARS[kind], scalars.get(argument, value)))
        block = (metadata.num_warps * metadata.warp_size, 1, 1)
        stats = run_code_object(
            kernel.binary.asm["hsaco"], metadata.name, kernel.launch.grid, block, arguments, device.arch, lds_bytes=metadata.shared,
            poison=0x7FC0DEAD,  # a NaN in float32 and in bfloat16 where nothing was written yet
        )  # fmt: skip
        assert not stats.warnings, (name, stats.warnings)  # writes outside an array, LDS accesses outside what was allocated
        call.ran.append(f"{name}: {stats.instructions} instructions, {stats.waves} waves, {stats.seconds + stats.compile_seconds:.1f} s")
    if not case.grad:
        call.grads = Gradients()
    elif case.bias:
        grads.bias = grads.bias.to(case.dtype)
    return problem, call


def verdicts(problem: Problem, call: Call):
    return compare_call(call.inputs, problem, call.out, call.lse, call.grads, call.grad_out)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gpu", GPUS)
def test_machine_code_agrees_with_the_oracle(gpu, name):
    problem, call = execute(CASES[name], gpu)
    results = verdicts(problem, call)
    print("\n".join(["", *call.ran, *map(str, results)]))
    assert len(results) == 5 + problem.bias
    assert all(v.ok for v in results), "\n".join(map(str, results))


@pytest.mark.parametrize("altered", [{"window_right": 1}, {"scale": 0.17}, {"seqlen_k": 70}], ids=lambda a: "".join(a))
def test_a_wrong_argument_is_noticed(altered):
    """A negative control: one key too many, a scale 4% off (of 32 ** -0.5), a key too few."""
    case = CASES["bf16 causal odd"]
    problem, call = execute(case, "mi300x", altered)
    assert not all(v.ok for v in verdicts(problem, call))
