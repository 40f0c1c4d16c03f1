"""A pipeline of two stages, each fully sharded over two ranks.

torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from corpus import load_corpus, random_windows
from fsdp2 import fully_shard
from gpt import GPT, GPTConfig

STAGES = 2


class Stage(nn.Module):
    """Some of a GPT's blocks; the first stage embeds, the last one predicts."""

    def __init__(self, model: GPT, index: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // STAGES
        self.embedding = model.embedding if index == 0 else nn.Identity()
        self.blocks = nn.ModuleList(model.blocks[index * per_stage : (index + 1) * per_stage])
        is_last = index == STAGES - 1
        self.norm = model.norm if is_last else nn.Identity()
        self.head = model.head if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per data-parallel rank")
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    shape = STAGES, dist.get_world_size() // STAGES
    mesh = init_device_mesh("cuda" if is_cuda else "cpu", shape, mesh_dim_names=("pp", "dp"))
    device = torch.device(mesh.device_type)
    index, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    torch.manual_seed(0)  # alike on all ranks: each keeps its stage, and of that its rows
    stage = Stage(GPT(GPTConfig(options.layers, options.width, heads=4, sequence=64)), index)
    # Kept after forward, the parameters are gathered once a step and not once a micro-batch.
    for block in stage.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    pipe = PipelineStage(stage, index, STAGES, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipe, options.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    data = load_corpus().train
    for step in range(options.steps):
        tokens = random_windows(data, shape[1] * options.batch, 65, 0, step)
        tokens = tokens.chunk(shape[1])[dp_rank].to(device)
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and dp_rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {torch.stack(losses).mean().item():.3f}", flush=True)
    time.sleep(0.1)  # gloo's threads let go of the last tensors that they sent
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
