"""Attention calls through the launches of the HIP backend, each run by the harness instead of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from unittest import mock

import simt
import torch
from calls import Call, uninitialised_memory_is_nan

from portable_flash import Tiling
from portable_flash.backends import Gradients, KernelPlan, Needs, Plan
from portable_flash.backends.hip import host, specialise
from portable_flash.backends.hip.specialise import Placement, placement
from portable_flash.device import Device

def gpu(arch: str, xcds: int = 1) -> Device:
    wave = 32 if arch.startswith("gfx1") else 64
    return Device(arch, "amd", arch, arch, 64, wave, 65536, 256, l2_bytes=4 << 20, xcds=xcds)


# One GPU of each kind that the kernels know: layers of products, waves, lengths and faults of matrix instructions.
GPUS = {
    "mfma": gpu("gfx942", xcds=8),
    "mfma_short": gpu("gfx908"),
    "mfma_flushing": gpu("gfx90a"),
    "mfma_long": gpu("gfx950", xcds=8),
    "wmma11": gpu("gfx1100"),
    "wmma12": gpu("gfx1201"),
    "fma64": gpu("gfx906"),
    "fma32": gpu("gfx1030"),
}


@dataclass(frozen=True)
class Machine:
    """A kind of GPU with a tiling for all kernels or for each, what is kept in LDS and in registers, and how the harness runs it."""

    gpu: str
    tiling: Tiling | dict[str, Tiling]
    where: Placement = Placement(stationary_in_lds=False, prefetch=True)
    how: simt.Build = simt.WATCHED
    schedule: int = 0
    faults: tuple[str, ...] = ()

    def run(self, call: Call, needs: Needs | None = None) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
        """Output, lse and gradients, by default of all inputs that the call has."""
        needs = needs or Needs(bias=call.bias is not None, sinks=call.sinks is not None)
        tilings = self.tiling if isinstance(self.tiling, dict) else dict.fromkeys(("forward", "backward_dkv", "backward_dq"), self.tiling)
        kernels = MappingProxyType({name: KernelPlan(tiling, "test") for name, tiling in tilings.items()})
        plan, inputs = Plan(call.problem, GPUS[self.gpu], "hip", kernels), call.inputs()
        with uninitialised_memory_is_nan(), mock.patch.object(specialise, "placement", self._placement):
            out, lse = host.forward(inputs, plan, execute=self._launch)
            return out, lse, host.backward(inputs, plan, out, lse, call.grad_out, call.grad_lse, needs, execute=self._launch)

    def check(self, call: Call) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
        result = self.run(call)
        call.judge(*result)
        return result

    def _placement(self, cut: specialise.Cut, device: Device) -> Placement:
        return placement(cut, device) if cut.kernel == "backward_dbias" else self.where  # that kernel knows one only

    def _launch(self, launch: host.Launch, plan: Plan) -> None:
        if launch.programs:
            executable = simt.build(launch.kernel, self.how, faults=self.faults)
            simt.run(executable, launch.kernel, launch.programs, bytes(launch.call), launch.tensors, self.schedule)

    def replace(self, **changes) -> Machine:
        return replace(self, **changes)
