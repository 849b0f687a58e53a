"""What a call will do, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from . import dispatch, ops
from .backends import Plan
from .device import named


@dataclass(frozen=True)
class Explanation:
    """A plan with its predictions; ``str()`` is the report."""

    plan: Plan
    flops: dict[str, int]  # by direction, matrix products only
    hbm_bytes: dict[str, int]  # by direction; empty when the backend has no tilings to predict from
    unfused_hbm_bytes: dict[str, int]

    def __str__(self) -> str:
        plan, problem, device = self.plan, self.plan.problem, self.plan.device
        lines = [f"{_title(problem)} on {device.name} ({device.arch})", f"  backend: {plan.backend}"]
        for kernel, chosen in plan.kernels.items():
            lines.append(f"  {kernel}: {chosen.tiling}  [{chosen.source}]")
        for direction, flops in self.flops.items():
            line = f"  {direction}: {flops / 1e9:.4g} GFLOP"
            if direction in self.hbm_bytes:
                fused, unfused = self.hbm_bytes[direction], self.unfused_hbm_bytes[direction]
                line += f", {fused / 1e6:.4g} MB of HBM traffic predicted (unfused: {unfused / 1e6:.4g} MB, {unfused / max(1, fused):.1f}x)"
            lines.append(line)
        lines += [f"  rejected {name}: {reason}" for name, reason in plan.rejected]
        return "\n".join(lines)


def _title(problem) -> str:
    sizes = f"batch {problem.batch}, heads {problem.heads_q}/{problem.heads_k}, seqlen {problem.seqlen_q}/{problem.seqlen_k}"
    width = f"head_dim {problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    options = [name for name in ("varlen", "softcap", "bias", "alibi", "sinks", "mask", "deterministic") if getattr(problem, name)]
    if problem.causal:
        options.insert(0, "causal" + (" top-left" if problem.top_left else ""))
    if problem.window_left is not None or problem.window_right not in (None, 0):
        options.append(f"window ({problem.window_left}, {problem.window_right})")
    return f"attention {problem.dtype_name}: {sizes}, {width}" + (f", {', '.join(options)}" if options else "")


def explain_arguments(arguments: tuple, device: str | None, needs_grad: bool) -> Explanation:
    """The explanation of the forward operator's arguments, on the tensors' device or on a named GPU model."""
    problem = ops.problem_of(*arguments, needs_grad=needs_grad)
    where = dispatch.device_of(arguments[0].device) if device is None else named(device)
    plan = dispatch.plan(problem, where, arguments[-1] or None)
    directions = ("forward", "backward") if needs_grad else ("forward",)
    hbm = {}
    if plan.kernels:
        hbm["forward"] = plan.kernels["forward"].tiling.hbm_bytes("forward", problem, where)
        if needs_grad:
            # dK/dV streams by its own block_n, dQ by its own block_m: together they are the backward pass
            dkv = plan.kernels["backward_dkv"].tiling
            tiling = plan.kernels["backward_dq"].tiling.replace(block_n=dkv.block_n, split_dkv=dkv.split_dkv)
            hbm["backward"] = tiling.hbm_bytes("backward", problem, where)
    return Explanation(
        plan, {d: problem.flops(d) for d in directions}, hbm, {d: problem.unfused_hbm_bytes(d) for d in directions}
    )
