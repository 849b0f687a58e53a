"""Instructions that tinygrad's emulator lacks or gets wrong, done here in numpy (README.md lists them).

decode() and override() are what emu.py calls. A function returned by override() takes a Wave and leaves the PC alone; the
caller moves it past the instruction.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np
from matrix import mfma, wmma
from state import BASE, getf, mem


# ------------------------------------------------------------------ buffer memory instructions
# number of bytes, load?, sign-extend, d16 half (0 lo, 1 hi)
_BUF = {
    "LOAD_UBYTE": (1, 1, 0, None),
    "LOAD_SBYTE": (1, 1, 1, None),
    "LOAD_USHORT": (2, 1, 0, None),
    "LOAD_SSHORT": (2, 1, 1, None),
    "LOAD_DWORD": (4, 1, 0, None),
    "LOAD_DWORDX2": (8, 1, 0, None),
    "LOAD_DWORDX3": (12, 1, 0, None),
    "LOAD_DWORDX4": (16, 1, 0, None),
    "LOAD_SHORT_D16": (2, 1, 0, 0),
    "LOAD_SHORT_D16_HI": (2, 1, 0, 1),
    "LOAD_UBYTE_D16": (1, 1, 0, 0),
    "LOAD_UBYTE_D16_HI": (1, 1, 0, 1),
    "STORE_BYTE": (1, 0, 0, None),
    "STORE_SHORT": (2, 0, 0, None),
    "STORE_DWORD": (4, 0, 0, None),
    "STORE_DWORDX2": (8, 0, 0, None),
    "STORE_DWORDX3": (12, 0, 0, None),
    "STORE_DWORDX4": (16, 0, 0, None),
    "STORE_SHORT_D16_HI": (2, 0, 0, 1),
    "STORE_BYTE_D16_HI": (1, 0, 0, 1),
    "LOAD_U8": (1, 1, 0, None),
    "LOAD_I8": (1, 1, 1, None),
    "LOAD_U16": (2, 1, 0, None),
    "LOAD_I16": (2, 1, 1, None),
    "LOAD_B32": (4, 1, 0, None),
    "LOAD_B64": (8, 1, 0, None),
    "LOAD_B96": (12, 1, 0, None),
    "LOAD_B128": (16, 1, 0, None),
    "LOAD_D16_B16": (2, 1, 0, 0),
    "LOAD_D16_HI_B16": (2, 1, 0, 1),
    "LOAD_D16_U8": (1, 1, 0, 0),
    "LOAD_D16_HI_U8": (1, 1, 0, 1),
    "STORE_B8": (1, 0, 0, None),
    "STORE_B16": (2, 0, 0, None),
    "STORE_B32": (4, 0, 0, None),
    "STORE_B64": (8, 0, 0, None),
    "STORE_B96": (12, 0, 0, None),
    "STORE_B128": (16, 0, 0, None),
    "STORE_D16_HI_B16": (2, 0, 0, 1),
    "STORE_D16_HI_B8": (1, 0, 0, 1),
}


def _put(regfile, reg, act, data, n, sext, half):
    """Write loaded bytes ([lanes, n]) to registers."""
    if n >= 4:
        d = np.ascontiguousarray(data).view(np.uint32)
        for i in range(n // 4):
            regfile[reg + i][act] = d[:, i][act]
        return
    u = data[:, 0].astype(np.uint32) | (data[:, 1].astype(np.uint32) << 8 if n == 2 else 0)
    if sext:
        u = (u.astype(np.int64) - ((u >> (8 * n - 1)).astype(np.int64) << 8 * n)).astype(np.uint32)
    if half is not None:
        old = regfile[reg]
        u = (old & 0xFFFF) | (u << 16) if half else (old & np.uint32(0xFFFF0000)) | (u & 0xFFFF)
    regfile[reg][act] = u[act]


def _bytes_of(regfile, reg, n, half):
    """[lanes, n] bytes to store."""
    if n >= 4:
        return np.ascontiguousarray(regfile[reg : reg + n // 4].T).view(np.uint8)
    u = regfile[reg] >> (16 if half else 0)
    return np.ascontiguousarray(u[:, None]).view(np.uint8)[:, :n]


def _buffer(E, inst, raw, name, arch):
    op = name.replace("BUFFER_", "", 1).split("_VBUFFER")[0]
    if op in ("GL0_INV", "GL1_INV", "INV", "WBL2", "WBINVL1", "WBINVL1_VOL"):
        return lambda w: None
    if (fa := _ATOM.get(op)) is None and op not in _BUF:
        raise RuntimeError(f"{name} is not done here")
    vdata, vaddr = getf(inst, raw, "vdata"), getf(inst, raw, "vaddr")
    srsrc = getf(inst, raw, "rsrc") if arch == "rdna4" else getf(inst, raw, "srsrc") * 4
    if arch == "rdna4":
        ioff = getf(inst, raw, "ioffset")
        ioff -= (ioff >> 23) << 24
        ret = getf(inst, raw, "th") & 1
    else:
        ioff, ret = getf(inst, raw, "offset"), getf(inst, raw, "sc0", getf(inst, raw, "glc"))
    soff, offen, idxen = getf(inst, raw, "soffset"), getf(inst, raw, "offen"), getf(inst, raw, "idxen")
    acc, lds = getf(inst, raw, "acc"), getf(inst, raw, "lds")
    if getf(inst, raw, "tfe"):
        raise RuntimeError("tfe")
    null = 124 if arch != "cdna" else -1
    n, load, sext, half = _BUF[op] if fa is None else (fa[0], 1, 0, None)
    gfx9 = arch == "cdna"

    def f(w):
        d0, d1, nrec, d3 = (int(x) for x in w.s[srsrc : srsrc + 4])
        base, stride = d0 | (d1 & 0xFFFF) << 32, d1 >> 16 & 0x3FFF
        so = 0 if soff == null else w.sval(soff)
        va = vaddr
        off = np.full(w.width, ioff, np.int64)
        act = w.exec_bits()
        structured = False
        if idxen:
            idx = w.v[va].astype(np.int64)
            va += 1
            if d1 >> 31 & 1 and gfx9 or (not gfx9 and d1 >> 30 & 3):
                raise RuntimeError("swizzled buffer")
            structured = True
        if offen:
            off = off + w.v[va].astype(np.int64)
        regs = w.a if acc else w.v
        data = np.zeros((w.width, n), np.uint8)
        if structured:
            ok = act & (idx < nrec) if stride else act & (off + so + n <= nrec)
            addr = base + so + idx * stride + off
            okb = np.repeat(ok[:, None], n, 1)
        else:
            end = off[:, None] + so + (np.arange(n) // 4 * 4 + min(n, 4))[None]  # each dword is checked on its own
            okb = act[:, None] & (end <= nrec)
            addr = base + so + off
        if fa is not None:
            return _atomic(w, addr, okb.all(1), regs, vdata, fa, ret, mem())
        ix = addr[:, None] + np.arange(n)[None] - BASE
        if load:
            data[okb] = mem()[ix[okb]]
            if lds:  # to LDS: M0 + lane * size; whether the instruction's offset moves the LDS address too is not settled here
                if ioff:
                    raise RuntimeError(f"{name} to LDS with an instruction offset")
                o = (int(w.s[124]) & 0x3FFFF) + np.arange(w.width)[:, None] * max(n, 4) + np.arange(n)[None]
                if (o[act] >= w.lds_bytes).any():
                    raise RuntimeError(f"{name}: LDS address beyond {w.lds_bytes}")
                w.lds[o[act]] = data[act]
            else:
                _put(regs, vdata, act, data, n, sext, half)
        else:
            mem()[ix[okb]] = _bytes_of(regs, vdata, n, half)[okb]

    return f


# ------------------------------------------------------------------ atomics (buffer form; the emulator does the global form)
_ATOM = {
    "ATOMIC_ADD_F32": (4, np.float32, "add"),
    "ATOMIC_ADD": (4, np.uint32, "add"),
    "ATOMIC_ADD_U32": (4, np.uint32, "add"),
    "ATOMIC_PK_ADD_F16": (4, np.float16, "add"),
    "ATOMIC_PK_ADD_BF16": (4, "bf16", "add"),
    "ATOMIC_ADD_F64": (8, np.float64, "add"),
}


def _atomic(w, addr, ok, regs, vdata, fa, ret, m):
    n, dt, _ = fa
    src = _bytes_of(regs, vdata, n, None).copy()
    for l in np.nonzero(ok)[0]:
        o = int(addr[l]) - BASE
        old = m[o : o + n].copy()
        if dt == "bf16":
            a, b = ((x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (old, np.ascontiguousarray(src[l])))
            u = (a + b).view(np.uint32)
            new = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
        else:
            new = (old.view(dt) + np.ascontiguousarray(src[l]).view(dt)).view(np.uint8)
        m[o : o + n] = new
        if ret:
            regs[vdata : vdata + n // 4, l] = old.view(np.uint32)


# ------------------------------------------------------------------ DPP16
def _dpp_tables(ctrl, W, gfx9):
    L = np.arange(W)
    row, i = L & ~15, L & 15
    ok = np.ones(W, bool)
    src = L.copy()
    if ctrl < 0x100:
        src = (L & ~3) + np.array([ctrl >> 2 * k & 3 for k in range(4)])[L & 3]
    elif 0x101 <= ctrl <= 0x10F:
        n = ctrl & 15
        src, ok = L + n, i + n <= 15
    elif 0x111 <= ctrl <= 0x11F:
        n = ctrl & 15
        src, ok = L - n, i >= n
    elif 0x121 <= ctrl <= 0x12F:
        n = ctrl & 15
        src = row + ((i - n) & 15)
    elif ctrl == 0x130 and gfx9:
        src, ok = L + 1, L < W - 1
    elif ctrl == 0x134 and gfx9:
        src = (L + 1) % W
    elif ctrl == 0x138 and gfx9:
        src, ok = L - 1, L > 0
    elif ctrl == 0x13C and gfx9:
        src = (L - 1) % W
    elif ctrl == 0x140:
        src = row + 15 - i
    elif ctrl == 0x141:
        src = (L & ~7) + 7 - (L & 7)
    elif ctrl == 0x142 and gfx9:
        src, ok = row - 1, L >= 16  # lane 15 of the row before
    elif ctrl == 0x143 and gfx9:
        src, ok = np.full(W, 31), L >= 32  # lane 31
    elif 0x150 <= ctrl <= 0x15F:
        src = row + (ctrl & 15)  # row_newbcast (gfx90a+) / row_share (gfx10+)
    elif 0x160 <= ctrl <= 0x16F and not gfx9:
        src = row + (i ^ (ctrl & 15))  # row_xmask
    else:
        raise RuntimeError(f"DPP control {ctrl:#x}")
    return np.where(ok, src, 0), ok


def _dpp(E, inst, raw, nbytes, name, arch):
    """Any DPP16 instruction: the plain instruction on a spare VGPR that holds the moved source, under an EXEC cut to the enabled lanes."""
    T = type(inst)
    vop3 = nbytes == 12  # VOP3/VOP3P/VOP3SD + DPP16 word (RDNA)
    if "CMPX" in name:
        raise RuntimeError(f"{name} with DPP")
    W = 64 if arch == "cdna" else 32
    d = raw >> (64 if vop3 else 32) & 0xFFFFFFFF
    src, ctrl, fi, bc, bank, rowm = d & 0xFF, d >> 8 & 0x1FF, d >> 18 & 1, d >> 19 & 1, d >> 24 & 15, d >> 28 & 15
    table, ok = _dpp_tables(ctrl, W, arch == "cdna")
    L = np.arange(W)
    enabled = (rowm >> (L // 16) & 1).astype(bool) & (bank >> ((L & 15) // 4) & 1).astype(bool)
    used = {getf(inst, raw, "vdst", -1), getf(inst, raw, "vsrc1", -1), src} | {getf(inst, raw, f, 0) - 256 for f in ("src1", "src2")}
    tmp = next(t for t in (255, 254, 253, 252, 251, 250) if t not in used and t + 1 not in used)
    if vop3:
        new = raw & ((1 << 64) - 1)
        new = new & ~(0x1FF << T.src0.lo) | (256 + tmp) << T.src0.lo
        code = new.to_bytes(8, "little")
    else:
        nd = d & ~0xFF & ~(0x1FF << 8) & ~(0xFF << 24) & ~(1 << 18) | tmp | 0xE4 << 8 | 0xFF << 24 | 1 << 19
        code = (raw & 0xFFFFFFFF | nd << 32).to_bytes(8, "little")
    run = _side(E, code, arch)
    if (
        arch == "cdna"
        and 16 in (inst.canonical_op_bits.get("d"), inst.canonical_op_bits.get("s0"))
        and max(getf(inst, raw, "vdst"), getf(inst, raw, "vsrc1")) > 127
    ):
        raise RuntimeError(f"{name} DPP on a VGPR from 128 on")

    def f(w):
        e = w.exec_bits()
        good = ok & (e[table] | bool(fi))
        act = e & enabled & (good | bool(bc))
        save, ex = w.v[tmp].copy(), w.exec_int()
        w.v[tmp] = np.where(good, w.v[src][table], 0)
        w.set_exec(sum(1 << int(i) for i in np.nonzero(act)[0]))
        run(w)
        w.set_exec(ex)
        w.v[tmp] = save

    return f


def _side(E, code: bytes, arch):
    """A runner for another instruction, to be run in place of this one: it reads its fields at the PC, so it gets its own bytes."""
    side = ctypes.create_string_buffer(code + b"\0" * 24, len(code) + 24)
    prg, rt = E._get_runner(code + b"\0" * 4, arch)
    fx, gl, addr = rt.fxn, prg.arg.globals, ctypes.addressof(side)

    def f(w, _keep=side):
        w.s[256], w.s[257] = addr & 0xFFFFFFFF, addr >> 32
        fx(*[w.bufs[g] for g in gl])

    return f


def _promote16(E, inst, raw, T, name):
    """CDNA: 16-bit operations in the 32-bit encoding.  The emulator takes VGPR numbers from 128 on for RDNA's upper halves there, so
    they are run in the 64-bit encoding instead."""
    b = inst.canonical_op_bits
    src0 = getf(inst, raw, "src0")
    high = (
        (b.get("s0") == 16 and src0 >= 384 and T != "VOPC")
        or (b.get("s0") == 16 and getf(inst, raw, "vsrc1") >= 128)
        or (b.get("d") == 16 and T != "VOPC" and getf(inst, raw, "vdst") >= 128)
    )
    if not high:
        return None
    if src0 == 255 or "MAMK" in name or "MAAK" in name or "MADMK" in name or "MADAK" in name:
        raise RuntimeError(f"{name}: literal with a VGPR from 128 on")
    if T == "VOP1":
        op, dst, s1 = 0x140 + (raw >> 9 & 0xFF), raw >> 17 & 0xFF, 0
    elif T == "VOP2":
        op, dst, s1 = 0x100 + (raw >> 25 & 0x3F), raw >> 17 & 0xFF, 256 + (raw >> 9 & 0xFF)
    else:
        op, dst, s1 = raw >> 17 & 0xFF, 106, 256 + (raw >> 9 & 0xFF)
    return _side(E, (0b110100 << 26 | op << 16 | dst | (src0 | s1 << 9) << 32).to_bytes(8, "little"), "cdna")


def _vopd(E, inst, raw, arch):
    """RDNA dual issue: both halves read before either writes.  The emulator may store X before it has read Y's first source."""
    T = type(inst)
    dx = getf(inst, raw, "vdstx")
    dy = getf(inst, raw, "vdsty") << 1 | (dx & 1 ^ 1)
    moved, new, n = [], raw, inst.size()
    free = iter(
        t for t in range(255, 200, -1) if t not in (dx, dy, *(getf(inst, raw, f) & 255 for f in ("srcx0", "srcy0", "vsrcx1", "vsrcy1")))
    )
    for f, other in (("srcx0", dy), ("vsrcx1", dy), ("srcy0", dx), ("vsrcy1", dx)):
        v = getf(inst, raw, f)
        r = v - 256 if f.startswith("src") else v
        if r != other:
            continue
        t = next(free)
        fl = getattr(T, f)
        new = new & ~((1 << fl.hi - fl.lo + 1) - 1 << fl.lo) | (t + (256 if f.startswith("src") else 0)) << fl.lo
        moved.append((t, r))
    if not moved:
        return None
    run = _side(E, new.to_bytes(n, "little"), arch)

    def f(w):
        save = [(t, w.v[t].copy()) for t, _ in moved]
        for t, r in moved:
            w.v[t] = w.v[r]
        run(w)
        for t, s in save:
            w.v[t] = s

    return f


