"""GPUs that measure: of this machine, and of others through Ray. Both run the same worker and the same compile pool."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from ..worker import Worker, WorkerError
from .compiling import Compiled, CompilePool, Job, default_jobs
from .search import Asked, NodeLost

GPU = "portable_flash.tune.measure:GpuMeasurer"


class Node(Protocol):
    """A GPU and the processes that compile for it, on this machine or another."""

    name: str
    worker: Asked

    def compile(self, jobs: list[Job]) -> list[Future[Compiled]]:
        """Start to compile; never raises for what a compiler says."""

    def close(self) -> None: ...


class LocalNode:
    """One GPU of this machine. `executor` compiles for all of them; None compiles nothing ahead."""

    def __init__(self, index: int, executor: CompilePool | None, factory: str = GPU, options: dict[str, Any] | None = None):
        self.name = f"gpu {index}"
        self.worker = Worker(factory, {"index": index} if options is None else options)
        self.executor = executor

    def compile(self, jobs: list[Job]) -> list[Future[Compiled]]:
        if self.executor is None:
            return [_done(Compiled(True)) for _ in jobs]
        return [self.executor.submit(job) for job in jobs]

    def close(self) -> None:
        self.worker.close()


def _done(value: Compiled) -> Future[Compiled]:
    future: Future[Compiled] = Future()
    future.set_result(value)
    return future


# ------------------------------------------------------------------ Ray
READY_TIMEOUT_S = 180.0  # for an actor to get its GPU: those of other people's jobs do not come


class _Remote:
    """Lives in a Ray actor that holds one GPU: a worker process and a compile pool beside it."""

    def __init__(self, jobs: int | None, factory: str, options: dict[str, Any] | None):
        self.node = LocalNode(0, None if jobs == 0 else CompilePool(jobs or default_jobs()), factory, options)

    def slug(self, wanted: bool) -> str | None:
        from ..device import detect

        return detect(0).slug if wanted else None

    def call(self, method: str, arguments: tuple, timeout_s: float) -> tuple[str, Any]:
        try:
            return "ok", self.node.worker.call(method, *arguments, timeout_s=timeout_s)
        except WorkerError as error:
            return error.kind, error.reason

    def compile(self, job: Job) -> Compiled:
        return self.node.compile([job])[0].result()

    def close(self) -> None:
        self.node.close()
        if self.node.executor is not None:
            self.node.executor.shutdown()


class RayNode:
    """A GPU somewhere in a Ray cluster. An actor that dies raises NodeLost: it says nothing about the candidate under way."""

    def __init__(self, number: int, actor: Any, ray: Any):
        self.name, self.actor, self.ray = f"ray {number}", actor, ray
        self.worker = self

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        try:
            kind, value = self.ray.get(self.actor.call.remote(method, arguments, timeout_s))
        except self.ray.exceptions.RayError as error:
            raise NodeLost(f"{self.name}: {type(error).__name__}") from error
        if kind != "ok":
            raise WorkerError(kind, value)
        return value

    def compile(self, jobs: list[Job]) -> list[Future[Compiled]]:
        return [self._translated(self.actor.compile.remote(job).future()) for job in jobs]

    def _translated(self, inner: Future[Compiled]) -> Future[Compiled]:
        outer: Future[Compiled] = Future()

        def settle(done: Future[Compiled]) -> None:
            if not outer.set_running_or_notify_cancel():
                return
            if (error := done.exception()) is not None:
                outer.set_exception(NodeLost(f"{self.name}: {type(error).__name__}"))
            else:
                outer.set_result(done.result())

        inner.add_done_callback(settle)
        return outer

    def close(self) -> None:
        try:
            self.ray.get(self.actor.close.remote(), timeout=10)
        except Exception:  # gone already, or too busy to say goodbye
            pass
        self.ray.kill(self.actor)


def ray_nodes(
    address: str, slug: str | None, jobs: int | None, factory: str = GPU, options: dict[str, Any] | None = None, gpus: int = 1
) -> list[RayNode]:  # fmt: skip
    """A node for every free GPU of the cluster that is of model `slug` (None: of any); gpus=0 takes CPUs, for tests.

    Raises RuntimeError where Ray is absent, the cluster cannot be reached or no such GPU comes within READY_TIMEOUT_S.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError('--ray needs the package ray: pip install "portable-flash[fleet]"') from error
    except Exception as error:  # such as a package amdsmi without the library that it binds, which Ray imports
        raise RuntimeError(f"--ray: the package ray cannot be imported: {type(error).__name__}: {error}") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise RuntimeError(f"--ray {address}: {error}") from error
    total = int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
    remote = ray.remote(num_gpus=gpus, num_cpus=0 if gpus else 1, max_concurrency=64)(_Remote)
    actors = [remote.remote(jobs, factory, options) for _ in range(total)]
    found = {actor.slug.remote(slug is not None): actor for actor in actors}
    ready, _ = ray.wait(list(found), num_returns=len(found), timeout=READY_TIMEOUT_S) if found else ([], [])
    nodes = []
    for reference, actor in found.items():
        if reference in ready and ray.get(reference) == slug:
            nodes.append(RayNode(len(nodes), actor, ray))
        else:
            ray.kill(actor)
    if not nodes:
        model = f" of model {slug}" if slug else ""
        raise RuntimeError(f"--ray {address}: no free GPU{model} among the cluster's {total}, {len(ready)} of which answered")
    return nodes
