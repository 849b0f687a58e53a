"""Every case from public bug reports, on a GPU."""

import public_reports_adapter as adapter
import pytest
import torch


@pytest.mark.parametrize("name", adapter.CASES)
def test_case(name):
    try:
        adapter.run(adapter.CASES[name], device="cuda")
    except adapter.NotBuilt as reason:
        pytest.skip(str(reason))
    torch.cuda.synchronize()
