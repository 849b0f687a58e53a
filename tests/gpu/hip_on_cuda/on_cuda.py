"""Execute the HIP backend's launches on an NVIDIA GPU: the same source through NVRTC, the same arguments through the driver."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import torch
from calls import Call, uninitialised_memory_is_nan

from portable_flash import backends
from portable_flash.backends import Gradients, KernelPlan, Needs, Plan
from portable_flash.backends.hip import host
from portable_flash.backends.hip.specialise import Kernel
from portable_flash.device import Device, named
from portable_flash.tiling import KERNELS, Tiling
from portable_flash.tuning import lookup

HERE = Path(__file__).parent
SOURCES = Path(backends.__file__).parent / "hip" / "kernels"
MAX_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BUFFER_POINTER, BUFFER_SIZE, END = ctypes.c_void_p(1), ctypes.c_void_p(2), ctypes.c_void_p(0)  # CU_LAUNCH_PARAM_*


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The one that comes with torch, or the system's."""
    found = sorted(Path(torch.__file__).parents[1].glob("nvidia/**/lib/libnvrtc.so*"))
    return ctypes.CDLL(str(found[0]) if found else "libnvrtc.so")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _done(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call}: status {status}")


@functools.cache
def cubin(kernel: Kernel, arch: str, extra: tuple[str, ...] = ()) -> bytes:
    """Machine code of a kernel for an NVIDIA arch ("sm_90")."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    source = (SOURCES / f"{kernel.name}.hip").read_bytes()
    _done("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{kernel.name}.hip".encode(), 0, None, None))
    options = [f"-I{SOURCES}", f"-I{HERE}", f"--gpu-architecture={arch}", "-std=c++17", "--fmad=false", "-lineinfo", *extra]
    options += [f"-D{name}={value}" for name, value in kernel.macros]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
    if status:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{kernel}: {log.value.decode()}")
    _done("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _done("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def compile_ahead(calls: list[tuple[Call, str]]) -> None:
    """Most of the kernels of these calls and layers, on all cores: one after another they take minutes."""
    kernels = {}
    for call, layer in calls:
        plan = plan_of(call, named(STANDS_FOR[layer]))
        layout = call.case.layout
        kernels |= dict.fromkeys(host.kernels_of(call.problem, plan.device, plan.kernels, layout).values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(functools.partial(cubin, arch=arch(), extra=()), kernels))


@functools.cache
def _function(kernel: Kernel, extra: tuple[str, ...]) -> ctypes.c_void_p:
    torch.cuda.synchronize()  # torch's context exists and is current
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = cubin(kernel, arch=arch(), extra=extra)
    _done("cuModuleLoadData", _driver().cuModuleLoadData(ctypes.byref(module), code))
    _done("cuModuleGetFunction", _driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()))
    _done("cuFuncSetAttribute", _driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_MEMORY, kernel.lds_bytes))
    return function


def launch(one: host.Launch, plan: Plan, extra: tuple[str, ...] = ()) -> None:
    """What `host.forward` and `host.backward` take as their executor."""
    if one.programs == 0:
        return
    arguments = one.arguments()
    buffer, size = ctypes.create_string_buffer(arguments, len(arguments)), ctypes.c_size_t(len(arguments))
    pointer = lambda x: ctypes.cast(ctypes.byref(x), ctypes.c_void_p)
    block = (ctypes.c_void_p * 5)(BUFFER_POINTER, pointer(buffer), BUFFER_SIZE, pointer(size), END)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    function = _function(one.kernel, extra)
    grid = (one.programs, 1, 1, one.kernel.threads, 1, 1)
    _done("cuLaunchKernel", _driver().cuLaunchKernel(function, *grid, one.kernel.lds_bytes, stream, None, block))


# One GPU model of each layer that has waves of 32.
STANDS_FOR = {"fma": "rx6900xt", "wmma11": "rx7900xtx", "wmma12": "rx9070xt"}


def plan_of(call: Call, device: Device, tilings: dict[str, Tiling] | None = None) -> Plan:
    from portable_flash.backends import hip

    chosen = {name: lookup(name, call.problem, device, hip.space(name), "hip") for name in KERNELS}
    chosen |= {name: KernelPlan(tiling, "test") for name, tiling in (tilings or {}).items()}
    return Plan(call.problem, device, "hip", MappingProxyType(chosen))


def run(call: Call, layer: str, tilings: dict[str, Tiling] | None = None, extra: tuple[str, ...] = ()):
    """Output, lse and all gradients of a call on the current NVIDIA GPU, as the kernels of `layer` compute them."""
    plan, inputs = plan_of(call, named(STANDS_FOR[layer]), tilings), call.inputs()
    needs = Needs(bias=call.bias is not None, sinks=call.sinks is not None)
    execute = functools.partial(launch, extra=extra)
    with uninitialised_memory_is_nan():
        out, lse = host.forward(inputs, plan, execute=execute)
        grads: Gradients = host.backward(inputs, plan, out, lse, call.grad_out, call.grad_lse, needs, execute=execute)
    torch.cuda.synchronize()
    return out, lse, grads


if __name__ == "__main__":  # for compute-sanitizer: one call after another, no test runner in between
    import sys

    from test_gpu_hip_source import SANITIZED

    for name in sys.argv[1:] or SANITIZED:
        call, layer = SANITIZED[name].draw("cuda"), name.split()[0]
        extra = ("-DPF_WITHOUT_BARRIERS",) if os.environ.get("WITHOUT_BARRIERS") else ()
        result = run(call, layer, extra=extra)
        if not extra:
            call.judge(*result)
        print(name, "agrees with the oracle", flush=True)
