"""Validate the GPUs of a job before it trains: each rank its own, and rank 0 compares them all.

    torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/fleet/torchrun.py
    torchrun --nproc-per-node 2 examples/fleet/torchrun.py --cpu --small     # to try it

Every rank exits with the fleet's code: 0 pass, 1 fail, 2 no verdict. Rank 0 prints the findings and writes --out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from portable_flash.fleet import findings, terminal
from portable_flash.fleet.compare import Fleet
from portable_flash.validate import document
from portable_flash.validate.report import EXIT_CODES


def validate(arguments: argparse.Namespace, extra: list[str], rank: int) -> tuple[str, bytes, str]:
    """(name, report, why there is none) of this rank's device. A process of its own, so that a fault there ends no rank."""
    name = f"rank {rank} on {os.uname().nodename}"
    device = "cpu" if arguments.cpu else os.environ["LOCAL_RANK"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "portable_flash.cli", "validate", "--level", arguments.level, "--device", device, "--quiet"]
        command += ["--timeout", str(arguments.timeout), "--json", str(path), *extra]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=arguments.timeout + 30)
        except subprocess.TimeoutExpired:
            return name, b"", f"no answer within {arguments.timeout + 30} s"
        if not path.exists():
            return name, b"", f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        return name, path.read_bytes(), ""


def compare(answers: list[tuple[str, bytes, str]], arguments: argparse.Namespace) -> int:
    fleet = Fleet()
    for name, raw, reason in answers:
        if not raw:
            fleet.silence(name, reason)
            continue
        try:
            report = document.read(raw, name)
        except document.ReportError as error:
            fleet.refuse(name, str(error))
            continue
        # the ranks of one host share its CPU: to try this out they count as hosts
        fleet.add(replace(report, host=f"{report.host}/{name.split(' on ')[0]}") if arguments.cpu else report, name)
    result = fleet.compare()
    if arguments.out:
        document.write_text(arguments.out, findings.to_json(result), "--out")
    terminal.render(result)
    return EXIT_CODES[result.verdict]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other arguments go to portable-flash validate.")
    parser.add_argument("--level", default="quick", choices=("quick", "standard"))
    parser.add_argument("--timeout", type=int, default=180, help="seconds for one device")
    parser.add_argument("--cpu", action="store_true", help="the CPU backend instead of a GPU")
    parser.add_argument("--out", help="file for the comparison, JSON")
    arguments, extra = parser.parse_known_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout + 300))
    rank, answers = dist.get_rank(), [None] * dist.get_world_size()
    dist.gather_object(validate(arguments, extra, rank), answers if rank == 0 else None)
    code = [compare(answers, arguments) if rank == 0 else 0]
    dist.broadcast_object_list(code)
    dist.destroy_process_group()
    return code[0]


if __name__ == "__main__":
    raise SystemExit(main())
