"""The command `portable-flash fleet`: compare reports that were gathered, or validate every GPU of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..arguments import positive_number
from ..validate import document
from ..validate.report import EXIT_CODES, LEVELS
from . import expected, formats, gather, terminal
from .compare import Fleet
from .findings import FleetReport

EXITS = """exit codes:
  0  every device passed, and nothing is missing
  1  a device failed its validation, is an outlier or has other bits than most of its kind (with --strict: or drifted)
  2  no verdict: a device without one, bits that differ without a majority, a report missing or refused, or wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (gather.SourceError, expected.ExpectationError, document.OutputError, ModuleNotFoundError, RuntimeError) as error:
        print(f"portable-flash fleet {arguments.command}: {error}", file=sys.stderr)
        return EXIT_CODES["no_verdict"]
    except KeyboardInterrupt:
        print(f"portable-flash fleet {arguments.command}: interrupted", file=sys.stderr)
        return EXIT_CODES["no_verdict"]
    except OSError:
        raise  # of standard output: `arguments.run` tells it from others
    except Exception:  # a fault of this program says nothing of a device, and Python would exit with 1, which means a failed one
        traceback.print_exc()
        return EXIT_CODES["no_verdict"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="portable-flash fleet", description="Validation of many machines.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")

    compare = commands.add_parser(
        "compare",
        help="compare reports of portable-flash validate --json",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare the reports of many machines: outliers, bits, versions, speed, who is missing.",
    )
    compare.add_argument(
        "reports",
        nargs="+",
        metavar="REPORT",
        help="a .json or .json.gz file, a folder, a pattern, @FILE with a list of names, or - for a list on stdin",
    )
    compare.add_argument(
        "--hosts-from-names", action="store_true", help="take a host's name from its file's (node7.json: node7), as for reports of pods"
    )
    _judging(compare)
    compare.set_defaults(run=_compare)

    validate = commands.add_parser(
        "validate",
        help="validate every GPU of a Ray cluster",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Validate every GPU of a Ray cluster, one task a GPU, and compare the reports. "
        "Arguments after -- go to portable-flash validate.",
    )
    validate.add_argument("--ray", required=True, metavar="ADDRESS", help='of the cluster: "auto", HOST:PORT, or ray://HOST:PORT')
    validate.add_argument("--level", choices=LEVELS, default="quick")
    validate.add_argument("--cpu", action="store_true", help="validate the CPU backend, once a node")
    validate.add_argument("--out", metavar="DIR", help="keep every report in this folder")
    validate.add_argument("--timeout", type=positive_number, metavar="S", help="seconds for one GPU, from its start; default by level")
    validate.add_argument(
        "--start-timeout", type=positive_number, default=300.0, metavar="S", help="seconds until a GPU is free and its task begins (300)"
    )
    _judging(validate)
    validate.add_argument(
        "extra", nargs="*", metavar="ARGUMENT", help="after --: arguments of portable-flash validate, such as --only accuracy"
    )
    validate.set_defaults(run=_validate)
    return parser


def _judging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expect", action="append", default=[], metavar="FILE", help="hosts that must report: a line is HOST or HOST DEVICES"
    )
    parser.add_argument("--expect-count", action="append", default=[], metavar="MODEL=N", help="how many devices of a model must report")
    parser.add_argument("--allow-missing", action="store_true", help="what is missing or refused is named, and takes no verdict away")
    parser.add_argument("--strict", action="store_true", help="drift and other warnings fail")
    for name, text in formats.HELP.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{text}; - is standard output")


def _compare(arguments: argparse.Namespace) -> int:
    wanted = expected.read(arguments.expect, arguments.expect_count)
    paths = list(gather.names(arguments.reports))
    lists = [(name, name[1:]) for name in arguments.reports if name.startswith("@")]
    outputs = _outputs(arguments, [*lists, *((f"the comparison of {path}", path) for path in paths)])
    fleet = Fleet()
    for source, report in gather.reports(paths):
        if isinstance(report, str):
            fleet.refuse(source, report)
        else:
            fleet.add(replace(report, host=gather.stem(source)) if arguments.hosts_from_names else report, source)
    return _finish(fleet, wanted, arguments, outputs)


def _validate(arguments: argparse.Namespace) -> int:
    from . import ray_run

    wanted = expected.read(arguments.expect, arguments.expect_count)
    outputs = _outputs(arguments)
    _apart(outputs, arguments.out)
    run = ray_run.Run(
        level=arguments.level,
        cpu=arguments.cpu,
        extra=tuple(arguments.extra),
        timeout_s=arguments.timeout or ray_run.TIMEOUTS_S[arguments.level],
        start_timeout_s=arguments.start_timeout,
        out=arguments.out,
    )
    fleet = Fleet()
    ray_run.validate(arguments.ray, run, fleet, lambda line: print(line, file=sys.stderr, flush=True))
    return _finish(fleet, wanted, arguments, outputs)


def _outputs(arguments: argparse.Namespace, inputs: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Format -> file; refuses, before any work is done, a file that cannot be written or that is one of the inputs, (argument, path)."""
    outputs = {name: path for name in formats.HELP if (path := getattr(arguments, name)) is not None}
    expectations = [(f"--expect {name}", name) for name in arguments.expect]
    document.check_outputs({f"--{name}": path for name, path in outputs.items()}, [*expectations, *inputs])
    return outputs


def _apart(outputs: Mapping[str, str], folder: str | None) -> None:
    """The folder of --out is for reports: a .json file of another kind there could overwrite one, or be taken for one later."""
    for name, path in outputs.items() if folder is not None else ():
        if path == "-":
            continue
        target, kept = os.path.realpath(path), os.path.realpath(folder)
        if target == kept or (os.path.dirname(target) == kept and target.endswith(gather.SUFFIXES)):
            raise document.OutputError(f"--{name} {path} and --out {folder}: that folder keeps reports; write this file elsewhere")


def _finish(fleet: Fleet, wanted: expected.Expected, arguments: argparse.Namespace, outputs: dict[str, str]) -> int:
    report: FleetReport = fleet.compare(wanted, arguments.strict, arguments.allow_missing)
    texts = {name: formats.render(name, report) for name in outputs}
    for name, path in outputs.items():
        document.write_text(path, texts[name], f"--{name}")
    # the table gives way where a document goes to standard output
    terminal.render(report, _stderr() if "-" in outputs.values() else None)
    return EXIT_CODES[report.verdict]


def _stderr() -> Any:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return sys.stderr
    return Console(stderr=True, highlight=False)
