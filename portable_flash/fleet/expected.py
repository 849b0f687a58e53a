"""Who should have reported: hosts with their devices, and models with their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .facts import clean

MAX_BYTES = 16 << 20


class ExpectationError(ValueError):
    """An expectation that cannot be read. The text names the option, the value and what is allowed."""


@dataclass(frozen=True)
class Expected:
    """hosts: name -> devices, None where any number above 0 will do. models: name or slug -> devices."""

    hosts: Mapping[str, int | None] = field(default_factory=dict)
    models: Mapping[str, int] = field(default_factory=dict)


def read(files: Iterable[str], counts: Iterable[str]) -> Expected:
    """From --expect FILE (a line a host: its name, then if wanted how many devices; # begins a comment) and --expect-count MODEL=N."""
    hosts: dict[str, int | None] = {}
    for name in files:
        for number, line in enumerate(_text(name).splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 2 or (len(words) == 2 and not words[1].isdecimal()):
                raise ExpectationError(f"--expect {name}: line {number}: {clean(line, 60)!r}: a line is HOST or HOST DEVICES")
            hosts[words[0]] = int(words[1]) if len(words) == 2 else None
    models: dict[str, int] = {}
    for text in counts:
        model, equals, count = text.rpartition("=")
        if not equals or not model.strip() or not count.strip().isdecimal():
            raise ExpectationError(f"--expect-count {text!r}: expected MODEL=N, N a whole number")
        models[model.strip()] = int(count)
    return Expected(hosts, models)


def missing_hosts(expected: Expected, seen: Mapping[str, int]) -> list[tuple[str, str]]:
    """(host, what is missing) by comparison with the devices that each host reported."""
    found: list[tuple[str, str]] = []
    short = Counter[str]()
    for host, devices in seen.items():
        short[host.partition(".")[0]] += devices
    for host, wanted in expected.hosts.items():
        # node7 and node7.cluster.local are one host where either side leaves the domain out
        devices = seen.get(host) if host in seen else (short.get(host) if "." not in host else seen.get(host.partition(".")[0]))
        if devices is None:
            found.append((host, "no report"))
        elif devices < (1 if wanted is None else wanted):
            found.append((host, f"{devices} of {1 if wanted is None else wanted} devices reported"))
    return found


def unexpected_hosts(expected: Expected, seen: Collection[str]) -> list[str]:
    if not expected.hosts:
        return []
    known = set(expected.hosts)
    shorts = {host.partition(".")[0] for host in known}
    return [h for h in seen if h not in known and h.partition(".")[0] not in (known if "." in h else shorts)]


def missing_models(expected: Expected, seen: Iterable[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """(model, what is missing), from (name, slug, devices) of the models that reported."""
    seen = list(seen)
    found = []
    for model, wanted in expected.models.items():
        devices = sum(n for name, slug, n in seen if model.casefold() in (name.casefold(), slug.casefold()))
        if devices < wanted:
            known = "" if devices else "; models that reported: " + (", ".join(sorted({f"{n} ({s})" for n, s, _ in seen})) or "none")
            found.append((model, f"{devices} of {wanted} devices reported{known}"))
    return found


def _text(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ExpectationError(f"--expect {name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise ExpectationError(f"--expect {name}: a list of hosts has at most {MAX_BYTES >> 20} MiB")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ExpectationError(f"--expect {name}: not a text in UTF-8") from None
