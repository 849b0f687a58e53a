"""One candidate: is it right, and how long does it take. Runs inside a worker process; the search sees only `Measurer`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from .. import backends
from ..backends import Gradients, Inputs, KernelPlan, Needs, Plan
from ..bench.checks import Cut, relative_norm, rows_that_fit
from ..bench.suite import Case, make_inputs
from ..bench.timing import Run, clock_for, interleave
from ..device import Device, detect
from ..problem import Problem
from ..reference import GRADIENT, OUTPUT, check, compare_call, differentiate
from ..tiling import Tiling
from .keys import Key
from .space import default

NEEDS = {"backward_dkv": Needs(query=False), "backward_dq": Needs(key=False, value=False)}
RESULTS = {"forward": ("out",), "backward_dkv": ("key", "value"), "backward_dq": ("query",)}
MAX_INPUT_SETS = 8
MAX_PLANS = 2000  # more than all keys of a few groups have
DATA_SHARE = 0.25  # of the device's memory that the data of several keys may take together


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a candidate is right. error_ratio: its largest error over unfused PyTorch's, the worst of all results."""

    ok: bool
    reason: str = ""
    error_ratio: float | None = None
    repeatable: bool | None = None  # a second launch gave the same bits


class Measurer(Protocol):
    """What a worker offers. Every method may raise, fault or hang: the caller is another process."""

    def prepare(self, key: Key) -> None:
        """Make what all candidates of a key share, so that it is in nobody's time."""

    def launch(self, key: Key, tiling: Tiling) -> Check:
        """Launch at the key's shape and wait for the end: what faults or hangs does it here. Right or wrong, it is ok."""

    def check(self, key: Key, tiling: Tiling) -> Check:
        """Launch at the key's shape into outputs full of NaN and compare with the oracle."""

    def probe(self, key: Key, tiling: Tiling) -> Check:
        """The same at the key's odd shape."""

    def time(self, key: Key, tilings: tuple[Tiling, ...], rounds: int, budget_s: float) -> list[list[float]]:
        """Microseconds a call, `rounds` samples for each tiling, interleaved; budget_s seconds of device time a sample."""


@dataclass
class _Data:
    """The tensors of one call, with rotating copies that together exceed the last cache four times over."""

    name: tuple
    case: Case
    sets: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # query, key, value, grad_out
    forwards: list[tuple[Tensor, Tensor]]  # out and lse of each set, by the default tiling
    cuts: list[Cut]
    whole: dict[tuple, Tensor]  # results of the first right tiling on the first set, by kernel and result name

    def nbytes(self) -> int:
        several = (*self.sets, *self.forwards, tuple(self.whole.values()))
        return sum(t.numel() * t.element_size() for group in several for t in group)


