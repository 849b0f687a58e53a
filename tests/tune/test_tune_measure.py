"""The real measurer on the CPU: Triton's interpreter runs the kernels, in a process that imports Triton for it."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
from portable_flash.tune import keys
keys.TOKENS, keys.HIDDEN, keys.PROBE = 64, 16, (1, 2, 1, 25, 41)
from portable_flash.backends.triton import host
from portable_flash.tiling import Tiling
from portable_flash.tune.keys import Key
from portable_flash.tune.measure import GpuMeasurer

measurer = GpuMeasurer(None)
tilings = (Tiling(32, 32), Tiling(16, 32))
for kernel in ("forward", "backward_dkv", "backward_dq"):
    key = Key("triton", kernel, "fp16", 16, True, 64)
    for tiling in tilings:
        assert measurer.launch(key, tiling).ok
        found = measurer.check(key, tiling)
        assert found.ok and found.repeatable and 0 < found.error_ratio < 4, (kernel, tiling, found)
    odd = measurer.probe(key, tilings[1])
    assert odd.ok, (kernel, odd)
    times = measurer.time(key, tilings, 2, 1e-4)
    assert len(times) == 2 and all(len(one) == 2 and min(one) > 0 for one in times)

# a kernel that leaves out what it should write, and one that is a little wrong
key, real = Key("triton", "forward", "fp16", 16, False, 64), host.forward
measurer.check(key, tilings[0])
def lazy(inputs, plan):
    out, lse = real(inputs, plan)
    unwritten = out.new_empty(out.shape)
    unwritten[..., :-1, :] = out[..., :-1, :]
    return unwritten, lse
host.forward = lazy
found = measurer.check(key, tilings[1])
assert not found.ok and "finite" in found.reason, found
host.forward = lambda inputs, plan: (real(inputs, plan)[0] * 1.02, real(inputs, plan)[1])
found = measurer.check(key, tilings[1])
assert not found.ok and "limit" in found.reason, found
print("done")
"""


def test_right_kernels_pass_and_wrong_ones_do_not():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0 and "done" in result.stdout, result.stdout + result.stderr
