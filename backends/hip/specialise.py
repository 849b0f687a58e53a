"""Which variant of a kernel a call needs: macros, work-items and LDS, from a Problem, a Device, a Tiling and what the call has.

The block that stays (forward, dQ: block_m queries; dK/dV: block_n keys) is cut into num_warps equal slices, one a wave, each a
whole number of accumulator tiles of side x side high; the other block streams through LDS. `Cut` holds what follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...device import Device
from ...problem import Problem
from ...tiling import Tiling
from ..shared import DELTA_ROWS

DTYPES = {torch.float16: "Float16", torch.bfloat16: "BFloat16", torch.float32: "Float32"}
INDEX_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
MATRIX = {"fma": 0, "mfma": 1, "wmma11": 2, "wmma12": 3}  # values of PF_MATRIX
DELTA_SHARERS = 4  # work-items a row of the delta kernel
MAX_STAGES = 2
MAX_BLOCK = 1 << 30
REGISTER_SHARE = 0.86  # of a lane's registers, up to which the estimate is trusted not to spill


@dataclass(frozen=True, slots=True)
class Arch:
    """What multiplies 16-bit tiles ("fma": ordinary and packed arithmetic), and the lanes of a wave."""

    matrix: str
    wave: int


ARCHES: Mapping[str, Arch] = MappingProxyType(
    {"gfx906": Arch("fma", 64)}
    | {name: Arch("mfma", 64) for name in ("gfx908", "gfx90a", "gfx942", "gfx950")}
    | {f"gfx{n}": Arch("fma", 32) for n in (1010, 1011, 1012, 1030, 1031, 1032, 1033, 1034, 1035, 1036)}
    | {f"gfx{n}": Arch("wmma11", 32) for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153)}
    | {f"gfx{n}": Arch("wmma12", 32) for n in (1200, 1201)}
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One variant to compile: entry point `name` of kernels/`name`.hip for `arch` with these macros."""

    name: str
    arch: str
    macros: tuple[tuple[str, str], ...]  # sorted (name, value)
    threads: int  # work-items of a workgroup
    lds_bytes: int


# ------------------------------------------------------------------ how a kernel cuts its work
@dataclass(frozen=True, slots=True)
class Placement:
    """What a kernel keeps where, in the order of preference of `placement`."""

    stationary_in_lds: bool  # the block that stays is read from LDS each time, else held in registers
    prefetch: bool  # the next streamed tile is under way in registers while one is computed with


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes that registers and LDS follow from. Blocks in rows, widths in elements (head dims as the tiles pad them)."""

    kernel: str
    matrix: str
    wave: int
    waves: int
    side: int
    stationary: int
    streamed: int
    stages: int
    width: int
    width_v: int
    size: int  # bytes of an element
    hides: bool = False  # a mask or a bias may hide slots one by one
    need_dk: bool = True
    need_dv: bool = True

    @property
    def threads(self) -> int:
        return self.waves * self.wave

    @property
    def least_streamed(self) -> int:
        """A streamed block is a multiple of this: the rows that one operand of a 16-bit matrix instruction of CDNA covers."""
        return 32 if self.side == 32 or (self.matrix == "mfma" and self.size == 2) else 16

    @property
    def most_streamed(self) -> int:
        """A streamed block has at most this many rows: what a mask or a bias hides is a bit for each row that a lane has."""
        return 32 * self.wave // self.side if self.hides else MAX_BLOCK

    @property
    def stationary_width(self) -> int:
        """Elements of a stationary row that are operands: Q; K and V (V only for dP, so for dK); Q and dO."""
        alone = self.kernel == "forward" or (self.kernel == "backward_dkv" and not self.need_dk)
        return self.width + (0 if alone else self.width_v)

    def streamed_bytes(self) -> int:
        """LDS of the streamed tiles; dK/dV streams lse and delta too, but for rows so long that tiles fill LDS to the last byte."""
        row = (self.width + self.width_v) * self.size
        return self.stages * self.streamed * (row + (8 if self.kernel == "backward_dkv" and row < 2048 else 0))

    def stationary_bytes(self) -> int:
        """LDS of the stationary tiles where they are kept there."""
        return self.stationary * self.stationary_width * self.size

    def accumulators(self) -> int:
        """Registers a lane."""
        width = {
            "forward": self.width_v,
            "backward_dkv": self.width * self.need_dk + self.width_v * self.need_dv,
            "backward_dq": self.width,
            "backward_dbias": self.streamed,
        }[self.kernel]
        return self.stationary // self.waves * width // self.wave

    def lds_bytes(self, where: Placement) -> int:
        return self.streamed_bytes() + (self.stationary_bytes() if where.stationary_in_lds else 0)

    def registers(self, where: Placement) -> int:
        """Estimate of the registers a lane: accumulators, stationary operands, scores, the streamed tile under way, and addresses."""
        rows = self.stationary // self.waves
        copies = {"mfma": 1, "wmma12": 1, "wmma11": 2, "fma": self.wave // 16}[self.matrix]  # lanes that hold the same operand
        operands = 0 if where.stationary_in_lds else rows * self.stationary_width * self.size * copies // 4 // self.wave
        scores = rows * self.streamed // self.wave * (1 if self.kernel == "forward" else 2)
        tile = self.streamed * (self.width + self.width_v) * self.size // 4 // self.threads
        moving = scores + tile if where.prefetch else max(scores, min(tile, 16))
        return self.accumulators() + operands + moving + _PASSING[self.matrix, self.wave] + (_HIDING if self.hides else 0)


# Registers for what passes through: streamed operands being turned round, addresses. Read off compiled kernels, as REGISTER_SHARE is.
_PASSING = {("mfma", 64): 40, ("wmma12", 32): 56, ("wmma11", 32): 72, ("fma", 32): 72, ("fma", 64): 80}  # by layer and wave
_HIDING = 40  # elements of a mask and a bias, and their addresses


def matrix_of(arch: str, dtype: torch.dtype) -> str:
    """The layer that multiplies tiles of this type: RDNA's matrix instructions take 16-bit elements only."""
    matrix = ARCHES[arch].matrix
    return "fma" if dtype == torch.float32 and matrix.startswith("wmma") else matrix


