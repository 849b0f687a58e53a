"""The command line of the tuner."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import backends
from ..arguments import positive_integer, positive_number
from ..database import BACKENDS, DatabaseError
from ..device import Device, all_devices, catalogue, named
from ..dispatch import order
from ..tiling import KERNELS
from ..tuning import user_folder
from . import looking, running
from .keys import DEFAULT_BUCKETS, DEFAULT_DTYPES, DEFAULT_HEAD_DIMS, DTYPES, KEY_FORM, Key, fits_memory, key_set, parse_key
from .running import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, Target, UsageError
from .space import SHORTLIST
from .writer import WriteError, ensure_writable, path_of


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="portable-flash tune", description="Find the fastest tilings for a GPU and keep them in a file of the tuning database.",
        epilog=f"Exit codes: {EXIT_DONE} done, {EXIT_FAILED} failed, {EXIT_USAGE} wrong arguments, {EXIT_STOPPED} stopped early "
        "(go on with --resume).",
    )  # fmt: skip
    p.add_argument("--device", default="auto", help="a GPU's name (h200, mi300x, ...) or auto: the first GPU here")
    what = p.add_argument_group("what is tuned")
    what.add_argument("--backend", choices=BACKENDS, help="default: the one that calls on this GPU would run on")
    what.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    what.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=DEFAULT_DTYPES, metavar="DTYPE", help=", ".join(DTYPES))
    what.add_argument("--head-dims", nargs="+", type=positive_integer, default=DEFAULT_HEAD_DIMS, metavar="N", help="1 to 256")
    what.add_argument("--seqlens", nargs="+", type=positive_integer, default=DEFAULT_BUCKETS, metavar="N", help="upper bounds of buckets")
    what.add_argument("--causal", choices=("both", "yes", "no"), default="both")
    what.add_argument("--keys", nargs="+", metavar="KEY", help=f"these keys only: {KEY_FORM}")
    how = p.add_argument_group("how")
    how.add_argument("--offline", action="store_true", help="without the GPU: compile for it, drop what spills, rank by the model")
    how.add_argument("--candidates", type=positive_integer, metavar="N", help=f"candidates a key (default {SHORTLIST}; offline 6)")
    how.add_argument("--budget", type=positive_number, metavar="SECONDS", help="stop cleanly after this time and keep what is done")
    how.add_argument("--resume", action="store_true", help="go on where the last run to the same --out stopped")
    how.add_argument("--jobs", type=positive_integer, metavar="N", help="processes that compile (default: cores less two)")
    how.add_argument("--ray", metavar="ADDRESS", help="measure on the GPUs of this model in a Ray cluster (auto, or host:port)")
    how.add_argument("--block", action="store_true", help="write tilings that were wrong, faulted or hung into `blocked`")
    out = p.add_argument_group("output")
    out.add_argument("--out", type=Path, help="folder laid out like tuning_db (default: the user's own, which look-ups read first)")
    out.add_argument("--journal", type=Path, help="file of finished measurements (default: <out>/.tune/<device>.journal)")
    out.add_argument("--table", type=Path, metavar="FILE", help="default and tuned times of every key, as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="the same as a picture (needs matplotlib)")
    out.add_argument("--json", action="store_true", help="print JSON lines")
    look = p.add_argument_group("instead of measuring the keys").add_mutually_exclusive_group()
    look.add_argument("--dry-run", action="store_true", help="what would be tried")
    look.add_argument("--list", action="store_true", help="every key with the tiling that is used now and its source")
    look.add_argument("--stale", action="store_true", help="kernels whose entries are void or stale")
    look.add_argument("--diff", action="store_true", help="how the file in --out differs from the one that ships")
    look.add_argument("--explain", metavar="KEY", help=f"why a key has its tiling: {KEY_FORM}")
    look.add_argument("--rebuild", action="store_true", help="write the file, --table and --plot again from the journal")
    look.add_argument("--verify-quality", type=Path, metavar="FILE", help="measure the search against an exhaustive one; table as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. `argv` defaults to the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments, argv)
    except UsageError as error:
        print(f"portable-flash tune: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (DatabaseError, WriteError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"portable-flash tune: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    if arguments.offline and (other := next((n for n in ("resume", "ray", "verify_quality", "rebuild") if getattr(arguments, n)), None)):
        raise UsageError(f"--{other.replace('_', '-')}: needs measurements, which --offline makes none of")
    target = find_target(arguments.device)
    device = target.device
    backend = arguments.backend or default_backend(device)
    _require_backend(f"--backend {backend}", backend, device)
    keys = _keys(arguments, backend, device)
    out = arguments.out or user_folder()
    path = path_of(out, device)
    if arguments.list:
        looking.show_list(keys, device, arguments.json)
    elif arguments.stale:
        looking.show_stale(device, path, arguments.json)
    elif arguments.diff:
        if not path.is_file():
            raise UsageError(f"--diff: {path} does not exist")
        looking.show_diff(keys, device, path, arguments.json)
    elif arguments.explain:
        key = _key_argument("--explain", arguments.explain)
        _require_backend(f"--explain {key}", key.backend, device)
        looking.show_explain(key, device, arguments.json)
    elif arguments.dry_run:
        looking.show_dry_run(keys, device, arguments.candidates, arguments.json)
    elif arguments.verify_quality:
        return running.verify(keys if arguments.keys else None, target, backend, arguments, argv)
    else:
        ensure_writable(path)
        if arguments.offline:
            return running.rank_offline(keys, device, out, arguments)
        if arguments.rebuild:
            return running.rebuild(keys, target, out, arguments, argv)
        return running.measure(keys, target, out, arguments, argv)
    return EXIT_DONE


# ------------------------------------------------------------------ arguments
def _require_backend(argument: str, backend: str, device: Device) -> None:
    if (reason := backends.load(backend).unavailable(device)) is not None:
        raise UsageError(f"{argument}: {backend}: {reason}")


def find_target(name: str) -> Target:
    """The GPU that --device names. Raises UsageError for a name that no file has and for auto without a GPU."""
    gpus = [device for device in all_devices() if device.vendor != "cpu"]
    if name == "auto":
        if not gpus:
            raise UsageError(f"--device auto: torch sees no GPU here; name one of {', '.join(catalogue())} and add --offline")
        return Target(gpus[0], tuple(d.index for d in gpus if d.slug == gpus[0].slug))
    try:
        device = named(name)
    except ValueError as error:
        here = [d for d in gpus if name.lower() in (d.slug, d.name.lower())]
        if not here:
            raise UsageError(f"--device {name}: {error}") from error
        device = here[0]
    if device.vendor == "cpu":
        raise UsageError("--device cpu: the CPU backend has no tilings; name a GPU")
    same = [d for d in gpus if d.slug == device.slug]
    return Target(same[0] if same else device, tuple(d.index for d in same))


def default_backend(device: Device) -> str:
    """The first in the order of dispatch that takes tilings and has a path for this GPU. Raises UsageError."""
    reasons = []
    for name in order(device):
        if name in BACKENDS:
            reason = backends.load(name).unavailable(device)
            if reason is None:
                return name
            reasons.append(f"{name} {reason}")
    raise UsageError(f"--device {device.slug}: no backend with tilings runs there: {'; '.join(reasons)}")


def _keys(arguments: argparse.Namespace, backend: str, device: Device) -> list[Key]:
    if arguments.keys:
        return [_key_argument("--keys", text) for text in arguments.keys]
    if too_wide := [d for d in arguments.head_dims if d > 256]:
        raise UsageError(f"--head-dims {too_wide[0]}: allowed are 1 to 256")
    causal = {"both": (False, True), "yes": (True,), "no": (False,)}[arguments.causal]
    unique = lambda values: tuple(dict.fromkeys(values))
    keys = key_set(backend, unique(arguments.kernels), unique(arguments.dtypes), unique(arguments.head_dims), arguments.seqlens, causal)
    return [k for k in keys if fits_memory(k, device.memory_bytes)]


def _key_argument(option: str, text: str) -> Key:
    try:
        return parse_key(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


