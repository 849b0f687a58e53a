"""Every HIP kernel, in the tilings that ship, compiled for every kind of AMD GPU without one: what the machine code takes and holds.

Spills, LDS, registers and instructions are read from the compiled code. Run with -s for a line a kernel; each test leaves its rows
in resources.json in its temporary folder, and `python tests/hip_resources.py --out FOLDER` makes the whole table.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import hip_resources
import pytest
from hip_resources import COVERED, PROBLEMS, gpu
from tools import require

from portable_flash.backends.hip.specialise import ARCHES

# Scalar registers (predicates, addresses) that a kernel may keep in lanes of a vector register, which costs no memory traffic. With
# everything on (a mask, a bias, a window), most with waves of 64, whose predicates are pairs of them; the bias gradient keeps one for
# each score of a lane.
SCALARS_IN_LANES = {"backward_dbias": 128}
FEW_SCALARS = 48

MATRIX = {  # by arch, or by the layer that multiplies; None: arithmetic only
    ("gfx908", "bf16"): r"v_mfma_f32_16x16x8_?bf16",
    ("gfx950", "bf16"): r"v_mfma_f32_16x16x32_bf16",
    ("gfx950", "fp16"): r"v_mfma_f32_16x16x32_f16",
    ("mfma", "bf16"): r"v_mfma_f32_16x16x16_?bf16(_1k)?",
    ("mfma", "fp16"): r"v_mfma_f32_16x16x16_?f16",
    ("mfma", "fp32"): r"v_mfma_f32_16x16x4_?f32",
    ("wmma11", "bf16"): r"v_wmma_f32_16x16x16_bf16",
    ("wmma11", "fp16"): r"v_wmma_f32_16x16x16_f16",
    ("wmma12", "bf16"): r"v_wmma_f32_16x16x16_bf16",
    ("wmma12", "fp16"): r"v_wmma_f32_16x16x16_f16",
    ("fma", "fp16"): r"v_dot2c?_f32_f16",
}


def matrix_instruction(arch: str, dtype: str) -> str | None:
    return MATRIX.get((arch, dtype)) or MATRIX.get((ARCHES[arch].matrix, dtype))


@pytest.mark.parametrize(("arch", "name"), COVERED)
def test_shipped_tilings_fit_in_registers_and_use_the_matrix_units(arch, name, tmp_path):
    require("clang++-22")
    require("llvm-mca-22")
    problem, device = PROBLEMS[name], gpu(arch)
    kernels = hip_resources.kernels(problem, arch)
    rows = {launch: hip_resources.resources(kernel) for launch, kernel in kernels.items()}
    (tmp_path / "resources.json").write_text(json.dumps({launch: asdict(row) for launch, row in rows.items()}, indent=1))
    expected = {"forward"}
    if problem.needs_grad:
        split = rows.keys() & {"backward_dk", "backward_dv"}
        expected |= {"backward_delta", "backward_dq"} | (split and {"backward_dk", "backward_dv"} or {"backward_dkv"})
    if problem.bias:
        expected.add("backward_dbias")
    assert rows.keys() == expected
    instruction, complaints = matrix_instruction(arch, problem.dtype_name), []
    for launch, row in rows.items():
        print(f"\n{arch} {name}: {launch} {row}", end="")
        if row.spilled or row.scalar_spills > SCALARS_IN_LANES.get(row.kernel, FEW_SCALARS):
            complaints.append(f"{launch}: {row.spilled} bytes and {row.scalar_spills} scalar registers spilled, {row.registers} registers")
        if row.registers > device.registers_per_thread:
            complaints.append(f"{launch}: {row.registers} registers, a lane has {device.registers_per_thread}")
        if not row.lds_bytes == kernels[launch].lds_bytes <= device.shared_memory_bytes:
            complaints.append(f"{launch}: {row.lds_bytes} bytes of LDS, planned {kernels[launch].lds_bytes}, there are {device.shared_memory_bytes}")
        if not row.wide_loads:
            complaints.append(f"{launch}: no 16-byte loads")
        if instruction and launch != "backward_delta" and not any(re.fullmatch(instruction, name) for name in row.matrix):
            complaints.append(f"{launch}: no {instruction}, but {row.matrix}")
    assert not complaints, "\n".join(complaints)


def test_the_matrix_unit_is_busy_for_half_of_the_main_loop():
    """The aim for the forward pass on CDNA 3, by llvm-mca's model of one wave alone."""
    require("clang++-22")
    require("llvm-mca-22")
    kernel = hip_resources.kernels(PROBLEMS["bf16 128 causal"], "gfx942")["forward"]
    assert hip_resources.resources(kernel).busy >= 0.5


def test_a_spill_is_noticed():
    """A negative control: a tiling that no register file holds."""
    from portable_flash.backends import KernelPlan
    from portable_flash.backends.hip import host
    from portable_flash.tiling import Tiling

    require("clang++-22")
    tiling = KernelPlan(Tiling(64, 64, 1), "test")
    kernel = host.kernels_of(PROBLEMS["bf16 128 causal"], gpu("gfx1201"), {"forward": tiling})["forward"]
    assert hip_resources.resources(kernel).spilled > 0
