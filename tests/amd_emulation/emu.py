"""Run an AMD GPU code object, as made by Triton or by clang, on a machine without such a GPU.

What an instruction does comes from tinygrad's AMD emulator (MIT), imported from the checkout at $TINYGRAD_REPO, of which
nothing is copied here, and from fixes.py. This module does what a driver would: it loads the code, lays out the kernel
arguments (hidden ones included), sets the user SGPRs, and runs the waves of each workgroup, in a child process, so that a
wild access is a report and not a dead test run.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import mmap
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time

import fixes
import numpy as np
from code_object import CodeObject, EmuError, MemoryFault, Unsupported
from state import Wave

TINYGRAD_REPO = os.environ.get("TINYGRAD_REPO", "")
CLANG = os.environ.get("AMD_EMU_CLANG") or next(
    (c for c in ("clang-22", "clang-21", "clang-20", "clang-19", "clang") if shutil.which(c)), "clang"
)

# gfx target -> (the emulator's name of its family, wave size)
ARCHES = {
    "gfx942": ("cdna", 64),
    "gfx950": ("cdna", 64),
    "gfx90a": ("cdna", 64),
    "gfx1100": ("rdna3", 32),
    "gfx1101": ("rdna3", 32),
    "gfx1102": ("rdna3", 32),
    "gfx1151": ("rdna3", 32),
    "gfx1200": ("rdna4", 32),
    "gfx1201": ("rdna4", 32),
}
LDS_LIMIT = {"cdna": 160 * 1024, "rdna3": 64 * 1024, "rdna4": 64 * 1024}


# ------------------------------------------------------------------ the emulator, imported when first needed
_E = None


def emulator():
    global _E
    if _E is None:
        if not os.path.isdir(os.path.join(TINYGRAD_REPO, "test", "mockgpu")):
            raise EmuError("set TINYGRAD_REPO to a checkout of github.com/tinygrad/tinygrad")
        if not shutil.which("clang"):  # the emulator compiles each instruction with a program named clang
            d = tempfile.mkdtemp(prefix="amd_emu_bin_")
            os.symlink(shutil.which(CLANG), os.path.join(d, "clang"))
            os.environ["PATH"] = d + os.pathsep + os.environ["PATH"]
        if TINYGRAD_REPO not in sys.path:
            sys.path.insert(0, TINYGRAD_REPO)
        # "test" of the checkout must win over the standard library's package of that name
        if "test" in sys.modules and not getattr(sys.modules["test"], "__file__", "").startswith(TINYGRAD_REPO):
            for k in [k for k in sys.modules if k == "test" or k.startswith("test.")]:
                del sys.modules[k]
        import test.mockgpu.amd.emu as E

        _E = E
    return _E


# ------------------------------------------------------------------ guarded host memory
_libc = ctypes.CDLL(None, use_errno=True)
CANARY = 0xA5


class Arena:
    """One argument's memory: shared with the child, canary bytes before and after, 16 MiB of inaccessible pages on either side."""

    PAGE, GUARD = 4096, 16 << 20

    def __init__(self, nbytes: int, align: int = 16, init: bytes | None = None):
        self.n, pg, gd = nbytes, self.PAGE, self.GUARD
        body = max(pg, (nbytes + align + pg - 1) & ~(pg - 1))
        self.m = mmap.mmap(-1, body + 2 * gd, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.m))
        self.lo, self.hi = gd, gd + body
        self.off = self.hi - ((max(nbytes, 1) + align - 1) & ~(align - 1))
        self.addr = base + self.off
        ctypes.memset(base + self.lo, CANARY, body)
        if init is not None:
            self.m[self.off : self.off + nbytes] = init
        for o in (0, self.hi):
            _libc.mprotect(ctypes.c_void_p(base + o), ctypes.c_size_t(gd), 0)

    def bytes(self):
        return self.m[self.off : self.off + self.n]

    def spoiled(self):
        """Offsets (relative to the array) of canary bytes that were overwritten."""
        pre, post = np.frombuffer(self.m[self.lo : self.off], np.uint8), np.frombuffer(self.m[self.off + self.n : self.hi], np.uint8)
        return [int(i) - len(pre) for i in np.nonzero(pre != CANARY)[0]] + [int(i) + self.n for i in np.nonzero(post != CANARY)[0]]


