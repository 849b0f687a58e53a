"""A fleet that does not exist: reports as portable-flash validate writes them, with known faults among sound devices.

python tests/fleet/fleet_samples.py FOLDER [REPORTS]     write one, then: portable-flash fleet compare FOLDER/reports ...
python tests/fleet/fleet_samples.py --measure FILE       time and memory of a comparison of 2,000 reports, into a JSON file
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from portable_flash.validate.report import Check, DeviceReport, Digest, Identity, Report, Signal, Software, Used, together, verdict_of

GIB = 1 << 30
MODELS = [  # name, slug, vendor, arch, units, GiB, driver
    ("NVIDIA A100-SXM4-80GB", "a100", "nvidia", "sm_80", 108, 80, "550.54.15"),
    ("NVIDIA A100-SXM4-40GB", "a100-40", "nvidia", "sm_80", 108, 40, "550.54.15"),
    ("NVIDIA H100 80GB HBM3", "h100", "nvidia", "sm_90", 132, 80, "570.86.15"),
    ("NVIDIA H100 PCIe", "h100-pcie", "nvidia", "sm_90", 114, 80, "570.86.15"),
    ("NVIDIA H200", "h200", "nvidia", "sm_90", 132, 141, "570.86.15"),
    ("NVIDIA B200", "b200", "nvidia", "sm_100", 148, 180, "580.95.05"),
    ("NVIDIA L4", "l4", "nvidia", "sm_89", 58, 24, "550.54.15"),
    ("NVIDIA L40S", "l40s", "nvidia", "sm_89", 142, 48, "550.54.15"),
    ("NVIDIA A10", "a10", "nvidia", "sm_86", 72, 24, "535.183.01"),
    ("NVIDIA GeForce RTX 4090", "rtx4090", "nvidia", "sm_89", 128, 24, "580.95.05"),
    ("AMD Instinct MI210", "mi210", "amd", "gfx90a", 104, 64, "6.12.12"),
    ("AMD Instinct MI250X", "mi250x", "amd", "gfx90a", 110, 64, "6.12.12"),
    ("AMD Instinct MI300X", "mi300x", "amd", "gfx942", 304, 192, "6.16.6"),
    ("AMD Instinct MI308X", "mi308x", "amd", "gfx942", 80, 192, "6.16.6"),
    ("AMD Instinct MI325X", "mi325x", "amd", "gfx942", 304, 256, "6.16.6"),
    ("AMD Instinct MI355X", "mi355x", "amd", "gfx950", 256, 288, "6.16.6"),
]
CASES = (
    "bf16-d128-causal", "fp16-d64-full", "fp32-d64-causal", "bf16-d64-window-softcap-sinks", "fp16-d96-bias-alibi-mask",
    "bf16-d128-varlen-causal", "bf16-d128-causal-large", "bf16-d256-full", "fp16-d192-gqa",
)  # fmt: skip
TENSORS = ("out", "lse", "grad_query", "grad_key", "grad_value")
SPEEDS = tuple(f"speed/{k}/B8 H16 S{s} D128 causal bf16" for k in ("forward", "backward_dkv", "backward_dq") for s in (1024, 2048, 4096))
ERROR = "x PyTorch's error, at most"


@dataclass
class Truth:
    """What is wrong in the fleet, by kind of finding: the subjects that a comparison must name, and no others."""

    reports: int
    expect: Path
    folder: Path
    bytes: int = 0
    wrong: dict[str, set[str]] = field(default_factory=dict)


def sha(*words: object) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()


def sound(number: int, random_: random.Random, slow: float = 1.0, driver: str | None = None) -> Report:
    """The report of device `number` (model: number modulo 16), with the noise that sound devices have."""
    name, slug, vendor, arch, units, gib, usual = MODELS[number % len(MODELS)]
    driver = driver or usual
    checks = []
    for case in CASES:
        for tensor in TENSORS:
            base = 0.6 + int(sha(slug, case, tensor)[:4], 16) / 0xFFFF * 0.5
            checks.append(
                Check(
                    id=f"accuracy/{case}/{tensor}",
                    status="pass",
                    measured=round(base * random_.lognormvariate(0, 0.06), 4),
                    limit=3.0,
                    unit=ERROR,
                    detail="max 0.00312 (limit 0.0094), RMS 1.4e-04; worst at [0, 3, 129, 64]: 0.1182, expected 0.1179",
                    seconds=0.11,
                    data={
                        "worst_index": [0, 3, 129, 64],
                        "value": 0.1182,
                        "expected": 0.1179,
                        "rms_ratio": 1.01,
                        "cosine": 0.99999871,
                        "max_error": 0.00312,
                        "rms_error": 1.4e-04,
                        "torch_max_error": 0.00301,
                        "torch_rms_error": 1.39e-04,
                        "elements": 4194304,
                        "problem": f"B2 H16 Hk4 S517 D128 {case}",
                        "plan": "triton 128x128, 8 warps, 3 stages (h200.yaml)",
                    },
                )
            )
    for phase, repeats in (("cold", 5), ("load", 200)):
        checks.append(
            Check(
                id=f"repeatability/{phase}",
                status="pass",
                measured=0,
                limit=0,
                unit="repeats that differ, at most",
                detail=f"{repeats} repeats of forward and backward, bit for bit equal",
                seconds=1.9,
                data={"repeats": repeats},
            )
        )
    pace = slow * random_.gauss(1.0, 0.012)  # clocks and cooling differ between sound devices
    for check in SPEEDS:
        record = 200.0 + int(sha(slug, check)[:4], 16) / 100
        measured = round(pace * random_.gauss(1.0, 0.008), 4)
        checks.append(
            Check(
                id=check,
                status="pass" if measured < 1.12 else "warn",
                severity="minor",
                measured=measured,
                limit=1.3,
                unit="x the recorded time, at most",
                detail=f"{record * measured:.1f} us, record {record:.1f} us ({slug}.yaml)",
                hint="" if measured < 1.12 else "Look at clocks and the power cap.",
                data={"measured_us": record * measured, "record_us": record, "tiling": "128x128, 8 warps"},
            )
        )
    for edge in (
        "rows-without-keys",
        "length-zero",
        "one-query",
        "odd-lengths",
        "nan-in-masked-slots",
        "large-logits",
        "layouts",
        "strides",
    ):
        checks.append(Check(id=f"edges/{edge}", status="pass", seconds=0.04))
    for signal in ("ecc_uncorrected", "row_remap", "throttle_reasons"):
        checks.append(Check(id=f"signals/{signal}", status="pass", measured=0, limit=0, unit="new, at most"))
    checks.append(Check(id="signals/xid", status="unread", severity="info", detail="no library tells it", hint="read the kernel's log"))
    checks.append(Check(id="agreement/golden/fixed-bf16/out", status="skipped", detail="no record for this key; --record writes one"))
    for control in ("bit_flip", "scaled_tile", "nan", "wrong_head"):
        checks.append(Check(id=f"control/{control}", status="pass", detail="noticed"))
    key = sha(slug, driver, "2.12.0", "3.7.1")[:32]
    device = DeviceReport(
        identity=Identity(
            index=0,
            name=name,
            slug=slug,
            vendor=vendor,
            arch=arch,
            compute_units=units,
            memory_bytes=gib * GIB,
            uuid=f"GPU-{sha(number)[:32]}",
            serial=f"16{number:010d}",
            pci_address="0000:19:00.0",
            pci_id="10de:2335" if vendor == "nvidia" else "1002:74a1",
            vbios=f"vbios {slug}",
        ),
        verdict=verdict_of(checks),
        driver=driver,
        checks=checks,
        signals=[
            Signal(name=signal, unit="", before=random_.uniform(30, 40), after=random_.uniform(55, 70))
            for signal in (
                "temperature",
                "temperature_memory",
                "power",
                "sm_clock",
                "memory_clock",
                "ecc_corrected",
                "ecc_uncorrected",
                "fan",
                "pcie_replays",
            )
        ],
        kernels=[
            Used(
                backend="triton",
                kernel=kernel,
                fingerprint=sha(kernel)[:8],
                case=case,
                tiling=f"128x{64 if units < 110 else 128}, 8 warps",
                source=slug,
            )
            for kernel in ("forward", "backward_dkv", "backward_dq")
            for case in CASES
        ],
        digests=[
            Digest(case=case, tensor=tensor, backend="triton", key=key, sha256=sha(slug, case, tensor))
            for case in CASES[:4]
            for tensor in TENSORS
        ],
        inputs_sha256=sha("inputs"),
        seconds=21.4,
    )
    software = Software(
        portable_flash="0.1.0",
        python="3.11.9",
        torch="2.12.0",
        runtime="cuda 13.0" if vendor == "nvidia" else "rocm 7.2",
        triton="3.7.1",
        driver=driver,
        platform="Linux-6.8-x86_64",
    )
    return Report(
        host=host_of(number),
        verdict=together([device.verdict]),
        level="quick",
        seed=number,
        started="2026-11-30T09:15:02+00:00",
        seconds=24.8,
        strict=False,
        command=["portable-flash", "validate", "--level", "quick"],
        software=software,
        devices=[device],
    )


def host_of(number: int) -> str:
    return f"node{number:05d}"


def with_checks(report: Report, change) -> Report:
    """Of a report with one device: each check replaced by change(check), verdicts made anew."""
    checks = [change(check) for check in report.devices[0].checks]
    device = replace(report.devices[0], checks=checks, verdict=verdict_of(checks, report.strict))
    return replace(report, devices=[device], verdict=together([device.verdict]))


def with_other_bits(report: Report, case: str, tensor: str) -> Report:
    device = report.devices[0]
    digests = [replace(d, sha256=sha("corrupt", report.host)) if (d.case, d.tensor) == (case, tensor) else d for d in device.digests]
    return replace(report, devices=[replace(device, digests=digests)])


def with_error(report: Report, id: str, factor: float) -> Report:
    return with_checks(report, lambda c: replace(c, measured=c.measured * factor) if c.id == id else c)


def with_failed_repeats(report: Report, repeats: int = 1) -> Report:
    return with_checks(
        report,
        lambda c: (
            replace(c, status="fail", measured=repeats, detail=f"{repeats} of 200 repeats differ") if c.id == "repeatability/load" else c
        ),
    )


def write(folder: Path, reports: int = 2000, seed: int = 1) -> Truth:
    """Write the fleet: 3 corrupted GPUs, 1 slow, 1 old driver, 2 of the expected hosts missing. Every fifth file is compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reports").mkdir()
    random_ = random.Random(seed)
    bits, error, repeats, slow, old, *missing = random_.sample(range(reports + 2), 7)
    truth = Truth(reports=reports, expect=folder / "hosts.txt", folder=folder / "reports")
    truth.expect.write_text("# all hosts\n" + "".join(f"{host_of(n)} 1\n" for n in range(reports + 2)))
    for number in range(reports + 2):
        if number in missing:
            continue
        report = sound(number, random_, slow=1.2 if number == slow else 1.0, driver="470.42.01" if number == old else None)
        if number == bits:
            report = with_other_bits(report, CASES[1], "grad_key")
        if number == error:
            report = with_error(report, f"accuracy/{CASES[2]}/grad_value", 2.2)
        if number == repeats:
            report = with_failed_repeats(report)
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        packed = number % 5 == 0
        (truth.folder / f"{report.host}.json{'.gz' if packed else ''}").write_bytes(gzip.compress(text, 1) if packed else text)
        truth.bytes += len(text)
    gpu = lambda number: f"{host_of(number)} gpu 0"
    truth.wrong = {
        "minority": {gpu(bits)}, "error": {gpu(error)}, "failed": {gpu(repeats)}, "slow": {gpu(slow)},
        "drift": {gpu(old)}, "missing": {host_of(n) for n in missing},
    }  # fmt: skip
    return truth


