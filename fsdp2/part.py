"""What is kept after forward when backward gathers over fewer ranks than the shard mesh has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2.buffers import Filling, FullBuffer, ShardBuffer
from fsdp2.collectives import GatherPlan, Transport
from fsdp2.layout import GroupLayout, plan_part
from fsdp2.mesh import Axis


class Part(NamedTuple):
    """This rank's part of the full parameters, and how backward gathers the others'."""

    shards: ShardBuffer
    """In the compute dtype; its memory is there only between forward and backward."""
    filling: Filling
    gather: GatherPlan | None
    kept: list[Tensor]
    """Views of ``shards``, aligned with the slices of the full parameters that go there."""
    sources: list[Tensor]

    def keep(self) -> None:
        """Copy it out of the full parameters, which can then be freed."""
        self.shards.allocate()
        torch._foreach_copy_(self.kept, self.sources)


def make_part(
    whole: GroupLayout, axis: Axis, full: FullBuffer, transport: Transport, device: torch.device
) -> Part:
    """Over the ranks of ``axis``, between which ``transport`` moves the parts."""
    layout = part_layout(whole, axis.size)
    shards = ShardBuffer(layout, axis.rank, device)
    filling = Filling(full, shards)
    gather = transport.plan_gather(filling.blocks, ()) if filling.blocks else None
    kept: list[Tensor] = []
    sources: list[Tensor] = []
    for index, section in enumerate(layout.sections):
        for slot in section.slots:
            param = full.full(index, slot)
            start, stop = slot.rows.bounds(axis.rank)
            is_scalar = slot.rows.is_scalar
            sources.append(param if is_scalar else param.narrow(slot.dim, start, stop - start))
            kept.append(shards.local(section, slot))
    return Part(shards, filling, gather, kept, sources)


def part_layout(whole: GroupLayout, size: int) -> GroupLayout:
    """How the parts of ``size`` ranks lie in memory."""
    return plan_part(whole, size, _itemsize)


def _itemsize(dtype: object) -> int:
    assert isinstance(dtype, torch.dtype)
    return dtype.itemsize
