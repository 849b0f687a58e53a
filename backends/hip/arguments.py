"""The arguments of every kernel: 18 pointers, then the structure `Call` of kernels/call.h by value."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

POINTERS = (
    "query", "key", "value", "out", "lse", "grad_out", "grad_lse", "delta", "dquery", "dkey", "dvalue", "dbias",
    "bias", "mask", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
_PACKED_POINTERS = struct.Struct(f"={len(POINTERS)}Q")


class Strides3(ctypes.Structure):
    """In elements; rows are contiguous."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row")]


class Strides4(ctypes.Structure):
    """In elements; 0 along dimensions of size 1."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row", "column")]


class Call(ctypes.Structure):
    """Sizes and strides of one launch; the fields of `struct Call` in their order."""

    _fields_ = [
        *((name, Strides3) for name in ("query", "key", "value", "out", "grad_out", "dquery", "dkey", "dvalue", "grad_lse")),
        *((name, Strides4) for name in ("bias", "mask", "dbias")),
        *((name, ctypes.c_int64) for name in ("lse_batch", "lse_head", "alibi_batch", "alibi_head", "total_q", "total_k")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "bias_rows", "bias_columns", "mask_rows", "mask_columns", "num_blocks", "num_heads", "heads_per_group",
                "batch", "heads_q", "heads_k", "group", "seqlen_q", "seqlen_k", "window_left", "window_right",
                "m_tiles", "n_tiles", "bias_heads",
            )
        ),
    ]  # fmt: skip


SIZE = _PACKED_POINTERS.size + ctypes.sizeof(Call)  # bytes


def pack(pointers: Mapping[str, int], call: Call | bytes) -> bytes:
    """The arguments as they lie in memory: addresses by name, null where absent, then the call. No padding: all is 8-byte aligned."""
    return _PACKED_POINTERS.pack(*[pointers.get(name, 0) for name in POINTERS]) + bytes(call)
