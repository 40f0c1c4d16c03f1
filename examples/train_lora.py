"""A frozen base in bfloat16 and small trainable adapters in float32, sharded together.

torchrun --standalone --nproc-per-node 2 examples/train_lora.py
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

import fsdp2
from corpus import load_corpus, random_windows
from fsdp2 import MixedPrecisionPolicy, fully_shard
from gpt import GPT, GPTConfig


class LoRA(nn.Module):
    """A frozen linear layer with a trainable correction of low rank (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.t()) @ self.up.t()


def add_adapters(model: GPT, rank: int) -> None:
    """Freeze the model, store it in bfloat16, and give its attention layers adapters."""
    model.to(torch.bfloat16).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LoRA(block.attention.qkv, rank)
        block.attention.out = LoRA(block.attention.out, rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    options = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    mesh = init_device_mesh("cuda" if is_cuda else "cpu", (dist.get_world_size(),))

    torch.manual_seed(0)
    model = GPT(GPTConfig(options.layers, options.width, heads=4, sequence=64))
    add_adapters(model, options.rank)
    # Everything computes in bfloat16. The base is stored so too; only adapters are float32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    data = load_corpus().train
    for step in range(options.steps):
        tokens = random_windows(data, dist.get_world_size() * options.batch, 65, 0, step)
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()].to(mesh.device_type)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    groups = fsdp2.explain(model).groups
    if dist.get_rank() == 0:
        share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
        nbytes = sum(group.shard_nbytes for group in groups)
        print(f"{share:.1%} of the parameters are trained; shards hold {nbytes:,} bytes per rank")
    time.sleep(0.1)  # gloo's threads let go of the last tensors that they sent
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
