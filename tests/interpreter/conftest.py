"""The Triton kernels on CPU tensors. `tests/backends/test_triton.py` runs this folder in processes of its own.

Whether kernels are interpreted is decided when triton is imported, once for a process, and other tests need the compiler.
By hand: TRITON_INTERPRET=1 python -m pytest tests/interpreter
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
