"""AMD GPU code objects (HSA ELF): symbols, metadata, kernel descriptors, and the image in host memory."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import re
import struct


class EmuError(RuntimeError):
    """A kernel that cannot be loaded or run here."""


class Unsupported(EmuError):
    """Instructions of the kernel that the emulator cannot run: .items is [(offset, text, reason)]."""

    def __init__(self, items):
        self.items = items
        super().__init__("instructions not supported by the emulator:\n" + "\n".join(f"  +{o:#x} {t}: {r}" for o, t, r in items))


class MemoryFault(EmuError):
    """An access outside every array of the call."""


# ------------------------------------------------------------------ msgpack (only what the metadata note uses)
def _unpack(b: bytes, p: int):
    t = b[p]
    p += 1

    def seq(n, p):
        r = []
        for _ in range(n):
            v, p = _unpack(b, p)
            r.append(v)
        return r, p

    def mp(n, p):
        r = {}
        for _ in range(n):
            k, p = _unpack(b, p)
            v, p = _unpack(b, p)
            r[k] = v
        return r, p

    def st(n, p):
        return b[p : p + n].decode(), p + n

    if t < 0x80:
        return t, p
    if t < 0x90:
        return mp(t & 15, p)
    if t < 0xA0:
        return seq(t & 15, p)
    if t < 0xC0:
        return st(t & 31, p)
    if t >= 0xE0:
        return t - 256, p
    if t in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[t], p
    num = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if t in num:
        return struct.unpack_from(num[t], b, p)[0], p + struct.calcsize(num[t])
    ln = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
    if t not in ln:
        raise ValueError(f"msgpack type {t:#x}")
    n = struct.unpack_from(ln[t], b, p)[0]
    p += struct.calcsize(ln[t])
    if t in (0xD9, 0xDA, 0xDB):
        return st(n, p)
    if t in (0xC4, 0xC5, 0xC6):
        return b[p : p + n], p + n
    return seq(n, p) if t in (0xDC, 0xDD) else mp(n, p)


# ------------------------------------------------------------------ code object
@dataclasses.dataclass
class Descriptor:
    group: int
    private: int
    kernarg: int
    entry: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    props: int
    preload_len: int
    preload_off: int

    @property
    def user_sgprs(self):
        return (self.rsrc2 >> 1) & 0x1F

    @property
    def wave32(self):
        return bool(self.props >> 10 & 1)


class CodeObject:
    """An AMDGPU HSA ELF: symbols, metadata, kernel descriptors, and its image in host memory."""

    def __init__(self, blob: bytes):
        self.blob = b = bytes(blob)
        if b[:24] == b"__CLANG_OFFLOAD_BUNDLE__":
            raise ValueError("offload bundle: compile with --no-gpu-bundle-output")
        if b[:4] != b"\x7fELF":
            raise ValueError("not an ELF")
        (_, self.machine, _, _, phoff, shoff, self.eflags, _, phsz, phn, shsz, shn, _) = struct.unpack_from("<HHIQQQIHHHHHH", b, 16)
        if self.machine != 224:
            raise ValueError(f"not an AMDGPU ELF (machine {self.machine})")
        self.phdrs = [
            struct.unpack_from("<IIQQQQQQ", b, phoff + i * phsz) for i in range(phn)
        ]  # type flags off vaddr paddr filesz memsz align
        sh = [
            struct.unpack_from("<IIQQQQIIQQ", b, shoff + i * shsz) for i in range(shn)
        ]  # name type flags addr off size link info align entsize
        self.symbols, self.relocs, self.meta = {}, [], None
        for s in sh:
            if s[1] in (2, 11):  # SYMTAB, DYNSYM
                st = sh[s[6]]
                for i in range(s[5] // 24):
                    nm, info, other, shndx, val, sz = struct.unpack_from("<IBBHQQ", b, s[4] + i * 24)
                    e = b.index(b"\0", st[4] + nm)
                    name = b[st[4] + nm : e].decode()
                    if name and shndx:
                        self.symbols[name] = (val, sz)
            elif s[1] == 4:  # RELA
                if not (s[2] & 2):
                    continue  # only those to apply at load time
                syt = sh[s[6]]
                sst = sh[syt[6]]
                for i in range(s[5] // 24):
                    off, info, add = struct.unpack_from("<QQq", b, s[4] + i * 24)
                    nm, _, _, shndx, val, _ = struct.unpack_from("<IBBHQQ", b, syt[4] + (info >> 32) * 24)
                    self.relocs.append((off, info & 0xFFFFFFFF, val, add, shndx, b[sst[4] + nm : b.index(b"\0", sst[4] + nm)].decode()))
        for p in self.phdrs:
            if p[0] != 4:
                continue
            o, end = p[2], p[2] + p[5]
            while o + 12 <= end:
                nsz, dsz, ty = struct.unpack_from("<III", b, o)
                o += 12
                name = b[o : o + nsz]
                o += (nsz + 3) & ~3
                if ty == 32 and name.rstrip(b"\0") == b"AMDGPU":
                    self.meta = _unpack(b, o)[0]
                o += (dsz + 3) & ~3
        if self.meta is None:
            raise ValueError("no AMDGPU metadata note")
        self.kernels = {k[".name"]: k for k in self.meta["amdhsa.kernels"]}
        self.gpu = (re.search(r"gfx[0-9a-f]+", self.meta.get("amdhsa.target", "")) or [""])[
            0
        ]  # "amdgcn-amd-amdhsa--gfx942", or "amdgpu9.42-amd-amdhsa-unknown-gfx942" in Triton 3.9
        self._load()

    def _load(self):
        loads = [p for p in self.phdrs if p[0] == 1]
        span = max(p[3] + p[6] for p in loads)
        self.map = mmap.mmap(
            -1, (span + 0xFFF & ~0xFFF) + 0x1000, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        )  # page aligned; a page of slack for the prefetch-like reads of the decoder
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for p in loads:
            self.map[p[3] : p[3] + p[5]] = self.blob[p[2] : p[2] + p[5]]
        for off, ty, val, add, shndx, name in self.relocs:
            if ty != 13 and shndx == 0:
                raise EmuError(f"undefined symbol {name} in a relocation")
            S, P = self.base + val, self.base + off
            fmt, v = {
                13: ("<Q", self.base + add),
                3: ("<Q", S + add),
                1: ("<I", S + add & 0xFFFFFFFF),
                2: ("<I", S + add >> 32),
                6: ("<I", S + add & 0xFFFFFFFF),
                4: ("<I", S + add - P & 0xFFFFFFFF),
                5: ("<Q", S + add - P & (1 << 64) - 1),
                10: ("<I", S + add - P & 0xFFFFFFFF),
                11: ("<I", (S + add - P) >> 32 & 0xFFFFFFFF),
            }.get(ty, (None, None))
            if fmt is None:
                raise EmuError(f"relocation type {ty}")
            struct.pack_into(fmt, self.map, off, v)

    def descriptor(self, kernel: str) -> Descriptor:
        v, _ = self.symbols[self.kernels[kernel][".symbol"]]
        d = bytes(self.map[v : v + 64])
        group, private, kernarg, _, entry = struct.unpack_from("<IIIIq", d, 0)
        rsrc3, rsrc1, rsrc2, props, pre = struct.unpack_from("<IIIHH", d, 44)
        return Descriptor(group, private, kernarg, v + entry, rsrc1, rsrc2, rsrc3, props, pre & 0x7F, pre >> 7)
