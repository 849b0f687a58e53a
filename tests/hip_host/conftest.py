"""Where compiled kernels are kept: with pytest's cache, for the next run and for other processes of this one."""

import os
import time

import pytest


@pytest.fixture(autouse=True, scope="session")
def kernel_cache(pytestconfig):
    folder = pytestconfig.cache.mkdir("hip_host")
    for path in folder.iterdir():
        if path.stat().st_mtime < time.time() - 2 * 3600:
            path.unlink(missing_ok=True)
    os.environ["PF_SIMT_CACHE"] = str(folder)