def _pkrtz(inst, raw, T):
    """v_cvt_pkrtz_f16_f32: the emulator rounds to nearest."""
    s0, s1 = getf(inst, raw, "src0"), getf(inst, raw, "src1", None) if hasattr(type(inst), "src1") else 256 + getf(inst, raw, "vsrc1")
    ab, ng, vd = getf(inst, raw, "abs"), getf(inst, raw, "neg"), getf(inst, raw, "vdst")
    if "DPP" in T or "SDWA" in T:
        raise RuntimeError("v_cvt_pkrtz with DPP or SDWA")
    size = 4 if not hasattr(type(inst), "src1") else 8
    lit = raw >> 8 * size & 0xFFFFFFFF

    def f(w):
        r = []
        for i, s in enumerate((s0, s1)):
            u = w.v[s - 256].copy() if s >= 256 else np.full(w.width, lit if s == 255 else w.sval(s), np.uint32)
            if ab >> i & 1:
                u &= np.uint32(0x7FFFFFFF)
            if ng >> i & 1:
                u ^= np.uint32(0x80000000)
            x = u.view(np.float32)
            with np.errstate(all="ignore"):
                h = x.astype(np.float16)
                over = np.isfinite(x) & (abs(h.astype(np.float32)) > abs(x))
                h = np.where(over, np.nextafter(h, np.float16(0)), h).astype(np.float16)
            r.append(h.view(np.uint16).astype(np.uint32))
        e = w.exec_bits()
        w.v[vd][e] = (r[0] | r[1] << 16)[e]

    return f


