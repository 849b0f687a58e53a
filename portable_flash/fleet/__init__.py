"""Validation of many machines: run it on a Ray cluster, or compare the reports that they sent."""

from .cli import main

__all__ = ["main"]
