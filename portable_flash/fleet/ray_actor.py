"""What runs on a node of a Ray cluster: `portable-flash validate` as a process, of the node's own installation.

Only the standard library is used, and Ray is sent this code itself: an actor starts without importing torch, and a node whose
portable-flash is older or broken says so through its process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

PATH = "{report}"  # in the arguments: the file that the node chooses for its report


class Validator:
    """The actor. Runs one process at a time, which ends with it."""

    def hello(self) -> str:
        return os.uname().nodename

    def run(self, arguments: Sequence[str], timeout_s: float, shares: int, most: int) -> tuple[bytes, int | None, str, list[str]]:
        """The report (empty if there is none, or one of more than `most` bytes), exit code (None: killed at its time-out), the end of
        standard error, and the GPUs that Ray gave to this actor. The process gets one of `shares` shares of the cores."""
        import ray

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "report.json")
            command = [sys.executable, *(path if argument == PATH else argument for argument in arguments)]
            threads = str(max(1, (os.cpu_count() or 1) // shares))  # Ray sets 1 for an actor without CPUs of its own
            code, errors = execute(command, timeout_s, {**os.environ, "OMP_NUM_THREADS": threads})
            report = b""
            if os.path.exists(path) and os.path.getsize(path) <= most:
                with open(path, "rb") as file:
                    report = file.read()
        return report, code, errors, [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def execute(command: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code, None where the time was over, and the last 2,000 bytes of standard error."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        return code, errors.read().decode(errors="replace")


def _die_with_parent() -> None:
    """An actor that is killed cannot end its process: the kernel does."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
