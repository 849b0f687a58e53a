"""The command `portable-flash`: a subcommand each for looking at the machine and for the tools, loaded when asked for."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from .arguments import run

# Subcommands with a parser of their own: name -> (module:function(argv) -> exit code, one line of help)
TOOLS = {
    "bench": ("portable_flash.bench:main", "measure attention here and compare it with its peers"),
    "tune": ("portable_flash.tune:main", "find the fastest tilings for a GPU and keep them in the tuning database"),
    "validate": ("portable_flash.validate:main", "prove that attention computes the right numbers on the devices of this machine"),
    "fleet": ("portable_flash.fleet:main", "validate every GPU of a cluster, or compare the reports of many machines"),
    "build": ("portable_flash.backends.hip.commands:build_main", "compile HIP kernels ahead of time, for machines without a compiler"),
    "cache": ("portable_flash.backends.hip.commands:cache_main", "list or clear the HIP kernels that were compiled here"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code. `argv` defaults to the command line."""
    return run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in TOOLS:
        module, _, function = TOOLS[argv[0]][0].partition(":")
        return getattr(importlib.import_module(module), function)(argv[1:]) or 0
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="portable-flash", description="Exact attention on NVIDIA and AMD GPUs and on the CPU.")
    commands = parser.add_subparsers(required=True, metavar="command")
    info = commands.add_parser("info", help="what this machine is and what can run on it")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_info)
    for name, (_, text) in TOOLS.items():  # listed in --help; main() hands their arguments over before this parser sees them
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _info(arguments: argparse.Namespace) -> int:
    from .info import info, render

    facts = info()
    print(json.dumps(facts, indent=2) if arguments.json else render(facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