def named(document: dict) -> dict[str, set[str]]:
    """What a comparison's document names, by kind, as in Truth.wrong."""
    found: dict[str, set[str]] = {}
    for finding in document["findings"]:
        found.setdefault(finding["kind"], set()).add(finding["subject"])
    return found


def timed(truth: Truth, folder: Path) -> tuple[dict, dict]:
    """Run the command in a process of its own: the document, and {exit code, seconds, peak memory in MB}."""
    out, page = folder / "fleet.json", folder / "fleet.html"
    program = (  # the kernel's record of this program alone: what getrusage tells begins with the parent's peak
        "import pathlib, re, sys; from portable_flash.cli import main; code = main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text()).group(1)); sys.exit(code)"
    )
    arguments = ["fleet", "compare", str(truth.folder), "--expect", str(truth.expect), "--json", str(out), "--html", str(page)]
    command = [sys.executable, "-c", program, *arguments]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process.stdout:
        said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # of this child alone, unlike getrusage
    seconds = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    assert out.exists(), said
    cost = {
        "exit_code": process.returncode,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(int(said.split()[-1]) / 1024, 1),
    }
    cost |= {"reports": truth.reports, "report_mb": round(truth.bytes / 1e6, 1), "page_mb": round(page.stat().st_size / 1e6, 2)}
    return json.loads(out.read_text()), cost


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["--measure"]:
        truth = write(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 2000)
        print(json.dumps({kind: sorted(names) for kind, names in truth.wrong.items()}, indent=1))
        return
    with tempfile.TemporaryDirectory() as name:
        truth = write(Path(name) / "fleet", 2000)
        document, cost = timed(truth, Path(name))
        exact = named(document) == truth.wrong
    facts = {
        "what": "fleet compare of a simulated fleet of 16 models: 3 corrupted GPUs, 1 slow, 1 with an old driver, 2 hosts missing",
        "command": "python tests/fleet/fleet_samples.py --measure benchmarks/results/fleet_compare.json",
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        **cost,
        "found_exactly_these": exact,
        "found": {kind: sorted(names) for kind, names in sorted(named(document).items())},
    }
    Path(arguments[1]).write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