# ------------------------------------------------------------------ decode and compile a kernel's instructions
def _text(inst):
    try:
        return repr(inst)
    except Exception:
        return type(inst).__name__


def prepare(co: CodeObject, kernel: str, arch: str, gpu: str = "", fix: bool = True):
    """Make every instruction of the kernel runnable (a linear sweep over its symbol).

    Returns ({pc: (function, its buffers or None for one of fixes.py, instruction, size)}, errors).
    """
    E = emulator()
    val, size = co.symbols[kernel]
    size = size or co.descriptor(kernel).entry
    prog, errs, pc, end = {}, [], co.base + val, co.base + val + size
    while pc < end:
        raw = bytes((ctypes.c_char * 16).from_address(pc).raw)
        try:
            inst, n = fixes.decode(E, raw, arch) if fix else (lambda i: (i, i.size()))(E.decode_inst(raw, arch))
        except Exception as e:
            errs.append((pc - co.base - val, "word " + raw[:8].hex(), f"decode: {type(e).__name__}: {e}"))
            pc += 4
            continue
        try:
            if fix and (o := fixes.override(E, inst, raw, n, arch, gpu)) is not None:
                prog[pc] = (o, None, inst, n)
                pc += n
                continue
            (prg, rt), _ = E._decode_at(pc, arch)
            prog[pc] = (rt.fxn, prg.arg.globals, inst, n)
        except Exception as e:
            c = e.__cause__ or e
            errs.append((pc - co.base - val, _text(inst), f"{type(c).__name__}: {str(c)[:200]}"))
        pc += n
    return prog, errs


# ------------------------------------------------------------------ run
@dataclasses.dataclass
class Stats:
    instructions: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    workgroups: int = 0
    waves: int = 0
    opcodes: dict = dataclasses.field(default_factory=dict)
    static_instructions: int = 0
    lds_bytes: int = 0
    warnings: list = dataclasses.field(default_factory=list)

    @property
    def rate(self):
        return self.instructions / self.seconds if self.seconds else 0.0


HIDDEN = {
    "hidden_block_count_x",
    "hidden_block_count_y",
    "hidden_block_count_z",
    "hidden_group_size_x",
    "hidden_group_size_y",
    "hidden_group_size_z",
    "hidden_remainder_x",
    "hidden_remainder_y",
    "hidden_remainder_z",
    "hidden_grid_dims",
    "hidden_dynamic_lds_size",
}


def kernarg_bytes(meta: dict, grid, block, values, dyn_lds: int) -> bytearray:
    """The kernarg segment for visible argument values (ints = addresses, bytes = raw) and the hidden arguments."""
    buf = bytearray(max(meta[".kernarg_segment_size"], 16))
    vi = 0
    hid = (
        dict(zip(("hidden_block_count_x", "hidden_block_count_y", "hidden_block_count_z"), grid))
        | dict(zip(("hidden_group_size_x", "hidden_group_size_y", "hidden_group_size_z"), block))
        | {"hidden_grid_dims": 3 if grid[2] * block[2] > 1 else 2 if grid[1] * block[1] > 1 else 1, "hidden_dynamic_lds_size": dyn_lds}
    )
    for a in meta.get(".args", []):
        o, n, k = a[".offset"], a[".size"], a[".value_kind"]
        if k.startswith("hidden_"):
            buf[o : o + n] = int(hid.get(k, 0)).to_bytes(n, "little")  # block counts etc.; offsets, buffers and apertures are 0
        else:
            v = values[vi] if vi < len(values) else b"\0" * n
            vi += 1
            if isinstance(v, int):
                v = v.to_bytes(8, "little")
            if len(v) != n:
                raise EmuError(f"argument {vi - 1}: {len(v)} bytes given, kernel wants {n} ({k})")
            buf[o : o + n] = v
    if vi < len(values):
        raise EmuError(f"{len(values)} arguments given, kernel has {vi}")
    return buf


