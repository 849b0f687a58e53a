"""What `import portable_flash` costs."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time, torch
before, start = set(sys.modules), time.process_time()
import portable_flash
print(time.process_time() - start)
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def imported():
    """(seconds of processor time beyond torch's, modules added) of five processes; the first one compiles the bytecode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = lambda: subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment).stdout
    outputs = [run() for _ in range(5)]
    return [(float(seconds), modules.split()) for seconds, modules in (text.splitlines() for text in outputs)]


def test_import_is_quick(imported):
    assert min(seconds for seconds, _ in imported) < 0.05


def test_import_brings_nothing_along(imported):
    """No compiler, no reader of files, no backend: each is imported when a call needs it."""
    added = set(imported[0][1])
    assert "portable_flash.functional" in added
    for heavy in ("triton", "hip", "yaml", "numpy", "importlib.metadata"):
        assert not {name for name in added if name == heavy or name.startswith(f"{heavy}.")}
    late = {"database", "reference", "bench", "integrations", "backends.cpu", "backends.triton", "backends.hip"}
    assert not {f"portable_flash.{name}" for name in late} & added


def test_a_call_on_the_cpu_needs_no_triton():
    script = "import torch, sys, portable_flash as p; q = torch.zeros(1, 1, 4, 8); p.attention(q, q, q); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
