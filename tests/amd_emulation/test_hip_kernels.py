"""The HIP kernels as clang's AMD machine code, run instruction by instruction on a CPU and judged against the float64 oracle.

Every launch is the one that the HIP backend would make, in the tilings that the tuning ladder gives it or in those of the case.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from calls import Call, Case, uninitialised_memory_is_nan

REPO = os.environ.get("TINYGRAD_REPO")
if not REPO or not (Path(REPO) / "test" / "mockgpu" / "amd" / "emu.py").is_file():
    pytest.skip("TINYGRAD_REPO does not name a checkout of github.com/tinygrad/tinygrad", allow_module_level=True)

from emu import run_code_object  # noqa: E402  (beside this file; imports the checkout when it is first used)

from portable_flash.backends import KernelPlan, Needs, Plan  # noqa: E402
from portable_flash.backends import hip  # noqa: E402
from portable_flash.backends.hip import arguments, compiler, host  # noqa: E402
from portable_flash.device import named  # noqa: E402
from portable_flash.tiling import KERNELS, Tiling  # noqa: E402
from portable_flash.tuning import lookup  # noqa: E402

GPUS = ("mi300x", "mi355x", "rx7900xtx", "rx9070xt")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = dict(batch=1, heads_k=1, group=1, seqlen_q=70, seqlen_k=75)
EACH = lambda tiling: dict.fromkeys(KERNELS, tiling)

CASES: dict[str, tuple[Case, dict[str, Tiling]]] = {
    "fp16": (Case(**SMALL, head_dim=64, dtype=FP16), {}),
    "bf16 causal, grouped": (Case(**dict(SMALL, group=2), head_dim=64, dtype=BF16, causal=True), {}),
    "bf16 128 causal": (Case(**dict(SMALL, seqlen_q=130, seqlen_k=131), head_dim=128, dtype=BF16, causal=True), {}),
    "fp16 256": (Case(**dict(SMALL, seqlen_q=33, seqlen_k=35), head_dim=256, dtype=FP16), {}),
    "bf16 window softcap, odd head_dims": (Case(**SMALL, head_dim=40, head_dim_v=24, dtype=BF16, window=(20, 3), softcap=2.0), {}),
    "fp16 sinks alibi, rows that see nothing": (
        Case(**dict(SMALL, seqlen_k=50), head_dim=32, dtype=FP16, causal=True, sinks=True, alibi="h"), {}
    ),
    "fp16 mask bias": (Case(**SMALL, head_dim=32, dtype=FP16, causal=True, mask="k", bias="qk"), {}),
    "bf16 bias of keys": (Case(**SMALL, head_dim=64, dtype=BF16, bias="k", bias_dtype=FP32), {}),
    "fp16 packed": (Case(lengths=((40, 40), (0, 3), (17, 52), (5, 0)), unused=5, heads_k=1, head_dim=32, dtype=FP16, causal=True), {}),
    "fp16 unaligned": (Case(**SMALL, head_dim=36, dtype=FP16, causal="top_left"), {}),
    "bf16 two stages": (Case(**SMALL, head_dim=64, dtype=BF16, causal=True), EACH(Tiling(64, 64, 2, 2))),
    "fp32 causal": (Case(**dict(SMALL, seqlen_q=40, seqlen_k=40), head_dim=32, dtype=FP32, causal=True), {}),
}
ON_CDNA = {"fp16 32x32": (Case(**SMALL, head_dim=64, dtype=FP16, causal=True), EACH(Tiling(64, 64, 2, 1, matrix_instr_nonkdim=32)))}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A view that numpy knows, of the whole storage: strides are the kernel's business."""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat.view({torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(tensor.dtype, tensor.dtype))


def emulate(launch: host.Launch, plan: Plan, alter=lambda call: call) -> None:
    """What the HIP backend takes as its executor."""
    if launch.programs == 0:
        return
    kernel = launch.kernel
    code = compiler.compile_kernel(kernel, "clang")
    tensors = {name: tensor for name, tensor in launch.tensors.items() if tensor is not None}
    assert all(tensor.storage_offset() == 0 for tensor in tensors.values())
    arrays = {name: numbers(tensor).numpy() for name, tensor in tensors.items()}
    call = arguments.Call.from_buffer_copy(bytes(launch.call))
    values = [arrays.get(name, (lambda _: bytes(8), None)) for name in arguments.POINTERS]
    stats = run_code_object(
        code, kernel.name, (launch.programs,), (kernel.threads,), [*values, (bytes, alter(call))], kernel.arch,
        poison=0x7FC0DEAD,  # a NaN in float32 and in bfloat16 where nothing was written yet
    )  # fmt: skip
    assert not stats.warnings, (kernel, stats.warnings)  # writes outside an array, LDS accesses outside what was allocated
    print(f"{kernel.name}: {stats.instructions} instructions, {stats.waves} waves, {stats.seconds:.1f} s")


def run(call: Call, tilings: dict[str, Tiling], gpu: str, execute=emulate):
    device = named(gpu)
    chosen = {name: lookup(name, call.problem, device, hip.space(name), "hip") for name in KERNELS}
    chosen |= {name: KernelPlan(tiling, "case") for name, tiling in tilings.items()}
    plan, inputs = Plan(call.problem, device, "hip", MappingProxyType(chosen)), call.inputs()
    needs = Needs(bias=call.bias is not None, sinks=call.sinks is not None)
    with uninitialised_memory_is_nan():
        out, lse = host.forward(inputs, plan, execute=execute)
        return out, lse, host.backward(inputs, plan, out, lse, call.grad_out, call.grad_lse, needs, execute=execute)


def check(call: Call, tilings: dict[str, Tiling], gpu: str) -> None:
    call.judge(*run(call, tilings, gpu))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gpu", GPUS)
def test_machine_code_agrees_with_the_oracle(gpu, name):
    if name == "bf16 two stages" and gpu == "rx7900xtx":
        tilings = EACH(Tiling(32, 32, 2, 2))
    else:
        tilings = CASES[name][1]
    check(CASES[name][0].draw(), tilings, gpu)


@pytest.mark.parametrize("name", ON_CDNA)
@pytest.mark.parametrize("gpu", GPUS[:2])
def test_matrix_instructions_of_32_rows(gpu, name):
    case, tilings = ON_CDNA[name]
    check(case.draw(), tilings, gpu)


def test_what_only_a_mask_hides_may_hold_nan():
    call = Case(**SMALL, head_dim=32, dtype=BF16, mask="qk").draw()
    call.mask[..., 30:34] = False
    call.mask[..., 7, :] = False
    check(call.poisoned(torch.nan), {}, "mi300x")


@pytest.mark.parametrize("altered", [dict(window_right=1), dict(scale=0.17), dict(seqlen_k=74)], ids=lambda a: "".join(a))
def test_a_wrong_argument_is_noticed(altered):
    """A negative control: one key too many, a scale 4% off (of 32 ** -0.5), a key too few."""

    def alter(call):
        for name, value in altered.items():
            setattr(call, name, value)
        return call

    call = Case(**SMALL, head_dim=32, dtype=FP16, causal=True).draw()
    result = run(call, {}, "mi300x", lambda *launch: emulate(*launch, alter))
    with pytest.raises(AssertionError):
        call.judge(*result)


def test_wrong_lanes_are_noticed():
    """A negative control: the accumulator's rows taken for others."""
    call = Case(**SMALL, head_dim=32, dtype=FP16).draw()
    good = compiler.source

    def broken(name):
        source = good(name)
        headers = tuple((h, t.replace("lane_group() * (IS_MFMA ? 4", "(lane_group() ^ 1) * (IS_MFMA ? 4")) for h, t in source.headers)
        assert headers != source.headers
        return replace(source, headers=headers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "source", broken)
        result = run(call, {}, "mi300x")
    with pytest.raises(AssertionError):
        call.judge(*result)
