"""The command line and the report of the machine, with and without GPUs."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from portable_flash import backends, cli, device
from portable_flash.info import info as collect
from portable_flash.info import render


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "load", lambda name: SimpleNamespace(unavailable=lambda d: None if name == "cpu" else "needs a GPU"))


@pytest.fixture
def h200(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 10**9, warp_size=32,
        shared_memory_per_block_optin=232448, L2_cache_size=62914560,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    device._detect.cache_clear()
    yield
    device._detect.cache_clear()


def test_without_a_gpu(no_gpu, capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "No GPU: " in out and "CPU, " in out
    assert "backend triton: needs a GPU" in out and "backend cpu: available" in out


def test_json_has_the_same_facts(no_gpu, capsys):
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(collect()))
    assert facts["torch"] == torch.__version__ and facts["devices"][-1]["vendor"] == "cpu"
    assert facts["devices"][-1]["backends"] == {"triton": "needs a GPU", "hip": "needs a GPU", "cpu": None}


def test_a_site_folder_that_does_not_exist_is_said(no_gpu, monkeypatch, tmp_path):
    for value, words in ((None, "site none (PORTABLE_FLASH_TUNING is not set)"), (tmp_path, f"site {tmp_path}\n")):
        monkeypatch.setenv("PORTABLE_FLASH_TUNING", str(value)) if value else monkeypatch.delenv("PORTABLE_FLASH_TUNING", raising=False)
        assert words in render(collect())
    monkeypatch.setenv("PORTABLE_FLASH_TUNING", str(tmp_path / "x"))
    assert f"site {tmp_path / 'x'} (does not exist: PORTABLE_FLASH_TUNING must" in render(collect())


def test_with_a_gpu(h200, monkeypatch):
    monkeypatch.setattr(backends, "load", lambda name: SimpleNamespace(unavailable=lambda d: None))
    out = render(collect())
    assert "No GPU" not in out
    assert "GPU 0: NVIDIA H200 (sm_90, PCI id not readable)" in out and "file nvidia/h200.yaml" in out
    assert "132 compute units of 32 lanes, 139.7 GiB, last cache 60 MiB, shared memory 227 KiB a program" in out


def test_a_broken_backend_is_reported_not_raised(no_gpu, monkeypatch):
    def broken(name):
        raise ImportError("libfoo.so is missing")

    monkeypatch.setattr(backends, "load", broken)
    assert "backend triton: failed: ImportError: libfoo.so is missing" in render(collect())


def test_tools_get_their_arguments_and_give_the_exit_code(monkeypatch):
    seen = []
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=lambda argv: seen.append((name, argv)) or 2))
    assert cli.main(["bench", "--suite", "quick", "--help"]) == 2
    assert seen == [("portable_flash.bench", ["--suite", "quick", "--help"])]


def test_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0 and "info" in capsys.readouterr().out
    for wrong in ([], ["sideways"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(wrong)
        assert stopped.value.code == 2


def test_nothing_heavy_at_import():
    """Reading the database, Triton and the command line wait until they are asked for."""
    heavy = {"yaml", "triton", "portable_flash.database"}
    script = f"import sys, portable_flash, portable_flash.cli; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "set()"
