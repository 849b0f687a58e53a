"""How good the search is: on a few keys, against an exhaustive search of the same space and against the default."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..device import Device
from .compiling import Job
from .journal import Journal
from .keys import DEFAULT_BUCKETS, Key, parse_key
from .search import Found, Recorded, Settings, search
from .nodes import Node
from .session import Session
from .space import default, space

KEYS = (
    "triton/forward/bf16/d64/full/s512", "triton/forward/bf16/d128/causal/s4096", "triton/backward_dkv/bf16/d128/full/s2048",
    "triton/backward_dkv/fp16/d64/causal/s8192", "triton/backward_dq/bf16/d192/causal/s1024", "triton/backward_dq/fp16/d128/full/s16384",
)  # fmt: skip
WITHIN = 1.03
GPU_SHARE = 0.25
COUNTED = (
    "wall time of launches, checks and timings, each way in a process of its own that has checked and timed another key of the same "
    "kernel and dtype before; compiling, process start, that other key, inputs and oracle are left out of both"
)


def keys_of(backend: str) -> list[Key]:
    return [parse_key(text.replace("triton/", f"{backend}/", 1)) for text in KEYS]


def compare(keys: Iterable[Key], device: Device, node: Node, settings: Settings, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each key. slower_than_best is the median of the search's choice over the best's, both of the exhaustive search's
    final rounds.

    GPU time is what COUNTED says. Each way gets a process of its own for all keys, so that neither finds code loaded by the other.
    Before a key that process checks and times the default of another one, so that what a process needs once is in neither's time.
    """
    plan = Session(device, [], Journal(None, {}), settings=settings)
    waiting = []
    for key in keys:
        few = plan.candidates([key])[key]
        every = tuple(dict.fromkeys((*few, *space(key, device))))  # what the database knows may lie outside of the space
        other = another(key)
        jobs = [Job(key.backend, key.kernel, key.problem(), t, device) for t in every]
        warm = Job(other.backend, other.kernel, other.problem(), default(other, device), device)
        waiting.append((key, few, every, node.compile([*jobs, *plan.support([key]), warm, *plan.support([other])])))
    rows: list[dict[str, Any]] = []
    quick: dict[Key, Found] = {}
    for exhaustive in (False, True):
        node.worker.close()
        for key, few, every, futures in waiting:
            wait(futures)
            failed = {t for t, f in zip(every, futures, strict=False) if not f.result().ok}
            near = lambda leaders, key=key, few=few: plan.joining({key: leaders}, {key: few})[key]
            joins = lambda leaders, near=near, failed=failed: [t for t in near(leaders) if t not in failed]
            _warm_up(node, another(key), device, settings)
            candidates = [t for t in (every if exhaustive else few) if t not in failed]
            ask = Recorded(node.worker, Journal(None, {}), settings)
            found = search(key, candidates, ask, settings, exhaustive, joins)
            if not exhaustive:
                quick[key] = found
                continue
            rows.append(_row(key, quick[key], found, len(space(key, device)), len(failed)))
            tell(json.dumps(rows[-1]))
    return rows


def another(key: Key) -> Key:
    """A short key of the same kernel and dtype whose compiled code is other."""
    return replace(key, head_dim=128 if key.head_dim <= 64 else 64, seqlen=min(DEFAULT_BUCKETS))


def _warm_up(node: Node, key: Key, device: Device, settings: Settings) -> None:
    """A context, libraries, what Triton and the oracle load at their first use."""
    tiling = default(key, device)
    for method, arguments in (("check", (tiling,)), ("check", (tiling,)), ("time", ((tiling,), 2, 0.001))):
        node.worker.call(method, key, *arguments, timeout_s=settings.prepare_timeout_s)


def _row(key: Key, quick: Found, slow: Found, size: int, failed: int) -> dict[str, Any]:
    """Raises RuntimeError where one of both found nothing right."""
    if quick.best is None or slow.best is None or quick.best.tiling not in slow.finals:
        way = "the search" if quick.best is None else "the exhaustive search"
        raise RuntimeError(f"{key}: {way} has no result: {[(str(r.tiling), r.kind, r.reason) for r in (*quick.rejected, *slow.rejected)]}")
    times = {tiling: one.median_us for tiling, one in slow.finals.items()}
    fastest = min((t.tiling for t in slow.ranking), key=times.get)
    chosen, default = quick.best.tiling, slow.default
    return {
        "key": str(key), "space": size, "not_compiled": failed, "tried_by_search": quick.tried, "tried_exhaustively": slow.tried,
        "chosen": chosen.as_dict(), "chosen_us": times[chosen], "best": fastest.as_dict(), "best_us": times[fastest],
        "slower_than_best": round(times[chosen] / times[fastest], 4), "default_us": default.median_us if default else None,
        "speedup_over_default": round(default.median_us / times[chosen], 4) if default else None,
        "search_gpu_s": round(quick.gpu_s, 3), "exhaustive_gpu_s": round(slow.gpu_s, 3),
        "gpu_share": round(quick.gpu_s / slow.gpu_s, 4) if slow.gpu_s else None,
        "rejected": [{"use": r.tiling.as_dict(), "kind": r.kind, "reason": r.reason} for r in slow.rejected],
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]], argv: list[str], identity: dict[str, Any]) -> bool:
    """The table with the command that made it; returns whether every row is within the bounds stated here."""
    speedups = [row["speedup_over_default"] for row in rows if row["speedup_over_default"]]
    passed = all(row["slower_than_best"] <= WITHIN and row["gpu_share"] <= GPU_SHARE for row in rows)
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None
    shares = [sum(row[f"{way}_gpu_s"] for row in rows) for way in ("search", "exhaustive")]
    table = {
        "command": shlex.join(["portable-flash", "tune", *argv]), **identity, "within": WITHIN, "gpu_share_at_most": GPU_SHARE,
        "gpu_s_counts": COUNTED, "passed": passed, "gpu_share_of_all": round(shares[0] / shares[1], 4) if shares[1] else None,
        "speedup_over_default_mean": round(mean, 4) if mean else None, "rows": rows,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    return passed
