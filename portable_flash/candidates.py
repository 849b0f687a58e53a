"""The tilings that the rule below the tuning database chooses from, by backend and kind of matrix unit.

Best first; the first that fits with room to spare is taken. Where operands of matrix instructions come from registers, each
width of a row has a list of its own; "masked" are calls with a mask or a bias, whose scores also need addresses and predicates.
"""

from __future__ import annotations

from .device import Device
from .problem import Problem
from .tiling import Tiling, padded_head_dim


def candidates(backend: str, kernel: str, problem: Problem, device: Device) -> tuple[tuple[Tiling, ...], float]:
    """The list for a kernel of a GPU backend, and the share of a thread's registers that the backend's count of them may reach."""
    if backend == "hip":
        return _HIP[_hip_kind(problem, device)][kernel], _HIP_ROOM
    kind = _triton_kind(problem, device)
    return _TRITON[kind][kernel], _TRITON_ROOM.get(kind, _TRITON_ROOM_DEFAULT)


def _width(problem: Problem) -> int:
    width = padded_head_dim(max(problem.head_dim, problem.head_dim_v))
    return 64 if width <= 64 else 128 if width <= 128 else 256


def _triton_kind(problem: Problem, device: Device) -> str:
    """Key of _TRITON: family of devices, then the width of a tile's row or what else decides how many registers are left."""
    if device.vendor == "amd":
        family = "cdna" if device.wave_size == 64 else "rdna4" if device.arch.startswith("gfx12") else "rdna3"
        if problem.dtype.itemsize > 2:
            return f"{family.rstrip('34')} float32"
    elif problem.dtype.itemsize > 2:
        return "float32"
    elif device.arch == "sm_90":
        return "warpgroup pointers" if problem.varlen or problem.mask or problem.bias else "warpgroup"
    else:
        family = {"sm_80": "ampere", "sm_100": "blackwell", "sm_103": "blackwell"}.get(device.arch, "consumer")
    if problem.mask or problem.bias or (family == "blackwell" and problem.varlen):
        return f"{family} masked"
    return f"{family} {_width(problem)}"


def _hip_kind(problem: Problem, device: Device) -> str:
    """Key of _HIP: what multiplies, then the width of a tile's row or what else decides."""
    plain = f"fma wave{device.wave_size}"
    family = "mfma" if device.is_cdna else {"gfx11": "wmma11", "gfx12": "wmma12"}.get(device.arch[:5], plain)
    if problem.dtype.itemsize > 2:
        return f"{'mfma' if device.is_cdna else plain} float32"
    return f"{family} masked" if problem.mask or problem.bias else f"{family} {_width(problem)}"


