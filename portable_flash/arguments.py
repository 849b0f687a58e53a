"""What the command lines share: types of arguments, whose errors name the value and what is allowed (argparse names the argument),
and what happens when nobody takes the output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

UNWRITTEN = 2  # exit code where standard output takes no more; 1 would say that a device failed


def run(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """main(argv), which returns an exit code (None is 0).

    UNWRITTEN where standard output could not be written: quietly where its reader has gone, as after `| head`, else with a line on
    standard error. Also where main ends because standard error could not be written.
    """
    out, errors = _Watched(sys.stdout), _Watched(sys.stderr)
    sys.stdout, sys.stderr = out, errors if errors.stream is not None else None
    try:
        try:
            code = main(argv) or 0
        finally:
            if out.error is None:
                out.flush()
    except (OSError, SystemExit):  # rich exits with 1 when its reader has gone
        if out.error is None and errors.error is None:
            raise
        code = UNWRITTEN
    finally:
        sys.stdout, sys.stderr = out.stream, errors.stream
    if errors.error is not None:
        _discard(errors.stream)
    if out.error is None:
        return code
    _discard(out.stream)
    if not isinstance(out.error, BrokenPipeError):
        print(f"portable-flash: standard output: {out.error.strerror or out.error}", file=sys.stderr)
    return UNWRITTEN


class _Watched:
    """A stream that remembers why it could not be written: an OSError of another file must not be taken for one of this."""

    def __init__(self, stream: Any):  # None where the process was started with a closed standard output
        self.stream, self.error = stream, None

    def write(self, text: str) -> int:
        return self._do("write", text)

    def flush(self) -> None:
        if self.stream is not None:
            self._do("flush")

    def _do(self, name: str, *arguments: str) -> Any:
        try:
            if self.stream is None:
                raise OSError("closed")
            return getattr(self.stream, name)(*arguments)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _discard(stream: Any) -> None:
    """What is still in its buffer goes nowhere: the interpreter would otherwise try again at exit, and complain."""
    try:
        place = os.open(os.devnull, os.O_WRONLY)
        os.dup2(place, stream.fileno())
        os.close(place)
    except (AttributeError, OSError, ValueError):  # no stream, or one that is no file
        pass


def positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


def positive_number(text: str) -> float:
    """At most 1e7, which as seconds a timer can still wait."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e7:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number")
    return value
