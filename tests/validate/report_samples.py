"""Reports for tests of what is made from them: a clean GPU, failures, no verdict, several GPUs, and texts that mean harm."""

from __future__ import annotations

from dataclasses import replace

from portable_flash.validate.report import (
    Check,
    DeviceReport,
    Digest,
    Identity,
    Report,
    Signal,
    Software,
    Used,
    together,
    verdict_of,
)

CASES = ("bf16-d128-causal", "bf16-d64-full", "fp16-d128-gqa", "fp16-d256-window", "fp32-d96-bias", "bf16-d192-sinks", "bf16-d128-varlen")
TENSORS = ("out", "lse", "grad_query", "grad_key", "grad_value")
ERROR = "x PyTorch's error, at most"

HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</style><script>document.title='owned'</script>",
    "{{ 7 * 7 }}{% raw %}",
    "[bold red]markup[/bold red] [link=file:///etc/passwd]x[/link] [/]",
    "\x1b]0;owned\x07\x1b[2J\x1b[31m",
    'quote " backslash \\ newline \n tab \t nul \x00 bell \x07 \ufffe \U0001f525',
    "a]]>b & c < d \u202edesrever",
    "C:\\new\\table\\",
    "x" * 3000,
)


def identity(index: int | None = 0) -> Identity:
    if index is None:
        return Identity(
            index=None, name="AMD EPYC 9654 96-Core Processor", slug="cpu", vendor="cpu", arch="x86_64", compute_units=96,
            memory_bytes=768 << 30,
        )  # fmt: skip
    return Identity(
        index=index,
        name="NVIDIA H200",
        slug="h200",
        vendor="nvidia",
        arch="sm_90",
        compute_units=132,
        memory_bytes=143 << 30,
        pci_id="10de:2335",
        pci_address=f"0000:{0x19 + 16 * index:02x}:00.0",
        uuid=f"GPU-5e1c41b{index}-77aa-4c2e-9d0b-3f1c2a8e4d5f",
        serial=f"16532240{index:05d}",
        vbios="96.00.A5.00.03",
    )


def checks(bump: float = 0.0) -> list[Check]:
    """What a clean run on a GPU looks like; `bump` moves the measured values a little."""
    found = []
    for row, case in enumerate(CASES):
        for column, tensor in enumerate(TENSORS):
            limit = 2.0 if column < 2 else 3.0
            found.append(
                Check(
                    id=f"accuracy/{case}/{tensor}",
                    status="pass",
                    measured=round(0.62 + 0.09 * row + 0.17 * column + bump, 4),
                    limit=limit,
                    unit=ERROR,
                    detail=f"max 0.00{31 + row}, RMS {1.2e-4 * (1 + column):.2e}",
                    seconds=0.11,
                    data={"worst_index": [0, row, 17 * column, 5], "value": 0.1182, "expected": 0.1179, "rms_ratio": 1.01},
                )
            )
    for phase, case, runs in (("cold", CASES[0], 5), ("load", CASES[0], 200), ("load", CASES[5], 200), ("units", "bf16-d128-large", 5)):
        for tensor in (*TENSORS, "grad_sinks") if "sinks" in case else TENSORS:
            found.append(
                Check(id=f"repeatability/{phase}/{case}/{tensor}", status="pass", measured=0, limit=0, unit="runs that differ, at most",
                      seconds=0.4, data={"runs": runs})
            )  # fmt: skip
    found.append(Check(id="agreement/golden/bf16-d128-causal/out", status="skipped", detail="no record for this key; --record writes one"))
    found.append(Check(id="backends/chosen", status="pass", detail="triton"))
    for tensor in TENSORS:
        found.append(Check(id=f"backends/triton-cpu/bf16-d64-full/{tensor}", status="pass", measured=1.03, limit=3.0, unit=ERROR))
    for edge in ("masked-rows", "no-keys", "one-query", "odd-lengths", "nan-in-hidden-keys", "large-logits", "layouts", "strides"):
        found.append(Check(id=f"edges/{edge}", status="pass", measured=0.3 + 0.02 * len(edge), limit=2.0, unit=ERROR, seconds=0.04))
    found.append(Check(id="memory/guards", status="pass", measured=0, limit=0, unit="changed bytes, at most"))
    found.append(Check(id="memory/all-written", status="pass", measured=0, limit=0, unit="elements not written, at most"))
    for kernel, ratio in (("forward", 1.004), ("backward_dkv", 0.991), ("backward_dq", 1.021)):
        found.append(
            Check(id=f"speed/{kernel}/B8-H16-S2048-D128-causal-bf16", status="pass", severity="minor", measured=ratio, limit=1.3,
                  unit="x the recorded time, at most", detail="412.3 us, record 410.7 us (h200.yaml)",
                  data={"median_us": 412.3, "record_us": 410.7})
        )  # fmt: skip
    found.append(
        Check(id="signals/ecc_uncorrected", status="pass", severity="critical", measured=0, limit=0, unit="new errors, at most")
    )
    found.append(
        Check(id="signals/temperature_memory", status="unread", severity="info", detail="NVML: not supported", hint="needs a newer driver")
    )
    for control in ("bit_flip", "scaled_tile", "nan", "wrong_head"):
        found.append(Check(id=f"control/{control}", status="pass", severity="critical", detail="noticed"))
    return found


