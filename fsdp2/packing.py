"""Several blocks in one flat collective: side by side in staging, gathered, copied out.

For collectives that take one tensor in and one out, and for backends that carry one large
tensor faster than several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.collectives import Pending

Allocate = Callable[..., Tensor]
"""``allocate(size, dtype=, device=)``, as ``torch.empty``."""

FlatGather = Callable[[Tensor, Tensor], dist.Work | None]
"""Issues one collective: all ranks' ``own``, flat, into ``everyone``, of which it is a part."""


class PackedGather:
    """Blocks gathered through staging, in one call per dtype.

    Staging is there only while it travels: what was gathered needs no more memory than if it
    had gone direct.
    """

    def __init__(
        self,
        blocks: Sequence[Tensor],
        rank: int,
        gather: FlatGather,
        allocate: Allocate = torch.empty,
    ) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for block in blocks:
            by_dtype.setdefault(block.dtype, []).append(block)
        self._columns = [Columns(each, rank, gather, allocate) for each in by_dtype.values()]

    @property
    def staging_nbytes(self) -> int:
        return sum(columns.staging_nbytes for columns in self._columns)

    def start(self, channel: int) -> Pending:
        return PackedCalls([columns.start() for columns in self._columns])


class Columns:
    """The blocks of one dtype, which lie side by side in staging."""

    def __init__(
        self, blocks: list[Tensor], rank: int, gather: FlatGather, allocate: Allocate
    ) -> None:
        self._blocks = blocks
        self._rank = rank
        self._gather = gather
        self._allocate = allocate
        self._owns = [block[rank] for block in blocks]
        self._sizes = [own.numel() for own in self._owns]
        self._shape = len(blocks[0]), sum(self._sizes)

    @property
    def staging_nbytes(self) -> int:
        return prod(self._shape) * self._blocks[0].itemsize

    def start(self) -> PackedCall:
        like = self._blocks[0]
        everyone = self._allocate((prod(self._shape),), dtype=like.dtype, device=like.device)
        staging = everyone.view(self._shape)
        own = staging[self._rank]
        torch._foreach_copy_(list(own.split(self._sizes)), self._owns)
        return PackedCall(self._gather(everyone, own), staging, self._sizes, self._blocks)


class PackedCall(NamedTuple):
    """Staging under way, and where its columns belong."""

    work: dist.Work | None
    staging: Tensor
    sizes: list[int]
    outs: list[Tensor]


class PackedCalls:
    """Staging under way; waiting copies it out and gives its memory back."""

    def __init__(self, calls: list[PackedCall]) -> None:
        self._calls = calls

    def wait(self) -> None:
        for work, staging, sizes, outs in self._calls:
            if work is not None:
                work.wait()
            torch.split_with_sizes_copy(staging, sizes, dim=1, out=outs)
        self._calls.clear()
