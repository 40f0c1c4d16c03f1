"""Lightning Fabric's ModelParallelStrategy: set up, accumulate, clip, save and go on."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from side_by_side import Report, compare, fingerprint, options, sharded_by
from small_net import batch, shard, small_net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

ACCUMULATED = 2


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh["data_parallel"])


class Training:
    """A model and an optimizer that Fabric has set up."""

    def __init__(self, seed: int) -> None:
        strategy = ModelParallelStrategy(
            parallelize,
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=not chosen.full,
        )
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        with self.fabric.init_module(empty_init=chosen.meta):
            model = small_net(seed)
        self.model = self.fabric.setup(model)
        if chosen.meta:
            self.start_alike(seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def start_alike(self, seed: int) -> None:
        """Setup has initialised the shards: from other numbers with each of the two engines."""
        whole = small_net(seed).state_dict()
        with torch.no_grad():
            for name, param in self.model.module.named_parameters():
                mesh, placements = param.device_mesh, param.placements
                param.copy_(distribute_tensor(whole[name], mesh, placements))

    def steps(self, first: int, last: int) -> list[float]:
        """The loss of every batch and the norm of the gradients of every step."""
        seen = []
        for step in range(first * ACCUMULATED, last * ACCUMULATED):
            is_last = step % ACCUMULATED == ACCUMULATED - 1
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                x = batch(step * self.fabric.world_size + self.fabric.global_rank)
                loss = self.model(x).square().mean()
                self.fabric.backward(loss)
            seen.append(loss.item())
            if is_last:
                norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.1)
                seen.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return seen

    def parts(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


def train(out: Path) -> Report:
    training = Training(seed=0)
    report: Report = {"sharded by": sharded_by(training.model.module)}
    report["losses"] = training.steps(0, 2)
    training.fabric.save(out / "saved", training.parts())
    report["went on"] = training.steps(2, 4)
    report["shards"] = fingerprint(training.model.parameters())

    training = Training(seed=1)
    training.fabric.load(out / "saved", training.parts())
    report["resumed"] = training.steps(2, 4)
    return report


if __name__ == "__main__":
    chosen = options("full", "meta")
    compare(train, chosen.out)
