"""Faults of hardware, kernels and processes, put between the validator and the backends; and a validator without a process."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch

from portable_flash.validate import session
from portable_flash.validate.context import Runner


class Corrupt(Runner):
    """Corrupts copies of what comes back; the backward pass is given what the kernel really computed."""

    clean = (None, None)

    def forward(self, inputs, plan):
        self.clean = super().forward(inputs, plan)
        out, lse = (tensor.clone() for tensor in self.clean)
        if out.numel() and inputs.key.numel():
            self.corrupt(out, lse)
        return out, lse

    def backward(self, inputs, plan, out, lse, grad_out, grad_lse, needs):
        grads = super().backward(inputs, plan, *self.clean, grad_out, grad_lse, needs)
        if out.numel() and inputs.key.numel():
            self.corrupt_gradients(grads)
        return grads

    def corrupt(self, out, lse): ...

    def corrupt_gradients(self, grads): ...


def words(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class RareFlip(Corrupt):
    """One mantissa bit of one element in 1 of 50 runs."""

    runs = 0

    def corrupt(self, out, lse):
        self.runs += 1
        if self.runs % 50 == 0:
            words(out).view(-1)[out.numel() // 3] ^= 1


class EverySecond(Corrupt):
    runs = 0

    def corrupt(self, out, lse):
        self.runs += 1
        words(out).view(-1)[0] ^= self.runs % 2


class ScaledTile(Corrupt):
    def corrupt(self, out, lse):
        out[0].flatten(0, -2)[:32] *= 1.01


class StuckLane(Corrupt):
    """A mantissa bit of every 32nd element is always set."""

    def corrupt(self, out, lse):
        words(out).view(-1)[5::32] |= 1 << (4 if out.dtype == torch.bfloat16 else 6 if out.dtype == torch.float16 else 18)


class NanRow(Corrupt):
    def corrupt(self, out, lse):
        out.view(-1, out.shape[-1])[out.numel() // out.shape[-1] // 2] = torch.nan


class GradientsOnly(Corrupt):
    def corrupt_gradients(self, grads):
        grads.key[0].flatten(0, -2)[:32] *= 1.05


class LseOnly(Corrupt):
    def corrupt(self, out, lse):
        lse.view(-1)[: max(1, lse.numel() // 4)] += 0.01


class DroppedKeys(Runner):
    """A block of 16 keys is left out of every product, forward and backward."""

    def without(self, inputs, plan):
        if inputs.cu_seqlens_q is not None or inputs.key.numel() == 0 or plan.problem.seqlen_k <= 16:
            return inputs, plan
        full = (plan.problem.batch, 1, plan.problem.seqlen_q, plan.problem.seqlen_k)
        mask = torch.ones(full, dtype=torch.bool, device=inputs.key.device) if inputs.mask is None else inputs.mask.expand(full).clone()
        mask[..., 8:24] = False
        return replace(inputs, mask=mask), self.plan(replace(plan.problem, mask=True), plan.backend)

    def forward(self, inputs, plan):
        return super().forward(*self.without(inputs, plan))

    def backward(self, inputs, plan, *rest):
        return super().backward(*self.without(inputs, plan), *rest)


class WrongHead(Runner):
    """Every key head is read where its neighbour is."""

    def turned(self, inputs):
        heads = 1 if inputs.cu_seqlens_q is not None or inputs.layout == "bhsd" else 2
        return replace(inputs, key=inputs.key.roll(1, heads))

    def forward(self, inputs, plan):
        return super().forward(self.turned(inputs), plan)

    def backward(self, inputs, plan, *rest):
        return super().backward(self.turned(inputs), plan, *rest)


class StrayWrite(Corrupt):
    """Writes one number past the end of the output."""

    def corrupt(self, out, lse):
        end = out.storage_offset() + out.numel()
        clean = self.clean[0]
        if clean.untyped_storage().nbytes() > end * clean.element_size():
            clean.as_strided((1,), (1,), clean.storage_offset() + clean.numel()).fill_(1.0)


class Unwritten(Corrupt):
    """The last row of the output is never written."""

    def forward(self, inputs, plan):
        out, lse = super().forward(inputs, plan)
        fresh = torch.empty_like(out)
        if out.numel():
            fresh.view(-1, out.shape[-1])[:-1] = out.view(-1, out.shape[-1])[:-1]
        return fresh, lse


class LuckyMemory(Corrupt):
    """The last row is never written, and its memory happens to hold the right numbers, but for memory that was filled with NaN."""

    def forward(self, inputs, plan):
        out, lse = super().forward(inputs, plan)
        fresh = torch.empty_like(out)
        if out.numel() and fresh.isnan().all():
            out.view(-1, out.shape[-1])[-1] = torch.nan
        return out, lse


class OtherBits(Corrupt):
    """The same wrong bit every time, too small for any limit of error."""

    def corrupt(self, out, lse):
        words(out).view(-1)[out.numel() // 3] ^= 1


class Slow(Runner):
    def seconds(self, step, calls):
        return 4 * super().seconds(step, calls)


class Dies(Runner):
    """The process ends in the first packed call, as a fault in a driver ends it."""

    def forward(self, inputs, plan):
        if plan.problem.varlen:
            os.kill(os.getpid(), 11)
        return super().forward(inputs, plan)


class Hangs(Runner):
    def forward(self, inputs, plan):
        if plan.problem.varlen:
            time.sleep(600)
        return super().forward(inputs, plan)


class Raises(Runner):
    def forward(self, inputs, plan):
        if plan.problem.varlen:
            raise RuntimeError("no kernel image is available")
        return super().forward(inputs, plan)


# ---------------------------------------------------------------- without a process
class InProcess:
    """Answers as a worker does."""

    def __init__(self, device, options, threads, facts):
        self.validator = session.DeviceValidator(device.index, options, None, facts)

    def call(self, method, *arguments, timeout_s):
        return getattr(self.validator, method)(*arguments)

    def close(self): ...


def validate(runner=None, devices=None, **options):
    """The part of the report for one device, or the whole report where `devices` is given."""
    from portable_flash.device import cpu

    if runner is not None:
        options["runner"] = f"{runner.__module__}:{runner.__name__}"
    report = session.validate(devices or [cpu()], session.Options(**{"small": True, **options}), worker=InProcess)
    return report if devices else report.devices[0]
