"""Reports as they lie about: files, folders, patterns, lists of names. One is read at a time, and what is no report is named."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Iterator

from ..validate import document
from ..validate.report import Report

SUFFIXES = (".json", ".json.gz")
MAX_LIST_BYTES = 64 << 20  # of a list of names
DEEPEST = 32  # folders below the one named


class SourceError(ValueError):
    """An argument that names nothing. The text says which, and what is allowed."""


def names(arguments: Iterable[str]) -> Iterator[str]:
    """The files that the arguments name, each once, in their order; those of a folder sorted.

    An argument is a file, a folder (every .json and .json.gz below it; links to folders are not followed), a pattern that the shell
    left alone, @FILE for a list of such names, or "-" for a list on standard input. A list has one name a line or, where it holds a
    NUL, names that end with one (find -print0), as file names may contain line ends. Raises SourceError.
    """
    seen: set[str] = set()
    for argument in arguments:
        for path in _named(argument, lists=True):
            if path not in seen:
                seen.add(path)
                yield path


def reports(paths: Iterable[str]) -> Iterator[tuple[str, Report | str]]:
    """Each file's report, or why it is refused. Raises ModuleNotFoundError without msgspec."""
    for path in paths:
        try:
            yield path, document.read(path, path)
        except document.ReportError as error:
            yield path, str(error).removeprefix(f"{path}: ")
        except RecursionError:
            yield path, "nested too deeply"


def stem(path: str) -> str:
    """The name of a report's file without its suffix."""
    name = os.path.basename(path)
    return next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)


def _named(argument: str, lists: bool) -> Iterator[str]:
    if lists and (argument == "-" or argument.startswith("@")):
        for name in _listed(argument):
            yield from _named(name, lists=False)
    elif os.path.isdir(argument):
        yield from _inside(argument)
    elif os.path.lexists(argument) or not glob.has_magic(argument):
        yield argument  # one that does not exist is refused by name, like one that cannot be read
    else:
        found = sorted(glob.glob(argument, recursive=True))
        if not found:
            raise SourceError(f"{argument!r} matches no file")
        for path in found:
            if os.path.isdir(path):
                yield from _inside(path)
            else:
                yield path


def _inside(folder: str) -> Iterator[str]:
    found = False
    for where, folders, files in os.walk(folder, followlinks=False):
        folders.sort()
        if where[len(folder) :].count(os.sep) >= DEEPEST:
            folders.clear()
        for name in sorted(files):
            if name.endswith(SUFFIXES) and not name.startswith("."):
                found = True
                yield os.path.join(where, name)
    if not found:
        raise SourceError(f"{folder!r}: no {' or '.join(SUFFIXES)} file in this folder")


def _listed(argument: str) -> list[str]:
    name = "standard input" if argument == "-" else argument[1:]
    try:
        if argument == "-":
            raw = sys.stdin.buffer.read(MAX_LIST_BYTES + 1)
        else:
            with open(name, "rb") as file:
                raw = file.read(MAX_LIST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SourceError(f"{argument!r}: the list cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_LIST_BYTES:
        raise SourceError(f"{argument!r}: a list of names has at most {MAX_LIST_BYTES >> 20} MiB")
    parts = raw.split(b"\0") if b"\0" in raw else raw.splitlines()
    found = [os.fsdecode(part) for part in parts if part.strip()]
    if not found:
        raise SourceError(f"{name}: the list names no file")
    return found