def device(index: int | None = 0, found: list[Check] | None = None, strict: bool = False, **changes) -> DeviceReport:
    found = checks() if found is None else found
    made = DeviceReport(
        identity=identity(index),
        verdict=verdict_of(found, strict),
        driver=None if index is None else "570.86.15",
        checks=found,
        signals=[
            Signal(name="sm_clock", unit="MHz", before=345.0, after=1980.0),
            Signal(name="temperature", unit="C", before=34.0, after=61.0),
            Signal(name="power", unit="W", before=78.2, after=642.9),
            Signal(name="throttle_reasons", unit="", before="none", after="none"),
            Signal(name="ecc_uncorrected", unit="errors", before=0.0, after=0.0),
            Signal(name="temperature_memory", unit="C", before=None, after=None, reason="NVML: not supported"),
        ],
        kernels=[
            Used(backend="triton", kernel=kernel, fingerprint="9f3c1b2a", case=case, tiling=f"{m}x{n}, 8 warps, 3 stages", source=source)
            for kernel, m, n, case, source in (
                ("forward", 128, 128, "bf16-d128-causal", "h200.yaml"),
                ("backward_dkv", 64, 128, "bf16-d128-causal", "h200.yaml"),
                ("backward_dq", 128, 64, "bf16-d128-causal", "h200.yaml"),
                ("forward", 128, 64, "fp32-d96-bias", "rule"),
            )
        ],
        digests=[
            Digest(case=case, tensor=tensor, backend="triton", key="5b1d" * 8, sha256=f"{row}{column}ab" * 16)
            for row, case in enumerate(CASES[:3])
            for column, tensor in enumerate(TENSORS)
        ],
        inputs_sha256="c0ffee12" * 8,
        seconds=21.4,
    )
    return replace(made, **changes)


def report(devices: list[DeviceReport], strict: bool = False, **changes) -> Report:
    made = Report(
        host="node-017",
        verdict=together(each.verdict for each in devices),
        level="quick",
        seed=20260611,
        started="2026-11-30T09:15:02+00:00",
        seconds=24.8,
        strict=strict,
        command=["portable-flash", "validate", "--level", "quick"],
        software=Software(portable_flash="0.1.0", python="3.11.9", torch="2.11.0+cu130", runtime="cuda 13.0", triton="3.6.0",
                          driver="570.86.15", platform="Linux-5.15-x86_64"),
        devices=devices,
    )  # fmt: skip
    return replace(made, **changes)


def changed(found: list[Check], id: str, **changes) -> list[Check]:
    """The list with one check replaced."""
    assert any(check.id == id for check in found), id
    return [replace(check, **changes) if check.id == id else check for check in found]


def clean() -> Report:
    return report([device()])


