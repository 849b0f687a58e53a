"""The options of the tuner that look and measure nothing: what is used now and why, what is void, what would be tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import backends
from ..database import DeviceRecord, read
from ..device import Device, catalogue
from ..tiling import Tiling
from ..tuning import _rungs, lookup, triton_version
from .keys import Key
from .space import JOINING, SHORTLIST, allows, cost, default, shortlist, space


def space_of(backend: str, kernel: str) -> str:
    """Hash of the kernel's code here."""
    return backends.load(backend).space(kernel)


def _now(key: Key, device: Device) -> Any:
    return lookup(key.kernel, key.problem(), device, space_of(key.backend, key.kernel), key.backend)


def show_list(keys: list[Key], device: Device, as_json: bool) -> None:
    for key in keys:
        plan = _now(key, device)
        if as_json:
            print(json.dumps({"key": str(key), "use": plan.tiling.as_dict(), "source": plan.source}))
        else:
            print(f"{str(key):<48} {plan.tiling}  ({plan.source})")


def _records(device: Device, path: Path) -> list[DeviceRecord]:
    shipped = catalogue().get(device.slug)
    return [*([shipped] if shipped else ()), *([read(path)] if path.is_file() else ())]


def show_stale(device: Device, path: Path, as_json: bool) -> None:
    """Void: made for other kernels, and skipped. Stale: measured with another Triton, and used. Exit code 0 either way."""
    rows = []
    current = triton_version()
    for record in _records(device, path):
        for backend, by_kernel in record.kernels.items():
            for kernel, found in by_kernel.items():
                space, measured = space_of(backend, kernel), record.measured_with.get("triton")
                if found.space not in (None, space):
                    rows.append((record.file, backend, kernel, "void", f"space {found.space}, now {space}"))
                elif backend == "triton" and measured and current and measured.split(".")[:2] != current.split(".")[:2]:
                    rows.append((record.file, backend, kernel, "stale", f"measured with triton {measured}, here is {current}"))
    for row in rows:
        names = ("file", "backend", "kernel", "state", "why")
        print(json.dumps(dict(zip(names, row, strict=True))) if as_json else f"{row[0]}: {row[1]} {row[2]}: {row[3]} ({row[4]})")
    if not rows and not as_json:
        print(f"{device.slug}: nothing is void or stale")


def show_diff(keys: list[Key], device: Device, path: Path, as_json: bool) -> None:
    """Which keys get another tiling from the file at `path` than from the one that ships."""
    shipped, own, changes = catalogue().get(device.slug), read(path), 0
    for key in keys:
        before, after = (_use(record, key) for record in (shipped, own))
        if before == after:
            continue
        changes += 1
        if as_json:
            uses = {"shipped": before.as_dict() if before else None, "own": after.as_dict() if after else None}
            print(json.dumps({"key": str(key), **uses}))
        else:
            print(f"{key}\n  - {before or 'nothing'}\n  + {after or 'nothing'}")
    if not as_json:
        print(f"{changes} of {len(keys)} keys differ from the file that ships")


def _use(record: DeviceRecord | None, key: Key) -> Tiling | None:
    found = record.kernels.get(key.backend, {}).get(key.kernel) if record else None
    return next((e.use for e in found.entries if e.when(key.problem())), None) if found else None


def show_explain(key: Key, device: Device, as_json: bool) -> None:
    problem, plan = key.problem(), _now(key, device)
    unit = cost(default(key, device), key.kernel, problem, device)
    rungs = []
    for record, source, _ in _rungs(device):
        found = record.kernels.get(key.backend, {}).get(key.kernel)
        entry = next((e for e in found.entries if e.when(problem)), None) if found else None
        void = found is not None and found.space not in (None, space_of(key.backend, key.kernel))
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
        return
        print(f"{key} on {device.name}: {plan.tiling}\n  from {plan.source}\n\nWhere it was looked for, in order:")
    for rung in rungs:
        proof = "; ".join(f"{k} {v}" for k, v in rung["proof"].items())
        print(f"  {rung['rung']}: {rung['says']}" + (f"\n    {proof}" if proof else ""))
    print(f"\nWhat a run would try, of {facts['space']} tilings that fit (the model's cost over the default's):")
    for one in tried:
        print(f"  {one['model']:6.2f}  {one['use']}")


def show_dry_run(keys: list[Key], device: Device, count: int | None, as_json: bool) -> None:
    from .journal import Journal
    from .session import Session

    groups: dict[tuple, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.group, []).append(key)
    session = Session(device, [], Journal(None, {}), count=count or SHORTLIST)
    compiled = 0
    for same in groups.values():
        chosen = session.candidates(same)
        distinct = list(dict.fromkeys(t for tilings in chosen.values() for t in tilings))
        compiled += len(distinct)
        if as_json:
            print(json.dumps({"keys": [str(k) for k in same], "candidates": [t.as_dict() for t in distinct]}))
            continue
        print(f"{same[0]} and {len(same) - 1} longer buckets: {len(distinct)} candidates")
        for tiling in distinct:
            print(f"    {tiling}")
    if not as_json:
        print(f"{len(keys)} keys in {len(groups)} groups, {compiled} kernels to compile, and up to {JOINING} neighbours of the fastest for"
              " each key; nothing was measured or written")  # fmt: skip
