"""Matrix instructions in numpy: exact products and sums, one rounding. override() in fixes.py chooses among them."""

from __future__ import annotations

import re

import numpy as np
from state import getf


# ------------------------------------------------------------------ number formats -> float64
def _f16(u):
    return u.astype(np.uint16).view(np.float16).astype(np.float64)


def _bf16(u):
    return (u.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _fp8_table(ebits, bias, kind):
    """kind 'ocp' or 'fnuz'"""
    mb, t = 7 - ebits, np.zeros(256)
    for i in range(256):
        s, e, m = -1.0 if i & 128 else 1.0, i >> mb & (1 << ebits) - 1, i & (1 << mb) - 1
        v = m * 2.0 ** (1 - bias - mb) if e == 0 else (1 + m / 2**mb) * 2.0 ** (e - bias)
        if kind == "fnuz":
            v = np.nan if i == 0x80 else s * v
        elif ebits == 4:
            v = np.nan if i & 127 == 127 else s * v
        else:
            v = (s * np.inf if m == 0 else np.nan) if e == 31 else s * v
        t[i] = v
    return t


FP8 = {
    ("fp8", "ocp"): _fp8_table(4, 7, "ocp"),
    ("bf8", "ocp"): _fp8_table(5, 15, "ocp"),
    ("fp8", "fnuz"): _fp8_table(4, 8, "fnuz"),
    ("bf8", "fnuz"): _fp8_table(5, 16, "fnuz"),
}


def _unpack_elems(regs, ty, gpu):
    """regs: [n registers, lanes] u32 -> [lanes, elements] in float64 (int64 for i8)."""
    r = np.ascontiguousarray(regs.T)  # lanes, regs
    if ty == "f32":
        return r.view(np.float32).astype(np.float64)
    if ty == "xf32":
        return ((r + 0xFFF + (r >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if ty == "f64":
        return r.view(np.float64)
    if ty in ("f16", "bf16"):
        return (_f16 if ty == "f16" else _bf16)(r.view(np.uint16))
    if ty == "i8":
        return r.view(np.int8).astype(np.int64)
    if ty == "u8":
        return r.view(np.uint8).astype(np.int64)
    return FP8[ty, "fnuz" if gpu == "gfx942" else "ocp"][r.view(np.uint8)]


# ------------------------------------------------------------------ CDNA matrix instructions
def mfma(E, inst, raw, name, gpu):
    m = re.match(r"V_MFMA_(SCALE_)?(F32|I32|F64)_(\d+)X(\d+)X(\d+)(?:_(\d+)B)?_(.+?)(?:_E64)?$", name)
    if not m or m[1]:
        return None
    out, M, N, K, blocks, ty = m[2], int(m[3]), int(m[4]), int(m[5]), int(m[6] or 1), m[7]
    if "F8F6F4" in ty or out == "F64":
        return None
    if getf(inst, raw, "cbsz") or getf(inst, raw, "abid") or getf(inst, raw, "blgp"):
        raise RuntimeError(f"{name} with cbsz/abid/blgp")
    ty = {"F16": "f16", "BF16": "bf16", "BF16_1K": "bf16", "F32": "f32", "XF32": "xf32", "I8": "i8"}.get(ty, ty)
    ta = tb = ty
    if "F8" in ty and "_" in ty:
        ta, tb = ({"FP8": "fp8", "BF8": "bf8"}[x] for x in ty.split("_"))
    elif ty not in ("f16", "bf16", "f32", "xf32", "i8"):
        raise RuntimeError(f"{name}: type {ty}")
    if (M, N) == (4, 4):
        blocks = 16
    esz = {"f16": 2, "bf16": 2, "f32": 4, "xf32": 4, "i8": 1, "fp8": 1, "bf8": 1}[ta]
    per = M * K * blocks // 64  # elements of A in each lane
    nreg, nout = max(1, per * esz // 4), M * N * blocks // 64
    s0, s1, s2, vd = (getf(inst, raw, f) for f in ("src0", "src1", "src2", "vdst"))
    acc = getf(inst, raw, "acc")
    cd = getf(inst, raw, "acc_cd")
    L = np.arange(64)
    r = np.arange(nout)
    # which (block, row) a lane's A elements belong to, and the place of each output register
    if M == 32:
        a_blk, a_i, kgrp = (np.zeros(64, int), L % 32, L // 32) if blocks == 1 else (L // 32, L % 32, np.zeros(64, int))
        q = r % 16
        o_row = 8 * (q[:, None] // 4) + 4 * (L[None] // 32) + q[:, None] % 4
        o_blk, o_col = np.broadcast_to(r[:, None] // 16, o_row.shape), np.broadcast_to(L[None] % 32, o_row.shape)
    elif M == 16:
        a_blk, a_i, kgrp = (np.zeros(64, int), L % 16, L // 16) if blocks == 1 else (L // 16, L % 16, np.zeros(64, int))
        q = r % 4
        o_row = 4 * (L[None] // 16) + q[:, None]
        o_blk, o_col = np.broadcast_to(r[:, None] // 4, o_row.shape), np.broadcast_to(L[None] % 16, o_row.shape)
    else:
        a_blk, a_i, kgrp = L // 4, L % 4, np.zeros(64, int)
        o_row = np.broadcast_to(r[:, None], (nout, 64))
        o_blk, o_col = np.broadcast_to(L[None] // 4, o_row.shape), np.broadcast_to(L[None] % 4, o_row.shape)
    kk = kgrp[:, None] * per + np.arange(per)[None]
    isint = out == "I32"

    def f(w):
        A = np.zeros((blocks, M, K), np.int64 if isint else np.float64)
        B = np.zeros((blocks, N, K), A.dtype)
        fa, fb = (w.a if acc & 1 else w.v), (w.a if acc & 2 else w.v)
        A[a_blk[:, None], a_i[:, None], kk] = _unpack_elems(fa[s0 - 256 : s0 - 256 + nreg], ta, gpu)[:, :per]
        B[a_blk[:, None], a_i[:, None], kk] = _unpack_elems(fb[s1 - 256 : s1 - 256 + nreg], tb, gpu)[:, :per]
        D = A @ B.transpose(0, 2, 1)
        rc = w.a if cd else w.v
        C = rc[s2 - 256 : s2 - 256 + nout].copy() if s2 >= 256 else np.full((nout, 64), w.sval(s2), np.uint32)
        d = D[o_blk, o_row, o_col]
        with np.errstate(all="ignore"):
            o = (
                (d + C.view(np.int32)).astype(np.int32).view(np.uint32)
                if isint
                else (d + C.view(np.float32).astype(np.float64)).astype(np.float32).view(np.uint32)
            )
        rc[vd : vd + nout] = o  # MFMA ignores EXEC

    return f


# ------------------------------------------------------------------ RDNA matrix instructions
def wmma(E, inst, raw, name, arch):
    m = re.match(r"V_WMMA_(F32|I32|F16|BF16)_16X16X16_(F16|BF16|IU8|FP8_FP8|FP8_BF8|BF8_FP8|BF8_BF8)", name)
    if not m or m[1] not in ("F32", "I32"):
        return None
    r4 = arch == "rdna4"
    neg, negh = getf(inst, raw, "neg"), getf(inst, raw, "neg_hi")
    s0, s1, s2, vd = (getf(inst, raw, f) for f in ("src0", "src1", "src2", "vdst"))
    if m[2] == "IU8":
        ta, tb = ("i8" if neg & 1 else "u8"), ("i8" if neg & 2 else "u8")
    elif "F8" in m[2]:
        ta, tb = ({"FP8": "fp8", "BF8": "bf8"}[x] for x in m[2].split("_"))
    else:
        ta = tb = m[2].lower()
    if m[1] == "F32" and (neg & 3 or negh & 3):
        raise RuntimeError(f"{name} with neg")
    nreg = (4 if "16" in ta else 2) if r4 else (8 if "16" in ta else 4)
    L, r = np.arange(32), np.arange(8)
    o_row = (r[:, None] + 8 * (L[None] // 16)) if r4 else (2 * r[:, None] + L[None] // 16)
    o_col = np.broadcast_to(L[None] % 16, (8, 32))

    def f(w):
        ea, eb = _unpack_elems(w.v[s0 - 256 : s0 - 256 + nreg], ta, "ocp"), _unpack_elems(w.v[s1 - 256 : s1 - 256 + nreg], tb, "ocp")
        if r4:
            A, B = np.concatenate((ea[:16], ea[16:]), 1), np.concatenate((eb[:16], eb[16:]), 1)
        else:
            A, B = ea[:16], eb[:16]
            if not (
                np.array_equal(w.v[s0 - 256 : s0 - 256 + nreg, :16], w.v[s0 - 256 : s0 - 256 + nreg, 16:])
                and np.array_equal(w.v[s1 - 256 : s1 - 256 + nreg, :16], w.v[s1 - 256 : s1 - 256 + nreg, 16:])
            ):
                raise RuntimeError(f"{name}: lanes 16-31 do not repeat the A or B of lanes 0-15")
        C = w.v[s2 - 256 : s2 - 256 + 8].copy() if s2 >= 256 else np.full((8, 32), w.sval(s2), np.uint32)
        d = (A @ B.T)[o_row, o_col]
        with np.errstate(all="ignore"):
            w.v[vd : vd + 8] = (
                (d + C.view(np.int32)).astype(np.int32).view(np.uint32)
                if m[1] == "I32"
                else (d + (C.view(np.float32).astype(np.float64) * (-1 if neg & 4 else 1))).astype(np.float32).view(np.uint32)
            )

    return f
