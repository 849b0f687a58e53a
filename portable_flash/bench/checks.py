"""Correct before timed: results are judged against the float64 oracle on a cut, and against SDPA at full size.

Heads of attention do not mix, so the first and the last key/value head with its query heads are cut out of the result of
the whole call, and the oracle computes those alone. Where its S would not fit, the cut keeps the last query rows: under
bottom-right alignment they mean the same, but the gradients of key and value then lack a cut and are compared with SDPA only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..backends import Inputs
from ..device import detect
from ..reference import GRADIENT, OUTPUT, Limits, Verdict, check, differentiate
from .records import OK, UNVERIFIED, WRONG, Outcome
from .suite import CallInputs, Case

CPU_SCORES = 1 << 23  # elements of S that the oracle may take on the CPU: it computes them in seconds
BYTES_A_SCORE = 256  # on a GPU: S and its kin in float64, with the graph of their gradients


def limits_of(name: str) -> Limits:
    return OUTPUT if name == "out" else GRADIENT


@dataclass
class Cut:
    """Part of a case, small enough for the oracle, and what it should be. `expected` and `lowprec` by tensor name."""

    batch: int
    head_k: int
    group: int
    rows: int
    expected: dict[str, Tensor] = field(default_factory=dict)
    lowprec: dict[str, Tensor] = field(default_factory=dict)

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """This cut of a full-size tensor; "key" and "value" belong to one head, the others to its query heads."""
        if name in ("key", "value"):
            return tensor[self.batch : self.batch + 1, self.head_k : self.head_k + 1]
        heads = slice(self.head_k * self.group, (self.head_k + 1) * self.group)
        return tensor[self.batch : self.batch + 1, heads, tensor.shape[2] - self.rows :]


def rows_that_fit(case: Case, device: torch.device) -> int:
    """Query rows whose S, for the query heads of one key/value head, the oracle can hold."""
    scores = CPU_SCORES if device.type == "cpu" else detect(device).memory_bytes // BYTES_A_SCORE
    return max(1, min(case.seqlen_q, scores // (case.group * case.seqlen_k)))


class Checker:
    """Judges every implementation of one case on the same inputs: (query, key, value, grad_out)."""

    def __init__(self, case: Case, inputs: CallInputs, with_gradients: bool):
        rows = rows_that_fit(case, inputs[0].device)
        corners = {(0, 0), (case.batch - 1, case.heads_k - 1)}
        self._cuts = [self._prepare(Cut(batch, head, case.group, rows), case, inputs, with_gradients) for batch, head in sorted(corners)]
        self._witness: dict[str, tuple[str, Tensor]] = {}  # tensor name -> SDPA backend and its full-size result

    @staticmethod
    def _prepare(cut: Cut, case: Case, inputs: CallInputs, with_gradients: bool) -> Cut:
        query, key, value = (cut.of(name, tensor.detach()) for name, tensor in zip(("query", "key", "value"), inputs, strict=False))
        part = Inputs(query, key, value, scale=case.head_dim**-0.5)
        problem = replace(case.problem(query.dtype), batch=1, heads_q=cut.group, heads_k=1, seqlen_q=cut.rows)
        names = ("query",) if cut.rows < case.seqlen_q else ("query", "key", "value")
        names = names if with_gradients else ()
        for results, dtype in ((cut.expected, torch.float64), (cut.lowprec, query.dtype)):
            out, _, grads = differentiate(part, problem, cut.of("out", inputs[3]), None, names, dtype)
            results.update(out=out, **{name: getattr(grads, name) for name in names})
        return cut

    def judge(self, peer: str, found: dict[str, Tensor]) -> Outcome:
        """`found` maps "out", "query", "key" and "value" to the output and the gradients, all at full size."""
        found = {name: tensor.detach() for name, tensor in found.items()}
        errors: dict[str, float | None] = {}
        verdicts: list[Verdict] = []
        for cut in self._cuts:
            for name in found.keys() & cut.expected.keys():
                verdict = check(name, cut.of(name, found[name]), cut.expected[name], cut.lowprec[name], limits_of(name))
                verdicts.append(verdict)
                key = f"{name}_error_ratio"
                errors[key] = finite(max(verdict.ratio, errors.get(key) or 0.0))
        reasons = [str(verdict) for verdict in verdicts if not verdict.ok]
        status = OK if not reasons else WRONG if any(verdict.status == "fail" for verdict in verdicts) else UNVERIFIED
        if status == OK:
            reasons = self._compare_with_witness(peer, found, errors)
            status = WRONG if reasons else OK
        if status == OK and peer.startswith("sdpa"):
            for name, tensor in found.items():
                self._witness.setdefault(name, (peer, tensor))
        return Outcome(status, "; ".join(reasons), errors)

    def _compare_with_witness(self, peer: str, found: dict[str, Tensor], errors: dict[str, float | None]) -> list[str]:
        """Relative norm of the difference to SDPA's result, which the cuts have shown to be right where they are.

        Each of the two may be limits.rms_ratio times as far from the truth as unfused PyTorch is, so that they may be
        twice that apart, plus the rounding of both.
        """
        reasons = []
        for name, tensor in found.items():
            witness, expected = self._witness.get(name, (peer, tensor))
            if witness == peer:
                continue
            distance = relative_norm(tensor, expected)
            errors[f"{name}_relative_to_{witness}"] = finite(distance)
            limit = 2 * limits_of(name).rms_ratio * self._lowprec_error(name) + torch.finfo(tensor.dtype).eps / 2
            if not distance <= limit:
                reasons.append(f"{name}: {distance:.3g} from {witness}'s at full size by relative norm, limit {limit:.3g}")
        return reasons

    def _lowprec_error(self, name: str) -> float:
        """Relative error of unfused PyTorch on the cuts; of the query's gradient where they have none of key and value."""
        known = name if all(name in cut.expected for cut in self._cuts) else "query"
        return max(relative_norm(cut.lowprec[known], cut.expected[known]) for cut in self._cuts)


def relative_norm(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, summed in float64; NaN stays NaN."""
    wide = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    difference = torch.linalg.vector_norm(actual.to(wide) - expected.to(wide), dtype=torch.float64).item()
    size = torch.linalg.vector_norm(expected, dtype=torch.float64).item()
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None
