"""Bytes between HBM and chip of one forward + backward, read from hardware counters with Nsight Compute.

ncu starts a child process for each implementation. The child warms up, then brackets one forward + backward with
cudaProfilerStart and cudaProfilerStop, so that only its kernels are counted. ncu empties the caches before each kernel
(its default), so nothing that one kernel leaves in L2 makes the next one look better.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import dispatch
from ..device import Device, detect, named
from ..tiling import Tiling
from .memory import UNFUSED, forward_backward
from .peers import OURS, PEERS, first_line
from .records import SCHEMA
from .suite import Case, make_inputs

PAPER_CASE = Case(batch=64, heads_q=16, heads_k=16, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64)  # FlashAttention, figure 2
MEASURED = (UNFUSED, OURS, "sdpa_flash", "sdpa_cudnn")
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CHILD_TIMEOUT_S = 240
_UNITS = {"byte": 1, "kbyte": 10**3, "mbyte": 10**6, "gbyte": 10**9, "tbyte": 10**12}


@dataclass
class HbmReport:
    """Bytes of one forward + backward."""

    case: Case
    dtype: str
    identity: dict[str, Any]
    predicted_for: str = ""  # device whose tilings and cache the prediction takes: this one, without a GPU an H200
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)  # launches counted
    not_measured: dict[str, str] = field(default_factory=dict)  # implementation -> why
    schema: int = SCHEMA
    kind: str = "hbm"


def predict(case: Case, dtype: torch.dtype, device: Device, tilings: dict[str, Tiling]) -> dict[str, int]:
    """Bytes by counting: unfused attention, this library's tilings, and the floor that any implementation has."""
    problem = case.problem(dtype)
    io = problem.operand_bytes()
    inputs = io["q"] + io["k"] + io["v"]
    predicted = {
        UNFUSED: problem.unfused_hbm_bytes("forward") + problem.unfused_hbm_bytes("backward"),
        "floor": 3 * inputs + 3 * io["o"],  # q, k, v in twice, their gradients out; o out and in, grad_out in
    }
    if "forward" in tilings and "backward_dkv" in tilings:
        forward = tilings["forward"].hbm_bytes("forward", problem, device)
        predicted[OURS] = forward + tilings["backward_dkv"].hbm_bytes("backward", problem, device)
    return predicted


def measure_hbm(report: HbmReport, dtype: torch.dtype, device: torch.device) -> HbmReport:
    """Fill the report; where counters cannot be read, not_measured says why."""
    target = detect(device) if device.type == "cuda" else named("h200")
    report.predicted_for = target.name
    report.predicted_bytes = predict(report.case, dtype, target, planned_tilings(report.case, dtype, target))
    reason = _counters_unavailable(device)
    for name in MEASURED:
        if reason is not None:
            report.not_measured[name] = reason
            continue
        try:
            report.measured_bytes[name], report.kernels[name] = _profile_child(name, report.case, report.dtype, device)
        except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
            report.not_measured[name] = first_line(error)
    return report


def _counters_unavailable(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return f"needs an NVIDIA GPU, this run is on {detect(device).name}"
    if shutil.which("ncu") is None:
        return "ncu (Nsight Compute) is not on the PATH"
    return None


def planned_tilings(case: Case, dtype: torch.dtype, device: Device) -> dict[str, Tiling]:
    """Tilings by kernel that a call would use there; none where no backend with tilings can run it."""
    try:
        plan = dispatch.plan(case.problem(dtype), device)
    except dispatch.NoBackendError:
        return {}
    return {name: kernel.tiling for name, kernel in plan.kernels.items()}


# ---------------------------------------------------------------------- the child process
def _profile_child(name: str, case: Case, dtype_name: str, device: torch.device) -> tuple[int, int]:
    """(bytes, kernel launches) of one implementation. Raises RuntimeError with what ncu or the child said."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *("ncu", "--metrics", ",".join(METRICS), "--clock-control", "none", "--profile-from-start", "off"),
            *("--csv", "--print-units", "base", "--log-file", str(log)),
            *(sys.executable, "-m", "portable_flash.bench", "--hbm-worker", name, "--dtype", dtype_name, "--device", str(device)),
            *("--shape", shape_text(case)),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, env=environment)
        lines = log.read_text().splitlines() if log.exists() else []
    if child.returncode != 0:
        said = [line for line in (*lines, *child.stderr.splitlines(), *child.stdout.splitlines()) if "==ERROR==" in line or "Error" in line]
        raise RuntimeError(f"ncu exited with {child.returncode}: {said[-1].strip() if said else child.stderr.strip()[-300:]}")
    return sum_metrics(lines)


def shape_text(case: Case) -> str:
    sizes = (case.batch, case.heads_q, case.heads_k, case.seqlen_q, case.seqlen_k, case.head_dim, case.head_dim_v)
    return ",".join(map(str, sizes)) + (",causal" if case.causal else "")


def sum_metrics(lines: Iterable[str]) -> tuple[int, int]:
    """(bytes, kernel launches) from ncu's CSV: one line a launch and metric, after lines of ncu's own talk.

    Raises ValueError when a value is missing ("n/a") or nothing was counted: an unread counter is no zero.
    """
    lines = list(lines)
    table = [line for line in lines if line.startswith('"')]
    total, launches = 0.0, set()
    for row in csv.DictReader(table):
        if row.get("Metric Name") not in METRICS:
            continue
        value, unit = row["Metric Value"].replace(",", ""), row["Metric Unit"].lower()
        try:
            total += float(value) * _UNITS[unit]
        except (ValueError, KeyError):
            raise ValueError(f"ncu: {row['Metric Name']} of {row['Kernel Name']} is {value!r} {unit!r}, expected bytes") from None
        launches.add((row["Process ID"], row["ID"]))
    if not launches:
        said = [line.strip() for line in lines if "==ERROR==" in line]
        raise ValueError(f"ncu counted no kernel{': ' + said[-1] if said else ''}")
    return round(total), len(launches)


def worker(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Run by ncu: one forward + backward between the profiler's start and stop."""
    inputs = make_inputs(case, dtype, device, seed=0)
    built = PEERS[name].build(case, *inputs[:3])
    with built.context():
        forward_backward(built.call, *inputs)
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()
        forward_backward(built.call, *inputs)
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