class GpuMeasurer:
    """Measures on one GPU of this machine through the backends' own protocol, so that what is timed is what a call runs.

    The time of a backward kernel includes that of the delta kernel before it, which is the same for all tilings.
    """

    def __init__(self, index: int | None = 0):
        """index: of the GPU in torch's count; None is the CPU, where Triton's interpreter shows that all of this is right."""
        if index is not None:
            torch.cuda.set_device(index)
        self.where = torch.device("cpu") if index is None else torch.device("cuda", index)
        self.device: Device = detect(self.where)
        self._data: dict[tuple, _Data] = {}  # the last used is the last
        self._plans: dict[tuple, Plan] = {}
        self._warm = False

    # -------------------------------------------------------------- one launch
    def _plan(self, key: Key, problem: Problem, tiling: Tiling) -> Plan:
        """Plans are remembered because the backends key their prepared launches by them."""
        name = (key.backend, key.kernel, problem, tiling)
        if name not in self._plans:
            kernels = {key.kernel: KernelPlan(tiling, "tune")}
            self._plans[name] = Plan(problem, self.device, key.backend, MappingProxyType(kernels))
        return self._plans[name]

    def _launch(self, key: Key, plan: Plan, inputs: Inputs, grad_out: Tensor, forward: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        backend = backends.load(key.backend)
        with torch.no_grad():
            if key.kernel == "forward":
                out, lse = backend.forward(inputs, plan)
                return {"out": out, "lse": lse}
            grads = backend.backward(inputs, plan, *forward, grad_out, None, NEEDS[key.kernel])
        return {name: getattr(grads, name) for name in RESULTS[key.kernel]}

    def _poisoned(self, *arguments) -> dict[str, Tensor]:
        """Launch with all memory that torch hands out full of NaN, so that an element nobody writes is seen."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            results = self._launch(*arguments)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = filled
        if self.where.type == "cuda":
            torch.cuda.synchronize()  # a fault is this candidate's
        return results

    def launch(self, key: Key, tiling: Tiling) -> Check:
        self._launch_first(key, tiling, self._prepare(key))
        return Check(True)

    def _launch_first(self, key: Key, tiling: Tiling, data: _Data) -> None:
        """On the first input set, to the end."""
        first = data.sets[0]
        self._launch(key, self._plan(key, key.problem(), tiling), _inputs(first), first[3], data.forwards[0] if data.forwards else None)
        if self.where.type == "cuda":
            torch.cuda.synchronize()

    # -------------------------------------------------------------- right
    def check(self, key: Key, tiling: Tiling) -> Check:
        data = self._prepare(key)
        plan, first = self._plan(key, key.problem(), tiling), data.sets[0]
        inputs, forward = _inputs(first), data.forwards[0] if data.forwards else None
        found = self._poisoned(key, plan, inputs, first[3], forward)
        verdicts = []
        first_one = (key.kernel, RESULTS[key.kernel][0]) not in data.whole
        for cut in data.cuts if first_one else data.cuts[-1:]:  # once one tiling is known to be right, one cut and its whole do
            for name in RESULTS[key.kernel]:
                if name in cut.expected:
                    limits = OUTPUT if name == "out" else GRADIENT
                    verdicts.append(check(name, cut.of(name, found[name]), cut.expected[name], cut.lowprec[name], limits))
        wrong = [str(v) for v in verdicts if not v.ok]
        if wrong:
            return Check(False, "; ".join(wrong))
        reason = self._differs(key, data, found)
        if reason:
            return Check(False, reason)
        again = self._launch(key, plan, inputs, first[3], forward)
        repeatable = all(torch.equal(found[name], again[name]) for name in RESULTS[key.kernel])
        return Check(True, "", max((v.ratio for v in verdicts), default=None), repeatable)

    def _differs(self, key: Key, data: _Data, found: dict[str, Tensor]) -> str:
        """The whole result against that of the first tiling (mostly the default), which the cuts have shown to be right where they are."""
        for name in RESULTS[key.kernel]:
            if not bool(found[name].isfinite().all()):
                return f"{name}: not finite outside of what the oracle sees"
            if (known := data.whole.get((key.kernel, name))) is None:
                continue
            distance = relative_norm(found[name], known)
            limit = 4 * torch.finfo(found[name].dtype).eps
            if not distance <= limit:
                return f"{name}: {distance:.3g} from the first tiling's at full size by relative norm, limit {limit:.3g}"
        for name in RESULTS[key.kernel]:
            data.whole.setdefault((key.kernel, name), found[name])
        return ""

    def probe(self, key: Key, tiling: Tiling) -> Check:
        problem = key.probe()
        generator = torch.Generator(self.where).manual_seed(1)

        def draw(rows: int, heads: int, width: int) -> Tensor:
            return torch.randn(problem.batch, rows, heads, width, generator=generator, device=self.where, dtype=problem.dtype)

        query, grad_out = (draw(problem.seqlen_q, problem.heads_q, problem.head_dim) for _ in range(2))
        keys, value = (draw(problem.seqlen_k, problem.heads_k, problem.head_dim) for _ in range(2))
        inputs = Inputs(query, keys, value, scale=problem.head_dim**-0.5, layout="bshd")
        right = Key(key.backend, "forward", key.dtype, key.head_dim, key.causal, key.seqlen)
        if key.kernel == "forward":
            found = self._poisoned(key, self._plan(key, problem, tiling), inputs, grad_out, None)
            verdicts = compare_call(inputs, problem, found["out"], found["lse"])
        else:
            plan = self._plan(right, problem, default(replace_bucket(right), self.device))
            forward = self._launch(right, plan, inputs, grad_out, None)
            found = self._poisoned(key, self._plan(key, problem, tiling), inputs, grad_out, tuple(forward.values()))
            verdicts = compare_call(inputs, problem, *forward.values(), Gradients(**found), grad_out)
        wrong = [str(v) for v in verdicts if not v.ok]
        return Check(not wrong, "; ".join(wrong), max(v.ratio for v in verdicts))

    # -------------------------------------------------------------- fast
    def time(self, key: Key, tilings: tuple[Tiling, ...], rounds: int, budget_s: float) -> list[list[float]]:
        data = self._prepare(key)
        runs = {str(i): Run(self._step(key, self._plan(key, key.problem(), tiling), data)) for i, tiling in enumerate(tilings)}
        samples = interleave(runs, clock_for(self.where), rounds, budget_s)
        return [[1e6 * s for s in samples[str(i)].seconds] for i in range(len(tilings))]

    def _step(self, key: Key, plan: Plan, data: _Data) -> Callable[[int], object]:
        calls = [(_inputs(one), one[3], data.forwards[i] if data.forwards else None) for i, one in enumerate(data.sets)]
        return lambda i: self._launch(key, plan, *calls[i % len(calls)])

    # -------------------------------------------------------------- data
    def prepare(self, key: Key) -> None:
        data = self._prepare(key)
        if not self._warm:  # the first launch of a process loads the backend
            self._launch_first(key, default(key, self.device), data)
            self._warm = True

    def _prepare(self, key: Key) -> _Data:
        """Tensors and oracle of a key, with those of the keys before it as far as memory goes: the two halves of a search come back
        to them, and the kernels of a backward pass share them."""
        backward = key.kernel != "forward"
        name = (key.backend, key.dtype, key.head_dim, key.causal, key.seqlen, backward)
        data = self._data.pop(name, None)
        if data is None:
            self._forget(DATA_SHARE * self.device.memory_bytes)
            data = self._new_data(key, name, backward)
        self._data[name] = data
        return data

    def _forget(self, room: float) -> None:
        """Drop the least recently used until the others take no more than `room` bytes, and the plans of all."""
        sizes = {name: data.nbytes() for name, data in self._data.items()}
        while sizes and sum(sizes.values()) > room:
            oldest = next(iter(sizes))
            del self._data[oldest], sizes[oldest]
        if len(self._plans) > MAX_PLANS:
            self._plans.clear()
        gc.collect()
        if self.where.type == "cuda":
            torch.cuda.empty_cache()

    def _new_data(self, key: Key, name: tuple, backward: bool) -> _Data:
        p = key.problem()
        case = Case(p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v, p.causal)
        sets = [tuple(t.detach() for t in make_inputs(case, p.dtype, self.where, seed)) for seed in range(input_sets(p, self.device))]
        rows = rows_that_fit(case, self.where)
        cuts = [_expected(Cut(b, h, 1, rows), case, sets[0], backward) for b, h in sorted({(0, 0), (p.batch - 1, p.heads_k - 1)})]
        forwards = []
        if backward:
            forward = Key(key.backend, "forward", key.dtype, key.head_dim, key.causal, key.seqlen)
            plan = self._plan(forward, p, default(forward, self.device))
            forwards = [tuple(self._launch(forward, plan, _inputs(one), one[3], None).values()) for one in sets]
        return _Data(name, case, sets, forwards, cuts, {})


def input_sets(problem: Problem, device: Device) -> int:
    """How many rotating copies of a call's tensors together exceed the last cache four times over."""
    one = sum(problem.operand_bytes().values())
    return max(1, min(MAX_INPUT_SETS, -(-4 * device.l2_bytes // max(1, one))))


def replace_bucket(key: Key) -> Key:
    """The shortest bucket: the default for a short call, which a probe is."""
    return replace(key, seqlen=512)


def _inputs(one: tuple[Tensor, Tensor, Tensor, Tensor]) -> Inputs:
    return Inputs(*one[:3], scale=one[0].shape[-1] ** -0.5)


def _expected(cut: Cut, case: Case, inputs: tuple[Tensor, ...], backward: bool) -> Cut:
    """Fill in what the cut's results should be, and what unfused PyTorch makes of them."""
    query, key, value = (cut.of(name, tensor) for name, tensor in zip(("query", "key", "value"), inputs, strict=False))
    part = Inputs(query, key, value, scale=case.head_dim**-0.5)
    problem = replace(case.problem(query.dtype), batch=1, heads_q=1, heads_k=1, seqlen_q=cut.rows)
    names = () if not backward else ("query",) if cut.rows < case.seqlen_q else ("query", "key", "value")
    for results, dtype in ((cut.expected, torch.float64), (cut.lowprec, query.dtype)):
        out, _, grads = differentiate(part, problem, cut.of("out", inputs[3]), None, names, dtype)
        results.update(out=out, **{name: getattr(grads, name) for name in names})
        del out, grads
    return cut
