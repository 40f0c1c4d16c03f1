"""accelerate: prepare, accumulate, clip, save the state and go on from it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_on_cpu import shard_on_cpu
from side_by_side import Report, compare, fingerprint, options, sharded_by
from tiny_llama import batch, tiny_llama

ACCUMULATED = 2


class Training:
    """A model and an optimizer that accelerate has prepared."""

    def __init__(self, seed: int) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=chosen.meta,
            state_dict_type="FULL_STATE_DICT" if chosen.full else "SHARDED_STATE_DICT",
            activation_checkpointing=chosen.checkpointing,
        )
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            mixed_precision="bf16" if chosen.bf16 else "no",
            gradient_accumulation_steps=ACCUMULATED,
        )
        halves = ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2)
        shard_on_cpu(self.accelerator, plugin, halves if chosen.hybrid else None)
        model = tiny_llama(chosen.tied, seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, first: int, last: int) -> list[float]:
        """The loss of every batch and the norm of the gradients of every step."""
        seen = []
        for step in range(first * ACCUMULATED, last * ACCUMULATED):
            tokens = batch(step * dist.get_world_size() + dist.get_rank())
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.accelerator.backward(loss)
                seen.append(loss.item())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    seen.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return seen


def train(out: Path) -> Report:
    training = Training(seed=0)
    report: Report = {"sharded by": sharded_by(training.model)}
    report["losses"] = training.steps(0, 2)
    training.accelerator.save_state(str(out))
    report["went on"] = training.steps(2, 4)
    report["shards"] = fingerprint(training.model.parameters())
    whole = training.accelerator.get_state_dict(training.model)
    report["whole"] = [list(whole), fingerprint(whole.values())]

    training = Training(seed=1)
    training.accelerator.load_state(str(out))
    report["resumed"] = training.steps(2, 4)
    return report


if __name__ == "__main__":
    chosen = options("tied", "full", "meta", "bf16", "checkpointing", "hybrid")
    compare(train, chosen.out)
