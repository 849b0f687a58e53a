"""The options of the tuner that write: measure, rank without the GPU, make the file again from a journal, compare with a full search."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from ..database import Blocked
from ..device import Device, all_devices, catalogue
from ..tiling import KERNELS
from ..tuning import clear_caches, triton_version
from .keys import Key
from .looking import space_of
from .space import SHORTLIST
from .writer import Update, path_of, update_file

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 3


class UsageError(ValueError):
    """An argument that cannot be used: names it, its value and what is allowed."""


@dataclass(frozen=True)
class Target:
    """What is tuned: a GPU that is here or one of the catalogue."""

    device: Device
    indices: tuple[int, ...]  # torch indices of the GPUs of this model that are here


def _require_present(target: Target, arguments: argparse.Namespace) -> None:
    if target.indices or arguments.ray:
        return
    here = ", ".join(f"{d.name} ({d.slug})" for d in all_devices() if d.vendor != "cpu") or "no GPU"
    raise UsageError(
        f"--device {arguments.device}: this machine has {here}; add --offline to rank tilings for {target.device.slug} without measuring"
    )


def nodes_of(target: Target, arguments: argparse.Namespace) -> tuple[list[Any], Any]:
    """What measures, and the pool that compiles for it where that is one of this process."""
    from .compiling import CompilePool, default_jobs
    from .nodes import LocalNode, ray_nodes

    if arguments.ray:
        return ray_nodes(arguments.ray, target.device.slug, arguments.jobs), None
    executor = CompilePool(arguments.jobs or default_jobs())
    return [LocalNode(index, executor) for index in target.indices], executor


def measure(keys: list[Key], target: Target, out: Path, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure the keys and keep what was found. Returns the exit code."""
    from .display import display
    from .journal import Journal
    from .outcomes import updates_of
    from .session import Event, Session

    _require_present(target, arguments)
    device = target.device
    path, spaces = path_of(out, device), _spaces(keys)
    about = software(device)
    journal = Journal(_journal_path(out, device, arguments), _identity(device, spaces), arguments.resume, about)
    nodes, executor = nodes_of(target, arguments)

    def save(outcomes: list[Any]) -> None:
        update_file(path, device, shipped_text(device), updates_of(outcomes, spaces, arguments.block), about)

    try:
        with display(len(keys), arguments.budget, arguments.json) as tell:
            session = Session(
                device, nodes, journal, budget_s=arguments.budget, tell=tell, save=save, count=arguments.candidates or SHORTLIST,
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
    times = {"wall_s": round(report.wall_s, 1), "gpu_s": round(report.gpu_s, 1)}
    if arguments.json:
        counts = {"keys": len(report.outcomes), "left": len(report.left)}
        print(json.dumps({"event": "done", **counts, **times, "file": str(path), "stopped": report.stopped}))
    _show(report.outcomes, device, arguments, argv, {"measured_with": about, **times})
    if report.left:
        print(f"stopped: {report.stopped}; {len(report.left)} keys are left, go on with --resume", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE if all(o.chosen for o in report.outcomes) else EXIT_FAILED


def rebuild(keys: list[Key], target: Target, out: Path, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Write the file, the table and the plot again from a journal: nothing is measured. Returns the exit code."""
    from .journal import JournalError, reopen
    from .outcomes import from_journal, updates_of
    from .search import Settings

    device, path, spaces = target.device, path_of(out, target.device), _spaces(keys)
    journal, identity, about = reopen(_journal_path(out, device, arguments))
    if "date" in about:
        about["date"] = datetime.date.fromisoformat(about["date"])
    recorded = {tuple(name.split("/")): space for name, space in identity.get("spaces", {}).items()}
    if identity.get("device") != device.slug:
        raise JournalError(f"journal {journal.path}: is of {identity.get('device')}, not of {device.slug}")
    wanted = set(keys)
    outcomes = [o for o in from_journal(journal, device, Settings()) if o.key in wanted]
    kernels = {(o.key.backend, o.key.kernel) for o in outcomes}
    if old := sorted(name[1] for name in kernels if recorded.get(name) != spaces[name]):
        raise JournalError(f"journal {journal.path}: was made with another {', '.join(old)}")
    update_file(path, device, shipped_text(device), updates_of(outcomes, spaces, arguments.block), about)
    clear_caches()
    print(f"{len(outcomes)} keys in {path}", file=sys.stderr)
    _show(outcomes, device, arguments, argv, {"measured_with": about})
    return EXIT_DONE


def _show(outcomes: list[Any], device: Device, arguments: argparse.Namespace, argv: Sequence[str], about: Mapping[str, Any]) -> None:
    from .outcomes import summary, write_table

    if arguments.table:
        write_table(arguments.table, outcomes, argv, {"device": device.name, **about})
    if arguments.plot:
        from .plot import plot

        plot(outcomes, device, arguments.plot)
    for kernel, s in summary(outcomes).items() if not arguments.json else ():
        span = f"{s['least']:.2f}x to {s['most']:.2f}x, {s['keys']} keys"
        print(f"{kernel}: {s['mean']:.3f}x of the default in the geometric mean, {span}", file=sys.stderr)


def _spaces(keys: list[Key]) -> dict[tuple[str, str], str]:
    return {(k.backend, k.kernel): space_of(k.backend, k.kernel) for k in keys}


def _journal_path(out: Path, device: Device, arguments: argparse.Namespace) -> Path:
    return arguments.journal or out / ".tune" / f"{device.slug}.journal"


def _identity(device: Device, spaces: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    import torch

    every = sorted({(backend, kernel) for backend, _ in spaces for kernel in KERNELS})  # whichever of them this run is for
    by_name = {f"{backend}/{kernel}": space_of(backend, kernel) for backend, kernel in every}
    return {"device": device.slug, "arch": device.arch, "spaces": by_name, "torch": torch.__version__, "triton": triton_version()}


def _blocked(device: Device) -> dict[tuple[str, str], tuple[Blocked, ...]]:
    record = catalogue().get(device.slug)
    return {(b, k): found.blocked for b, ks in record.kernels.items() for k, found in ks.items()} if record else {}


def verify(keys: list[Key] | None, target: Target, backend: str, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure the search itself. Returns the exit code."""
    from . import quality
    from .search import Settings

    _require_present(target, arguments)
    nodes, executor = nodes_of(target, arguments)
    start = time.monotonic()
    try:
        say = lambda text: print(text, file=sys.stderr, flush=True)
        rows = quality.compare(keys or quality.keys_of(backend), target.device, nodes[0], Settings(), say)
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
def rank_offline(keys: list[Key], device: Device, out: Path, arguments: argparse.Namespace) -> int:
    """Static entries for a GPU that need not be here. Returns the exit code."""
    from . import offline
    from .compiling import default_jobs, pool

    def say(text: str) -> None:
        stream = sys.stdout if arguments.json else sys.stderr
        print(json.dumps({"event": "note", "text": text}) if arguments.json else text, file=stream, flush=True)

    deadline = None if arguments.budget is None else time.monotonic() + arguments.budget
    with pool(arguments.jobs or default_jobs()) as executor:
        ranked = offline.rank(keys, device, executor, arguments.candidates or offline.COUNT, deadline, say)
    found = offline.entries(ranked)
    updates = [Update(b, k, space_of(b, k), tuple(entries)) for (b, k), entries in sorted(found.items())]
    path = path_of(out, device)
    update_file(path, device, shipped_text(device), updates, None)
    clear_caches()
    done = {key for one in ranked for key in one.keys}
    left = [key for key in keys if key not in done]
    say(f"{sum(len(u.entries) for u in updates)} static entries of this run are in {path}")
    if left:
        say(f"{len(left)} of {len(keys)} keys are left; narrow the next run with --kernels, --head-dims or --dtypes")
    return EXIT_STOPPED if left else EXIT_DONE


def shipped_text(device: Device) -> str | None:
    """Text of the device's file in the catalogue."""
    record = catalogue().get(device.slug)
    return None if record is None else (resources.files("portable_flash.tuning_db") / record.file).read_text(encoding="utf-8")


# ------------------------------------------------------------------ what it was measured with
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