def run_code_object(
    co_bytes,
    kernel_name,
    grid,
    block,
    args,
    arch,
    lds_bytes=None,
    *,
    isolate=True,
    order="forward",
    quantum=None,
    seed=0,
    poison=None,
    groups=None,
    timeout=None,
    max_instructions=50_000_000,
    align=16,
    count=True,
    strict=True,
    fix=True,
) -> Stats:
    """Run a kernel. grid in workgroups, block in work-items.

    args: numpy arrays (passed by address, written back) or (ctypes type, value), in the order of the kernel's visible
    arguments; those left off the end get zeros (Triton's two scratch pointers).

    lds_bytes   LDS size in all (Triton: kernel.metadata.shared); default: the code object's group_segment_fixed_size
    isolate     run in a forked child: a bad access becomes MemoryFault naming the instruction
    order       'forward' | 'reverse' | 'random': which wave runs first between barriers; quantum=N also switches after N instructions
    poison      a u32 put in every VGPR/AGPR and LDS word before the run (finds reads of what was never written)
    groups      iterable of (x,y,z) workgroup ids to run instead of the whole grid
    fix         use fixes.py for the instructions the emulator lacks or gets wrong
    strict      raise Unsupported before running if any instruction of the kernel cannot be compiled (else only when reached)
    """
    E = emulator()
    emu_arch, wave = ARCHES[arch.split(":")[0]]
    co = co_bytes if isinstance(co_bytes, CodeObject) else CodeObject(co_bytes)
    if co.gpu and co.gpu != arch.split(":")[0]:
        raise EmuError(f"code object is for {co.gpu}, not {arch}")
    meta, kd = co.kernels[kernel_name], co.descriptor(kernel_name)
    grid, block = (tuple(grid) + (1, 1, 1))[:3], (tuple(block) + (1, 1, 1))[:3]
    st = Stats()
    ws = meta[".wavefront_size"]
    if ws != wave:
        raise EmuError(f"kernel is wave{ws}; the emulator runs {emu_arch} as wave{wave}")
    if block[0] * block[1] * block[2] > meta.get(".max_flat_workgroup_size", 1024):
        raise EmuError("workgroup larger than .max_flat_workgroup_size")
    lds = max(lds_bytes or 0, meta[".group_segment_fixed_size"])
    if lds > LDS_LIMIT[emu_arch]:
        raise EmuError(f"{lds} bytes of LDS")
    st.lds_bytes = lds

    t0 = time.perf_counter()
    prog, errs = prepare(co, kernel_name, emu_arch, arch.split(":")[0], fix)
    st.compile_seconds, st.static_instructions = time.perf_counter() - t0, len(prog)
    bad = {co.base + co.symbols[kernel_name][0] + o: (o, t, r) for o, t, r in errs}
    if errs and strict:
        raise Unsupported(errs)

    # arguments into guarded memory
    arenas, values = [], []
    for a in args:
        if isinstance(a, np.ndarray):
            if not a.flags.c_contiguous:
                raise EmuError("array arguments must be C contiguous")
            ar = Arena(a.nbytes, align, a.tobytes())
            arenas.append((a, ar))
            values.append(ar.addr)
        else:
            values.append(bytes(a[0](a[1])))
    ka = Arena(max(meta[".kernarg_segment_size"], 16), 64, None)
    kb = kernarg_bytes(meta, grid, block, values, lds - meta[".group_segment_fixed_size"])
    ka.m[ka.off : ka.off + ka.n] = bytes(kb[: ka.n])
    # dispatch packet (for kernels that ask for its address)
    pkt = Arena(
        64,
        64,
        struct.pack(
            "<HHHHHHIIIIIQQQQ",
            2,
            3,
            *block,
            0,
            *(g * b for g, b in zip(grid, block)),
            kd.private,
            lds,
            co.base + co.symbols[meta[".symbol"]][0],
            ka.addr,
            0,
            0,
        ),
    )
    # user SGPRs, in the ABI's order
    ud = []

    def q(v):
        ud.extend((v & 0xFFFFFFFF, v >> 32 & 0xFFFFFFFF))

    p = kd.props
    if p & 1:
        ud.extend((0, 0, 0, 0))  # private segment buffer
    if p >> 1 & 1:
        q(pkt.addr)  # dispatch pointer
    if p >> 2 & 1:
        q(0)  # queue pointer
    if p >> 3 & 1:
        q(ka.addr)  # kernarg segment pointer
    if p >> 4 & 1:
        q(0)  # dispatch id
    if p >> 5 & 1:
        q(0)  # flat scratch init
    if p >> 6 & 1:
        ud.append(kd.private)  # private segment size
    if kd.preload_len:  # preloaded kernarg words; entry is moved past the compatibility prologue
        w = np.frombuffer(bytes(kb) + b"\0" * (-len(kb) % 4), np.uint32)
        ud.extend(int(x) for x in w[kd.preload_off : kd.preload_off + kd.preload_len])
    ud.extend([0] * (kd.user_sgprs - len(ud)))
    if len(ud) > kd.user_sgprs and kd.user_sgprs:
        ud = ud[: kd.user_sgprs]
    entry = co.base + kd.entry + (256 if kd.preload_len else 0)
    rsrc2 = (kd.rsrc2 & ~(0x1FF << 15)) | (((lds + 511) // 512) << 15)
    scratch = kd.private
    if scratch and kd.props >> 11 & 1:
        scratch = max(scratch, 16384)  # dynamic stack

    todo = list(groups) if groups is not None else [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    st.workgroups, st.waves = len(todo), len(todo) * ((block[0] * block[1] * block[2] + wave - 1) // wave)
    where = mmap.mmap(-1, 4096, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)  # pc, wave, x, y, z of the instruction being run
    wmv = memoryview(where).cast("Q")

    def body():
        t1 = time.perf_counter()
        n, ops = _step(
            E, kd.rsrc1, co, prog, bad, entry, todo, block, wave, emu_arch, ka.addr, rsrc2, scratch, lds, ud, wmv,
            order, quantum, seed, poison, max_instructions, count,
        )  # fmt: skip
        return n, time.perf_counter() - t1, ops

    if isolate:
        n, st.seconds, st.opcodes = _in_child(body, wmv, co, kernel_name, prog, timeout, arenas, args)
    else:
        n, st.seconds, st.opcodes = body()
    st.instructions = n
    for k, c in (st.opcodes.pop("_notes", None) or {}).items():
        st.warnings.append(f"{k} ({c} times)")
    for i, (a, ar) in enumerate(arenas):
        a.reshape(-1).view(np.uint8)[:] = np.frombuffer(ar.bytes(), np.uint8)
        if sp := ar.spoiled():
            st.warnings.append(f"array {i} ({a.nbytes} bytes): wrote outside it, at byte offsets {sp[:8]}{'...' if len(sp) > 8 else ''}")
    return st


def _step(
    E, rsrc1, co, prog, bad, entry, todo, block, wave, arch, ka, rsrc2, scratch, lds, ud, wmv, order, quantum, seed, poison, limit, count
):
    rng, total, hits = random.Random(seed), 0, collections.Counter()
    fixes.NOTES = {}
    threads = block[0] * block[1] * block[2]
    lds_arr = np.zeros(max(lds, 4) // 4 + 64, np.uint32)
    END = E.ENDPGM_PC

    def is_barrier(inst):
        nm = E._op_name(inst)
        return nm in ("S_BARRIER", "S_BARRIER_WAIT")

    barrier = {pc for pc, (_, _, inst, _) in prog.items() if is_barrier(inst)}
    # the emulator always flushes f32 subnormals; a kernel that asks to keep them (FP32 denorm mode 3 in rsrc1) gets them kept
    with contextlib.nullcontext() if rsrc1 >> 16 & 3 == 3 else E._MXCSRContext():
        for g in todo:
            lds_arr[:] = 0 if poison is None else poison
            waves = []
            for w0 in range(0, threads, wave):
                s = E._init_wave(entry, w0, threads, *block, ka, rsrc2, scratch, arch, *g, ud, wave)
                if arch == "rdna4":
                    s._write_sgpr(E.ttmp[8].offset, (w0 // wave) << 25)  # wave id in the workgroup, not set by the emulator
                if poison is not None:
                    mv = s._vgpr_mv
                    for i in range(wave, 256 * wave):
                        mv[i] = poison
                scr = np.zeros(max(scratch, 1) * wave + 64, np.uint8)  # of its own for each wave (run_asm shares one)
                bufs = [
                    ctypes.c_uint64(v)
                    for v in (
                        s.sgpr_buf._buf.va_addr,
                        s.vgpr_buf._buf.va_addr,
                        0,
                        lds_arr.ctypes.data,
                        scr.ctypes.data,
                        s.accvgpr_buf._buf.va_addr,
                    )
                ]
                view = Wave(
                    s.sgpr_buf._buf.va_addr, s.vgpr_buf._buf.va_addr, s.accvgpr_buf._buf.va_addr, lds_arr.ctypes.data, lds, wave, bufs
                )
                waves.append(
                    [s, bufs, 0, False, {}, view, scr]
                )  # state, buffers, barriers passed, done, pc -> bound call, numpy view, scratch
            wmv[2], wmv[3], wmv[4] = g
            while True:
                live = [i for i, w in enumerate(waves) if not w[3]]
                if not live:
                    break
                low = min(waves[i][2] for i in live)
                ready = [i for i in live if waves[i][2] == low]
                i = ready[0] if order == "forward" else ready[-1] if order == "reverse" else rng.choice(ready)
                w = waves[i]
                s, bufs, bound = w[0], w[1], w[4]
                mv, n = s._sgpr_mv, 0
                wmv[1] = i
                PL, PH = E.PC_LO_IDX, E.PC_HI_IDX
                while True:
                    pc = mv[PL] | mv[PH] << 32
                    if pc == END:
                        w[3] = True
                        break
                    f = bound.get(pc)
                    if f is None:
                        if pc not in prog:
                            if pc in bad:
                                raise Unsupported([bad[pc]])
                            raise EmuError(f"jump to {pc - co.base:#x}, outside the kernel")
                        fx, gl, _, size = prog[pc]
                        f = bound[pc] = (fx, [bufs[k] for k in gl], 0) if gl is not None else (fx, [w[5]], pc + size)
                    wmv[0] = pc
                    f[0](*f[1])
                    if f[2]:
                        mv[PL], mv[PH] = f[2] & 0xFFFFFFFF, f[2] >> 32
                    n += 1
                    if count:
                        hits[pc] += 1
                    if pc in barrier:
                        w[2] += 1
                        break
                    if quantum and n >= quantum:
                        break
                    if n + total > limit:
                        raise EmuError(f"more than {limit} instructions")
                total += n
    ops = collections.Counter()
    for pc, c in hits.items():
        ops[E._op_name(prog[pc][2])] += c
    ops["_notes"] = fixes.NOTES
    return total, dict(ops)


def _in_child(body, wmv, co, kernel, prog, timeout, arenas, args):
    r, w = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(r)
            try:
                out = ("ok", body())
            except Unsupported as e:
                out = ("unsup", e.items)
            except BaseException as e:
                out = ("err", f"{type(e).__name__}: {e}")
            with os.fdopen(w, "wb") as f:
                pickle.dump(out, f)
            code = 0
        finally:
            os._exit(code)
    os.close(w)
    if timeout:

        def kill():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

        tm = threading.Timer(timeout, kill)
        tm.daemon = True
        tm.start()
    with os.fdopen(r, "rb") as f:
        raw = f.read()
    _, status = os.waitpid(pid, 0)
    if timeout:
        tm.cancel()
    if os.WIFSIGNALED(status):
        sig = os.WTERMSIG(status)
        pc = wmv[0]
        inst = _text(prog[pc][2]) if pc in prog else "?"
        off = pc - co.base - co.symbols[kernel][0]
        msg = f"signal {signal.Signals(sig).name} at +{off:#x} {inst}, workgroup ({wmv[2]},{wmv[3]},{wmv[4]}), wave {wmv[1]}"
        raise (MemoryFault if sig in (signal.SIGSEGV, signal.SIGBUS) else EmuError)(msg)
    if not raw:
        raise EmuError(f"child ended with status {status}")
    kind, v = pickle.loads(raw)
    if kind == "unsup":
        raise Unsupported(v)
    if kind == "err":
        raise EmuError(v)
    return v
