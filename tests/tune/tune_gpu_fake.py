"""The real measurer with three candidates that go wrong on the GPU itself."""

import torch

from portable_flash.tune.measure import GpuMeasurer


class Sabotaged(GpuMeasurer):
    """how: block_n -> "fault" (an illegal address), "hang" (a kernel that does not end in time) or "wrong" (results 2% off)."""

    def __init__(self, how, index=0):
        super().__init__(index)
        self.how = how

    def _launch(self, key, plan, *rest):
        how = self.how.get(plan.kernels[key.kernel].tiling.block_n)
        if how == "fault":
            torch.zeros(4, device=self.where)[torch.tensor([1 << 40], device=self.where)].sum().item()
        if how == "hang":
            torch.cuda._sleep(1 << 40)
            torch.cuda.synchronize()
        results = super()._launch(key, plan, *rest)
        return {name: tensor * 1.02 for name, tensor in results.items()} if how == "wrong" else results
