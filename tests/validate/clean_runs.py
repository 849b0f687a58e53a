"""Clean runs, none of which may be anything but a pass: of the CPU backend at small shapes, or of a GPU at its own.

    python tests/validate/clean_runs.py 60 benchmarks/results/validate_cpu_clean.json
    python tests/validate/clean_runs.py 20 benchmarks/results/validate_h200_clean.json cuda
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import torch
from faults import validate

from portable_flash.device import detect
from portable_flash.validate import identity


def main(count: int, path: Path, device: str = "cpu") -> int:
    small, software = device == "cpu", identity.software()
    if small:
        torch.set_num_threads(1)
    runs, began, began_cpu = [], time.monotonic(), time.process_time()
    for number in range(count):
        seed = number * 71_582_788  # spread over all seeds
        report = validate(level="quick", seed=seed, small=small, devices=[detect(device)]).devices[0]
        shares = [c.measured / c.limit for c in report.checks if c.group in ("accuracy", "edges") and c.measured is not None and c.limit]
        bad = [[c.id, c.status, c.detail] for c in report.checks if c.status not in ("pass", "skipped")]
        runs.append({"seed": seed, "verdict": report.verdict, "checks": len(report.checks)})
        runs[-1] |= {"largest_share_of_a_limit": round(max(shares), 3)} | ({"not_passed": bad} if bad else {})
        print(runs[-1], flush=True)
        table = {
            "command": shlex.join(["python", "tests/validate/clean_runs.py", str(count), str(path), *([] if small else [device])]),
            "level": "quick", "shapes": "small" if small else "of the level", "device": detect(device).name,
            "torch": software.torch, "portable_flash": software.portable_flash, "runs": len(runs),
            "false_alarms": sum(run["verdict"] != "pass" for run in runs), "cpu_seconds_a_run": round((time.process_time() - began_cpu) / len(runs), 2),
            "wall_seconds_a_run": round((time.monotonic() - began) / len(runs), 2),
            "each": runs,
        }  # fmt: skip
        path.write_text(json.dumps(table, indent=1) + "\n")
    return int(table["false_alarms"] != 0)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4]))
