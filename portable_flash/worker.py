"""The process that owns a GPU: asked over a pipe, killed when it hangs, replaced when it dies.

What a candidate can break is its process: a fault leaves the GPU context unusable, so the worker ends itself and the next
request starts another one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

START_METHOD = "spawn"  # of processes here and of those that compile: a forked child could not use the GPU
START_TIMEOUT_S = 120.0  # importing torch and creating a context, on a loaded machine
CONTINUES = "error"  # kinds of failure: the worker goes on after an error, and is gone after a fault or a hang
FAULT = "fault"
HANG = "hang"


class WorkerError(RuntimeError):
    """A request failed. `kind` is "error" (the worker raised), "fault" (its process or its GPU context died) or "hang"."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Worker:
    """Calls the methods of the object that factory(**options) makes in a process of its own. Not thread-safe.

    factory: "module:name", imported in that process.
    """

    def __init__(self, factory: str, options: Mapping[str, Any] | None = None):
        self.factory, self.options = factory, dict(options or {})
        self.starts = 0
        self._process: Any = None
        self._pipe: Any = None

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What factory's method returns; raises WorkerError. timeout_s is wall time, the start of a process not counted."""
        self.start()
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout_s):
                self.close()
                raise WorkerError(HANG, f"no answer within {timeout_s:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            process = self._process
            process.join(5)
            code = process.exitcode
            self.close()
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise WorkerError(FAULT, f"its process died ({how})") from error
        if kind == "ok":
            return value
        if kind == FAULT:
            self.close()
        raise WorkerError(kind, value)

    def close(self) -> None:
        """End the process. A process inside a driver may ignore a request to end, so it is killed."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None:
            process.kill()
            process.join(10)

    def kill(self) -> None:
        """End the process from another thread: the call under way there fails with a fault."""
        if (process := self._process) is not None:
            process.kill()

    def start(self) -> None:
        """Make the process if there is none, and wait until it is ready. Raises WorkerError."""
        if self._process is not None:
            return
        context = multiprocessing.get_context(START_METHOD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.factory, self.options), daemon=True)
        self._process.start()
        theirs.close()
        self.starts += 1
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise WorkerError(HANG, f"did not start within {START_TIMEOUT_S:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerError(FAULT, "its process died while it started") from error
        if kind != "ok":
            self.close()
            raise WorkerError(FAULT, f"did not start: {value}")


def _serve(pipe: Any, factory: str, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which then closes this one
    try:
        module, _, name = factory.partition(":")
        served = getattr(importlib.import_module(module), name)(**options)
    except BaseException as error:
        pipe.send(("error", _text(error)))
        return
    pipe.send(("ok", None))
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = ("ok", getattr(served, method)(*arguments))
        except Exception as error:  # whatever a compiler, driver or kernel raises is the candidate's reason
            answer = (FAULT if _context_is_broken() else CONTINUES, _text(error))
        pipe.send(answer)
        if answer[0] == FAULT:
            return


def _context_is_broken() -> bool:
    """After a fault every later call fails too, in whichever candidate it is."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return True
    return False


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
