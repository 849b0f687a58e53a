"""Every case from public bug reports that the interpreter can run in seconds, on the Triton kernels."""

import public_reports_adapter as adapter
import pytest

TOO_SLOW = {"C14", "C58"}  # tens of thousands of programs; tens of runs
BF16 = {"C09", "C30", "C37", "C52"}  # the interpreter multiplies bfloat16 as if it were integers
LARGE = {"C31", "C43"}  # each several large calls: one of them is enough here


def smaller(name):
    """The same case in float16, or with fewer of its sizes."""
    case = dict(adapter.CASES[name])
    if name in BF16:
        case["repro"] = case["repro"].replace("bf16", "f16")
    if name == "C30":
        case["repro"] = case["repro"].replace("(f16, f16)", "(f16,)").replace("(32, 64, 128, 256)", "(32, 256)")
    if name == "C31":
        case["repro"] = case["repro"].replace("((28, 4), (24, 4), (10, 2), (6, 2), (16, 1))", "((14, 2), (6, 2), (16, 1))")
    if name == "C43":
        case["repro"] = case["repro"].replace("(127, 128, 129)", "(129,)")
    if name == "C52":
        case["repro"] = case["repro"].replace("3000", "300")
    return case


@pytest.mark.parametrize("name", [name for name in adapter.CASES if name not in TOO_SLOW])
def test_case(name):
    try:
        adapter.run(smaller(name), backend="triton")
    except adapter.NotBuilt as reason:
        pytest.skip(str(reason))
