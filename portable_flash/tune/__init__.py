"""Measure which tilings are fastest on a GPU, or rank them without one, and keep the result as a file of the tuning database.

Every measurement goes through a worker process that owns the GPU (`worker`), so that a candidate that faults or hangs
costs that process and nothing else. `keys` says what is tuned, `space` what is tried, `measure` how one candidate is
judged and timed, `search` how the fastest is found with few measurements, `session` runs them all, `writer` keeps the result.
"""

from .cli import main

__all__ = ["main"]
