"""Every Triton kernel, in the tilings that ship, compiled for every kind of GPU without one: what the machine code takes and holds.

Spills, shared memory, matrix instructions and 16-byte loads are read from the compiled code. Run with -s for a table of
registers and shared memory by kernel; each test leaves its rows in resources.json in its temporary folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from portable_flash.device import Device, named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS
from portable_flash.tune.compiling import nvidia_usage
from portable_flash.tuning import lookup

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def call(
    dtype: torch.dtype, head_dim: int, head_dim_v: int | None = None, heads_k: int = 16, seqlen: int = 2048, **options: Any
) -> Problem:
    return Problem(dtype, 2, 16, heads_k, seqlen, seqlen, head_dim, head_dim_v or head_dim, **options)


PACKED = {"varlen": True, "total_q": 4000, "total_k": 4000}
EVERYTHING = {"window_left": 512, "window_right": 0, "softcap": True, "sinks": True, "alibi": True, "mask": True, "bias": True}
PROBLEMS = {
    "bf16 64": call(BF16, 64),
    "bf16 128 causal": call(BF16, 128, window_right=0),
    "bf16 256 causal": call(BF16, 256, window_right=0),
    "fp16 64 causal": call(FP16, 64, window_right=0),
    "fp16 128": call(FP16, 128, heads_k=4),
    "fp16 256": call(FP16, 256),
    "bf16 192/128 causal": call(BF16, 192, 128, window_right=0),
    "bf16 80 window softcap sinks, odd length": call(
        BF16, 80, heads_k=4, seqlen=2001, window_left=512, window_right=0, softcap=True, sinks=True
    ),
    "bf16 128 causal packed": call(BF16, 128, heads_k=4, window_right=0, **PACKED),
    "bf16 64 everything": call(BF16, 64, **EVERYTHING),
    "fp16 128 everything packed": call(FP16, 128, heads_k=4, **EVERYTHING, **PACKED),
    "fp32 64 causal": call(FP32, 64, window_right=0),
    "bf16 128 one query": Problem(BF16, 2, 16, 4, 1, 4096, 128, 128, window_right=0, needs_grad=False),
}
DEVICES = ("a100", "h100", "h200", "b200", "rtx5090", "mi210", "mi300x", "mi355x", "rx7900xtx", "strix-halo", "rx9070xt")
FEW = ("bf16 128 causal", "bf16 64 everything")  # enough for a device whose code is that of a device before it, or nearly
ONCE_A_FAMILY = ("fp16 64 causal", "fp16 256")  # differ little from bf16


def covered(device: str, problem: str) -> bool:
    if device in ("h100", "mi210", "strix-halo"):
        return problem in FEW
    return problem not in ONCE_A_FAMILY or device in ("a100", "h200", "mi300x", "rx7900xtx", "rx9070xt")


COVERED = [(device, problem) for device in DEVICES for problem in PROBLEMS if covered(device, problem)]

# What may spill, and why: (arch, kernels, problems, bytes a thread at most). Everything else must not.
SPILLS = (
    # Both halves of an RDNA 3 wave hold a copy of A and of B: 16 rows of K and of V of 128 columns take 128 of 256 registers, those of
    # 256 columns all of them. Smaller tiles do not help (16 rows are the least), and more waves would compute the same scores again.
    ("gfx11", ("backward_dk", "backward_dq", "backward_dbias"), ("128", "192", "256", " 80 "), 600),
    # 16 rows for 8 warps: the compiler settles for 64 registers.
    ("sm_100", ("forward",), ("one query",), 8),
    # Tilings timed on an H200 for plain calls; with masks, packing or softcap they were only compiled and checked, not timed.
    ("sm_90", ("forward", "backward_dkv", "backward_dq", "backward_dbias"), ("everything", "window"), 400),
    # The fastest on an H200 of all that fit, timed with Triton 3.6 (benchmarks/results/h200_tune.json).
    ("sm_90", ("backward_dk",), ("bf16 256 causal", "fp16 256"), 16),
    # At 256 columns dQ's own accumulator, both operands and dS leave nothing.
    ("gfx12", ("backward_dk", "backward_dq"), ("fp16 256",), 160),
)
# Scalar registers (predicates, addresses) that an AMD kernel may keep in lanes of a vector register, which costs no memory traffic.
SCALARS_IN_LANES = 16

TENSOR_MEMORY_COLUMNS = 512  # sm_100: of 128 rows of 32 bits, which accumulators are kept in

MATRIX = {  # what multiplies 16-bit tiles
    "sm_80": r"\bmma\.sync",
    "sm_90": r"\bwgmma\.mma_async",
    "sm_100": r"\btcgen05\.mma|\bmma\.sync",  # tiles of fewer than 64 rows take mma.sync
    "sm_120": r"\bmma\.sync",
    "cdna": r"\bv_mfma_f32_\d+x\d+x\d+_?(bf16|f16)",
    "rdna": r"\bv_wmma_f32_16x16x16_(bf16|f16)",
}
WIDE_LOADS = {
    "nvidia": r"\bld\.global\S*\.v4\.b32|\bcp\.async\.c[ag]\.shared\.global \[[^]]*\], *\[[^]]*\], *(16|0x10)\b|\bcp\.async\.bulk\.tensor",
    "amd": r"\b(global|buffer)_load_(dwordx4|b128)",
}


# ---------------------------------------------------------------- compiling, in a process of its own
@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton's decorators make kernels to compile, whatever TRITON_INTERPRET said when this one imported triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(os.getpid).result()  # started, and so with this environment
            yield pool


def compiled(device: Device, problem: Problem) -> dict[str, dict[str, Any]]:
    """What the machine code of each kernel of a problem takes and holds."""
    from portable_flash.backends.triton.compile import compile_problem

    kernels = {name: lookup(name, problem, device) for name in (KERNELS if problem.needs_grad else KERNELS[:1])}
    rows = {}
    for name, kernel in compile_problem(problem, device, kernels).items():
        tiling = kernels.get(
            "backward_dkv" if name in ("backward_dk", "backward_dv") else "backward_dq" if name == "backward_dbias" else name
        )
        asm = kernel.binary.asm
        used = nvidia_resources(asm["cubin"]) if device.vendor == "nvidia" else amd_resources(asm["amdgcn"])
        text = asm["ptx"] if device.vendor == "nvidia" else asm["amdgcn"]
        family = device.arch if device.vendor == "nvidia" else "cdna" if device.is_cdna else "rdna"
        rows[name] = {
            "tiling": str(tiling.tiling) if tiling else "", "source": tiling.source if tiling else "",
            "shared": kernel.binary.metadata.shared,
            "tensor_memory": getattr(kernel.binary.metadata, "tmem_size", None) or 0, **used,
            "matrix": sorted({m.group(0) for m in re.finditer(MATRIX[family], text)}),
            "wide_loads": len(re.findall(WIDE_LOADS[device.vendor], text)),
        }  # fmt: skip
    return rows


def nvidia_resources(cubin: bytes) -> dict[str, int]:
    registers, spilled = nvidia_usage(cubin)
    return {"registers": registers, "spilled": spilled, "scalar_spills": 0}


def amd_resources(amdgcn: str) -> dict[str, int]:
    """Registers a lane (accumulation registers included), scalar ones a wave, bytes of scratch a lane, scalar registers spilled."""
    field = lambda name: int(re.search(rf"^\s+\.{name}:\s+(\d+)", amdgcn, re.MULTILINE).group(1))
    scratch = max(field("private_segment_fixed_size"), 4 * field("vgpr_spill_count"))
    return {
        "registers": field("vgpr_count"), "scalar_registers": field("sgpr_count"),
        "spilled": scratch, "scalar_spills": field("sgpr_spill_count"),
    }  # fmt: skip


def allowed_spills(arch: str, kernel: str, name: str) -> int:
    """Bytes a thread that may spill in a kernel of the problem of this name."""
    found = [
        most for start, kernels, names, most in SPILLS if arch.startswith(start) and kernel in kernels and any(n in name for n in names)
    ]
    return max(found, default=0)


# ---------------------------------------------------------------- tests
@pytest.mark.parametrize(("slug", "name"), COVERED)
def test_shipped_tilings_fit_in_registers_and_use_the_matrix_units(slug, name, compiler, tmp_path):
    device, problem = named(slug), PROBLEMS[name]
    rows = compiler.submit(compiled, device, problem).result()
    (tmp_path / "resources.json").write_text(json.dumps(rows, indent=1))
    for kernel, row in rows.items():
        print(f"\n{slug} {name}: {kernel} {row}", end="")
    expected = {"forward"}
    if problem.needs_grad:
        split = rows.keys() & {"backward_dk", "backward_dv"}
        expected |= {"backward_delta", "backward_dq"} | (split and {"backward_dk", "backward_dv"} or {"backward_dkv"})
    if problem.bias:
        expected.add("backward_dbias")
    assert rows.keys() == expected
    complaints = []
    for kernel, row in rows.items():
        if row["spilled"] > allowed_spills(device.arch, kernel, name) or row["scalar_spills"] > SCALARS_IN_LANES:
            spilled = f"{row['spilled']} bytes and {row['scalar_spills']} scalar registers spilled"
            complaints.append(f"{kernel}: {spilled}, {row['registers']} registers, {row['tiling']}")
        if row["shared"] > device.shared_memory_bytes:
            complaints.append(f"{kernel}: {row['shared']} bytes of shared memory, there are {device.shared_memory_bytes}; {row['tiling']}")
        if row["tensor_memory"] > TENSOR_MEMORY_COLUMNS:
            complaints.append(f"{kernel}: {row['tensor_memory']} columns of tensor memory; {row['tiling']}")
        if not row["wide_loads"]:
            complaints.append(f"{kernel}: no 16-byte loads")
        if not row["matrix"] and kernel != "backward_delta" and problem.dtype != FP32:
            complaints.append(f"{kernel}: no matrix instructions")
    assert not complaints, "\n".join(complaints)


def test_kernels_are_hashed_before_the_first_of_them_is_used():
    """Triton up to 3.7 hashes a kernel as the order of first uses has it: a process with another order finds nothing in the cache."""
    script = (
        "import json\n"
        "from portable_flash.backends.triton import backward_kernels, forward_kernels, host\n"
        "names = {n: k for m in (backward_kernels, forward_kernels) for n, k in vars(m).items() if n.endswith('_kernel')}\n"
        "print(json.dumps({n: k.hash for n, k in names.items()}))"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    hashes = json.loads(done.stdout)
    assert len(hashes) >= 5 and all(hashes.values()) and len(set(hashes.values())) == len(hashes), hashes
