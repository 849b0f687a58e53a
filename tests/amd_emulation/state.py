"""The state of one wave as numpy arrays, and the fields of an instruction."""

from __future__ import annotations

import ctypes

import numpy as np


class Wave:
    """numpy views of one wave: s (SGPRs), v and a (VGPR, AGPR: [register, lane]), lds (bytes), W lanes."""

    def __init__(self, sgpr, vgpr, acc, lds, lds_bytes, width, bufs):
        def view(addr, n, t):
            return np.frombuffer((t[0] * n).from_address(addr), t[1])

        u32 = (ctypes.c_uint32, np.uint32)
        self.width, self.bufs = width, bufs
        self.s = view(sgpr, 260, u32)
        self.v = view(vgpr, 256 * width, u32).reshape(256, width)
        self.a = view(acc, 256 * width, u32).reshape(256, width)
        self.lds, self.lds_bytes = view(lds, max(lds_bytes, 4) + 256, (ctypes.c_uint8, np.uint8)), lds_bytes
        self.lanes = np.arange(width)

    def exec_bits(self):
        m = int(self.s[126]) | (int(self.s[127]) << 32 if self.width == 64 else 0)
        return np.array([m >> i & 1 for i in range(self.width)], bool) if m + 1 != 1 << self.width else np.ones(self.width, bool)

    def exec_int(self):
        return int(self.s[126]) | (int(self.s[127]) << 32 if self.width == 64 else 0)

    def set_exec(self, m):
        self.s[126] = m & 0xFFFFFFFF
        if self.width == 64:
            self.s[127] = m >> 32

    def sval(self, code):  # scalar operand: SGPR or inline constant
        return int(self.s[code])


BASE = 4096
_MEM = None


def mem():
    """The whole address space as bytes (index = address - 4096)."""
    global _MEM
    if _MEM is None:
        _MEM = np.frombuffer((ctypes.c_uint8 * ((1 << 47) - BASE)).from_address(BASE), np.uint8)
    return _MEM


def bits(raw, f):
    return raw >> f.lo & (1 << f.hi - f.lo + 1) - 1


def getf(inst, raw, name, default=0):
    f = getattr(type(inst), name, None)
    return default if f is None else bits(raw, f)
