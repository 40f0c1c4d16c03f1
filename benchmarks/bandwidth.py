"""What grouped all-gathers reach of the bandwidth of packed ones, over NCCL on several GPUs.

Times are those that fsdp2 decides by (``fsdp2.direct_or_packed``), on the sizes of a Llama
block's weights.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2.direct_or_packed import Choice, measure, median_seconds, slowest
from fsdp2.grouped import Grouped, OneGather
from launch import on_ranks
from llama import Block, LlamaShape

HEADER = (
    "gather of",
    "parameters",
    "MB",
    "grouped GB/s",
    "packed GB/s",
    "with its copies GB/s",
    "grouped / packed",
    "path",
)

PARTS = {"attention": "attention.", "feed-forward": "feed_forward.", "block": ""}
"""What is gathered together, by the beginning of its parameters' names."""


def rows(ranks: int, shape: LlamaShape) -> list[tuple[str, ...]]:
    """The table, measured in ``ranks`` fresh processes."""
    return on_ranks(ranks, "cuda", rows_of_rank, shape)


def rows_of_rank(shape: LlamaShape, device: str = "cuda") -> list[tuple[str, ...]]:
    """Every rank of the default process group runs this, on its current ``device``."""
    with torch.device("meta"):
        weights = {n: p.numel() for n, p in Block(shape).named_parameters() if p.ndim > 1}
    return [
        _row(part, [n for name, n in weights.items() if name.startswith(prefix)], device)
        for part, prefix in PARTS.items()
    ]


def _row(part: str, numels: Sequence[int], device: str) -> tuple[str, ...]:
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    blocks = [
        torch.zeros((ranks, -(-numel // ranks)), dtype=torch.bfloat16, device=device)
        for numel in numels
    ]
    place = blocks[0].device
    choice = Choice(*slowest(group, measure(group, blocks), place))
    packed = OneGather(Grouped(group, group.rank()), blocks)
    [with_copies] = slowest(group, median_seconds([lambda: packed.start(0).wait()]), place)
    nbytes = sum(block.nbytes for block in blocks)
    received = nbytes * (ranks - 1) / ranks
    speeds = [received / seconds / 1e9 for seconds in (choice.direct, choice.packed, with_copies)]
    return (
        part,
        str(len(blocks)),
        f"{nbytes / 1e6:.0f}",
        *(f"{speed:.1f}" for speed in speeds),
        f"{choice.bandwidth:.3f}",
        "direct" if choice.is_direct else "packed",
    )
