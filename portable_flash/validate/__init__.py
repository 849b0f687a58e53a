"""Prove that attention computes the right numbers on this machine's devices, with a verdict that an operator can act on."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """`portable-flash validate`; returns the exit code. Loaded when called: reading and rendering reports needs none of it."""
    from .cli import main as run

    return run(argv)
