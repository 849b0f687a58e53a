"""GPUs that measure: of this machine, and of others through Ray. Both run the same worker and the same compile pool."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from .compiling import Compiled, CompilePool, Job, default_jobs
from ..worker import FAULT, Worker, WorkerError

GPU = "portable_flash.tune.measure:GpuMeasurer"


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
class _Remote:
    """Lives in a Ray actor that holds one GPU: a worker process and a compile pool beside it."""

    def __init__(self, jobs: int | None, factory: str, options: dict[str, Any] | None):
        self.node = LocalNode(0, CompilePool(jobs or default_jobs()), factory, options)

    def identity(self) -> Any:
        from ..device import detect

        return detect(0)

    def call(self, method: str, arguments: tuple, timeout_s: float) -> tuple[str, Any]:
        try:
            return "ok", self.node.worker.call(method, *arguments, timeout_s=timeout_s)
        except WorkerError as error:
            return error.kind, error.reason

    def compile(self, job: Job) -> Compiled:
        return self.node.executor.submit(job).result()

    def close(self) -> None:
        self.node.close()
        self.node.executor.shutdown()


class RayNode:
    """A GPU somewhere in a Ray cluster. An actor that dies is a fault of the request under way and of all after it."""

    def __init__(self, number: int, actor: Any, ray: Any):
        self.name, self.actor, self.ray = f"ray {number}", actor, ray
        self.worker = self

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        try:
            kind, value = self.ray.get(self.actor.call.remote(method, arguments, timeout_s))
        except self.ray.exceptions.RayError as error:
            raise WorkerError(FAULT, f"{self.name}: {type(error).__name__}") from error
        if kind != "ok":
            raise WorkerError(kind, value)
        return value

    def compile(self, jobs: list[Job]) -> list[Future[Compiled]]:
        return [self.actor.compile.remote(job).future() for job in jobs]

    def close(self) -> None:
        try:
            self.ray.get(self.actor.close.remote(), timeout=10)
        except Exception:
            self.ray.kill(self.actor)


def ray_nodes(address: str, slug: str | None, jobs: int | None, factory: str = GPU, options: dict[str, Any] | None = None, gpus: int = 1):
    """A node for every GPU of the cluster, or for those of model `slug`; raises RuntimeError where Ray is absent or there is none."""
    try:
        import ray
    except ImportError as error:
        raise RuntimeError('--ray needs the package ray: pip install "portable-flash[fleet]"') from error
    if not ray.is_initialized():
        ray.init(address=address or None, log_to_driver=False, ignore_reinit_error=True)
    total = int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
    remote = ray.remote(num_gpus=gpus, num_cpus=1 if not gpus else 0, max_concurrency=64)(_Remote)
    actors = [remote.remote(jobs, factory, options) for _ in range(total)]
    nodes = [RayNode(i, actor, ray) for i, actor in enumerate(actors)]
    if slug is not None:
        same = []
        for node in nodes:
            found = ray.get(node.actor.identity.remote()).slug
            same += [node] if found == slug else []
            if found != slug:
                node.close()
        nodes = same
    if not nodes:
        raise RuntimeError(f"--ray {address}: the cluster has no GPU" + (f" of model {slug}" if slug else ""))
    return nodes
