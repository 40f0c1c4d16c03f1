"""Tensor parallelism inside, fully sharded data parallelism around it: 2 x 2 ranks.

torchrun --standalone --nproc-per-node 4 examples/train_tp.py
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from corpus import load_corpus, random_windows
from fsdp2 import fully_shard


class Block(nn.Module):
    """Attention and MLP; a rank of the tp dimension computes some of the heads and channels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.channels = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        # -1: as many heads as this rank has.
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, sequence: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


SPLIT_COLUMNS = ("query", "key", "value", "up")
SPLIT_ROWS = ("out", "down")


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """First tp lays out the linear layers, then fully_shard splits what each tp rank has."""
    plan = {name: ColwiseParallel() for name in SPLIT_COLUMNS}
    for block in model.blocks:
        rows = {name: RowwiseParallel() for name in SPLIT_ROWS}
        parallelize_module(block, mesh["tp"], plan | rows)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences per data-parallel rank")
    options = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    shape = dist.get_world_size() // options.tp, options.tp
    mesh = init_device_mesh("cuda" if is_cuda else "cpu", shape, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # alike on all ranks: every one of them cuts its part out of the whole
    model = Model(options.width, 4, options.layers, 64)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = load_corpus().train
    for step in range(options.steps):
        # The ranks of one tp group see the same batch.
        tokens = random_windows(data, shape[0] * options.batch, 65, 0, step)
        tokens = tokens.chunk(shape[0])[mesh["dp"].get_local_rank()].to(mesh.device_type)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    weight = model.blocks[0].up.weight
    if dist.get_rank() == 0:
        print(f"blocks.0.up.weight: {tuple(weight.to_local().shape)} of {tuple(weight.shape)}")
    time.sleep(0.1)  # gloo's threads let go of the last tensors that they sent
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
