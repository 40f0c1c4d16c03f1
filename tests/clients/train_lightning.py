"""Lightning's Trainer with ModelParallelStrategy: fit, validate, save and go on."""

from __future__ import annotations

import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from side_by_side import Report, compare, fingerprint, options, sharded_by
from small_net import WIDTH, shard, small_net
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

SAVED = 2
STEPS = 4
ACCUMULATED = 2


class Module(lightning.LightningModule):
    """Notes the loss of every batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = shard(small_net(self.seed), self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self._loss(batch)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(max_steps: int) -> lightning.Trainer:
    strategy = ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not chosen.full,
    )
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=max_steps,
        accumulate_grad_batches=ACCUMULATED,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # it shuffles by the epoch's number
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(module: Module, steps: int, checkpoint: Path | None = None) -> lightning.Trainer:
    """Every epoch has ``SAVED`` steps, over the same batches in the same order."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2 * 4 * ACCUMULATED * SAVED, WIDTH, generator=generator)
    mine = TensorDataset(rows[int(os.environ["RANK"]) :: 2])
    data = DataLoader(mine, batch_size=4)
    run = trainer(steps)
    run.fit(module, data, data, ckpt_path=checkpoint, weights_only=False)
    return run


def train(out: Path) -> Report:
    module = Module(seed=0)
    fit(module, SAVED).save_checkpoint(out / "saved")
    report: Report = {"sharded by": sharded_by(module.net), "losses": module.losses}
    report["shards"] = fingerprint(module.net.parameters())

    module = Module(seed=0)
    fit(module, STEPS)
    report["went on"] = module.losses[len(module.losses) // 2 :]

    module = Module(seed=1)
    fit(module, STEPS, out / "saved")
    report["resumed"] = module.losses
    return report


if __name__ == "__main__":
    chosen = options("full")
    compare(train, chosen.out)
