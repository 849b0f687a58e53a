"""Validation of every GPU of a Ray cluster: an actor for each, pinned to its node, that runs `portable-flash validate` as a process.

A process of its own can be killed when it hangs and takes nothing along when it dies. An actor keeps its GPU until all of its node
have answered: Ray would otherwise hand the same GPU out again and leave another one untested. GPUs that other jobs hold are waited
for, and named when they do not come free.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..validate import document
from ..validate.report import Report, to_json
from . import ray_actor
from .compare import Fleet
from .facts import clean

TIMEOUTS_S = {"quick": 180.0, "standard": 1200.0, "soak": 90000.0}  # for one GPU: three times what a level takes, or a day's soak
GRACE_S = 15.0  # a validation ends itself at its time-out; later than this it hangs
WAIT_S = 0.5
CONNECT_S = 10.0


@dataclass(frozen=True)
class Run:
    """What every actor does. extra: further arguments of `portable-flash validate`. out: folder for the reports."""

    level: str = "quick"
    cpu: bool = False
    extra: tuple[str, ...] = ()
    timeout_s: float = TIMEOUTS_S["quick"]
    start_timeout_s: float = 300.0
    out: str | None = None

    def arguments(self) -> list[str]:
        """After the node's own Python."""
        device = "cpu" if self.cpu else "0"  # Ray shows an actor its own GPU only
        own = ["--level", self.level, "--device", device, "--timeout", f"{self.timeout_s:g}", "--quiet", "--json", ray_actor.PATH]
        return ["-m", "portable_flash.cli", "validate", *own, *self.extra]


@dataclass(frozen=True)
class Node:
    """A node of the cluster. name: its host name, with more where several nodes share a host. devices: GPUs, or 1 for its CPU."""

    id: str
    name: str
    address: str
    devices: int
    cpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass
class Task:
    """One actor. asked, begun: when it was asked for and when its node answered, by time.monotonic()."""

    place: int  # among all tasks
    node: Node
    number: int  # on its node
    actor: Any
    hello: Any
    answer: Any
    asked: float
    begun: float | None = None

    def __str__(self) -> str:
        return f"{self.node} task {self.number}" if self.node.devices > 1 else str(self.node)

    def late(self, run: Run, now: float) -> str:
        """Why it is given up; "" while it is not."""
        if self.begun is None:
            waited = f"did not begin within {run.start_timeout_s:g} s: another job holds its GPU, or the node does not answer"
            return waited if now - self.asked > run.start_timeout_s else ""
        limit = run.timeout_s + 2 * GRACE_S
        return f"no answer within {limit:g} s: the node hangs" if now - self.begun > limit else ""


def validate(address: str, run: Run, fleet: Fleet, tell: Callable[[str], None]) -> None:
    """Validate every GPU (with run.cpu: every node's CPU) and add the reports to `fleet`. tell(line) is called as things happen.

    What a node does not answer is no verdict, with the reason; so is what an interrupt leaves open. Raises RuntimeError where Ray is
    absent, the cluster cannot be reached, or it has no such device, and document.OutputError for run.out.
    """
    if run.out is not None:
        _make_folder(run.out)
    ray = connect(address)
    nodes, dead = nodes_of(ray.nodes(), run.cpu)
    if dead:
        tell(f"left out, for Ray says that they are dead: {', '.join(dead)}")
    if not nodes:
        raise RuntimeError(f"--ray {address}: no living node has a " + ("CPU" if run.cpu else "GPU; --cpu validates the CPU backend"))
    tasks: list[Task] = []
    for node in nodes:
        tasks += _start(ray, node, run, len(tasks))
    tell(f"{len(tasks)} tasks on {len(nodes)} nodes")
    waiting: list[Task] = list(tasks)
    died: dict[int, str] = {}
    try:
        while waiting:
            for task in _ready(ray, waiting, run):
                waiting.remove(task)
                line = _take(ray, task, run, fleet, died)
                tell(f"[{len(tasks) - len(waiting)}/{len(tasks)}] {task}: {line}")
                if all(other.node != task.node for other in waiting):  # the node's GPUs go back together
                    _release(ray, [one for one in tasks if one.node == task.node])
            for task in _begun(ray, waiting):
                tell(f"{task}: begins")
    except KeyboardInterrupt:
        for task in waiting:
            fleet.silence(str(task), "interrupted")
        tell(f"interrupted; {len(waiting)} tasks are given up")
    finally:
        _release(ray, waiting)
    if died:
        # only by now does Ray know whether it was the process or the whole node
        living = {node.get("NodeID") for node in ray.nodes() if node.get("Alive")}
        for number, error in died.items():
            task = tasks[number]
            fleet.silence(str(task), f"{'its process' if task.node.id in living else 'the node'} died during the run ({error})")


