"""Every case from public bug reports that a CPU can run, on the CPU backend (`interpreter` has the Triton kernels, `gpu` the rest)."""

import public_reports_adapter as adapter
import pytest


@pytest.mark.parametrize("name", adapter.CASES)
def test_case(name):
    if name == "C58":
        pytest.skip(adapter.CASES[name]["cpu_note"])
    try:
        adapter.run(adapter.CASES[name], backend="cpu")
    except adapter.NotBuilt as reason:
        pytest.skip(str(reason))


def test_the_adapter_reports_a_failure():
    with pytest.raises(AssertionError):
        adapter.run({"id": "planted", "repro": "q, k, v = qkv(1, 2, 6, 16); assert close(pf.attention(q, k, v, causal=True), ref(q, k, v)[0])"})