# ------------------------------------------------------------------ cross-lane and transpose
def _permlane16(inst, raw, name):
    """RDNA v_permlane16 / v_permlanex16 (and _var): the emulator reads a literal lane select as 0."""
    vd, s0, s1, s2 = (getf(inst, raw, f) for f in ("vdst", "src0", "src1", "src2"))
    lit, op = raw >> 64 & 0xFFFFFFFF, getf(inst, raw, "opsel")
    fi, bc, x, L = op & 1, op >> 1 & 1, "PERMLANEX" in name, np.arange(32)
    row = (L & 16) ^ (16 if x else 0)

    def f(w):
        e = w.exec_bits()
        if "VAR" in name:
            sel = w.v[s1 - 256].astype(np.int64) & 15
        else:
            m = (lit if s1 == 255 else w.sval(s1)) | (lit if s2 == 255 else w.sval(s2)) << 32
            sel = np.array([m >> 4 * (i & 15) & 15 for i in range(32)])
        src = row + sel
        ok = e[src] | bool(fi)
        r = np.where(ok, w.v[s0 - 256][src], 0)
        k = e & (ok | bool(bc))
        w.v[vd][k] = r[k]

    return f


def _permlane_swap(inst, raw, name):
    n = 32 if "PERMLANE32" in name else 16
    a, b = getf(inst, raw, "vdst"), getf(inst, raw, "src0") - 256
    odd = np.nonzero(np.arange(64) // n % 2)[0]

    def f(w):
        e = w.exec_bits()
        k = odd[e[odd] & e[odd - n]]
        t = w.v[a][k].copy()
        w.v[a][k] = w.v[b][k - n]
        w.v[b][k - n] = t

    return f


def _lds_read_tr(inst, raw, name):
    """gfx950: 16 lanes read 64 bits each (row k = lane*width/16...), lane n gets column n."""
    bytes_ = 2 if "B16" in name else 1
    if bytes_ == 1 and "B8" not in name:
        raise RuntimeError(name)
    per = 8 // bytes_  # elements a lane reads; also the rows of the tile
    off = getf(inst, raw, "offset1") << 8 | getf(inst, raw, "offset0")
    addr, vd, acc = getf(inst, raw, "addr"), getf(inst, raw, "vdst"), getf(inst, raw, "acc")
    n = np.arange(64)
    lane = (n & ~15)[:, None] + np.arange(per)[None] * (16 // per) + ((n & 15) // per)[:, None]
    el = np.broadcast_to(((n & 15) % per)[:, None], lane.shape)
    dt = np.uint16 if bytes_ == 2 else np.uint8

    def f(w):
        a = w.v[addr].astype(np.int64) + off
        if (a + 8 > w.lds_bytes).any():
            raise RuntimeError(f"{name}: LDS address beyond {w.lds_bytes}")
        d = w.lds[a[:, None] + np.arange(8)[None]].view(dt)
        r = np.ascontiguousarray(d[lane, el]).view(np.uint32)
        g = w.a if acc else w.v
        g[vd], g[vd + 1] = r[:, 0], r[:, 1]

    return f


def _ds_perm(inst, raw, name, W):
    off = getf(inst, raw, "offset1") << 8 | getf(inst, raw, "offset0")
    addr, data, vd = getf(inst, raw, "addr"), getf(inst, raw, "data0"), getf(inst, raw, "vdst")
    L = np.arange(W)
    if "SWIZZLE" in name:
        if off & 0x8000:
            if off >> 13 & 3 == 3 or off >= 0xE000:
                raise RuntimeError(f"{name} {off:#x}")  # FFT and rotate modes
            src = (L & ~3) + np.array([off >> 2 * k & 3 for k in range(4)])[L & 3]
        else:
            src = (L & ~31) + ((((L & 31) & (off & 31)) | (off >> 5 & 31)) ^ (off >> 10 & 31))

        def f(w):
            e = w.exec_bits()
            r = np.where(e[src], w.v[addr][src], 0)
            w.v[vd][e] = r[e]
    elif "BPERMUTE" in name:

        def f(w):
            e = w.exec_bits()
            i = (w.v[addr].astype(np.int64) + off >> 2) % (W if W == 64 else 32)
            r = np.where(e[i] | ("FI" in name), w.v[data][i], 0)
            w.v[vd][e] = r[e]
    else:

        def f(w):
            e = w.exec_bits()
            i = (w.v[addr].astype(np.int64) + off >> 2) % W
            r = np.zeros(W, np.uint32)
            r[i[e]] = w.v[data][e]
            w.v[vd][e] = r[e]

    return f


NOTES: dict = {}  # what the run should be told about: text -> count


def note(text):
    NOTES[text] = NOTES.get(text, 0) + 1


def _ds(inst, raw, name, W):
    """LDS loads and stores. The emulator reads LDS for inactive lanes too (wild addresses); its D16 loads overwrite both halves."""
    m = re.match(r"DS_(READ|LOAD|WRITE|STORE)(2|_2ADDR)?(ST64|_STRIDE64)?_(B|U|I)(8|16|32|64|96|128)(_D16)?(_D16_HI|_HI)?$", name)
    if not m:
        return None
    load, two, st64, n = m[1] in ("READ", "LOAD"), bool(m[2]), bool(m[3]), int(m[5]) // 8
    hi = (m[7] or "").endswith("HI")
    half = (1 if hi else 0) if load and (m[6] or m[7]) else 1 if hi else None
    o0, o1 = getf(inst, raw, "offset0"), getf(inst, raw, "offset1")
    unit = n * (64 if st64 else 1)
    offs = (o0 * unit, o1 * unit) if two else (o1 << 8 | o0,)
    addr, vd, acc = getf(inst, raw, "addr"), getf(inst, raw, "vdst"), getf(inst, raw, "acc")
    data = (getf(inst, raw, "data0"), getf(inst, raw, "data1"))
    step = np.arange(n)[None]

    def f(w):
        e = w.exec_bits()
        regs = w.a if acc else w.v
        base = w.v[addr].astype(np.int64)
        got = []
        for i, o in enumerate(offs):
            a = base + o
            ok = e & (a + n <= w.lds_bytes)
            if ok.sum() != e.sum():
                note(f"{name.lower()} beyond the {w.lds_bytes} bytes of LDS")
            if (a[ok] % min(n, 8 if n == 12 else n)).any():
                note(f"{name.lower()} at an address that is not a multiple of {n}")
            ix = a[ok][:, None] + step
            if load:
                b = np.zeros((W, n), np.uint8)
                b[ok] = w.lds[ix]
                got.append(b)
            else:
                w.lds[ix] = _bytes_of(regs, data[i], n, half)[ok]
        for i, b in enumerate(got):
            _put(regs, vd + i * n // 4, e, b, n, m[4] == "I", half)

    return f


def _load_lds(inst, raw, name):
    """global_load_lds_*: memory straight to LDS, at M0 + offset + lane * size."""
    n = {"UBYTE": 1, "USHORT": 2, "DWORD": 4, "DWORDX3": 12, "DWORDX4": 16}.get(name.rsplit("_", 1)[1])
    if n is None:
        raise RuntimeError(name)
    addr, saddr, off = getf(inst, raw, "addr"), getf(inst, raw, "saddr"), getf(inst, raw, "offset")
    off -= (off >> 12) << 13

    def f(w):
        e = w.exec_bits()
        a = w.v[addr].astype(np.int64)
        if saddr < 124:
            a = a + (int(w.s[saddr]) | int(w.s[saddr + 1]) << 32)
        else:
            a = a | w.v[addr + 1].astype(np.int64) << 32
        o = (int(w.s[124]) & 0x3FFFF) + off + np.arange(64)[:, None] * max(n, 4) + np.arange(n)[None]
        if (o[e] >= w.lds_bytes).any():
            raise RuntimeError(f"{name}: LDS address beyond {w.lds_bytes}")
        w.lds[o[e]] = mem()[(a[:, None] + off + np.arange(n)[None] - BASE)[e]]

    return f


# ------------------------------------------------------------------ what a kernel's bytes mean, where the emulator's decoder does not know
def decode(E, data: bytes, arch: str):
    """Returns (inst, size): the emulator's decoding, plus buffer instructions on RDNA and DPP words on VOP3."""
    w = int.from_bytes(data[:4], "little")
    if arch == "rdna3" and w >> 26 == 0b111000:
        return E.ir3.MUBUF.from_bytes(data), 8
    if arch == "rdna4" and w >> 26 == 0b110001:
        return E.ir4.VBUFFER.from_bytes(data), 12
    inst = E.decode_inst(data, arch)
    n = inst.size()
    T = type(inst)
    if T.__name__.endswith("_DPP8"):
        raise RuntimeError("DPP8")
    if (
        arch != "cdna"
        and hasattr(T, "src0")
        and T.__name__.startswith("VOP")
        and not T.__name__.startswith("VOPD")
        and not T.__name__.endswith("_DPP16")
    ):
        s0 = int.from_bytes(data, "little") >> T.src0.lo & 0x1FF
        if s0 in (0xE9, 0xEA, 0xFA):
            raise RuntimeError("DPP form not decoded")
    return inst, n


def override(E, inst, data: bytes, size: int, arch: str, gpu: str):
    """A function of a Wave for an instruction that the emulator lacks or gets wrong; None where its own is right."""
    name, raw = E._op_name(inst), int.from_bytes(data[:size], "little")
    T = type(inst).__name__
    if T in ("MUBUF", "VBUFFER"):
        return _buffer(E, inst, raw, name, arch)
    if name in ("GLOBAL_INV", "GLOBAL_WB", "GLOBAL_WBINV"):
        return lambda w: None
    if name.startswith("GLOBAL_LOAD_LDS"):
        return _load_lds(inst, raw, name)
    if "PERMLANE" in name and "SWAP" in name:
        return _permlane_swap(inst, raw, name)
    if "PERMLANE16" in name or "PERMLANEX16" in name:
        return _permlane16(inst, raw, name)
    if name.startswith("DS_READ_B64_TR"):
        return _lds_read_tr(inst, raw, name)
    if name.startswith("DS_") and ("PERMUTE" in name or "SWIZZLE" in name):
        return _ds_perm(inst, raw, name, 64 if arch == "cdna" else 32)
    if name.startswith("DS_") and (o := _ds(inst, raw, name, 64 if arch == "cdna" else 32)) is not None:
        return o
    if "CVT_PKRTZ_F16" in name or "CVT_PK_RTZ_F16" in name:
        return _pkrtz(inst, raw, T)
    if T.startswith("VOPD"):
        return _vopd(E, inst, raw, arch)
    if "SMFMAC" in name or "SWMMAC" in name:
        raise RuntimeError("sparse matrix instruction")
    if "MFMA" in name:
        return mfma(E, inst, raw, name, gpu)
    if "WMMA" in name:
        return wmma(E, inst, raw, name, arch)
    if T.endswith("_DPP16"):
        return _dpp(E, inst, raw, size, name, arch)
    if arch == "cdna" and T in ("VOP1", "VOP2", "VOPC"):
        return _promote16(E, inst, raw, T, name)
    return None
