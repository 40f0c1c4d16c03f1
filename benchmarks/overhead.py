"""What sharding costs one process per param group and step, when communication is free.

    python benchmarks/overhead.py --world 8,1024

Trains a chain of tiny blocks on a process group that does nothing (noop.py), as
rank 0 of as many ranks as asked for. The engines take turns, and the time of
the same model without sharding is taken off.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
import noop
import tables
from models import TinyChain

HEADER = (
    "engine",
    "world",
    "ms per group",
    "forward",
    "backward",
    "/ torch",
    "min-max",
    "fully_shard ms per group",
)

SHARDERS: dict[str, Callable[..., Any] | None] = {
    "plain": None,
    "torch": torch_fully_shard,
    "fsdp2": fsdp2.fully_shard,
}


class StepTime(NamedTuple):
    """Seconds of one step and of its two halves."""

    step: float
    forward: float
    backward: float


class Chain:
    """The tiny model under one engine; ``sharding`` is the seconds that ``fully_shard`` took."""

    def __init__(self, engine: str, blocks: int, linears: int) -> None:
        torch.manual_seed(0)
        self.model = TinyChain(blocks, linears)
        self.inputs = torch.randn(2, 16)
        self.sharding = 0.0
        fully_shard = SHARDERS[engine]
        if fully_shard is None:
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        start = time.perf_counter()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.sharding = time.perf_counter() - start

    def step(self) -> StepTime:
        """One forward and backward; there is no optimizer, and gradients are dropped after."""
        start = time.perf_counter()
        loss: Tensor = self.model(self.inputs)
        between = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        return StepTime(end - start, between - start, end - between)


@dataclass(frozen=True)
class Overhead:
    """One engine's seconds per group and step over the plain model's, one entry per round."""

    rounds: list[StepTime]
    sharding: float  # seconds that fully_shard took per group

    def median(self) -> StepTime:
        """The median round, for the step and each half on its own."""
        return _medians(self.rounds)


def measure(
    engines: Sequence[str], blocks: int, linears: int, rounds: int, steps: int
) -> dict[str, Overhead]:
    """Let the engines take turns, and take the plain model's time off each in each round."""
    groups = blocks + 1  # the root is one too
    for engine in engines:
        Chain(engine, blocks=1, linears=1)  # so that imports do not count as time of fully_shard
    chains = {engine: Chain(engine, blocks, linears) for engine in ("plain", *engines)}
    for chain in chains.values():
        for _ in range(3):
            chain.step()  # the first ones set up what later ones reuse
    found: dict[str, list[StepTime]] = {engine: [] for engine in engines}
    for index in range(rounds):
        order = list(chains) if index % 2 == 0 else list(reversed(chains))
        turn = {engine: _turn(chains[engine], steps) for engine in order}
        for engine in engines:
            pairs = zip(turn[engine], turn["plain"], strict=True)
            found[engine].append(StepTime(*((own - plain) / groups for own, plain in pairs)))
    return {name: Overhead(found[name], chains[name].sharding / groups) for name in engines}


def _turn(chain: Chain, steps: int) -> StepTime:
    chain.step()  # not timed: the caches still hold another engine's data
    return _medians([chain.step() for _ in range(steps)])


def _medians(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(median(part) for part in zip(*times, strict=True)))


def _rows(world: int, overheads: dict[str, Overhead]) -> list[tuple[str, ...]]:
    reference = overheads.get("torch")
    rows = []
    for engine, overhead in overheads.items():
        ratio, spread = "-", "-"
        if reference is not None:
            pairs = zip(overhead.rounds, reference.rounds, strict=True)
            ratios = [own.step / other.step for own, other in pairs]
            ratio, spread = f"{median(ratios):.3f}", f"{min(ratios):.2f}-{max(ratios):.2f}"
        times = [f"{seconds * 1e3:.3f}" for seconds in overhead.median()]
        rows.append((engine, str(world), *times, ratio, spread, f"{overhead.sharding * 1e3:.2f}"))
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", default="8,1024", help="numbers of ranks, separated by commas")
    parser.add_argument("--engines", default="torch,fsdp2", help="separated by commas")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument(
        "--linears", type=int, default=8, help="layers per block, 2 parameters each"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round and engine")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    options.world = [int(size) for size in options.world.split(",")]
    if unknown := set(options.engines) - (set(SHARDERS) - {"plain"}):
        parser.error(f"unknown engines {sorted(unknown)}; choose from torch, fsdp2")
    return options


def main() -> None:
    """Measure what the command line asks for and print the table."""
    options = _arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Outputs that no collective fills may hold denormals, slow to compute with.
    torch.set_flush_denormal(True)
    rows: list[tuple[str, ...]] = []
    for world in options.world:
        noop.start(world)
        shape = (options.blocks, options.linears)
        rows += _rows(world, measure(options.engines, *shape, options.rounds, options.steps))
        dist.destroy_process_group()
    print(
        f"{tables.machine()}; {options.blocks} blocks of {2 * options.linears} parameters "
        "and the root\n"
    )
    print(tables.markdown(HEADER, rows))


if __name__ == "__main__":
    main()
