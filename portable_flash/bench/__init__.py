"""Times attention beside every peer that is present, and measures memory, HBM traffic and host time.

    portable-flash bench                          forward, backward and peak memory over a suite of shapes
    portable-flash bench --memory                 peak memory against sequence length
    portable-flash bench --hbm                    bytes between HBM and chip, from hardware counters
    portable-flash bench --host                   host time of one small eager call
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .peers import OURS, PEERS, chosen
from .suite import DIRECTIONS, DTYPES, SHAPE_FORM, SUITES, Case, parse_shape

__all__ = ["main"]

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool. Returns 0; 1 when this library is wrong or could not run a case. Bad arguments exit with 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        device = _device(args.device)
        if args.plot is not None:
            _check_plot(args)
        return _mode(args)(args, device, argv)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))


# ---------------------------------------------------------------------- arguments
def _argument(convert: Callable[[str], T], allowed: str) -> Callable[[str], T]:
    """An argparse type whose error names the value and what is allowed (argparse names the argument)."""

    def parse(text: str) -> T:
        try:
            return convert(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r}: allowed {allowed}") from None

    return parse


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _directions(text: str) -> tuple[str, ...]:
    asked = [word.strip() for word in text.split(",")]
    if not set(asked) <= set(DIRECTIONS):
        raise ValueError
    return tuple(direction for direction in DIRECTIONS if direction in asked)


def _shape(text: str) -> Case:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--shape ")) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="portable-flash bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = _argument(_positive, "are whole numbers from 1")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--memory", action="store_true", help="peak memory of forward + backward against sequence length")
    mode.add_argument("--hbm", action="store_true", help="HBM bytes of forward + backward: predicted, and read with ncu if present")
    mode.add_argument("--host", action="store_true", help="host time of one eager call at B1 H8 S128 D64")
    mode.add_argument("--hbm-worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--suite", choices=SUITES, help="shapes to time (default: peers on a GPU, cpu on the CPU)")
    parser.add_argument("--shape", type=_shape, action="append", metavar=SHAPE_FORM, help="instead of a suite; may be repeated")
    parser.add_argument("--peers", help=f"comma-separated, beside this library (default: all present but unfused): {', '.join(PEERS)}")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU (fp16 with --hbm), fp32 on the CPU")
    directions = _argument(_directions, f"are {' and '.join(DIRECTIONS)}, comma-separated")
    parser.add_argument("--direction", type=directions, default=DIRECTIONS, metavar="forward,backward", help="default: both")
    parser.add_argument("--rounds", type=positive, help="rounds in which every implementation is timed in turn (default: 5, on the CPU 3)")
    parser.add_argument("--budget-ms", type=positive, default=60, help="milliseconds for one implementation in one round (default 60)")
    lengths = _argument(_lengths, "are whole numbers from 1, comma-separated")
    parser.add_argument("--lengths", type=lengths, help="sequence lengths for --memory")
    parser.add_argument("--device", help="torch device (default: cuda where present, else cpu)")
    parser.add_argument("--out", metavar="FILE.json", help="write the results")
    parser.add_argument("--plot", metavar="FILE.png", help="write a figure (timing and --memory)")
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted(_positive(word) for word in text.split(",")))


def _device(text: str | None) -> torch.device:
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(text or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise ValueError(f"--device {text!r}: allowed are cpu" + "".join(f", cuda:{index}" for index in range(gpus)))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _dtype_name(args: argparse.Namespace, device: torch.device, on_gpu: str = "bf16") -> str:
    return args.dtype or (on_gpu if device.type == "cuda" else "fp32")


def _check_plot(args: argparse.Namespace) -> None:
    """Fail before the measurement, not after it."""
    from .plot import pyplot

    if args.hbm or args.host or args.hbm_worker:
        raise ValueError(f"--plot {args.plot!r}: allowed with timing and with --memory only")
    pyplot()


# ---------------------------------------------------------------------- modes
def _mode(args: argparse.Namespace) -> Callable[[argparse.Namespace, torch.device, list[str]], int]:
    if args.hbm_worker:
        return _hbm_worker
    return _memory if args.memory else _hbm if args.hbm else _host if args.host else _speed


def _speed(args: argparse.Namespace, device: torch.device, argv: list[str]) -> int:
    from .machine import identity
    from .measure import Settings, measure_row
    from .records import OK, SpeedReport, write_json
    from .report import print_speed
    from .suite import FLOPS_CONVENTION
    from .timing import clock_for

    names = [word.strip() for word in args.peers.split(",")] if args.peers else None
    peers, absent = chosen(names, device)
    cases = args.shape or SUITES[args.suite or ("peers" if device.type == "cuda" else "cpu")]
    dtype_name = _dtype_name(args, device)
    rounds = args.rounds or (5 if device.type == "cuda" else 3)
    settings = Settings(DTYPES[dtype_name], device, args.direction, rounds, args.budget_ms * 1e-3)
    report = SpeedReport(dtype_name, list(args.direction), FLOPS_CONVENTION, absent, identity(device, argv))
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        report.rows.append(measure_row(case, peers, settings, clock_for(device)))
        if args.out:  # a long run that is cut short keeps what it measured
            write_json(args.out, report)
    print_speed(report)
    if args.plot:
        from .plot import plot_speed

        plot_speed(report, args.plot)
    ours = [outcome.status for row in report.rows for result in row.results if result.peer == OURS for outcome in result.outcomes.values()]
    return int(any(status != OK for status in ours))


def _memory(args: argparse.Namespace, device: torch.device, argv: list[str]) -> int:
    from .machine import identity
    from .memory import LENGTHS, MemoryReport, measure_growth
    from .records import write_json
    from .report import print_memory

    heads = 16 if device.type == "cuda" else 4
    case = args.shape[0] if args.shape else Case(1, heads, heads, 1, 1, 64, 64)
    dtype_name = _dtype_name(args, device)
    report = MemoryReport(dtype_name, case.batch, case.heads_q, case.head_dim, case.causal, identity(device, argv))
    measure_growth(report, args.lengths or LENGTHS[device.type], DTYPES[dtype_name], device)
    print_memory(report)
    if args.out:
        write_json(args.out, report)
    if args.plot:
        from .plot import plot_memory

        plot_memory(report, args.plot)
    return 0


def _hbm(args: argparse.Namespace, device: torch.device, argv: list[str]) -> int:
    from .hbm import PAPER_CASE, HbmReport, measure_hbm
    from .machine import identity
    from .records import write_json
    from .report import print_hbm

    dtype_name = args.dtype or "fp16"
    report = HbmReport(args.shape[0] if args.shape else PAPER_CASE, dtype_name, identity(device, argv))
    measure_hbm(report, DTYPES[dtype_name], device)
    print_hbm(report)
    if args.out:
        write_json(args.out, report)
    return 0


def _hbm_worker(args: argparse.Namespace, device: torch.device, argv: list[str]) -> int:
    from .hbm import worker

    worker(args.hbm_worker, args.shape[0], DTYPES[args.dtype], device)
    return 0


def _host(args: argparse.Namespace, device: torch.device, argv: list[str]) -> int:
    from .host import CALLS, CASE, HostReport, measure_host
    from .machine import identity
    from .records import write_json
    from .report import print_host

    dtype_name = args.dtype or "bf16"
    report = HostReport(dtype_name, args.shape[0] if args.shape else CASE, CALLS[device.type], identity(device, argv))
    measure_host(report, DTYPES[dtype_name], device)
    print_host(report)
    if args.out:
        write_json(args.out, report)
    return 0
