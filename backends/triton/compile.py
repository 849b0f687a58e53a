"""Compile the kernels of a problem for a device that need not be there: for tests, offline tuning and shipping."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import Device
from ...problem import Problem
from .. import KernelPlan, Needs, Plan
from ..shared import dkv_passes, meta_call
from . import host
from .common import SIZES
from .launch import Launch

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code and how it was launched: asm by kind ("ptx", "cubin", "amdgcn", "hsaco"), metadata, Launch."""

    binary: triton.compiler.CompiledKernel
    launch: Launch
    arguments: tuple  # (name, type, value) of each run-time argument, in order; tensors are on the meta device


def target(device: Device) -> GPUTarget:
    if device.vendor == "nvidia":
        return GPUTarget("cuda", int(device.arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", device.arch, device.wave_size)


def compile_problem(problem: Problem, device: Device, kernels: dict[str, KernelPlan], layout: str = "bhsd") -> dict[str, Compiled]:
    """Compile forward, delta, dK/dV, dQ and, with a bias, dbias; `kernels` holds the tilings by name."""
    inputs, out, lse, grad_out = meta_call(problem, layout)
    plan = Plan(problem, device, "triton", MappingProxyType(dict(kernels)))
    bias, mask, alibi = host._extras(inputs)
    packed = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    tail = (bias, mask, alibi, *packed, inputs.scale, inputs.softcap)
    result = {}
    if "forward" in kernels:
        launch, tma = host.plan_forward(inputs, plan)
        operands = host._forward_descriptors(inputs, plan) if tma else (inputs.query, inputs.key, inputs.value)
        head = (bias, mask, alibi, inputs.sinks, *packed, inputs.scale, inputs.softcap)
        result["forward"] = compile_launch(launch, (*operands, out, lse, *head), device)
    if "backward_dkv" in kernels:
        launch, _ = host.plan_delta(inputs, plan, out, grad_out, None)
        result["backward_delta"] = compile_launch(launch, (out, grad_out, lse, None, lse), device)
        for dk, dv in dkv_passes(plan, Needs()):
            launch, tma = host.plan_dkv(inputs, plan, grad_out, dk, dv)
            q, do = host._dkv_descriptors(inputs, plan, grad_out) if tma else (inputs.query, grad_out)
            operands = (q, inputs.key, inputs.value, do, lse, lse, inputs.key if dk else None, inputs.value if dv else None)
            name = "backward_d" + "k" * dk + "v" * dv
            result[name] = compile_launch(launch, (*operands, *tail), device)
    if "backward_dq" in kernels:
        launch, tma = host.plan_dq(inputs, plan, grad_out)
        k, v = host._dq_descriptors(inputs, plan) if tma else (inputs.key, inputs.value)
        result["backward_dq"] = compile_launch(launch, (inputs.query, k, v, grad_out, lse, lse, inputs.query, *tail), device)
        if problem.bias:
            launch, _ = host.plan_dbias(inputs, plan, grad_out)
            operands = (inputs.query, inputs.key, inputs.value, grad_out, lse, lse, lse)
            result["backward_dbias"] = compile_launch(launch, (*operands, *tail), device)
    return result


def compile_launch(launch: Launch, tensors_and_scalars: tuple, device: Device) -> Compiled:
    """Compile one launch for a device; integers get the divisibility that Triton would see at run time."""
    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, (*tensors_and_scalars, *launch.integers)))
    signature, constexprs, attributes, arguments = {}, {}, {}, []
    for position, name in enumerate(kernel.arg_names):
        if name in launch.constexprs:
            signature[name], constexprs[(position,)] = "constexpr", launch.constexprs[name]
            continue
        value = values[name]
        kind = _type(value)
        if kind == "constexpr" or (type(value) is int and value == 1 and name not in SIZES):
            signature[name], constexprs[(position,)] = "constexpr", value
            continue
        signature[name] = kind
        arguments.append((name, kind, value))
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0 and name not in SIZES):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return Compiled(triton.compile(source, target=target(device), options=dict(launch.options)), launch, tuple(arguments))


def _type(value) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
