"""Bytes alive on one rank at the peak of a backward pass, counted by the allocator.

    python benchmarks/alive.py --ranks 4

PyTorch's profiler reports every allocation on the host, so nothing is estimated from pages.
Segments that ranks share are no allocations: their pages are added. Activations are next to
nothing: a sequence has two tokens. See README.md beside this file.
"""

import argparse
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

import fsdp2
import memory
from launch import on_ranks
from models import GPT, VOCABULARY, Shape
from tables import machine, markdown

SHAPE = Shape(width=256, blocks=8, heads=4)
SEQUENCE = 2


@dataclass(frozen=True)
class Alive:
    """Bytes on the rank that held most."""

    start: int
    """Between steps: parameters and optimizer state."""
    peak: int
    shared: int
    """Pages of segments, which are kept between steps."""
    sharded: int
    """16 bytes for each of this rank's parameters."""
    block: int
    """One block's full parameters."""


def measure(engine: str, limit: int) -> Alive:
    """Every rank runs this."""
    torch.manual_seed(0)
    model: nn.Module = GPT(SHAPE, SEQUENCE)
    numel = sum(param.numel() for param in model.parameters())
    block = sum(param.numel() for param in model.blocks[0].parameters()) * 4
    fully_shard = torch_fully_shard if engine == "torch" else fsdp2.fully_shard
    for each in model.blocks:
        fully_shard(each)
    fully_shard(model)
    if engine == "fsdp2":
        fsdp2.set_inflight_limit(model, limit)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    for _ in range(3):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    start = _held(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.nbytes()]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    peak = start + max(itertools.accumulate(changes))
    found = Alive(start, peak, memory.segment_nbytes(), 16 * numel // dist.get_world_size(), block)
    everyone: list[Alive] = [found] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return max(everyone, key=lambda alive: alive.peak + alive.shared)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters and optimizer state, each storage once."""
    tensors: list[Any] = [*model.parameters()]
    tensors += [v for entry in optimizer.state.values() for v in entry.values()]
    storages = {}
    for tensor in tensors:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    rows = []
    for engine, limit in (("torch", 2), ("fsdp2", 2), ("fsdp2", 1)):
        found: Alive = on_ranks(ranks, "cpu", measure, engine, limit)
        peak = found.peak + found.shared
        least = found.sharded + found.block
        figures = (found.start, found.peak, found.shared, peak, least)
        name = engine if engine == "torch" else f"{engine}, limit {limit}"
        rows.append([name, *(f"{nbytes / 1e6:.1f}" for nbytes in figures)])
    print(f"{machine()}; {ranks} ranks\n")
    header = ["engine", "start MB", "peak MB", "shared MB", "in all MB", "16P/N + a block MB"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
