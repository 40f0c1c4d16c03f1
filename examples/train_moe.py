"""A mixture of experts: experts are split over two ranks and sharded over two, the rest over four.

torchrun --standalone --nproc-per-node 4 examples/train_moe.py
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from corpus import load_corpus, random_windows
from fsdp2 import fully_shard, local_step
from gpt import GPT, GPTConfig

EXPERTS = 4


class Exchange(torch.autograd.Function):
    """Rows to and from all ranks of ``group``; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.arguments = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return Exchange.apply(gradient, *ctx.arguments), None, None, None


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    """Each token goes to the one expert that its router prefers (Switch Transformer, 2021)."""

    def __init__(self, width: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh["ep"].get_group()
        self.ranks = mesh["ep"].size()
        self.first = mesh["ep"].get_local_rank() * (EXPERTS // self.ranks)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        # Only this rank's experts are made.
        self.experts = Experts(width, EXPERTS // self.ranks)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(dim=-1).max(dim=-1)
        order = torch.argsort(chosen, stable=True)
        sent = torch.bincount(chosen // (EXPERTS // self.ranks), minlength=self.ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        there, back = sent.tolist(), received.tolist()
        arrived = Exchange.apply(tokens[order], there, back, self.group)
        wanted = torch.empty(sum(back), dtype=chosen.dtype, device=x.device)
        dist.all_to_all_single(wanted, chosen[order], back, there, group=self.group)
        computed = self.experts(arrived, wanted - self.first)
        results = Exchange.apply(computed, back, there, self.group)
        out = torch.zeros_like(tokens).index_copy(0, order, results)
        return (out * weight[:, None]).view_as(x)


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, member in enumerate(self.members):
            rows = (index == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, member(x[rows]))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    options = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    ranks = dist.get_world_size()
    device_type = "cuda" if is_cuda else "cpu"
    mesh = init_device_mesh(device_type, (ranks // 2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone = init_device_mesh(device_type, (ranks,))

    torch.manual_seed(0)
    model = GPT(GPTConfig(options.layers, options.width, heads=4, sequence=64))
    torch.manual_seed(1 + mesh["ep"].get_local_rank())  # other experts on other ranks
    for block in model.blocks:
        block.mlp = MoE(options.width, mesh)
        fully_shard(block.mlp.experts, mesh=mesh["efsdp"])
        # An expert sees the tokens of all ranks, however many of them share its rows.
        block.mlp.experts.set_gradient_divide_factor(float(ranks))
    torch.manual_seed(2)
    for block in model.blocks:
        block.mlp.router.reset_parameters()  # alike on all ranks
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    # On DTensors PyTorch's foreach kernels take the parameters of one mesh only.
    optimizer = local_step(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    data = load_corpus().train
    for step in range(options.steps):
        tokens = random_windows(data, ranks * options.batch, 65, 0, step)
        tokens = tokens.chunk(ranks)[dist.get_rank()].to(device_type)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    time.sleep(0.1)  # gloo's threads let go of the last tensors that they sent
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
