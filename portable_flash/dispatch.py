"""Problem x Device -> Plan: which backend runs, with which tilings, and why not the others."""

from __future__ import annotations

import warnings
from types import MappingProxyType

import torch

from . import backends
from .backends import Backend, Inputs, KernelPlan, Needs, Plan
from .device import Device, detect
from .problem import Problem
from .tuning import lookup, override

device_of = detect  # torch.device -> Device


class NoBackendError(NotImplementedError):
    """No backend can do the call; the message lists each one's reason."""


_PLANS: dict[tuple, Plan] = {}
_MAX_PLANS = 8192  # distinct problems remembered; beyond that the memory starts again from nothing
_PROBED: dict[tuple, str | None] = {}
_WARNED: set[tuple] = set()


def order(device: Device) -> tuple[str, ...]:
    """Backends in the order tried. On the CPU Triton is only its interpreter: right, and very slow."""
    names = tuple(name for name in backends.NAMES if backends.VENDORS.get(name, device.vendor) == device.vendor)
    return tuple(reversed(names)) if device.vendor == "cpu" else names


def plan(problem: Problem, device: Device, backend: str | None = None) -> Plan:
    """The plan of a call, remembered. Raises NoBackendError when nothing can run it."""
    key = (problem, device, backend, override())
    found = _PLANS.get(key)
    if found is None:
        found = _choose(problem, device, backend)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = found
    return found


def _choose(problem: Problem, device: Device, wanted: str | None) -> Plan:
    rejected, broken = [], False
    names = order(device) if wanted is None else (wanted,)
    for name in names:
        backend = backends.load(name)
        reason = backend.unavailable(device) or backend.supports(problem, device)
        if reason is None and device.present:
            reason = probe(name, device)
            broken = broken or reason is not None
        if reason is None:
            if device.present and (broken or name == "cpu"):
                _warn_fallback(name, rejected)
            return Plan(problem, device, name, _tilings(backend, problem, device), tuple(rejected))
        rejected.append((name, reason))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in rejected)
    raise NoBackendError(f"no backend can run this call on {device.name} ({device.arch}):{reasons}")


def _tilings(backend: Backend, problem: Problem, device: Device) -> MappingProxyType[str, KernelPlan]:
    tuned = backend.tuned_kernels(problem)
    return MappingProxyType({k: lookup(k, problem, device, backend.space(k), backend.NAME) for k in tuned})


def _warn_fallback(name: str, rejected: list[tuple[str, str]]) -> None:
    """Once: the CPU backend's operations run instead of kernels, or kernels that should be right here are not.

    That one kernel backend runs where another has no path is as intended, and only for `explain`.
    """
    if rejected and (name, *rejected) not in _WARNED:
        _WARNED.add((name, *rejected))
        why = "; ".join(f"{other} {reason}" for other, reason in rejected)
        slower = ", a slower path" if name == "cpu" else ""
        warnings.warn(f"portable_flash runs this call on its {name!r} backend{slower}: {why}", stacklevel=2)


# ---------------------------------------------------------------- the probe
def probe(name: str, device: Device) -> str | None:
    """Run one small causal call, forward and backward, against the oracle. None when right, else the reason; remembered.

    A library that loads, or a kernel that compiles, is no evidence: some return zeros.
    """
    key = (name, device.index)
    if key in _PROBED:
        return _PROBED[key]
    if device.vendor != "cpu" and torch.cuda.is_current_stream_capturing():
        return None  # a comparison would break the capture: judged at the next call outside of one
    _PROBED[key] = _run_probe(name, device)
    return _PROBED[key]


def _run_probe(name: str, device: Device) -> str | None:
    from torch.utils._python_dispatch import _disable_current_modes

    from . import reference

    where = torch.device("cpu") if device.index is None else torch.device("cuda", device.index)
    problem = Problem(torch.float16, batch=1, heads_q=2, heads_k=1, seqlen_q=40, seqlen_k=72, head_dim=32, head_dim_v=32, window_right=0)
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            draw = lambda heads, rows: torch.randn(1, heads, rows, 32, generator=generator, device="cpu").to(where, torch.float16)
            inputs = Inputs(draw(2, 40), draw(1, 72), draw(1, 72), scale=32**-0.5)
            backend = backends.load(name)
            plan = Plan(problem, device, name, _tilings(backend, problem, device))
            grad_out = draw(2, 40)
            out, lse = backend.forward(inputs, plan)
            grads = backend.backward(inputs, plan, out, lse, grad_out, None, Needs())
            # judged on the CPU: cuBLAS raises where a process asks torch for determinism without configuring it
            verdicts = reference.compare_call(inputs, problem, out, lse, grads, grad_out, device=torch.device("cpu"))
    except Exception as error:  # whatever a driver, compiler or kernel raises means the same: not usable here
        return f"failed its probe on this device: {type(error).__name__}: {error}"
    wrong = [str(v) for v in verdicts if not v.ok]
    return f"computed wrong numbers in its probe on this device: {'; '.join(wrong)}" if wrong else None
