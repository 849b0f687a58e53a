"""Types of command-line arguments, whose errors name the value and what is allowed (argparse names the argument)."""

from __future__ import annotations

import argparse


def positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


def positive_number(text: str) -> float:
    """At most 1e7, which as seconds a timer can still wait."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e7:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number")
    return value
