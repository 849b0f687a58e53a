"""Everything here needs a GPU; elsewhere it is skipped, and says so."""

import os

# `calls.uninitialised_memory_is_nan` switches deterministic mode on, in which cuBLAS asks for this. Read at CUDA's start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU"))


@pytest.fixture(autouse=True)
def give_memory_back():
    """Workers share the GPU: what one test has cached, another may need."""
    yield
    torch.cuda.empty_cache()
