"""Clean runs of the CPU backend, none of which may be anything but a pass.

    python tests/validate/clean_runs.py 60 benchmarks/results/validate_cpu_clean.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from faults import validate

from portable_flash.validate import identity


def main(count: int, path: Path) -> int:
    torch.set_num_threads(1)
    runs, began = [], time.process_time()
    for number in range(count):
        seed = number * 71_582_788  # spread over all seeds
        report = validate(level="quick", seed=seed)
        shares = [c.measured / c.limit for c in report.checks if c.group in ("accuracy", "edges") and c.measured is not None and c.limit]
        bad = [[c.id, c.status, c.detail] for c in report.checks if c.status not in ("pass", "skipped")]
        runs.append({"seed": seed, "verdict": report.verdict, "checks": len(report.checks)})
        runs[-1] |= {"largest_share_of_a_limit": round(max(shares), 3)} | ({"not_passed": bad} if bad else {})
        print(runs[-1], flush=True)
    software = identity.software()
    table = {
        "command": f"python tests/validate/clean_runs.py {count} {path}", "level": "quick", "shapes": "small", "device": "cpu",
        "torch": software.torch, "portable_flash": software.portable_flash, "runs": count,
        "false_alarms": sum(run["verdict"] != "pass" for run in runs), "cpu_seconds_a_run": round((time.process_time() - began) / count, 2),
        "each": runs,
    }  # fmt: skip
    path.write_text(json.dumps(table, indent=1) + "\n")
    return int(table["false_alarms"] != 0)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2])))