_TRITON: dict[str, dict[str, tuple[Tiling, ...]]] = {
    "warpgroup": {  # sm_90: operands come from shared memory
        "forward": (Tiling(64, 64, 4, 3, tma=True), Tiling(128, 64, 8, 2, tma=True), Tiling(64, 32, 4, 2, tma=True)),
        "backward_dkv": (Tiling(64, 64, 4, 2, tma=True), Tiling(32, 128, 8, 2, split_dkv=True, tma=True), Tiling(32, 64, 8, 2)),
        "backward_dq": (Tiling(64, 64, 4, 2, tma=True), Tiling(128, 32, 8, 3, tma=True), Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 1)),
    },
    "warpgroup pointers": {  # the same where descriptors cannot be used: addresses take registers
        "forward": (Tiling(64, 64, 4, 3), Tiling(128, 32, 8, 3), Tiling(64, 32, 4, 2)),
        "backward_dkv": (Tiling(32, 64, 4, 3), Tiling(32, 64, 4, 2, split_dkv=True), Tiling(32, 64, 8, 2)),
        "backward_dq": (Tiling(64, 64, 4, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 1)),
    },
    "float32": {  # NVIDIA at full float32 precision: no matrix unit, so that blocks and code a thread stay small
        "forward": (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1)),
        "backward_dkv": (Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1)),
        "backward_dq": (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1)),
    },
    "blackwell 64": {  # sm_100: accumulators in tensor memory, which tiles of 128 rows fill
        "forward": (Tiling(128, 128, 8, 2, tma=True), Tiling(128, 64, 8, 2, tma=True)),
        "backward_dkv": (Tiling(64, 128, 8, 2, tma=True), Tiling(64, 64, 8, 2, split_dkv=True, tma=True)),
        "backward_dq": (Tiling(128, 64, 8, 2, tma=True), Tiling(64, 64, 4, 2, tma=True)),
    },
    "blackwell 128": {
        "forward": (Tiling(128, 128, 8, 2, tma=True), Tiling(128, 64, 8, 2, tma=True)),
        "backward_dkv": (Tiling(32, 64, 8, 2, tma=True), Tiling(32, 64, 8, 1, tma=True)),
        "backward_dq": (Tiling(128, 64, 8, 2, tma=True), Tiling(64, 64, 4, 2, tma=True)),
    },
    "blackwell 256": {
        "forward": (Tiling(128, 64, 8, 2, tma=True), Tiling(64, 64, 4, 2, tma=True)),
        "backward_dkv": (Tiling(32, 64, 8, 1, split_dkv=True, tma=True),),
        "backward_dq": (Tiling(128, 32, 8, 2, tma=True), Tiling(64, 32, 8, 2, tma=True)),
    },
    "blackwell masked": {  # packed calls too, which cannot use descriptors
        "forward": (Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 1), Tiling(32, 32, 8, 1)),
        "backward_dq": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
    },
    "ampere 64": {  # sm_80: 163 KB of shared memory, operands in registers
        "forward": (Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 2)),
        "backward_dkv": (Tiling(16, 64, 4, 2), Tiling(16, 64, 4, 1)),
        "backward_dq": (Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    },
    "ampere 128": {
        "forward": (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 1)),
        "backward_dq": (Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2)),
    },
    "ampere 256": {
        "forward": (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 2, split_dkv=True), Tiling(32, 64, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
    },
    "ampere masked": {
        "forward": (Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(16, 64, 8, 1), Tiling(16, 32, 8, 1)),
        "backward_dq": (Tiling(64, 32, 8, 1), Tiling(32, 32, 8, 1)),
    },
    "consumer 64": {  # sm_75, sm_86, sm_89, sm_120: 64 to 99 KB of shared memory
        "forward": (Tiling(128, 64, 8, 2), Tiling(64, 64, 4, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 1), Tiling(16, 64, 4, 1)),
        "backward_dq": (Tiling(64, 64, 8, 2), Tiling(64, 32, 4, 2)),
    },
    "consumer 128": {
        "forward": (Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2)),
        "backward_dkv": (Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 1)),
        "backward_dq": (Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 1)),
    },
    "consumer 256": {
        "forward": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
        "backward_dkv": (Tiling(32, 64, 8, 1, split_dkv=True), Tiling(16, 64, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 8, 1), Tiling(64, 16, 8, 1)),
    },
    "consumer masked": {
        "forward": (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 1)),
        "backward_dkv": (Tiling(16, 64, 8, 1), Tiling(16, 32, 8, 1)),
        "backward_dq": (Tiling(32, 32, 8, 1), Tiling(32, 16, 8, 1)),
    },
    "cdna 64": {  # wave64, 64 or 160 KB of LDS, 512 registers; at most 256 leave room for two waves a SIMD, which hide loads
        "forward": (Tiling(128, 64, 4, 1, waves_per_eu=2), Tiling(64, 32, 4, 1, waves_per_eu=2)),
        "backward_dkv": (Tiling(32, 128, 4, 1), Tiling(32, 64, 4, 1)),
        "backward_dq": (Tiling(128, 64, 4, 1), Tiling(64, 32, 4, 1)),
    },
    "cdna 128": {
        "forward": (Tiling(128, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16), Tiling(64, 32, 4, 1, waves_per_eu=2)),
        "backward_dkv": (Tiling(32, 64, 4, 1, matrix_instr_nonkdim=16), Tiling(16, 64, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dq": (Tiling(128, 32, 4, 1), Tiling(64, 32, 4, 1, matrix_instr_nonkdim=16)),
    },
    "cdna 256": {
        "forward": (Tiling(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16), Tiling(32, 32, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dkv": (Tiling(32, 64, 4, 1, matrix_instr_nonkdim=16), Tiling(16, 64, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dq": (Tiling(64, 32, 4, 1, matrix_instr_nonkdim=16), Tiling(32, 32, 4, 1, matrix_instr_nonkdim=16)),
    },
    "cdna masked": {  # the predicate of a score is a pair of scalar registers, of which a wave has a hundred
        "forward": (Tiling(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16), Tiling(32, 32, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dkv": (Tiling(16, 64, 4, 1, matrix_instr_nonkdim=16), Tiling(16, 32, 4, 1, matrix_instr_nonkdim=16)),
        "backward_dq": (Tiling(64, 16, 4, 1, matrix_instr_nonkdim=16), Tiling(32, 16, 4, 1, matrix_instr_nonkdim=16)),
    },
    "rdna4 64": {  # gfx12: wave32, 64 KB of LDS, 256 registers
        "forward": (Tiling(64, 64, 4, 1), Tiling(64, 32, 4, 1)),
        "backward_dkv": (Tiling(32, 64, 4, 1), Tiling(16, 64, 4, 1)),
        "backward_dq": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
    },
    "rdna4 128": {
        "forward": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 64, 4, 1, split_dkv=True), Tiling(16, 32, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
    },
    "rdna4 256": {
        "forward": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 8, 1, split_dkv=True), Tiling(16, 16, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(16, 16, 4, 1),),
    },
    "rdna4 masked": {
        "forward": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 4, 1, split_dkv=True), Tiling(16, 16, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
    },
    "rdna3 64": {  # gfx11: the same, but both halves of a wave hold a copy of the operands of a matrix instruction
        "forward": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 64, 4, 1, split_dkv=True), Tiling(16, 32, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 4, 1), Tiling(64, 16, 4, 1)),
    },
    "rdna3 128": {
        "forward": (Tiling(64, 16, 4, 1), Tiling(32, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 64, 4, 1, split_dkv=True), Tiling(16, 32, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
    "rdna3 256": {
        "forward": (Tiling(32, 16, 8, 1), Tiling(16, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 8, 1, split_dkv=True), Tiling(16, 16, 8, 1, split_dkv=True)),
        "backward_dq": (Tiling(16, 16, 8, 1),),
    },
    "rdna3 masked": {
        "forward": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 32, 4, 1, split_dkv=True), Tiling(16, 16, 4, 1, split_dkv=True)),
        "backward_dq": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
    "rdna float32": {  # no matrix instruction: a thread holds whole rows of its operands
        "forward": (Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
        "backward_dkv": (Tiling(16, 16, 8, 1),),
        "backward_dq": (Tiling(16, 16, 8, 1),),
    },
    "cdna float32": {  # matrix instructions as for 16 bits, with operands of twice the size
        "forward": (Tiling(64, 32, 4, 1, waves_per_eu=2), Tiling(32, 16, 4, 1, waves_per_eu=2)),
        "backward_dkv": (Tiling(32, 64, 4, 1), Tiling(16, 32, 4, 1), Tiling(16, 16, 4, 1)),
        "backward_dq": (Tiling(64, 32, 4, 1), Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
}
# share of the registers that accumulators may take; the rest holds operands and addresses
_TRITON_ROOM = {"warpgroup": 0.8, "warpgroup pointers": 0.8}
_TRITON_ROOM_DEFAULT = 0.65

# HIP kernels cut the block that stays into equal slices, one a wave, of whole tiles of 16 (or 32) rows: num_warps is at most
# its rows over 16. Two tiles a wave halve what is read of the streamed block from LDS; more take too many registers.
_HIP: dict[str, dict[str, tuple[Tiling, ...]]] = {
    "mfma 64": {  # CDNA: wave64, 512 registers; at most 256 leave room for two waves a SIMD
        "forward": (Tiling(128, 64, 4), Tiling(64, 64, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(64, 128, 4), Tiling(32, 128, 4), Tiling(32, 64, 4)),
        "backward_dq": (Tiling(128, 64, 4), Tiling(64, 64, 4), Tiling(64, 32, 4)),
    },
    "mfma 128": {
        "forward": (Tiling(128, 64, 4), Tiling(64, 64, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(32, 128, 4), Tiling(32, 64, 4)),
        "backward_dq": (Tiling(128, 32, 4), Tiling(64, 32, 4)),
    },
    "mfma 256": {
        "forward": (Tiling(128, 32, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(32, 64, 4), Tiling(32, 32, 2)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(32, 32, 2)),
    },
    "mfma masked": {  # the predicate of a score is a pair of scalar registers, of which a wave has a hundred
        "forward": (Tiling(64, 64, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(32, 64, 4), Tiling(32, 32, 2)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(32, 32, 2)),
    },
    "mfma float32": {
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(32, 64, 4), Tiling(16, 64, 4), Tiling(16, 32, 2)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "wmma12 64": {  # RDNA 4: wave32, 64 KB of LDS, 256 registers
        "forward": (Tiling(128, 32, 4), Tiling(64, 64, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(32, 64, 4), Tiling(16, 64, 4)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
    },
    "wmma12 128": {
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "wmma12 256": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "wmma12 masked": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "wmma11 64": {  # RDNA 3: the same, but both halves of a wave hold a copy of the operands of a matrix instruction
        "forward": (Tiling(64, 64, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
    },
    "wmma11 128": {
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "wmma11 256": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "wmma11 masked": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "fma wave32 64": {  # RDNA 1 and 2: no matrix instruction, half of a wave's lanes hold the same operand
        "forward": (Tiling(64, 64, 4), Tiling(64, 32, 4)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
    },
    "fma wave32 128": {
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "fma wave32 256": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "fma wave32 masked": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "fma wave32 float32": {  # all RDNA: no matrix instruction takes float32
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 32, 2), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "fma wave64 64": {  # gfx906: a quarter of a wave's lanes, 256 registers
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
        "backward_dkv": (Tiling(32, 64, 4), Tiling(16, 64, 4)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
    },
    "fma wave64 128": {
        "forward": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True)),
        "backward_dq": (Tiling(64, 32, 4), Tiling(64, 16, 4)),
    },
    "fma wave64 256": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 32, 2), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(32, 16, 2),),
    },
    "fma wave64 masked": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 64, 4, split_dkv=True), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
    "fma wave64 float32": {
        "forward": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
        "backward_dkv": (Tiling(16, 64, 4), Tiling(16, 32, 2), Tiling(16, 32, 2, split_dkv=True)),
        "backward_dq": (Tiling(64, 16, 4), Tiling(32, 16, 2)),
    },
}
_HIP_ROOM = 0.86  # of all registers: the backend's estimate counts operands and addresses too
