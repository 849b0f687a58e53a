"""One row of a speed benchmark: every implementation is checked, then all that are right are timed together."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ..device import detect
from .checks import Checker
from .memory import forward_backward, peak_extra_bytes
from .peers import OURS, Built, Peer, Refused, first_line
from .records import OK, REFUSED, Outcome, Result, Row
from .suite import CallInputs, Case, make_inputs
from .timing import Clock, Run, Samples, interleave

BASELINES = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")  # the first that runs
MAX_INPUT_SETS = 8


@dataclass(frozen=True)
class Settings:
    dtype: torch.dtype
    device: torch.device
    directions: tuple[str, ...]
    rounds: int
    budget_s: float  # of one implementation in one round


def input_set_count(case: Case, settings: Settings) -> int:
    """Enough sets that together exceed the last cache four times over; 1 on the CPU, whose users' data is often in cache."""
    if settings.device.type == "cpu":
        return 1
    one = case.input_bytes(settings.dtype) + case.problem(settings.dtype).operand_bytes()["o"]
    return max(1, min(MAX_INPUT_SETS, -(-4 * detect(settings.device).l2_bytes // one)))


def measure_row(case: Case, peers: list[Peer], settings: Settings, clock: Clock) -> Row:
    """Check and time `peers` on `case`. What refuses or is wrong says so in its outcome and is not timed."""
    sets = [make_inputs(case, settings.dtype, settings.device, seed) for seed in range(input_set_count(case, settings))]
    checker = Checker(case, sets[0], with_gradients="backward" in settings.directions)
    ready: dict[str, Built] = {}
    results: dict[str, Result] = {}
    for peer in sorted(peers, key=lambda peer: peer.name == OURS):  # SDPA first: the others are compared with it at full size
        result, built = _check(peer, case, sets[0], checker, settings)
        results[peer.name] = result
        if built is not None:
            ready[peer.name] = built
    del checker  # its references and SDPA's results take memory that the timed calls may need
    usable = [name for name in BASELINES if name in ready and all(_is_ok(results[name], direction) for direction in settings.directions)]
    baseline = usable[0] if usable else None
    for direction in settings.directions:
        right = {name: built for name, built in ready.items() if _is_ok(results[name], direction)}
        samples = _time(direction, right, results, sets, settings, clock)
        for name, taken in samples.items():
            results[name].outcomes[direction].add_times(taken, case.flops(direction), samples.get(baseline) if baseline else None)
    return Row(case, len(sets), baseline, [results[peer.name] for peer in peers])


# ---------------------------------------------------------------------- correct first
def _check(peer: Peer, case: Case, inputs: CallInputs, checker: Checker, settings: Settings) -> tuple[Result, Built | None]:
    """Outcomes without times, and the implementation if at least its forward is right."""
    result = Result(peer.name, peer.label)
    with _refusal_as_outcome(result, ("forward", *settings.directions)):
        built = peer.build(case, *inputs[:3])
        result.note = built.note
        poison(inputs)
        with built.context(), torch.no_grad():
            out = built.call(*inputs[:3])
        result.outcomes["forward"] = checker.judge(peer.name, {"out": out})
    if result.outcomes["forward"].status != OK:
        for direction in settings.directions:
            result.outcomes.setdefault(direction, Outcome(result.outcomes["forward"].status, "see forward"))
        return result, None
    if "backward" in settings.directions:
        with _refusal_as_outcome(result, ("backward",)):
            poison(inputs)
            with built.context():
                found = forward_backward(built.call, *inputs)
            result.outcomes["backward"] = checker.judge(peer.name, dict(zip(("out", "query", "key", "value"), found, strict=True)))
            del found
            with built.context():
                result.peak_extra_bytes = peak_extra_bytes(partial(forward_backward, built.call, *inputs), settings.device)
    return result, built


@contextlib.contextmanager
def _refusal_as_outcome(result: Result, directions: Iterable[str]) -> Iterator[None]:
    """Whatever an implementation raises is its reason: peers are other people's code and raise what they like."""
    reason = ""
    try:
        yield
    except Refused as error:
        reason = first_line(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    if reason:  # outside of except: there the traceback keeps the tensors alive
        for direction in directions:
            result.outcomes.setdefault(direction, Outcome(REFUSED, reason))
        release_memory()


def _is_ok(result: Result, direction: str) -> bool:
    return result.outcomes[direction].status == OK


def poison(inputs: CallInputs) -> None:
    """Fill freed memory of the results' sizes with NaN, so that an element nobody writes does not look right by luck."""
    poisoned = [torch.full_like(tensor, torch.nan, requires_grad=False) for tensor in inputs]
    del poisoned  # all at once: one after the other they would share a block


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- then time
def _time(
    direction: str, ready: dict[str, Built], results: dict[str, Result], sets: list[CallInputs], settings: Settings, clock: Clock
) -> dict[str, Samples]:
    """Interleave all that are right. Each fitted into memory alone; one that does not beside the others is refused."""
    prepare = forward_run if direction == "forward" else backward_run
    runs: dict[str, Run] = {}
    for name, built in ready.items():
        reason = ""
        try:
            runs[name] = prepare(built, sets)
            with runs[name].context():
                runs[name].step(0)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory beside the others: {first_line(error)}"
        if reason:  # outside of except: there the traceback keeps the tensors alive
            runs.pop(name, None)
            results[name].outcomes[direction] = Outcome(REFUSED, reason)
            release_memory()
    return interleave(runs, clock, settings.rounds, settings.budget_s)


def forward_run(built: Built, sets: list[CallInputs]) -> Run:
    """Inference: no graph is kept."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with built.context(), torch.no_grad():
            yield

    def step(i: int) -> None:
        query, key, value, _ = sets[i % len(sets)]
        built.call(query, key, value)

    return Run(step, context)


def backward_run(built: Built, sets: list[CallInputs]) -> Run:
    """The backward pass alone: outputs are computed once and their graphs kept."""
    with built.context():
        outs = [built.call(query, key, value) for query, key, value, _ in sets]

    def step(i: int) -> None:
        query, key, value, grad_out = sets[i % len(sets)]
        torch.autograd.grad(outs[i % len(sets)], (query, key, value), grad_out, retain_graph=True)

    return Run(step, built.context)
