"""A real Ray cluster on this machine: two actors with a fake GPU each, one of which dies in the middle of a run."""

import os
from pathlib import Path

import pytest
import tune_fake
from tools import require_module

from portable_flash.database import read
from portable_flash.tune import nodes as nodes_module
from portable_flash.tune.journal import Journal
from portable_flash.tune.keys import key_set
from portable_flash.tune.nodes import ray_nodes
from portable_flash.tune.outcomes import updates_of
from portable_flash.tune.session import Session
from portable_flash.tune.writer import path_of, update_file

KEYS = key_set("triton", kernels=("forward",), dtypes=("bf16",), head_dims=(64, 128, 256), buckets=(512, 4096), causal=(False, True))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    require_module("ray")
    shadow = tmp_path_factory.mktemp("shadow")
    (shadow / "amdsmi.py").write_text("raise ImportError('Ray imports it and fails where its library is missing')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(shadow)
        here = str(Path(__file__).parent)  # actors import tune_fake
        patch.setenv("PYTHONPATH", os.pathsep.join([here, str(shadow)]), prepend=os.pathsep)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        import ray
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
        found = Cluster(initialize_head=True, head_node_args=arguments)
        try:
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


def written(outcomes, folder):
    path = path_of(folder, tune_fake.DEVICE)
    update_file(path, tune_fake.DEVICE, None, updates_of(outcomes, {("triton", "forward"): "1"}, block=True), None)
    return path.read_text()


def test_an_actor_that_dies_leaves_its_keys_to_the_others_and_the_result_is_that_of_one_machine(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes_module, "_Remote", tune_fake.Actor)
    options = {"slow": 0.02, "log": str(tmp_path / "log")}
    nodes = ray_nodes(cluster.address, None, 0, "tune_fake:FakeMeasurer", options, gpus=0)
    assert len(nodes) == 2
    said, done_by = [], {}

    def tell(event):
        said.append(event.text)
        if event.kind == "key":
            done_by.setdefault(event.node, []).append(event.key)
            if event.node == "ray 1" and len(done_by["ray 1"]) == 1:  # of a group of two: it dies with keys under way
                nodes[1].ray.kill(nodes[1].actor)

    try:
        report = Session(tune_fake.DEVICE, nodes, Journal(tmp_path / "journal", {}), tell=tell).run(KEYS)
    finally:
        for node in nodes:
            node.close()
    assert any("lost ray 1" in text for text in said) and len(done_by["ray 0"]) >= len(KEYS) - 2
    assert [o.key for o in report.outcomes] == KEYS and not report.left
    assert all(o.chosen and not o.found.rejected for o in report.outcomes)  # the death is nobody's fault
    alone = Session(tune_fake.DEVICE, [tune_fake.FakeNode()], Journal(None, {})).run(KEYS)
    assert written(report.outcomes, tmp_path / "ray") == written(alone.outcomes, tmp_path / "alone")
    assert not read(path_of(tmp_path / "ray", tune_fake.DEVICE)).kernels["triton"]["forward"].blocked
    log = [line for line in (tmp_path / "log").read_text().splitlines() if '"check"' in line]
    assert len(log) - len(set(log)) <= 1  # at most what was under way is measured again


def test_a_cluster_without_such_gpus_says_so(cluster):
    with pytest.raises(RuntimeError, match="no free GPU of model h200 among the cluster's 0"):
        ray_nodes(cluster.address, "h200", 0)


def test_when_every_actor_is_lost_the_keys_are_left():
    class Lost(tune_fake.InProcess):
        def call(self, method, *arguments, timeout_s):
            from portable_flash.tune.search import NodeLost

            if len(self.requests) == 5:
                raise NodeLost("ray 0: ActorDiedError")
            return super().call(method, *arguments, timeout_s=timeout_s)

    report = Session(tune_fake.DEVICE, [tune_fake.FakeNode(Lost())], Journal(None, {})).run(KEYS)
    assert report.left == KEYS and report.stopped == "no GPU is left"
