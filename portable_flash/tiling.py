"""How a kernel cuts a problem: block sizes as data, what they cost, and whether they fit a device.

The Triton and HIP backends read the same ``Tiling``. The resource model decides what is worth compiling (HIP kernels, whose
waves cut blocks their own way, have one of their own beside them); the compiler has the last word (the tests compile every
shipped tiling and assert that nothing spills).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .device import Device
from .problem import Problem

KERNELS = ("forward", "backward_dkv", "backward_dq")  # the kernels that have tilings of their own


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def padded_head_dim(n: int) -> int:
    """Width of the tile that holds a head_dim: a power of two, at least one matrix instruction's K (16)."""
    return max(16, next_power_of_2(n))


@dataclass(frozen=True, slots=True)
class Tiling:
    """block_m query rows by block_n keys a step, run by num_warps warps (AMD: waves) with num_stages tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1
    split_dkv: bool = False  # dK and dV by separate programs: half the accumulators, S computed once more
    tma: bool = False  # NVIDIA sm_90+: tiles move through the tensor memory accelerator
    maxnreg: int | None = None  # NVIDIA: register cap a thread
    waves_per_eu: int = 0  # AMD: occupancy that the compiler aims for, 0 = its own choice
    matrix_instr_nonkdim: int = 0  # AMD: 16 or 32, side of the matrix instruction, 0 = the compiler's choice

    def __post_init__(self):
        for name in ("block_m", "block_n", "num_warps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ValueError(f"Tiling.{name}={value!r}: must be a power of two")
        if min(self.block_m, self.block_n) < 16:
            raise ValueError(f"Tiling {self.block_m}x{self.block_n}: blocks are at least 16, one matrix instruction's side")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"Tiling.num_stages={self.num_stages!r}: must be 1 to 8")

    def replace(self, **changes) -> Tiling:
        return replace(self, **changes)

    def as_dict(self) -> dict:
        """Fields that differ from their defaults, in order: what the database file shows."""
        out = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("block_m", "block_n", "num_warps", "num_stages") or value != f.default:
                out[f.name] = value
        return out

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.as_dict().items())

    # ------------------------------------------------------------------ resources
    def shared_memory_bytes(self, kernel: str, problem: Problem) -> int:
        """Shared memory (AMD: LDS) of one program: the tiles that stay, plus num_stages of those that stream."""
        size = problem.dtype.itemsize
        d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        if kernel == "forward":  # Q stays; K and V stream
            return size * (self.block_m * d + self.num_stages * self.block_n * (d + dv))
        if kernel == "backward_dkv":  # K and V stay; Q, dO, lse and delta stream
            return size * (d + dv) * (self.block_n + self.num_stages * self.block_m) + self.num_stages * self.block_m * 8
        if kernel == "backward_dq":  # Q and dO stay; K and V stream
            return size * (d + dv) * (self.block_m + self.num_stages * self.block_n)
        raise ValueError(f"kernel={kernel!r}: allowed are {', '.join(KERNELS)}")

    def accumulator_registers(self, kernel: str, problem: Problem, wave_size: int) -> int:
        """32-bit registers a thread that the float32 tiles need: accumulators, S and dP."""
        d, dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        scores = self.block_m * self.block_n
        elements = {
            "forward": self.block_m * dv + scores,
            "backward_dkv": self.block_n * (max(d, dv) if self.split_dkv else d + dv) + 2 * scores,
            "backward_dq": self.block_m * d + 2 * scores,
        }[kernel]
        return elements // (self.num_warps * wave_size)

    def unfit(self, kernel: str, problem: Problem, device: Device) -> str | None:
        """Why this tiling cannot run there; None when it fits."""
        if self.num_warps * device.wave_size > 1024:
            return f"{self.num_warps} warps of {device.wave_size} are more than the 1024 threads of a program"
        if self.tma and not device.has_tma:
            return f"tma=True needs NVIDIA sm_90 or newer, {device.slug} is {device.arch}"
        need = self.shared_memory_bytes(kernel, problem)
        if need > device.shared_memory_bytes:
            return f"needs {need} bytes of shared memory, {device.slug} has {device.shared_memory_bytes}"
        registers = self.accumulator_registers(kernel, problem, device.wave_size)
        if registers > device.registers_per_thread:
            return f"needs {registers} accumulator registers a thread, {device.slug} has {device.registers_per_thread}"
        return None

    # ------------------------------------------------------------------ memory traffic
    def hbm_bytes(self, direction: str, problem: Problem, device: Device) -> int:
        """Predicted bytes between HBM and chip (the IO analysis of FlashAttention, section 3.2).

        Every operand moves once, except those that a program streams: K and V in forward and dQ, Q and dO in dK/dV,
        which move once for each block that streams them unless the cache keeps them for the programs running
        side by side.
        """
        io = problem.operand_bytes()
        q_blocks = -(-problem.seqlen_q // self.block_m) if problem.seqlen_q else 0
        k_blocks = -(-problem.seqlen_k // self.block_n) if problem.seqlen_k else 0
        kv_heads = max(1, problem.batch * problem.heads_k)
        stream_k = (io["k"] + io["v"]) * _passes(q_blocks * problem.group, (io["k"] + io["v"]) // kv_heads, device)
        if direction == "forward":
            return io["q"] + io["o"] + io["lse"] + stream_k
        if direction != "backward":
            raise ValueError(f"direction={direction!r}: allowed are 'forward' and 'backward'")
        stream_q = (io["q"] + io["o"]) * _passes(k_blocks, (io["q"] + io["o"]) // kv_heads, device)
        delta = 2 * io["o"] + 2 * io["lse"]  # rowsum(dO * O), stored like lse
        dq = io["q"] + io["o"] + 2 * io["lse"] + io["q"] + stream_k  # Q, dO, lse, delta in; dQ out; K and V streamed
        passes = 2 if self.split_dkv else 1
        dkv = io["k"] + io["v"] + passes * (io["k"] + io["v"] + stream_q + 2 * io["lse"])  # dK, dV out; K, V in; Q and dO streamed
        return delta + dq + dkv


def _passes(blocks: int, streamed_bytes: int, device: Device) -> int:
    """Times that a streamed operand of one head comes from HBM when `blocks` programs read it.

    Programs of one head are neighbours in launch order and walk in step; while the operand fits in half of the last
    cache it is read once, otherwise once for each wave of programs over the device.
    """
    if blocks <= 1 or streamed_bytes <= device.l2_bytes // 2:
        return 1
    return max(1, -(-blocks // max(1, device.compute_units)))
