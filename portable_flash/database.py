"""Read one file of the tuning database and check it, so that a mistake is reported with its file, line and field.

The YAML is read with the safe loader after a pass over its events that bounds depth and refuses tags, anchors and
aliases: a database file is plain data, whoever wrote it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .tiling import KERNELS, Tiling

if TYPE_CHECKING:
    from .problem import Problem

SCHEMA = 1
MAX_BYTES = 1 << 20  # a database file is a page or two; anything larger is not one
MAX_DEPTH = 16
VENDORS = ("nvidia", "amd")
DTYPES = ("fp16", "bf16", "fp32", "fp64")
BACKENDS = ("triton", "hip")  # whose kernels take tilings
SOURCES = ("measured", "static", "reported")


class DatabaseError(ValueError):
    """A database file that cannot be used: names the file, the line, the field and what is allowed."""


@dataclass(frozen=True)
class When:
    """Conditions on a Problem; None does not restrict. Sizes are upper bounds (inclusive)."""

    dtype: tuple[str, ...] | None = None
    head_dim_le: int | None = None
    head_dim_v_le: int | None = None
    seqlen_q_le: int | None = None
    seqlen_k_le: int | None = None
    causal: bool | None = None
    varlen: bool | None = None
    mask_or_bias: bool | None = None

    def __call__(self, problem: Problem) -> bool:
        for name in ("head_dim", "head_dim_v", "seqlen_q", "seqlen_k"):
            bound = getattr(self, f"{name}_le")
            if bound is not None and getattr(problem, name) > bound:
                return False
        return (
            (self.dtype is None or problem.dtype_name in self.dtype)
            and (self.causal is None or problem.causal == self.causal)
            and (self.varlen is None or problem.varlen == self.varlen)
            and (self.mask_or_bias is None or (problem.mask or problem.bias) == self.mask_or_bias)
        )


@dataclass(frozen=True)
class Entry:
    """A tiling, the problems that it is for, and the evidence for it."""

    when: When
    use: Tiling
    proof: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Blocked:
    """Tilings that must not be used on this device: all that agree with every field given."""

    use: Mapping[str, Any]
    reason: str
    issue: str | None = None

    def __call__(self, tiling: Tiling) -> bool:
        return all(getattr(tiling, name) == value for name, value in self.use.items())


@dataclass(frozen=True)
class KernelRecord:
    """What a file says of one kernel."""

    entries: tuple[Entry, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    space: str | None = None  # hash of the kernel's source and of Tiling's fields when the entries were made


@dataclass(frozen=True)
class DeviceRecord:
    """One file of the database: how to know a GPU model, its facts, and its tilings."""

    file: str
    slug: str
    vendor: str
    arch: str
    aliases: tuple[str, ...]
    pci_ids: tuple[str, ...]
    compute_units: int
    limits: Mapping[str, int | float]  # wave_size, shared_memory_bytes, memory_gb (GiB), l2_bytes; xcds, registers_per_thread
    inherits: str | None
    measured_with: Mapping[str, Any]
    kernels: Mapping[str, Mapping[str, KernelRecord]]  # by backend, then by kernel


class _Later(Mapping):
    """The `kernels` of a file whose entries are read when they are first asked for."""

    def __init__(self, load: Callable[[], Mapping[str, Mapping[str, KernelRecord]]]):
        self._load = load

    @functools.cached_property
    def _found(self) -> Mapping[str, Mapping[str, KernelRecord]]:
        return self._load()

    def __getitem__(self, backend: str) -> Mapping[str, KernelRecord]:
        return self._found[backend]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def read(path: Path | Any, label: str | None = None, kernels_later: bool = False) -> DeviceRecord:
    """Read and check one file. `path` is a Path or an importlib.resources Traversable; `label` is its name in messages.

    kernels_later: the file's last part, from the line `kernels:`, is read and checked when `kernels` is first used. It is nearly
    all of a file, and of the catalogue only the file of the device at hand needs it.
    """
    label = label or str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise DatabaseError(f"{label}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise DatabaseError(f"{label}: larger than {MAX_BYTES} bytes, so it is no database file")
    if kernels_later and (start := re.search(rb"^kernels:", data, re.MULTILINE)):
        return replace(parse(data[: start.start()], label), kernels=_Later(lambda: parse(data, label).kernels))
    return parse(data, label)


def parse(data: bytes | str, label: str) -> DeviceRecord:
    """Check the text of one file. Raises DatabaseError."""
    root = _compose(data, label)
    top = root.mapping({"schema", "device", "measured_with", "kernels"}, required={"schema", "device"})
    top["schema"].one_of(SCHEMA)
    device = top["device"].mapping(
        {"slug", "vendor", "arch", "aliases", "match", "limits", "inherits", "sources"},
        required={"slug", "vendor", "arch", "match", "limits"},
    )
    match = device["match"].mapping({"pci_ids", "compute_units"}, required={"compute_units"})
    limits = device["limits"].mapping(
        {"wave_size", "shared_memory_bytes", "memory_gb", "l2_bytes", "xcds", "registers_per_thread"},
        required={"wave_size", "shared_memory_bytes", "memory_gb", "l2_bytes"},
    )
    kernels = _kernels(top["kernels"]) if "kernels" in top else {}
    measured = {k: v.scalar() for k, v in top["measured_with"].mapping().items()} if "measured_with" in top else {}
    for name in ("portable_flash", "torch", "triton", "runtime", "driver"):
        if not isinstance(measured.get(name, ""), str):
            top["measured_with"].fail(f"{name} must be quoted text (unquoted, 3.10 reads as the number 3.1)")
    if "sources" in device:
        device["sources"].texts()
    return DeviceRecord(
        file=label,
        slug=device["slug"].text(),
        vendor=device["vendor"].one_of(*VENDORS),
        arch=device["arch"].text(),
        aliases=device["aliases"].texts() if "aliases" in device else (),
        pci_ids=tuple(item.pci_id() for item in match["pci_ids"].items()) if "pci_ids" in match else (),
        compute_units=match["compute_units"].integer(1),
        limits=MappingProxyType({k: v.number() if k == "memory_gb" else v.integer(1) for k, v in limits.items()}),
        inherits=device["inherits"].text(optional=True) if "inherits" in device else None,
        measured_with=MappingProxyType(measured),
        kernels=MappingProxyType(kernels),
    )


def _kernels(cursor: _Cursor) -> dict[str, Mapping[str, KernelRecord]]:
    """Tilings by backend, then by kernel: what is best for one backend's code says little about another's."""
    given = cursor.mapping()
    for name, child in given.items():
        if name in KERNELS:  # files had one backend once
            child.fail(f"tilings belong to a backend: put {name} below kernels.triton (or {', '.join(BACKENDS[1:])})")
    return {
        backend: MappingProxyType({name: _kernel(child) for name, child in kernels.mapping(set(KERNELS)).items()})
        for backend, kernels in cursor.mapping(set(BACKENDS)).items()
    }


def _kernel(cursor: _Cursor) -> KernelRecord:
    parts = cursor.mapping({"space", "entries", "blocked"})
    items = parts["entries"].items() if "entries" in parts else []
    entries = tuple(_entry(item) for item in items)
    if entries and entries[-1].when != When():
        items[-1].fail("the last entry must match every problem: when: {}")
    for item, entry in zip(items[:-1], entries[:-1], strict=True):
        if entry.when == When():
            item.fail("matches every problem, so the entries after it are never used")
    return KernelRecord(
        entries=entries,
        blocked=tuple(_blocked(item) for item in parts["blocked"].items()) if "blocked" in parts else (),
        space=parts["space"].text(optional=True) if "space" in parts else None,
    )


def _entry(cursor: _Cursor) -> Entry:
    parts = cursor.mapping({"when", "use", "proof"}, required={"when", "use"})
    when: dict[str, Any] = {}
    for name, value in parts["when"].mapping({f.name for f in fields(When)}).items():
        if name == "dtype":
            when[name] = tuple(item.one_of(*DTYPES) for item in value.items(or_one=True))
        else:
            when[name] = value.integer(0) if name.endswith("_le") else value.boolean()
    proof = parts["proof"].mapping(required={"source"}) if "proof" in parts else {}
    if proof:
        proof["source"].one_of(*SOURCES)
    use = _tiling_fields(parts["use"])
    try:
        tiling = Tiling(**use)
    except (TypeError, ValueError) as error:
        parts["use"].fail(str(error).replace("Tiling.__init__() ", ""))
    return Entry(When(**when), tiling, MappingProxyType({k: v.scalar() for k, v in proof.items()}))


def _blocked(cursor: _Cursor) -> Blocked:
    parts = cursor.mapping({"use", "reason", "issue"}, required={"use", "reason"})
    use = _tiling_fields(parts["use"])
    if not use:
        parts["use"].fail("names no field, so it would block every tiling")
    return Blocked(MappingProxyType(use), parts["reason"].text(), parts["issue"].text(optional=True) if "issue" in parts else None)


def _tiling_fields(cursor: _Cursor) -> dict[str, Any]:
    kinds = {f.name: f.type for f in fields(Tiling)}
    given = cursor.mapping(set(kinds))
    return {name: value.boolean() if kinds[name] == "bool" else value.integer(0) for name, value in given.items()}


# ------------------------------------------------------------------ YAML with positions
def _compose(data: bytes | str, label: str) -> _Cursor:
    import yaml  # here, so that importing the package does not pay for it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(data, Loader=loader):  # iterative, so that no depth can exhaust the stack
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise DatabaseError(f"{label}:{line}: anchors and aliases are not allowed")
            if getattr(event, "tag", None) is not None:
                raise DatabaseError(f"{label}:{line}: tag {event.tag!r}: tags are not allowed")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise DatabaseError(f"{label}:{line}: nested deeper than {MAX_DEPTH}")
        node = yaml.compose(data, Loader=loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{label}:{mark.line + 1}" if mark else label
        raise DatabaseError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if node is None:
        raise DatabaseError(f"{label}: empty")
    return _Cursor(node, "", label, yaml.constructor.SafeConstructor())


class _Cursor:
    """A YAML node that knows its line and field path, and turns itself into checked Python values."""

    def __init__(self, node: Any, path: str, label: str, constructor: Any):
        self.node, self.path, self.label, self.constructor = node, path, label, constructor

    def fail(self, message: str) -> None:
        path = f" {self.path}:" if self.path else ""
        raise DatabaseError(f"{self.label}:{self.node.start_mark.line + 1}:{path} {message}")

    def _child(self, node: Any, step: str) -> _Cursor:
        dot = "." if self.path and not step.startswith("[") else ""
        return _Cursor(node, f"{self.path}{dot}{step}", self.label, self.constructor)

    def mapping(self, allowed: set[str] | None = None, required: set[str] = frozenset()) -> dict[str, _Cursor]:
        """Children by key, in order; `allowed` None means any key."""
        if self.node.id != "mapping":
            self.fail("must be a mapping")
        out: dict[str, _Cursor] = {}
        for key, value in self.node.value:
            name = key.value if key.id == "scalar" else "?"
            child = self._child(value, name)
            if allowed is not None and name not in allowed:
                child.fail(f"unknown field; allowed are {', '.join(sorted(allowed))}")
            if name in out:
                child.fail("given twice")
            out[name] = child
        if missing := sorted(required - out.keys()):
            self.fail(f"lacks {', '.join(missing)}")
        return out

    def items(self, or_one: bool = False) -> list[_Cursor]:
        if self.node.id == "sequence":
            return [self._child(node, f"[{i}]") for i, node in enumerate(self.node.value)]
        if not or_one:
            self.fail("must be a list")
        return [self]

    def scalar(self) -> Any:
        if self.node.id != "scalar":
            self.fail("must be a single value")
        try:
            return self.constructor.construct_object(self.node)
        except Exception as error:  # e.g. a date like 2026-13-45, which the resolver accepts and datetime refuses
            self.fail(f"{self.node.value!r}: {error}")

    def _typed(self, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.scalar()
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(f"must be {what}, got {value!r}")
        return value

    def text(self, optional: bool = False) -> str | None:
        if optional and self.scalar() is None:
            return None
        return self._typed(str, "text (quote it)")

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items())

    def boolean(self) -> bool:
        return self._typed(bool, "true or false")

    def integer(self, low: int) -> int:
        value = self._typed(int, f"an integer of at least {low}")
        if value < low:
            self.fail(f"must be an integer of at least {low}, got {value}")
        return value

    def number(self) -> int | float:
        value = self._typed((int, float), "a positive number")
        if not 0 < value < float("inf"):
            self.fail(f"must be a positive number, got {value}")
        return value

    def one_of(self, *allowed: Any) -> Any:
        value = self.scalar()
        if value not in allowed or isinstance(value, bool):
            self.fail(f"{value!r}: allowed are {', '.join(map(str, allowed))}")
        return value

    def pci_id(self) -> str:
        value = self.text()
        vendor, _, device = value.partition(":")
        if not all(len(part) == 4 and set(part) <= set("0123456789abcdef") for part in (vendor, device)):
            self.fail(f"{value!r}: must be vendor:device in lower-case hexadecimal, as in \"10de:2335\"")
        return value
