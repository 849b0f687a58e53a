"""The HIP kernels' source on an NVIDIA GPU, at real sizes, against the float64 oracle.

No AMD instruction runs here: the layers over matrix units use RDNA's lane layouts on top of shuffles. What is the same is all the
rest: staging, barriers, masks, positions, reductions, program order, the host's arguments.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calls import Case

HERE = Path(__file__).parent
sys.path.append(str(HERE / "hip_on_cuda"))

if torch.version.hip is not None:
    pytest.skip("for NVIDIA GPUs; on an AMD GPU the backend itself runs", allow_module_level=True)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LAYERS = ("fma", "wmma11", "wmma12")
ODD = dict(batch=2, heads_k=2, group=2, seqlen_q=709, seqlen_k=1021)
LONG = dict(batch=1, heads_k=2, group=1, seqlen_q=4096, seqlen_k=4096)
PACKED = dict(lengths=((130, 241), (0, 70), (226, 0), (1, 300), (345, 122), (0, 0), (64, 64)), unused=37, heads_k=2, group=2)

CASES = {
    "causal 64": Case(**ODD, head_dim=64, dtype=F16, causal=True),
    "causal 128": Case(**ODD, head_dim=128, dtype=BF16, causal=True),
    "256": Case(**ODD, head_dim=256, dtype=BF16),
    "192 and 128, causal": Case(**ODD, head_dim=192, head_dim_v=128, dtype=F16, causal=True),
    "long, causal": Case(**LONG, head_dim=128, dtype=F16, causal=True),
    "window, softcap, sinks": Case(**ODD, head_dim=80, dtype=BF16, window=(300, 20), softcap=2.0, sinks=True),
    "top left, odd head_dim": Case(**ODD, head_dim=36, dtype=F16, causal="top_left"),
    "packed, causal, ALiBi": Case(**PACKED, head_dim=64, dtype=BF16, causal=True, alibi="h"),
    "bias, mask, bshd": Case(**ODD, head_dim=64, dtype=F16, bias="hqk", mask="bk", causal=True, layout="bshd"),
    "bias of keys": Case(**ODD, head_dim=64, dtype=BF16, bias="bk", bias_dtype=F32),
}
FLOAT32 = {
    "float32 causal 64": Case(**ODD, head_dim=64, dtype=F32, causal=True),
    "float32 bias of rows, sinks": Case(**ODD, head_dim=128, dtype=F32, bias="q", sinks=True),
}
SMALL = dict(batch=1, heads_k=1, group=2, seqlen_q=203, seqlen_k=150)
SANITIZED = {f"{layer} causal": Case(**SMALL, head_dim=64, dtype=F16, causal=True) for layer in LAYERS} | {
    "fma packed": Case(**PACKED, head_dim=40, dtype=F32, causal=True),
    "wmma11 everything": Case(**SMALL, head_dim=64, dtype=BF16, window=(60, 3), softcap=2.0, bias="qk", mask="bk", alibi="h", sinks=True),
    "wmma12 256": Case(**SMALL, head_dim=256, dtype=BF16),
    "wmma12 unaligned": Case(**SMALL, head_dim=36, dtype=F16, bias="k"),
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ:  # whose workers would all compile everything
        from on_cuda import compile_ahead

        calls = [(case, layer) for case in CASES.values() for layer in LAYERS] + [(case, "fma") for case in FLOAT32.values()]
        compile_ahead([(case.draw(), layer) for case, layer in calls])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layer", LAYERS)
def test_source_agrees_with_the_oracle(layer, name):
    from on_cuda import run

    call = CASES[name].draw("cuda")
    call.judge(*run(call, layer))


@pytest.mark.parametrize("name", FLOAT32)
def test_float32(name):
    from on_cuda import run

    call = FLOAT32[name].draw("cuda")
    call.judge(*run(call, "fma"))


@pytest.mark.parametrize("layer", LAYERS)
def test_slots_that_nothing_sees_may_hold_nan(layer):
    from on_cuda import run

    call = Case(**ODD, head_dim=64, dtype=F16, window=(None, 100), causal="top_left").draw("cuda").poisoned(torch.nan)
    call.judge(*run(call, layer))


def test_two_runs_are_the_same_bit_for_bit():
    from on_cuda import run

    call = CASES["causal 128"].draw("cuda")
    first, second = run(call, "wmma12"), run(call, "wmma12")
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(getattr(first[2], n), getattr(second[2], n)) for n in ("query", "key", "value"))


def sanitize(tool: str, *names: str, **environment: str) -> subprocess.CompletedProcess:
    program = [sys.executable, HERE / "hip_on_cuda" / "on_cuda.py", *names]
    path = os.pathsep.join([str(HERE.parent), str(HERE), str(HERE / "hip_on_cuda")])
    variables = {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **environment}
    # torch's own kernels are not under test, and racecheck would take minutes for them
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=forward,kns=backward_", *program]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    result = sanitize(tool)
    print(result.stdout[-3000:])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    assert result.stdout.count("agrees with the oracle") == len(SANITIZED)
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "0 hazards" in result.stdout


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
def test_racecheck_notices_missing_barriers():
    """A negative control."""
    result = sanitize("racecheck", "fma causal", WITHOUT_BARRIERS="1")
    assert result.returncode != 0 and "hazard" in result.stdout.lower(), result.stdout[-3000:]
