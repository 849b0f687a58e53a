"""Validation over Ray: a cluster of four nodes on this machine, one of which dies, and nodes that hang or answer nonsense."""

import importlib
import json
import os
import random
import re
import socket
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import fleet_samples as samples
import pytest
from tools import require_module

from portable_flash.fleet import cli, ray_actor, ray_run
from portable_flash.fleet.compare import Fleet
from portable_flash.validate import document
from portable_flash.validate.report import to_json


@pytest.fixture
def cluster(tmp_path_factory):
    require_module("ray")
    patch = pytest.MonkeyPatch()
    try:
        importlib.import_module("amdsmi")
    except ImportError:
        pass
    except Exception:  # installed without its library: Ray could not be imported beside it
        folder = tmp_path_factory.mktemp("without_amdsmi")
        (folder / "amdsmi.py").write_text("raise ImportError('no library')\n")
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(folder)
    patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from ray.cluster_utils import Cluster

    made = Cluster()
    nodes = {
        # Ray believes a node that says it has GPUs
        name: made.add_node(wait=False, num_cpus=1, num_gpus=gpus, node_name=name, object_store_memory=80 << 20, include_dashboard=False)
        for name, gpus in (("alpha", 3), ("beta", 0), ("gamma", 0), ("delta", 0))
    }
    made.wait_for_nodes()
    yield made, nodes
    import ray

    ray.shutdown()
    made.shutdown()
    patch.undo()


def a_node_dies_and_the_others_are_validated(made, nodes, tmp_path, capsys, monkeypatch):
    lines: list[str] = []
    validate = ray_run.validate

    def killing(address, run, fleet, tell):
        def watch(line: str) -> None:
            tell(line)
            lines.append(line)
            if "/beta" in line and line.endswith("begins"):
                made.remove_node(nodes["beta"], allow_graceful=False)

        validate(address, run, fleet, watch)

    monkeypatch.setattr(ray_run, "validate", killing)
    out, kept = tmp_path / "fleet.json", tmp_path / "reports"
    arguments = ["validate", "--ray", made.address, "--cpu", "--timeout", "240", "--out", str(kept), "--json", str(out)]
    code = cli.main([*arguments, "--", "--small", "--only", "agreement"])
    document = json.loads(out.read_text())
    assert (code, document["verdict"], document["passed"], document["hosts"]) == (2, "no_verdict", 3, 3), lines
    (finding,) = document["findings"]
    assert finding["kind"] == "no_verdict" and "/beta (" in finding["subject"] and "died during the run" in finding["detail"]
    assert document["models"][0]["compared"] == 3  # the three that are left have the same bits
    assert [line.split("]")[0] for line in lines if line.startswith("[")] == ["[1/4", "[2/4", "[3/4", "[4/4"]
    saved = sorted(kept.iterdir())
    assert [path.name.rpartition("_")[2] for path in saved] == ["alpha-cpu.json", "delta-cpu.json", "gamma-cpu.json"]
    assert cli.main(["compare", str(kept), "--json", str(out)]) == 0 and json.loads(out.read_text())["devices"] == 3
    assert "/beta" in capsys.readouterr().err


MISBEHAVE = """
import os, sys, time
for turn in range(4):
    try:
        os.mkdir(os.path.join({folder!r}, str(turn)))
        break
    except FileExistsError:
        continue
if turn == 0:
    time.sleep(600)
if turn == 1:
    open(sys.argv[1], "w").write('{{"schema": 99}}')
if turn >= 2:
    print("something", file=sys.stderr)
    sys.exit("no kernel here")
"""


def nodes_that_hang_or_answer_nonsense_have_no_verdict(made, tmp_path, monkeypatch):
    script = tmp_path / "misbehave.py"
    script.write_text(MISBEHAVE.format(folder=str(tmp_path)))
    monkeypatch.setattr(ray_run, "GRACE_S", 1.0)
    monkeypatch.setattr(ray_run.Run, "arguments", lambda self: [str(script), ray_actor.PATH])
    fleet = Fleet()
    ray_run.validate(made.address, ray_run.Run(cpu=True, timeout_s=3.0), fleet, lambda line: None)
    reasons = sorted(reason for _, reason in fleet.silent)
    assert len(reasons) == 4 and fleet.compare().verdict == "no_verdict"
    assert "schema 99" in reasons[0]
    assert reasons[1] == reasons[2] == "no report, exit code 1: no kernel here"
    assert reasons[3].startswith("no report, killed after 4 s")


def test_a_cluster_without_gpus_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(ray_run, "connect", lambda address: SimpleNamespace(nodes=lambda: [told("a", "1" * 56, CPU=4.0)]))
    assert cli.main(["validate", "--ray", "auto"]) == 2
    assert "no living node has a GPU; --cpu" in capsys.readouterr().err


CANNED = """
import os, sys
text = open({path!r}).read().replace("GPU-uuid", "GPU-" + os.environ["CUDA_VISIBLE_DEVICES"])
open(sys.argv[1], "w").write(text)
"""


