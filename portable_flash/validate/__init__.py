"""Prove that attention computes the right numbers on this machine's devices, with a verdict that an operator can act on."""

from .cli import main

__all__ = ["main"]
