"""The command line of the validator."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .. import backends
from ..arguments import positive_number
from ..device import Device, all_devices, cpu
from .inputs import MAX_SEED
from .report import EXIT_CODES, LEVELS, Report

FORMATS = ("json", "junit", "prometheus", "html")
PASS, FAIL, NO_VERDICT = (EXIT_CODES[name] for name in ("pass", "fail", "no_verdict"))


class UsageError(ValueError):
    """An argument that cannot be used: names it, its value and what is allowed."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="portable-flash validate",
        description="Prove that attention computes the right numbers on this machine's devices.",
        epilog=f"Exit codes: {PASS} pass, {FAIL} fail, {NO_VERDICT} no verdict (also: wrong arguments, interrupted, out of time). Warnings "
        "and unread signals fail only with --strict. Nothing is drained or changed: what to do with a device is for its operator.",
    )  # fmt: skip
    what = p.add_argument_group("what is validated")
    what.add_argument("--level", choices=LEVELS, default="quick", help="quick: under a minute; standard: about five; soak: --hours")
    what.add_argument("--hours", type=positive_number, metavar="N", help="how long a soak repeats itself with new seeds (default 1)")
    what.add_argument("--device", metavar="WHICH", help="0, or 0,2, or cpu, or all (default: every GPU; the CPU if there is none)")
    what.add_argument("--backend", choices=backends.NAMES, help="default: the one that a call gets")
    what.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="these checks or groups only (repeatable); controls always run"
    )
    what.add_argument("--seed", type=_seed, default=0, metavar="N", help=f"of the inputs, 0 to {MAX_SEED} (default 0)")
    what.add_argument("--small", action="store_true", help="small shapes: for many runs, or to try this out")
    what.add_argument("--list", action="store_true", help="the checks and what each asks; nothing is run")
    how = p.add_argument_group("how it is judged")
    how.add_argument("--strict", action="store_true", help="warnings and unread signals fail")
    how.add_argument("--timeout", type=positive_number, metavar="SECONDS", help="of the whole run; what is not done by then has no verdict")
    how.add_argument("--golden", type=Path, metavar="DIR", help="folder of recorded digests (default: the user's own)")
    how.add_argument("--record", action="store_true", help="record this run's digests there, if it passes")
    how.add_argument("--replace", action="store_true", help="with --record: replace what is recorded otherwise")
    out = p.add_argument_group("output")
    out.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the whole report (no FILE: on standard output)")
    out.add_argument("--junit", metavar="FILE", help="for CI systems")
    out.add_argument("--prometheus", metavar="FILE", help="for the textfile collector of node_exporter")
    out.add_argument("--html", metavar="FILE", help="one page, without external resources")
    out.add_argument("--from", dest="source", metavar="REPORT", help="render a report that was written with --json; nothing is run")
    out.add_argument("--quiet", action="store_true", help="no progress and no table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. `argv` defaults to the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(argv)
    from .document import OutputError, ReportError
    from .golden import GoldenError

    try:
        return _run(arguments, argv)
    except (UsageError, OutputError, ReportError, GoldenError, ModuleNotFoundError) as error:
        print(f"portable-flash validate: {error}", file=sys.stderr)
        return NO_VERDICT
    except OSError:
        raise  # of standard output: `arguments.run` tells it from others
    except Exception:  # a fault of this program says nothing of a device, and Python would exit with 1, which means a failed one
        traceback.print_exc()
        return NO_VERDICT


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    from . import document, session

    outputs = {name: path for name in FORMATS if (path := getattr(arguments, name)) is not None}
    if arguments.source is not None and (idle := _given(argv) - {"source", "quiet", *FORMATS}):
        raise UsageError(f"--{', --'.join(sorted(idle))}: without effect together with --from, which runs and judges nothing")
    read = [] if arguments.source is None else [(f"--from {arguments.source}", arguments.source)]
    document.check_outputs({f"--{name}": path for name, path in outputs.items()}, read)
    if arguments.source is not None:
        return _show(document.read(arguments.source), outputs, arguments.quiet)
    if arguments.hours is not None and arguments.level != "soak":
        raise UsageError(f"--hours {arguments.hours:g}: only for --level soak, not {arguments.level}")
    if arguments.replace and not arguments.record:
        raise UsageError("--replace: only with --record")
    devices = find_devices(arguments.device)
    options = session.Options(
        level=arguments.level, seed=arguments.seed, hours=(arguments.hours or 1.0) if arguments.level == "soak" else 0.0,
        strict=arguments.strict, timeout_s=arguments.timeout, backend=arguments.backend, only=tuple(arguments.only), small=arguments.small,
        golden=None if arguments.golden is None else str(arguments.golden),
    )  # fmt: skip
    listed = session.listing(devices, options)
    _check_patterns(arguments.only, listed)
    if arguments.list:
        return _list(listed)

    from .progress import display

    with display(arguments.quiet) as tell:
        report = session.validate(devices, options, command=["portable-flash", "validate", *argv], tell=tell)
    code = _show(report, outputs, arguments.quiet)
    if arguments.record:
        _record(report, arguments)
    return code


def _given(argv: list[str]) -> set[str]:
    """The options that are on the command line, also those with their default as value."""
    unset = argparse.Namespace(**dict.fromkeys(vars(parser().parse_args([]))))  # None, which keeps the defaults out
    return {name for name, value in vars(parser().parse_args(argv, unset)).items() if value is not None}


def _show(report: Report, outputs: dict[str, str], quiet: bool) -> int:
    from . import document, terminal

    document.write(report, outputs)
    if not quiet and "-" not in outputs.values():
        terminal.render(report)
    return EXIT_CODES[report.verdict]


def _record(report: Report, arguments: argparse.Namespace) -> None:
    from . import golden

    for path in golden.record(report, arguments.golden or golden.default_folder(), arguments.replace):
        print(f"recorded in {path}", file=sys.stderr)


def _list(listed: dict[str, list[tuple[tuple[str, ...], str]]]) -> int:
    for device, tasks in listed.items():
        print(f"{device}:")
        for ids, asks in tasks:
            print(f"  {asks}?")
            print("".join(f"    {name}\n" for name in ids), end="")
    return 0


# ------------------------------------------------------------------ arguments
def find_devices(which: str | None) -> list[Device]:
    """The devices that --device names. Raises UsageError."""
    gpus = [device for device in all_devices() if device.vendor != "cpu"]
    if which is None:
        return gpus or [cpu()]
    if which == "all":
        return [*gpus, cpu()]
    found: list[Device] = []
    for part in which.split(","):
        part = part.strip()
        if part == "cpu":
            found.append(cpu())
        elif part.isdecimal() and int(part) < len(gpus):
            found.append(gpus[int(part)])
        else:
            known = f"0 to {len(gpus) - 1}" if len(gpus) > 1 else "0" if gpus else "no GPU, for torch sees none"
            raise UsageError(f"--device {which}: {part!r}: allowed are cpu, all, and {known}")
    return list(dict.fromkeys(found))


def _check_patterns(patterns: list[str], listed: dict[str, list[tuple[tuple[str, ...], str]]]) -> None:
    """A pattern that selects nothing is a mistake, and would otherwise look like a pass."""
    from .checks import GROUPS, wanted

    names = [name for tasks in listed.values() for ids, _ in tasks for name in ids]
    names += [f"{group}/*" for group in ("signals", "agreement/node", "agreement/golden", "speed/node")]
    for pattern in patterns:
        if not any(wanted(name, [pattern]) for name in names if not name.startswith("control/")) and pattern != "control":
            raise UsageError(f"--only {pattern}: selects no check; groups are {', '.join(GROUPS)}; see --list")


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 0 to {MAX_SEED}")
    return int(text)
