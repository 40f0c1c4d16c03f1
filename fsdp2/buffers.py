"""The flat buffers of one group and their views.

A buffer is one allocation of bytes; a view has the dtype and shape of what lies there.
The full buffer keeps its storage object for the life of the group and only gives its
memory back, so that what autograd saved in forward sees the data again after the next
gather, and so that every view is made once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2.layout import GroupLayout, Path, Section, Slot


class PackedBlock(NamedTuple):
    """The staging block of one section and what its columns are copied out to."""

    rows: Tensor
    """``(packed_ranks, packed_numel)``: of the block what holds real rows."""
    sizes: list[int]
    outs: list[Tensor]
    """Per packed parameter its slice of the full buffer, ``(packed_ranks, chunk_numel)``."""

    def copy_out(self) -> None:
        torch.split_with_sizes_copy(self.rows, self.sizes, dim=1, out=self.outs)


class ShardBuffer:
    """This rank's padded rows of every parameter of the group, zero where there is padding."""

    def __init__(self, layout: GroupLayout, rank: int, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self.memory = torch.zeros(layout.shard_nbytes, dtype=torch.uint8, device=device)
        self._sections = {id(section): self._typed(section) for section in layout.sections}

    def _typed(self, section: Section) -> Tensor:
        return typed_view(
            self.memory, section.shard_start_nbytes, section.shard_numel, section.storage
        )

    def padded(self, section: Section, slot: Slot) -> Tensor:
        """The padded rows of one parameter, flat."""
        return self._sections[id(section)].narrow(0, slot.shard_offset, slot.rows.chunk_numel)

    def local(self, section: Section, slot: Slot) -> Tensor:
        """The real rows of one parameter, in their shape."""
        numel = slot.rows.local_numel(self.rank)
        flat = self._sections[id(section)].narrow(0, slot.shard_offset, numel)
        return flat.view(slot.rows.local_shape(self.rank))

    def packed(self, section: Section) -> Tensor:
        """The padded rows of all packed parameters of a section, flat."""
        return self._sections[id(section)].narrow(0, section.packed_start, section.packed_numel)


class FullBuffer:
    """All full parameters of a group and its staging blocks: one storage, filled and freed.

    It starts allocated, since views cannot be cut from a storage that is not.
    """

    def __init__(self, layout: GroupLayout, rank: int, shards: ShardBuffer) -> None:
        memory = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=shards.memory.device)
        self._storage = memory.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._sections = {
            id(s): typed_view(memory, s.full_start_nbytes, s.full_numel, s.compute)
            for s in layout.sections
        }
        self.own: list[Tensor] = []
        """Where this rank's rows go; aligned with ``own_sources``."""
        self.own_sources: list[Tensor] = []
        self.blocks: list[Tensor] = []
        """What a gather fills: ``(world_size, n)``, own row first filled by us."""
        self.packed: list[PackedBlock] = []
        for section in layout.sections:
            self._plan_section(section, layout.world_size, rank, shards)

    def _plan_section(
        self, section: Section, world_size: int, rank: int, shards: ShardBuffer
    ) -> None:
        for slot in section.by_path(Path.DIRECT):
            block = self._chunks(section, slot, world_size)
            if block.numel():
                self.blocks.append(block)
                self._fill_own(block[rank], shards.padded(section, slot))
        for slot in section.by_path(Path.REPLICATED):
            self._fill_own(self._chunks(section, slot, 1)[0], shards.padded(section, slot))
        slots = section.by_path(Path.PACKED)
        if section.packed_numel:
            flat = self._sections[id(section)]
            staging = flat.narrow(0, section.staging_offset, world_size * section.packed_numel)
            block = staging.view(world_size, section.packed_numel)
            self.blocks.append(block)
            self._fill_own(block[rank], shards.packed(section))
            sizes = [slot.rows.chunk_numel for slot in slots]
            outs = [self._chunks(section, slot, section.packed_ranks) for slot in slots]
            self.packed.append(PackedBlock(block[: section.packed_ranks], sizes, outs))

    def _fill_own(self, own: Tensor, source: Tensor) -> None:
        self.own.append(own)
        self.own_sources.append(source)

    def _chunks(self, section: Section, slot: Slot, count: int) -> Tensor:
        numel = count * slot.rows.chunk_numel
        flat = self._sections[id(section)].narrow(0, slot.full_offset, numel)
        return flat.view(count, slot.rows.chunk_numel)

    def full(self, section: Section, slot: Slot) -> Tensor:
        """The full parameter, in its shape, with a version counter of its own."""
        flat = self._sections[id(section)].narrow(0, slot.full_offset, slot.rows.numel)
        return flat.view(slot.rows.shape).data

    def allocate(self) -> None:
        self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)


class Staging:
    """Packed gradient blocks that are not in use: the next group of the same kind takes one.

    One block a kind is kept, since one reduction at a time is under way.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, Tensor] = {}

    def take(self, kind: Hashable) -> Tensor | None:
        return self._idle.pop(kind, None)

    def give(self, kind: Hashable, block: Tensor) -> None:
        self._idle[kind] = block


def typed_view(memory: Tensor, start_nbytes: int, numel: int, dtype: object) -> Tensor:
    """``numel`` elements of ``dtype`` out of a buffer of bytes."""
    assert isinstance(dtype, torch.dtype)
    return memory.narrow(0, start_nbytes, numel * dtype.itemsize).view(dtype)