def failing() -> Report:
    """A GPU that computes wrong gradients now and then, and is slow."""
    found = changed(
        checks(), "accuracy/bf16-d128-causal/grad_key", status="fail", measured=41.7,
        detail="max 0.131 at [0, 3, 129, 64]: -1.25, expected -1.119",
        hint="Run --level standard on this GPU. If it fails again, take the GPU out of service.",
    )  # fmt: skip
    found = changed(
        found, "repeatability/load/bf16-d128-causal/grad_key", status="fail", measured=3,
        detail="3 of 200 runs differ; 4 elements, first at (0, 3, 129, 64), bits [11, 21]",
        hint="The same instructions on the same numbers gave other bits: suspect this device's hardware.",
        data={"runs": 200, "elements": 4, "first_index": [0, 3, 129, 64], "bits": [11, 21], "tiles": [2, 2], "matrices": [3, 7],
              "tile_count": 2, "lanes": [0, 1, 17], "same_position_modulo": 1},
    )  # fmt: skip
    found = changed(
        found, "speed/backward_dq/B8-H16-S2048-D128-causal-bf16", status="warn", measured=1.18, hint="Look at clocks and the power cap."
    )
    found = changed(found, "accuracy/fp16-d256-window/out", status="inconclusive", detail="the reference itself is off by 14%")
    return report([device(found=found)])


def no_verdict() -> Report:
    """The worker died, and on the CPU the negative control was not noticed."""
    dead = device(found=[], verdict="no_verdict", reason="the worker ended with signal 11 (SIGSEGV)", signals=[], kernels=[], digests=[])
    blind = changed(checks(), "control/bit_flip", status="inconclusive", detail="a flipped bit was not noticed", hint="Report this.")
    blind = [replace(check, status="skipped") if check.group == "control" and check.id != "control/bit_flip" else check for check in blind]
    return report([dead, device(index=None, found=blind)])


def node(gpus: int = 8) -> Report:
    """One GPU of several disagrees."""
    devices = []
    for index in range(gpus):
        found = checks(bump=0.01 * index)
        found.append(
            Check(
                id="agreement/node/bf16-d128-causal/grad_key",
                status="fail" if index == 5 else "pass",
                detail=f"1 of {gpus} GPUs has other bits" if index == 5 else f"{gpus - 1} of {gpus} GPUs agree",
                hint="This GPU is in the minority." if index == 5 else "",
            )
        )
        devices.append(device(index=index, found=found))
    return report(devices)


def hostile() -> Report:
    """Every text field that a report has says something that a renderer must not obey."""
    found = checks()[:2]
    for position, text in enumerate(HOSTILE):
        found.append(
            Check(id=f"edges/{position}-{text[:200]}", status="fail", detail=text, hint=text, unit=text, measured=1e300, limit=1e-300,
                  data={text[:200]: text, "list": [1, 2]})
        )  # fmt: skip
    text = " ".join(HOSTILE[:-1])
    made = device(
        found=found,
        reason=text,
        driver=text,
        signals=[Signal(name=text, unit=text, before=text, after=None, reason=text)],
        kernels=[Used(backend=text, kernel=text, fingerprint=text, case=text, tiling=text, source=text)],
        digests=[Digest(case=text, tensor=text, backend=text, key=text, sha256=text)],
        inputs_sha256=text,
        identity=replace(identity(), name=text, slug=text, vendor=text, arch=text, uuid=text, serial=text, pci_id=text, pci_address=text),
    )
    return report([made], host=text, command=[text], software=Software(portable_flash=text, python=text, torch=text, platform=text))


def soak() -> Report:
    """More checks than a person wants to see at once."""
    found = [replace(check, id=check.id.replace("/", f"/{turn}-", 1)) for turn in range(12) for check in checks(bump=0.003 * turn)]
    return report([device(found=found)], level="soak", seconds=7211.5)


SAMPLES = {"clean": clean, "failing": failing, "no_verdict": no_verdict, "node": node, "hostile": hostile, "soak": soak}