def every_gpu_of_a_node_gets_one_task(made, tmp_path, monkeypatch):
    device = samples.sound(4, random.Random(1)).devices[0]
    device = replace(device, identity=replace(device.identity, uuid="GPU-uuid", serial=None))
    (tmp_path / "canned.json").write_text(to_json(replace(samples.sound(4, random.Random(1)), devices=[device])))
    (tmp_path / "canned.py").write_text(CANNED.format(path=str(tmp_path / "canned.json")))
    monkeypatch.setattr(ray_run.Run, "arguments", lambda self: [str(tmp_path / "canned.py"), ray_actor.PATH])
    fleet = Fleet()
    ray_run.validate(made.address, ray_run.Run(out=str(tmp_path / "kept")), fleet, lambda line: None)
    result = fleet.compare()
    assert (result.verdict, result.devices, result.hosts, result.findings) == ("pass", 3, 1, [])
    kept = sorted((tmp_path / "kept").iterdir())
    found = [document.read(path).devices[0].identity for path in kept]
    assert [(identity.index, identity.uuid) for identity in found] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")]


def test_a_cluster_of_four_nodes(cluster, tmp_path, capsys, monkeypatch):
    """In one test, because a cluster takes long to start: pytest may give tests of one file to several processes."""
    made, nodes = cluster
    for step in (every_gpu_of_a_node_gets_one_task, nodes_that_hang_or_answer_nonsense_have_no_verdict):
        with monkeypatch.context() as patch:
            (tmp_path / step.__name__).mkdir()
            step(made, tmp_path / step.__name__, patch)
    a_node_dies_and_the_others_are_validated(made, nodes, tmp_path, capsys, monkeypatch)


def test_execute_kills_what_its_process_started(tmp_path):
    """The validator's workers must not outlive it."""
    child = "import time; time.sleep(60)"
    script = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
    script += "print(p.pid, file=sys.stderr, flush=True); time.sleep(60)"
    code, errors = ray_actor.execute([sys.executable, "-c", script], 3.0, os.environ)
    assert code is None
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{int(errors)}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":  # dead, and nobody has asked
                    break
        except FileNotFoundError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the grandchild still runs")


def told(host: str, number: str, alive: bool = True, name: str = "", **resources: float) -> dict:
    return {
        "NodeID": number, "Alive": alive, "NodeManagerAddress": f"10.0.0.{len(number)}", "NodeManagerHostname": host, "NodeName": name,
        "Resources": resources,
    }  # fmt: skip


def test_nodes_and_their_devices():
    nodes = [told("a", "1" * 56, GPU=8.0, CPU=64.0), told("b", "2" * 56, CPU=4.0), told("c", "3" * 56, alive=False, GPU=8.0)]
    living, dead = ray_run.nodes_of(nodes, cpu=False)
    assert [(node.name, node.devices) for node in living] == [("a", 8)] and dead == ["c (10.0.0.56)"]
    assert [(node.name, node.devices) for node in ray_run.nodes_of(nodes, cpu=True)[0]] == [("a", 1), ("b", 1)]
    same = ray_run.nodes_of([told("a", "4" * 56, GPU=1.0), told("a", "5" * 56, name="two", GPU=1.0)], cpu=False)[0]
    assert [node.name for node in same] == ["a/44444444", "a/two"]


def test_a_task_is_given_up_when_it_does_not_begin_or_does_not_end():
    node = ray_run.Node("1", "a", "10.0.0.1", 8)
    task = ray_run.Task(0, node, 0, None, None, None, asked=100.0)
    run = ray_run.Run(timeout_s=60, start_timeout_s=300)
    assert task.late(run, 399.0) == "" and "another job holds its GPU" in task.late(run, 401.0)
    task.begun = 400.0
    assert task.late(run, 480.0) == "" and "the node hangs" in task.late(run, 491.0)


def test_an_interrupt_leaves_a_comparison_and_no_actors(monkeypatch):
    killed: list[str] = []

    def wait(*_, **__):
        raise KeyboardInterrupt

    ray = SimpleNamespace(nodes=lambda: [told("a", "1" * 56, GPU=2.0), told("b", "2" * 56, GPU=1.0)], wait=wait, kill=killed.append)

    def start(ray, node, run, first):
        numbers = range(node.devices)
        return [ray_run.Task(first + n, node, n, f"{node.name}{n}", object(), object(), time.monotonic()) for n in numbers]

    monkeypatch.setattr(ray_run, "connect", lambda address: ray)
    monkeypatch.setattr(ray_run, "_start", start)
    fleet = Fleet()
    ray_run.validate("auto", ray_run.Run(), fleet, lambda line: None)
    assert killed == ["a0", "a1", "b0"]
    assert [f.detail for f in fleet.compare().findings] == ["interrupted"] * 3


@pytest.mark.parametrize("address, words", [
    ("127.0.0.1:1", "refused"), ("ray://127.0.0.1:1", "refused"), ("nonsense.invalid:6379", "not known|resolution|No address"),
    ("nonsense", "HOST:PORT"), ("host:99999", "HOST:PORT"),
])  # fmt: skip
def test_no_cluster_there_is_said_soon(monkeypatch, capsys, address, words):
    begun: list[str] = []
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda address, **_: begun.append(address), nodes=lambda: [])
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert cli.main(["validate", "--ray", address]) == 2 and begun == []
    error = capsys.readouterr().err
    assert f"--ray {address}: no cluster there: " in error and re.search(words, error), error


def test_a_host_that_answers_is_left_to_ray(monkeypatch):
    begun: list[str] = []
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda address, **_: begun.append(address))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for each in (address, f"ray://{address}", "auto"):
            ray_run.connect(each)
    assert begun == [address, f"ray://{address}", "auto"]


def test_ray_is_an_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["validate", "--ray", "auto"]) == 2
    assert 'pip install "portable-flash[fleet]"' in capsys.readouterr().err
