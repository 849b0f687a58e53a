"""Nobody takes the output, or the package is not there: never a traceback, and never the exit code of a verdict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable_flash import arguments

ROOT = Path(__file__).parent.parent
LIST = ["--list", "--device", "cpu", "--only", "edges"]


def ended(command: list[str], shell: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output the shell redirects."""
    done = subprocess.run(["bash", "-c", f'"$@" {shell}', "bash", *command], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


MODULE, TOOL = ["-m", "portable_flash.cli", "validate"], [str(ROOT / "tools" / "validate")]


@pytest.mark.parametrize("program, shell, words", [
    (MODULE, "| true; exit ${PIPESTATUS[0]}", ""),
    (MODULE, ">/dev/full", "portable-flash: standard output: No space left on device\n"),
    (MODULE, ">&-", "portable-flash: standard output: closed\n"),
    (TOOL, "| true; exit ${PIPESTATUS[0]}", ""),
])  # fmt: skip
def test_standard_output_that_takes_nothing(program, shell, words):
    assert ended([sys.executable, *program, *LIST], shell) == (2, words)


class Full:
    """A standard output that takes the first write only."""

    def __init__(self, error: OSError):
        self.error, self.taken = error, []

    def write(self, text):
        if self.taken:
            raise self.error
        self.taken.append(text)

    def flush(self): ...


@pytest.mark.parametrize("error, words", [(BrokenPipeError(32, "Broken pipe"), ""), (OSError(5, "I/O error"), "I/O error")])
@pytest.mark.parametrize("ending", [None, SystemExit(1), RuntimeError])
def test_whatever_the_program_makes_of_it(monkeypatch, capsys, error, words, ending):
    """Such as rich, which exits with 1 when the reader has gone."""

    def main(argv):
        try:
            print("first", end="")
            print("second", end="")
        except OSError:
            if ending is None:
                raise
            if ending is not RuntimeError:
                raise ending from None
        return 1

    monkeypatch.setattr(sys, "stdout", stream := Full(error))
    assert arguments.run(main) == 2 and sys.stdout is stream and stream.taken == ["first"]
    assert words in (said := capsys.readouterr().err) and bool(words) == bool(said)


def test_other_errors_and_exit_codes_stay_what_they_are(capsys):
    def of_a_file(argv):
        raise BrokenPipeError(32, "of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        arguments.run(of_a_file)
    with pytest.raises(SystemExit, match="3"):
        arguments.run(lambda argv: sys.exit(3))
    assert [arguments.run(lambda argv: argv, code) for code in (0, 1, 2, None)] == [0, 1, 2, 0]


def test_an_error_that_nobody_reads(monkeypatch):
    def main(argv):
        print("portable-flash: no such file", file=sys.stderr)
        print("read --help", file=sys.stderr)
        return 1

    monkeypatch.setattr(sys, "stderr", Full(BrokenPipeError(32, "Broken pipe")))
    assert arguments.run(main) == 2


@pytest.mark.parametrize("tool", ["validate", "tune", "bench"])
def test_a_tool_without_the_package_says_what_to_do(tool):
    done = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "tools" / tool)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"not installed for this Python ({sys.executable})" in line and f".venv/bin/python tools/{tool}" in line


@pytest.mark.parametrize(("module", "argv"), [("validate", ["--list"]), ("fleet", ["compare", "."])])
def test_a_fault_of_the_program_is_no_verdict_on_a_device(module, argv, monkeypatch, capsys):
    import importlib

    cli = importlib.import_module(f"portable_flash.{module}.cli")

    def broken(*arguments, **options):
        raise KeyError("a fault")

    for name in ("_run", "_compare"):
        if hasattr(cli, name):
            monkeypatch.setattr(cli, name, broken)
    assert cli.main(argv) == 2 and "KeyError" in capsys.readouterr().err