def connect(address: str) -> Any:
    """Ray, connected. Raises RuntimeError."""
    try:
        import ray
    except ImportError as error:
        raise RuntimeError('--ray needs the package ray: pip install "portable-flash[fleet]"') from error
    except Exception as error:  # such as a package amdsmi without the library that it binds
        raise RuntimeError(f"--ray: the package ray does not load here: {type(error).__name__}: {error}") from error
    try:
        if not ray.is_initialized():
            _reach(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise RuntimeError(f"--ray {address}: no cluster there: {clean(str(error), 300)}") from error
    return ray


def _reach(address: str) -> None:
    """Ray waits for minutes for a host that is not there. Raises OSError, or ValueError for what is no address."""
    told = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if not told or told == "auto" or ("://" in told and not told.startswith("ray://")):
        return  # found, or bounded, by Ray itself
    host, _, port = told.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{clean(told, 100)!r}: allowed are auto, HOST:PORT and ray://HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def nodes_of(told: Sequence[Mapping[str, Any]], cpu: bool) -> tuple[list[Node], list[str]]:
    """The living nodes with a device, and the names of dead ones, from what ray.nodes() told."""
    hosts = Counter(str(node.get("NodeManagerHostname")) for node in told if node.get("Alive"))
    living, dead = [], set()
    for node in told:
        told_host, number = str(node.get("NodeManagerHostname")), str(node.get("NodeID"))
        host, address = clean(told_host, 100), clean(str(node.get("NodeManagerAddress")), 60)
        if not node.get("Alive"):
            dead.add(f"{host} ({address})")
            continue
        own = clean(str(node.get("NodeName") or ""), 100)
        if hosts[told_host] > 1:
            host = f"{host}/{own if own and own != address else number[:8]}"
        resources = node.get("Resources", {})
        devices = 1 if cpu else int(resources.get("GPU", 0))
        if devices:
            living.append(Node(number, host, address, devices, float(resources.get("CPU", 0))))
    return living, sorted(dead)


def _start(ray: Any, node: Node, run: Run, first: int) -> list[Task]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(ray_actor)
    remote = ray.remote(ray_actor.Validator).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False), max_restarts=0, max_task_retries=0,
        num_cpus=min(1, int(node.cpus)) if run.cpu else 0, num_gpus=0 if run.cpu else 1,
    )  # fmt: skip
    tasks = []
    for number in range(node.devices):
        actor = remote.remote()
        hello = actor.hello.remote()
        answer = actor.run.remote(run.arguments(), run.timeout_s + GRACE_S, node.devices, document.MAX_BYTES)
        tasks.append(Task(first + number, node, number, actor, hello, answer, time.monotonic()))
    return tasks


def _ready(ray: Any, waiting: list[Task], run: Run) -> list[Task]:
    """Tasks that answered, died, or are out of time."""
    ray.wait([task.answer for task in waiting], timeout=WAIT_S)
    done = set(ray.wait([task.answer for task in waiting], num_returns=len(waiting), timeout=0)[0])
    now = time.monotonic()
    return [task for task in waiting if task.answer in done or task.late(run, now)]


def _begun(ray: Any, waiting: list[Task]) -> list[Task]:
    """Tasks whose actor answered for the first time."""
    new = [task for task in waiting if task.begun is None]
    done = set(ray.wait([task.hello for task in new], num_returns=len(new), timeout=0)[0]) if new else set()
    new = [task for task in new if task.hello in done]
    for task in new:
        task.begun = time.monotonic()
    return new


def _take(ray: Any, task: Task, run: Run, fleet: Fleet, died: dict[int, str]) -> str:
    """Enter what a task left into the fleet, or why it died into `died`; returns one line on it."""
    try:
        raw, code, errors, gpus = ray.get(task.answer, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return _silent(fleet, task, task.late(run, time.monotonic()) or "no answer")
    except Exception as error:  # RayError
        died[task.place] = type(error).__name__
        return f"no verdict, its process or its node died ({type(error).__name__})"
    try:
        report = _placed(document.read(raw, "its report"), task.node, gpus) if raw else None
    except document.ReportError as error:
        return _silent(fleet, task, str(error))
    if report is None:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
        how = f"killed after {run.timeout_s + GRACE_S:g} s" if code is None else f"exit code {code}"
        return _silent(fleet, task, f"no report, {how}" + (f": {last.strip()}" if last else ""))
    source = "ray"
    if run.out is not None:
        device = "-".join(gpus) or ("cpu" if run.cpu else str(task.number))
        source = os.path.join(run.out, f"{re.sub(r'[^A-Za-z0-9._-]', '_', task.node.name)}-{device}.json")
        document.write_text(source, to_json(report), "--out")
    fleet.add(report, source)
    reason = next((device.reason for device in report.devices if device.reason), "")
    return report.verdict.replace("_", " ") + (f", {clean(reason)}" if reason else "")


def _placed(report: Report, node: Node, gpus: list[str]) -> Report:
    """With the node's name in the cluster and the GPU's number on the node, which its process saw as number 0."""
    devices = report.devices
    if len(devices) == len(gpus) == 1 and gpus[0].isdecimal() and devices[0].identity.index is not None:
        devices = [replace(devices[0], identity=replace(devices[0].identity, index=int(gpus[0])))]
    return replace(report, host=node.name, devices=devices)


def _silent(fleet: Fleet, task: Task, reason: str) -> str:
    fleet.silence(str(task), reason)
    return f"no verdict, {clean(reason, 300)}"


def _release(ray: Any, tasks: list[Task]) -> None:
    for task in tasks:
        try:
            ray.kill(task.actor)
        except Exception:  # it is gone already, or the cluster is
            continue


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise document.OutputError(f"--out: cannot make the folder {path}: {error.strerror or error}") from None
