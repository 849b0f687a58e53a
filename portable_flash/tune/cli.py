"""The command line of the tuner."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import backends
from ..database import BACKENDS, Blocked, DatabaseError, DeviceRecord, Entry, read
from ..device import Device, all_devices, catalogue, named
from ..dispatch import order
from ..tiling import KERNELS
from ..tuning import _rungs, clear_caches, lookup, triton_version, user_folder
from . import keys as key_module
from .keys import DEFAULT_BUCKETS, DEFAULT_DTYPES, DEFAULT_HEAD_DIMS, DTYPES, KEY_FORM, MASKS, Key, key_set, parse_key
from .writer import Update, WriteError, ensure_writable, path_of, update_file

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 3


class UsageError(ValueError):
    """An argument that cannot be used: names it, its value and what is allowed."""


@dataclass(frozen=True)
class Target:
    """What is tuned: a GPU that is here or one of the catalogue."""

    device: Device
    indices: tuple[int, ...]  # torch indices of the GPUs of this model that are here


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="portable-flash tune", description="Find the fastest tilings for a GPU and keep them in a file of the tuning database.",
        epilog=f"Exit codes: {EXIT_DONE} done, {EXIT_FAILED} failed, {EXIT_USAGE} wrong arguments, {EXIT_STOPPED} stopped early "
        "(go on with --resume).",
    )  # fmt: skip
    p.add_argument("--device", default="auto", help="a GPU's name (h200, mi300x, ...) or auto: the first GPU here")
    what = p.add_argument_group("what is tuned")
    what.add_argument("--backend", choices=BACKENDS, help="default: the one that calls on this GPU would run on")
    what.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    what.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=DEFAULT_DTYPES, metavar="DTYPE", help=", ".join(DTYPES))
    what.add_argument("--head-dims", nargs="+", type=_positive, default=DEFAULT_HEAD_DIMS, metavar="N", help="1 to 256")
    what.add_argument("--seqlens", nargs="+", type=_positive, default=DEFAULT_BUCKETS, metavar="N", help="upper bounds of buckets")
    what.add_argument("--causal", choices=("both", "yes", "no"), default="both")
    what.add_argument("--keys", nargs="+", metavar="KEY", help=f"these keys only: {KEY_FORM}")
    how = p.add_argument_group("how")
    how.add_argument("--offline", action="store_true", help="without the GPU: compile for it, drop what spills, rank by the model")
    how.add_argument("--candidates", type=_positive, metavar="N", help="candidates a key (default 12; offline 6)")
    how.add_argument("--budget", type=_seconds, metavar="SECONDS", help="stop cleanly after this time and keep what is done")
    how.add_argument("--resume", action="store_true", help="go on where the last run to the same --out stopped")
    how.add_argument("--jobs", type=_positive, metavar="N", help="processes that compile (default: cores less two)")
    how.add_argument("--ray", metavar="ADDRESS", help="measure on the GPUs of this model in a Ray cluster (auto, or host:port)")
    how.add_argument("--block", action="store_true", help="write tilings that were wrong, faulted or hung into `blocked`")
    out = p.add_argument_group("output")
    out.add_argument("--out", type=Path, help="folder laid out like tuning_db (default: the user's own, which look-ups read first)")
    out.add_argument("--journal", type=Path, help="file of finished measurements (default: <out>/.tune/<device>.jsonl)")
    out.add_argument("--json", action="store_true", help="print JSON lines")
    look = p.add_argument_group("look, do not measure").add_mutually_exclusive_group()
    look.add_argument("--dry-run", action="store_true", help="what would be tried")
    look.add_argument("--list", action="store_true", help="every key with the tiling that is used now and its source")
    look.add_argument("--stale", action="store_true", help="kernels whose entries are void or stale")
    look.add_argument("--diff", action="store_true", help="how the file in --out differs from the one that ships")
    look.add_argument("--explain", metavar="KEY", help=f"why a key has its tiling: {KEY_FORM}")
    look.add_argument("--verify-quality", type=Path, metavar="FILE", help="measure the search against an exhaustive one; table as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. `argv` defaults to the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments, argv)
    except UsageError as error:
        print(f"portable-flash tune: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (DatabaseError, WriteError, ValueError, RuntimeError) as error:
        print(f"portable-flash tune: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    target = find_target(arguments.device)
    device = target.device
    backend = arguments.backend or default_backend(device)
    if (reason := backends.load(backend).unavailable(device)) is not None:
        raise UsageError(f"--backend {backend}: {reason}")
    keys = _keys(arguments, backend, device)
    out = arguments.out or user_folder()
    if arguments.list:
        return _list(keys, device, arguments.json)
    if arguments.stale:
        return _stale(device, path_of(out, device), arguments.json)
    if arguments.diff:
        return _diff(device, path_of(out, device), arguments.json)
    if arguments.explain:
        return _explain(_key_argument("--explain", arguments.explain), device, arguments.json)
    if arguments.dry_run:
        return _dry_run(keys, device, arguments)
    if arguments.verify_quality:
        return _verify(target, backend, arguments, argv)
    ensure_writable(path_of(out, device))
    if arguments.offline:
        return _offline(keys, device, out, arguments)
    return _measure(keys, target, out, arguments)


# ------------------------------------------------------------------ arguments
def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number of seconds")
    return value


def find_target(name: str) -> Target:
    """The GPU that --device names. Raises UsageError for a name that no file has and for auto without a GPU."""
    gpus = [device for device in all_devices() if device.vendor != "cpu"]
    if name == "auto":
        if not gpus:
            raise UsageError(f"--device auto: torch sees no GPU here; name one of {', '.join(catalogue())} and add --offline")
        return Target(gpus[0], tuple(d.index for d in gpus if d.slug == gpus[0].slug))
    try:
        device = named(name)
    except ValueError as error:
        here = [d for d in gpus if name.lower() in (d.slug, d.name.lower())]
        if not here:
            raise UsageError(f"--device {name}: {error}") from error
        device = here[0]
    if device.vendor == "cpu":
        raise UsageError("--device cpu: the CPU backend has no tilings; name a GPU")
    same = [d for d in gpus if d.slug == device.slug]
    return Target(same[0] if same else device, tuple(d.index for d in same))


def default_backend(device: Device) -> str:
    """The first in the order of dispatch that takes tilings and has a path for this GPU. Raises UsageError."""
    reasons = []
    for name in order(device):
        if name in BACKENDS:
            reason = backends.load(name).unavailable(device)
            if reason is None:
                return name
            reasons.append(f"{name} {reason}")
    raise UsageError(f"--device {device.slug}: no backend with tilings runs there: {'; '.join(reasons)}")


def _keys(arguments: argparse.Namespace, backend: str, device: Device) -> list[Key]:
    if arguments.keys:
        return [_key_argument("--keys", text) for text in arguments.keys]
    if too_wide := [d for d in arguments.head_dims if d > 256]:
        raise UsageError(f"--head-dims {too_wide[0]}: allowed are 1 to 256")
    causal = {"both": (False, True), "yes": (True,), "no": (False,)}[arguments.causal]
    unique = lambda values: tuple(dict.fromkeys(values))
    keys = key_set(backend, unique(arguments.kernels), unique(arguments.dtypes), unique(arguments.head_dims), arguments.seqlens, causal)
    return [k for k in keys if key_module.fits_memory(k, device.memory_bytes)]


def _key_argument(option: str, text: str) -> Key:
    try:
        return parse_key(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


# ------------------------------------------------------------------ looking
def _space(backend: str, kernel: str) -> str:
    return backends.load(backend).space(kernel)


def _now(key: Key, device: Device) -> Any:
    return lookup(key.kernel, key.problem(), device, _space(key.backend, key.kernel), key.backend)


def _list(keys: list[Key], device: Device, as_json: bool) -> int:
    for key in keys:
        plan = _now(key, device)
        if as_json:
            print(json.dumps({"key": str(key), "use": plan.tiling.as_dict(), "source": plan.source}))
        else:
            print(f"{str(key):<48} {plan.tiling}  ({plan.source})")
    return EXIT_DONE


def _records(device: Device, path: Path) -> list[DeviceRecord]:
    shipped = catalogue().get(device.slug)
    return [*([shipped] if shipped else ()), *([read(path)] if path.is_file() else ())]


def _stale(device: Device, path: Path, as_json: bool) -> int:
    """Void: made for other kernels, and skipped. Stale: measured with another Triton, and used. Exit code 0 either way."""
    rows = []
    current = triton_version()
    for record in _records(device, path):
        for backend, by_kernel in record.kernels.items():
            for kernel, found in by_kernel.items():
                space, measured = _space(backend, kernel), record.measured_with.get("triton")
                if found.space not in (None, space):
                    rows.append((record.file, backend, kernel, "void", f"space {found.space}, now {space}"))
                elif backend == "triton" and measured and current and measured.split(".")[:2] != current.split(".")[:2]:
                    rows.append((record.file, backend, kernel, "stale", f"measured with triton {measured}, here is {current}"))
    for row in rows:
        names = ("file", "backend", "kernel", "state", "why")
        print(json.dumps(dict(zip(names, row, strict=True))) if as_json else f"{row[0]}: {row[1]} {row[2]}: {row[3]} ({row[4]})")
    if not rows and not as_json:
        print(f"{device.slug}: nothing is void or stale")
    return EXIT_DONE


def _diff(device: Device, path: Path, as_json: bool) -> int:
    shipped = catalogue().get(device.slug)
    if not path.is_file():
        raise UsageError(f"--diff: {path} does not exist")
    own, changes = read(path), 0
    for backend, kernel in sorted({(b, k) for r in (shipped, own) if r for b, ks in r.kernels.items() for k in ks}):
        before, after = ({e.when: e for e in _entries(record, backend, kernel)} for record in (shipped, own))
        for when in dict.fromkeys((*before, *after)):
            old, new = before.get(when), after.get(when)
            if old is None or new is None or old.use != new.use:
                changes += 1
                kind = "added" if old is None else "removed" if new is None else "changed"
                named_when = " ".join(f"{k}={v}" for k, v in asdict(when).items() if v is not None) or "everything else"
                if as_json:
                    use = {"shipped": old.use.as_dict() if old else None, "own": new.use.as_dict() if new else None}
                    print(json.dumps({"backend": backend, "kernel": kernel, "when": named_when, "change": kind, **use}))
                else:
                    print(f"{kind} {backend}/{kernel} {named_when}\n  - {old.use if old else '-'}\n  + {new.use if new else '-'}")
    if not as_json:
        print(f"{changes} entries differ from the file that ships")
    return EXIT_DONE


def _entries(record: DeviceRecord | None, backend: str, kernel: str) -> tuple[Entry, ...]:
    found = record.kernels.get(backend, {}).get(kernel) if record else None
    return found.entries if found else ()


def _explain(key: Key, device: Device, as_json: bool) -> int:
    from .space import allows, cost, default, shortlist, space

    problem, plan = key.problem(), _now(key, device)
    unit = cost(default(key, device), key.kernel, problem, device)
    rungs = []
    for record, source, _ in _rungs(device):
        found = record.kernels.get(key.backend, {}).get(key.kernel)
        entry = next((e for e in found.entries if e.when(problem)), None) if found else None
        void = found is not None and found.space not in (None, _space(key.backend, key.kernel))
        said = "void: made for other kernels" if void else f"{entry.use}" if entry else "says nothing of this kernel"
        rungs.append({"rung": source, "says": said, "proof": {k: str(v) for k, v in entry.proof.items()} if entry and not void else {}})
    rungs.append({"rung": "rule", "says": str(default(key, device)), "proof": {}})
    model = lambda t: round(cost(t, key.kernel, problem, device) / unit, 3)
    tried = [{"use": str(t), "model": model(t), "fits": allows(key, t, device)} for t in shortlist(key, device)]
    facts = {
        "key": str(key), "device": device.slug, "use": str(plan.tiling), "source": plan.source, "ladder": rungs,
        "space": len(space(key, device)), "candidates": tried,
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts))
        return EXIT_DONE
    print(f"{key} on {device.name}: {plan.tiling}\n  from {plan.source}\n\nWhere it was looked for, in order:")
    for rung in rungs:
        proof = "; ".join(f"{k} {v}" for k, v in rung["proof"].items())
        print(f"  {rung['rung']}: {rung['says']}" + (f"\n    {proof}" if proof else ""))
    print(f"\nWhat a run would try, of {facts['space']} tilings that fit (the model's cost over the default's):")
    for one in tried:
        print(f"  {one['model']:6.2f}  {one['use']}")
    return EXIT_DONE


def _dry_run(keys: list[Key], device: Device, arguments: argparse.Namespace) -> int:
    from .journal import Journal
    from .session import Session

    groups: dict[tuple, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.group, []).append(key)
    session = Session(device, [], Journal(None, {}), count=arguments.candidates or 12)
    compiled = 0
    for same in groups.values():
        chosen = session.candidates(same)
        distinct = list(dict.fromkeys(t for tilings in chosen.values() for t in tilings))
        compiled += len(distinct)
        if arguments.json:
            print(json.dumps({"keys": [str(k) for k in same], "candidates": [t.as_dict() for t in distinct]}))
        else:
            print(f"{same[0]} and {len(same) - 1} longer buckets: {len(distinct)} candidates")
            for tiling in distinct:
                print(f"    {tiling}")
    if not arguments.json:
        print(f"{len(keys)} keys in {len(groups)} groups, at most {compiled} kernels to compile; nothing was measured or written")
    return EXIT_DONE


# ------------------------------------------------------------------ measuring
def _require_present(target: Target, arguments: argparse.Namespace) -> None:
    if target.indices or arguments.ray:
        return
    here = ", ".join(f"{d.name} ({d.slug})" for d in all_devices() if d.vendor != "cpu") or "no GPU"
    raise UsageError(
        f"--device {arguments.device}: this machine has {here}; add --offline to rank tilings for {target.device.slug} without measuring"
    )


def _nodes(target: Target, arguments: argparse.Namespace) -> tuple[list[Any], Any]:
    from .compiling import CompilePool, default_jobs
    from .nodes import LocalNode, ray_nodes

    if arguments.ray:
        return ray_nodes(arguments.ray, target.device.slug, arguments.jobs), None
    executor = CompilePool(arguments.jobs or default_jobs())
    return [LocalNode(index, executor) for index in target.indices], executor


def _measure(keys: list[Key], target: Target, out: Path, arguments: argparse.Namespace) -> int:
    from .display import display
    from .journal import Journal
    from .session import Event, Session, updates_of

    _require_present(target, arguments)
    device = target.device
    path = path_of(out, device)
    spaces = {(k.backend, k.kernel): _space(k.backend, k.kernel) for k in keys}
    journal_path = arguments.journal or out / ".tune" / f"{device.slug}.jsonl"
    identity = {
        "device": device.slug, "arch": device.arch, "spaces": {"/".join(name): value for name, value in sorted(spaces.items())},
        "torch": _torch_version(), "triton": triton_version(),
    }  # fmt: skip
    journal = Journal(journal_path, identity, arguments.resume)
    nodes, executor = _nodes(target, arguments)
    measured_with = software(device)

    def save(outcomes: list[Any]) -> None:
        update_file(path, device, _shipped(device), updates_of(outcomes, spaces, arguments.block), measured_with)

    try:
        with display(len(keys), arguments.budget, arguments.json) as tell:
            session = Session(
                device, nodes, journal, budget_s=arguments.budget, tell=tell, save=save, count=arguments.candidates or 12,
                blocked=_blocked(device),
            )  # fmt: skip
            report = session.run(keys)
            took = f"{report.wall_s:.0f} s, {report.gpu_s:.0f} s of GPU time"
            tell(Event("note", f"{len(report.outcomes)} of {len(keys)} keys in {took}; {path}"))
    finally:
        for node in nodes:
            node.close()
        if executor is not None:
            executor.shutdown()
        clear_caches()
    if arguments.json:
        seconds = {"gpu_s": round(report.gpu_s, 1), "wall_s": round(report.wall_s, 1)}
        counts = {"keys": len(report.outcomes), "left": len(report.left)}
        print(json.dumps({"event": "done", **counts, **seconds, "file": str(path), "stopped": report.stopped}))
    elif report.outcomes:
        print(_summary(report.outcomes), file=sys.stderr)
    if report.left:
        print(f"stopped: {report.stopped}; {len(report.left)} keys are left, go on with --resume", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE if all(o.chosen for o in report.outcomes) else EXIT_FAILED


def _summary(outcomes: Sequence[Any]) -> str:
    """Speed against the default, by kernel."""
    lines = []
    for kernel in dict.fromkeys(o.key.kernel for o in outcomes):
        ratios = sorted(o.speedup for o in outcomes if o.key.kernel == kernel and o.speedup)
        if ratios:
            product = 1.0
            for ratio in ratios:
                product *= ratio
            mean, span = product ** (1 / len(ratios)), f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x"
            lines.append(f"{kernel}: {mean:.3f}x of the default in the geometric mean, {span}, {len(ratios)} keys")
    return "\n".join(lines)


def _blocked(device: Device) -> dict[tuple[str, str], tuple[Blocked, ...]]:
    record = catalogue().get(device.slug)
    return {(b, k): found.blocked for b, ks in record.kernels.items() for k, found in ks.items()} if record else {}


def _verify(target: Target, backend: str, arguments: argparse.Namespace, argv: list[str]) -> int:
    from . import quality
    from .search import Settings

    _require_present(target, arguments)
    keys = [_key_argument("--keys", k) for k in arguments.keys] if arguments.keys else quality.keys_of(backend)
    nodes, executor = _nodes(target, arguments)
    try:
        start = time.monotonic()
        rows = quality.compare(keys, target.device, nodes[0], Settings(), lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        for node in nodes:
            node.close()
        if executor is not None:
            executor.shutdown()
    facts = {"device": target.device.name, "measured_with": {k: str(v) for k, v in software(target.device).items()}}
    passed = quality.write(arguments.verify_quality, rows, argv, facts | {"wall_s": round(time.monotonic() - start, 1)})
    print(f"{arguments.verify_quality}: {'within' if passed else 'NOT within'} the bounds", file=sys.stderr)
    return EXIT_DONE if passed else EXIT_FAILED


# ------------------------------------------------------------------ offline
def _offline(keys: list[Key], device: Device, out: Path, arguments: argparse.Namespace) -> int:
    from . import offline
    from .compiling import default_jobs, pool

    def say(text: str) -> None:
        stream = sys.stdout if arguments.json else sys.stderr
        print(json.dumps({"event": "note", "text": text}) if arguments.json else text, file=stream, flush=True)

    deadline = None if arguments.budget is None else time.monotonic() + arguments.budget
    with pool(arguments.jobs or default_jobs()) as executor:
        ranked = offline.rank(keys, device, executor, arguments.candidates or offline.COUNT, deadline, say)
    found = offline.entries(ranked)
    updates = [Update(b, k, _space(b, k), tuple(entries)) for (b, k), entries in sorted(found.items())]
    path = path_of(out, device)
    update_file(path, device, _shipped(device), updates, None)
    clear_caches()
    say(f"{sum(len(u.entries) for u in updates)} static entries in {path}")
    return EXIT_DONE


def _shipped(device: Device) -> str | None:
    """Text of the device's file in the catalogue."""
    from importlib import resources

    record = catalogue().get(device.slug)
    if record is None:
        return None
    return (resources.files("portable_flash.tuning_db") / record.file).read_text(encoding="utf-8")


# ------------------------------------------------------------------ what it was measured with
def _torch_version() -> str:
    import torch

    return torch.__version__


def software(device: Device) -> dict[str, Any]:
    """The `measured_with` of a file: versions, driver, date and power cap, as far as this machine tells them."""
    import torch

    runtime = f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}" if torch.version.cuda else None
    try:
        version = metadata.version("portable-flash")
    except metadata.PackageNotFoundError:
        version = None
    facts: dict[str, Any] = {
        "portable_flash": version, "torch": torch.__version__.split("+")[0], "triton": triton_version(), "runtime": runtime,
        "date": datetime.date.today(),
    }  # fmt: skip
    if device.vendor == "nvidia" and device.index is not None:
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits", f"--id={device.index}"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().split(", ")
            facts |= {"driver": answer[0], "clocks": "default", "power_cap_w": round(float(answer[1]))}
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            pass  # not told: left out
    return {name: value for name, value in facts.items() if value is not None}
