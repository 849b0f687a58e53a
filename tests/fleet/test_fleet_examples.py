"""The examples for Slurm, Kubernetes, ssh and torchrun do what they say."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import fleet_samples as samples
import pytest
import yaml
from tools import require

from portable_flash.fleet import cli
from portable_flash.validate.report import to_json

EXAMPLES = Path(__file__).parents[2] / "examples" / "fleet"
BIN = Path(sys.executable).parent  # where the command portable-flash is


def run(command: list, **environment: str) -> subprocess.CompletedProcess:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        list(map(str, command)), env=os.environ | {"PATH": path} | environment, capture_output=True, text=True, timeout=240
    )


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["slurm_prolog.sh", "ssh.sh"])
def test_shell_scripts_are_scripts(name):
    path = EXAMPLES / name
    assert os.access(path, os.X_OK)
    assert run([require("bash"), "-n", path]).returncode == 0


@pytest.mark.parametrize("code", [0, 1, 2, 127])
def test_slurm_script_never_drains_by_itself(tmp_path, code):
    """A prolog that fails, and a call of scontrol, would drain the node."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "scontrol", f"echo drained >> {tmp_path}/drained")
    script(tmp_path / "bin" / "logger", f'echo "$@" >> {tmp_path}/log')
    stub = script(tmp_path / "bin" / "stub", f'echo "$@" > {tmp_path}/arguments; exit {code}')
    done = run(
        [EXAMPLES / "slurm_prolog.sh"],
        PORTABLE_FLASH_COMMAND=str(stub),
        PORTABLE_FLASH_REPORTS=str(tmp_path / "reports"),
        SLURMD_NODENAME="node7",
        PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "drained").exists()
    word = {0: "node7: pass", 1: "node7: FAIL"}.get(code, "node7: no verdict")
    assert word in (tmp_path / "log").read_text()
    assert f"--json {tmp_path}/reports/node7.json" in (tmp_path / "arguments").read_text()


def test_slurm_script_ends_within_60_s():
    text = (EXAMPLES / "slurm_prolog.sh").read_text()
    own, after, outer = (
        int(re.search(pattern, text)[1]) for pattern in (r"--timeout (\d+)", r"--kill-after=(\d+)", r"--kill-after=\d+ (\d+) ")
    )
    assert own < outer and outer + after < 60


def test_kubernetes_job():
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes_job.yaml").read_text())
    spec = job["spec"]
    assert (job["kind"], job["apiVersion"], spec["completionMode"]) == ("Job", "batch/v1", "Indexed")
    assert spec["completions"] == spec["parallelism"] and spec["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = spec["template"]["spec"]["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["template"]["spec"]["volumes"]}
    done = run([require("sh"), "-n", "-c", container["args"][0]])
    assert done.returncode == 0, done.stderr


def test_kubernetes_command_names_the_report_after_the_node(tmp_path):
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes_job.yaml").read_text())
    command = job["spec"]["template"]["spec"]["containers"][0]["args"][0].replace("/reports", str(tmp_path))
    (tmp_path / "bin").mkdir()
    report = tmp_path / "report"
    report.write_text(to_json(samples.sound(4, random.Random(1))))
    for code, result in ((0, 0), (1, 0), (137, 1)):
        script(tmp_path / "bin" / "portable-flash", f'for last; do :; done; cp {report} "$last"; exit {code}')
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        assert run(["/bin/sh", "-c", command], NODE_NAME="gpu-7.example", PATH=path).returncode == result
    (tmp_path / "hosts").write_text("gpu-7.example\n")
    arguments = [tmp_path / "gpu-7.example.json", "--hosts-from-names", "--expect", tmp_path / "hosts"]
    assert cli.main(["compare", *map(str, arguments)]) == 0


def test_ssh_gathers_and_compares(tmp_path):
    """Of four hosts one answers, one cannot be reached, one is cut off and one is ended by `timeout`."""
    require("bash")
    report = tmp_path / "report"
    report.write_text(to_json(samples.sound(4, random.Random(1))))
    cut = f"head -c 999 {report}"
    fake = script(
        tmp_path / "ssh",
        f"case $1 in {samples.host_of(4)}) cat {report};; far) exit 255;; cut) {cut};; slow) {cut}; exit 124;; esac",
    )
    (tmp_path / "hosts").write_text(f"# all\n{samples.host_of(4)}\nfar\ncut 8  # devices\n\nslow\n")
    done = run([EXAMPLES / "ssh.sh", tmp_path / "hosts"], SSH=str(fake), REPORTS=str(tmp_path / "reports"), COLUMNS="120")
    assert done.returncode == 2, done.stderr
    assert {path.name for path in (tmp_path / "reports").glob("*.json")} == {f"{samples.host_of(4)}.json", "cut.json"}
    assert all(f"{host}: missing" in done.stdout for host in ("far", "slow", "cut"))
    assert "cut.json: report refused" in done.stdout and (tmp_path / "reports" / "fleet.html").exists()


def test_torchrun_compares_two_ranks(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "fleet.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    done = run([*command, EXAMPLES / "torchrun.py", "--cpu", "--small", "--only", "agreement", "--out", out], GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert (document["verdict"], document["devices"], document["models"][0]["compared"]) == ("pass", 2, 2)
