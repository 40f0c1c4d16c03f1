"""Time and peak memory of the ways to start a sharded model.

    python benchmarks/init.py --size 100m --ranks 2,4

Each way starts in fresh processes, one after the other; see README.md beside this file.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import fsdp2
from launch import on_ranks
from memory import goes_back_when_freed, peak_nbytes, reset_peak, resident_nbytes
from models import GPT, Shape
from tables import machine, markdown

SIZES = {
    "14m": Shape(width=384, blocks=8, heads=6),
    "100m": Shape(width=768, blocks=14, heads=12),
    "1b": Shape(width=2048, blocks=20, heads=16),
}

SEQUENCE = 64


@dataclass(frozen=True)
class Start:
    """What rank 0 measured."""

    build: float
    shard: float
    fill: float
    peak_nbytes: int
    """Beside what the process held before; on one rank."""
    held_nbytes: int


def deferred(shape: Shape) -> nn.Module:
    with fsdp2.deferred_init():
        return GPT(shape, SEQUENCE)


def on_meta(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        return GPT(shape, SEQUENCE)


def full(shape: Shape) -> nn.Module:
    return GPT(shape, SEQUENCE)


WAYS: dict[str, Callable[[Shape], nn.Module]] = {
    "deferred": deferred,
    "meta, reset": on_meta,
    "full on CPU": full,
}


def measure(way: str, shape: Shape) -> Start:
    """Build, shard and fill one model in this process."""
    fsdp2.fully_shard(nn.Linear(2, 2))  # what is imported and made once is no part of it
    torch.manual_seed(0)
    before = resident_nbytes("cpu")
    reset_peak("cpu")
    times = [time.perf_counter()]
    model = WAYS[way](shape)
    times.append(time.perf_counter())
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    times.append(time.perf_counter())
    fsdp2.materialize(model)
    times.append(time.perf_counter())
    assert all(param.device.type == "cpu" for param in model.parameters())
    build, shard, fill = (end - start for start, end in zip(times, times[1:]))
    held = resident_nbytes("cpu") - before
    return Start(build, shard, fill, peak_nbytes("cpu") - before, held)


def row(way: str, ranks: int, found: Start) -> list[str]:
    total = found.build + found.shard + found.fill
    seconds = [f"{t:.2f}" for t in (found.build, found.shard, found.fill, total)]
    megabytes = [f"{nbytes / 1e6:.0f}" for nbytes in (found.peak_nbytes, found.held_nbytes)]
    return [way, str(ranks), *seconds, *megabytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--way", choices=WAYS, action="append", help="one of them; default: all")
    chosen = parser.parse_args()
    shape = SIZES[chosen.size]
    with goes_back_when_freed():
        rows = [
            row(way, ranks, on_ranks(ranks, "cpu", measure, way, shape))
            for ranks in map(int, chosen.ranks.split(","))
            for way in chosen.way or WAYS
        ]
    numel = sum(param.numel() for param in on_meta(shape).parameters())
    print(f"{machine()}; {numel / 1e6:.0f} M parameters, float32\n")
    header = ["way", "ranks", "build s", "shard s", "fill s", "all s", "peak MB", "held MB"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