def mfma_dwords(arch: str, dtype: torch.dtype) -> int:
    """32-bit words of an operand of one MFMA instruction of this type: the longest that the arch has."""
    if dtype == torch.float32 or (arch == "gfx908" and dtype == torch.bfloat16):
        return 1
    return 4 if arch == "gfx950" else 2


def padded(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def cut(kernel: str, tiling: Tiling, problem: Problem, device: Device, need_dk: bool = True, need_dv: bool = True) -> Cut:
    """How this kernel of this call is cut; raises KeyError for an arch without a path."""
    size, matrix = problem.dtype.itemsize, matrix_of(device.arch, problem.dtype)
    width, width_v = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = matrix == "mfma" and tiling.matrix_instr_nonkdim == 32 and (size == 4 or width % 64 == width_v % 64 == 0)
    stays, streams = (tiling.block_n, tiling.block_m) if kernel == "backward_dkv" else (tiling.block_m, tiling.block_n)
    stages = 1 if kernel == "backward_dbias" else min(tiling.num_stages, MAX_STAGES)
    return Cut(
        kernel, matrix, ARCHES[device.arch].wave, tiling.num_warps, 32 if wide else 16, stays, streams, stages, width, width_v, size,
        problem.mask or problem.bias, need_dk, need_dv,
    )  # fmt: skip


def placement(cut: Cut, device: Device) -> Placement:
    """The first that LDS and registers have room for; where registers have it for none, the one that takes fewest of them.

    Then some are spilled: slow, and right.
    """
    if cut.kernel == "backward_dbias":
        return Placement(stationary_in_lds=True, prefetch=False)
    choices = [Placement(False, True), Placement(True, True), Placement(True, False), Placement(False, False)]
    choices = [p for p in choices if cut.lds_bytes(p) <= device.shared_memory_bytes] or [Placement(False, False)]
    limit = REGISTER_SHARE * device.registers_per_thread
    return next((p for p in choices if cut.registers(p) <= limit), None) or min(choices, key=cut.registers)


def lds_bytes(cut: Cut, device: Device) -> int:
    """LDS of a workgroup."""
    return cut.lds_bytes(placement(cut, device))


# ------------------------------------------------------------------ what the look-up of tilings asks
def unfit(tiling: Tiling, kernel: str, problem: Problem, device: Device) -> str | None:
    """Why these kernels cannot run this tiling there; None when they can."""
    if device.arch not in ARCHES:
        return f"has no path for {device.arch}"
    if tiling.tma:
        return f"tma=True needs NVIDIA sm_90 or newer, {device.slug} is {device.arch}"
    for one in _passes(kernel, tiling, problem, device):
        if (reason := _unfit(one, device)) is not None:
            return reason
    return None


def registers(tiling: Tiling, kernel: str, problem: Problem, device: Device) -> int:
    """Estimated registers a lane."""
    return max(one.registers(placement(one, device)) for one in _passes(kernel, tiling, problem, device))


def settle(tiling: Tiling, kernel: str, problem: Problem, device: Device) -> Tiling:
    """The nearest tiling that these kernels can cut: fewer waves, another streamed block, a smaller matrix instruction."""
    stays, streams = ("block_n", "block_m") if kernel == "backward_dkv" else ("block_m", "block_n")
    if getattr(tiling, stays) < 32 and tiling.matrix_instr_nonkdim == 32:
        tiling = tiling.replace(matrix_instr_nonkdim=16)
    one = cut(kernel, tiling, problem, device)
    tiling = tiling.replace(tma=False, num_stages=one.stages, num_warps=min(tiling.num_warps, one.stationary // one.side))
    one = cut(kernel, tiling, problem, device)
    return tiling.replace(**{streams: max(min(one.streamed, one.most_streamed), one.least_streamed)})


def dbias_tiling(tiling: Tiling, problem: Problem, device: Device) -> Tiling:
    """dQ's tiling, whose products the bias gradient has, cut down until both blocks fit in LDS at once, and the tile where they were."""

    def fits(one: Cut) -> bool:
        bytes_ = lds_bytes(one, device)
        return one.stationary * (one.streamed + 1) * 4 <= bytes_ <= device.shared_memory_bytes

    tiling = tiling.replace(num_stages=1)
    while not fits(one := cut("backward_dbias", tiling, problem, device)):
        if one.streamed > one.least_streamed:
            tiling = tiling.replace(block_n=tiling.block_n // 2)
        elif one.stationary > one.side:
            m = tiling.block_m // 2
            tiling = tiling.replace(block_m=m, num_warps=min(tiling.num_warps, m // one.side))
        else:
            break
    return tiling


def _passes(kernel: str, tiling: Tiling, problem: Problem, device: Device) -> Iterator[Cut]:
    """The cut of each launch of a kernel."""
    both = kernel != "backward_dkv" or not tiling.split_dkv
    for needs in ((True, True),) if both else ((True, False), (False, True)):
        yield cut(kernel, tiling, problem, device, *needs)


def _unfit(cut: Cut, device: Device) -> str | None:
    stays, streams = ("block_n", "block_m") if cut.kernel == "backward_dkv" else ("block_m", "block_n")
    if cut.threads > 1024:
        return f"{cut.waves} waves of {cut.wave} are more than the 1024 work-items of a workgroup"
    if cut.stationary % (cut.waves * cut.side):
        return f"{stays}={cut.stationary} cannot be cut into {cut.waves} waves of whole tiles of {cut.side} rows"
    if cut.streamed % cut.least_streamed:
        return f"{streams}={cut.streamed} is no multiple of {cut.least_streamed}, the rows of one operand"
    if cut.streamed > cut.most_streamed:
        return f"{streams}={cut.streamed} is more than {cut.most_streamed} rows, which a mask or a bias leaves"
    need = lds_bytes(cut, device)
    if need > device.shared_memory_bytes:
        return f"needs {need} bytes of LDS, {device.slug} has {device.shared_memory_bytes}"
    if cut.accumulators() > device.registers_per_thread:
        return f"needs {cut.accumulators()} accumulator registers a lane, {device.slug} has {device.registers_per_thread}"
    return None


# ------------------------------------------------------------------ kernels
def attention_kernel(
    name: str, problem: Problem, device: Device, tiling: Tiling, *, wide_loads: bool, bias_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None, need_dk: bool = True, need_dv: bool = True, summed: tuple[bool, ...] = (False,) * 4,
) -> Kernel:  # fmt: skip
    """The variant of "forward", "backward_dkv", "backward_dq" or "backward_dbias" for a call.

    Args:
        wide_loads: rows of all tensors may be moved 16 bytes at a time.
        bias_dtype, index_dtype: of bias and of cu_seqlens; None where the call has none.
        need_dk, need_dv: what this launch of backward_dkv computes.
        summed: dimensions (batch, heads, rows, columns) along which bias is broadcast, for backward_dbias.

    Raises:
        ValueError: the kernels cannot run this tiling (one that a person gave: those looked up fit).
    """
    one = cut(name, tiling, problem, device, need_dk, need_dv)
    if (reason := "tma=True is for NVIDIA" if tiling.tma else _unfit(one, device)) is not None:
        raise ValueError(f"the HIP backend cannot run {name} with {tiling}: {reason}")
    where, left, right = placement(one, device), problem.window_left is not None, problem.window_right is not None
    macros = {
        "MATRIX": MATRIX[one.matrix], "SIDE": one.side, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n,
        "STAGES": one.stages, "XCDS": 1 if name == "backward_dbias" else device.xcds, "WAVES_PER_EU": tiling.waves_per_eu,
        "STATIONARY_IN_LDS": where.stationary_in_lds, "PREFETCH": where.prefetch,
        "HEAD_DIM": problem.head_dim, "HAS_LEFT": left, "HAS_RIGHT": right, "TOP_LEFT": problem.top_left and (left or right),
        "VARLEN": problem.varlen, "HAS_BIAS": problem.bias, "HAS_MASK": problem.mask, "HAS_ALIBI": problem.alibi,
        "HAS_SOFTCAP": problem.softcap, "HAS_SINKS": problem.sinks and name == "forward",
        "NEED_DK": need_dk and name == "backward_dkv", "NEED_DV": need_dv and name == "backward_dkv",
    }  # fmt: skip
    if one.matrix == "mfma":
        macros["MFMA_DWORDS"] = mfma_dwords(device.arch, problem.dtype)
    macros |= {f"SUM_{axis}": value for axis, value in zip(("BATCH", "HEADS", "ROWS", "COLUMNS"), summed, strict=True)}
    if problem.bias and bias_dtype is not None:
        macros["BIAS_DTYPE"] = DTYPES[bias_dtype]
    if problem.varlen and index_dtype is not None:
        macros["INDEX"] = INDEX_DTYPES[index_dtype]
    return _kernel(name, problem, device, macros, one.waves, wide_loads, lds_bytes(one, device))


def delta_kernel(problem: Problem, device: Device, *, wide_loads: bool, grad_lse: bool) -> Kernel:
    """The variant of "backward_delta": a stream over O and dO, which no option of the call changes."""
    waves = DELTA_ROWS * DELTA_SHARERS // ARCHES[device.arch].wave
    return _kernel("backward_delta", problem, device, {"HAS_GRAD_LSE": grad_lse}, waves, wide_loads, 0)


def _kernel(
    name: str, problem: Problem, device: Device, macros: dict[str, int | bool | str], waves: int, wide_loads: bool, lds: int
) -> Kernel:
    """With every macro of kernels/config.h: those that a kernel does not use have one value, so that calls share variants."""
    wave = ARCHES[device.arch].wave
    common = {"DTYPE": DTYPES[problem.dtype], "WAVE": wave, "WAVES": waves, "HEAD_DIM_V": problem.head_dim_v, "WIDE_LOADS": wide_loads}
    values = {**_UNUSED, "HEAD_DIM": problem.head_dim_v, **macros, **common}
    texts = {f"PF_{key}": value if isinstance(value, str) else str(int(value)) for key, value in values.items()}
    return Kernel(name, device.arch, tuple(sorted(texts.items())), waves * wave, lds)


_UNUSED: Mapping[str, int | str] = MappingProxyType(
    {"MATRIX": 0, "MFMA_DWORDS": 4, "SIDE": 16, "BLOCK_M": DELTA_ROWS, "BLOCK_N": 16, "STAGES": 1, "XCDS": 1}
    | dict.fromkeys(("WAVES_PER_EU", "STATIONARY_IN_LDS", "PREFETCH", "HAS_LEFT", "HAS_RIGHT", "TOP_LEFT", "VARLEN"), 0)
    | dict.fromkeys(("HAS_BIAS", "HAS_MASK", "HAS_ALIBI", "HAS_SOFTCAP", "HAS_SINKS", "HAS_GRAD_LSE", "NEED_DK", "NEED_DV"), 0)
    | dict.fromkeys(("SUM_BATCH", "SUM_HEADS", "SUM_ROWS", "SUM_COLUMNS"), 0)
    | {"BIAS_DTYPE": "Float32", "INDEX": "int32"}
)
