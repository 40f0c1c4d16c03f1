"""The flat buffers of one group and their views.

A buffer is one allocation of bytes; a view has the dtype and shape of what lies there.
The full buffer keeps its storage object for the life of the group and only gives its
memory back, so that what autograd saved in forward sees the data again after the next
gather, and so that every view is made once.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate
from math import prod
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from fsdp2.layout import GroupLayout, Path, Section, Slot
from fsdp2.runs import runs_of


class PackedBlock(NamedTuple):
    """The staging block of one section and what its columns are copied out to."""

    rows: Tensor
    """``(packed_ranks, packed_numel)``: of the block what holds real rows."""
    sizes: list[int]
    outs: list[Tensor]
    """Per packed parameter its slice of the full buffer, ``(packed_ranks, chunk_numel)``."""
    runs: list[Tensor]
    """On the CPU: runs of such slices."""
    run_columns: list[Tensor]
    """What goes there."""

    def copy_out(self) -> None:
        if self.runs:
            torch._foreach_copy_(self.runs, self.run_columns)
        else:  # one kernel on an accelerator
            torch.split_with_sizes_copy(self.rows, self.sizes, dim=1, out=self.outs)


class ShardBuffer:
    """This rank's padded rows of every parameter of the group, zero where there is padding."""

    def __init__(
        self, layout: GroupLayout, rank: int, device: torch.device, is_pinned: bool = False
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.memory = torch.zeros(
            layout.shard_nbytes, dtype=torch.uint8, device=device, pin_memory=is_pinned
        )
        self._storage = self.memory.untyped_storage()
        self._sections = {id(section): self._typed(section) for section in layout.sections}
        _shard_buffers.add(self)

    @property
    def starts(self) -> list[int]:
        """The addresses at which parameters begin, in order, of those with rows on this rank."""
        return sorted(
            self.padded(section, slot).data_ptr()
            for section in self.layout.sections
            for slot in section.slots
            if slot.rows.local_numel(self.rank)
        )

    def _typed(self, section: Section) -> Tensor:
        return typed_view(
            self.memory, section.shard_start_nbytes, section.shard_numel, section.storage
        )

    def padded(self, section: Section, slot: Slot) -> Tensor:
        """The padded rows of one parameter, flat."""
        return self._sections[id(section)].narrow(0, slot.shard_offset, slot.rows.chunk_numel)

    def local(self, section: Section, slot: Slot) -> Tensor:
        """The real rows of one parameter, in the parameter's shape but for the split dimension."""
        numel = slot.rows.local_numel(self.rank)
        flat = self._sections[id(section)].narrow(0, slot.shard_offset, numel)
        return flat.view(slot.shape_of(slot.rows.local_shape(self.rank)))

    def packed(self, section: Section) -> Tensor:
        """The padded rows of all packed parameters of a section, flat."""
        return self._sections[id(section)].narrow(0, section.packed_start, section.packed_numel)

    @property
    def held_nbytes(self) -> int:
        return self._storage.nbytes()

    def allocate(self) -> None:
        """Only for copies that are freed; the shards themselves stay."""
        self._storage.resize_(self.layout.shard_nbytes)

    def free(self) -> None:
        self._storage.resize_(0)


_shard_buffers: WeakSet[ShardBuffer] = WeakSet()


def shard_buffers() -> list[ShardBuffer]:
    """Those that hold memory now, by address. Compilers' stand-ins have none."""
    real = [buffer for buffer in _shard_buffers if type(buffer.memory) is Tensor]
    found = [buffer for buffer in real if buffer.memory.data_ptr()]
    return sorted(found, key=lambda buffer: buffer.memory.data_ptr())


class FullBuffer:
    """All full parameters of a group and its staging blocks: one storage, filled and freed.

    It starts allocated, since views cannot be cut from a storage that is not.
    """

    def __init__(self, layout: GroupLayout, device: torch.device) -> None:
        memory = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=device)
        self._storage = memory.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._sections = [
            typed_view(memory, s.full_start_nbytes, s.full_numel, s.compute)
            for s in layout.sections
        ]

    def at(self, section_index: int, offset: int, *shape: int) -> Tensor:
        """A contiguous view of one section."""
        return self._sections[section_index].narrow(0, offset, prod(shape)).view(shape)

    def full(self, section_index: int, slot: Slot) -> Tensor:
        """The full parameter, in its shape, with a version counter of its own."""
        return self.at(section_index, slot.full_offset, *slot.shape_of(slot.rows.shape)).data

    @property
    def held_nbytes(self) -> int:
        """0 while it is free."""
        return self._storage.nbytes()

    def allocate(self) -> None:
        self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)


class Filling:
    """How a full buffer is filled from the shards of one layout, by its rank and its peers."""

    def __init__(self, full: FullBuffer, shards: ShardBuffer) -> None:
        self._full = full
        self._shards = shards
        self._rank = shards.rank
        self._own: list[Tensor] = []
        """Where this rank's rows go; aligned with ``_own_sources``."""
        self._own_sources: list[Tensor] = []
        self.blocks: list[Tensor] = []
        """What a gather fills: ``(world_size, n)``, own row first filled by us."""
        self.own_rows: list[Tensor] = []
        """Aligned with ``blocks``: this rank's rows in the shard buffer, cast or not."""
        self._packed: list[PackedBlock] = []
        self._moved: list[Tensor] = []
        """Full parameters that are split along another dimension than the first."""
        self._moved_sources: list[Tensor] = []
        for index, section in enumerate(shards.layout.sections):
            self._plan_section(index, section, shards.layout.world_size)

    def copy_own(self) -> None:
        """This rank's rows into the blocks, cast to the compute dtype."""
        if self._own:
            torch._foreach_copy_(self._own, self._own_sources)

    def copy_out(self) -> None:
        """Out of the blocks what does not lie in its place yet."""
        for packed in self._packed:
            packed.copy_out()
        if self._moved:
            torch._foreach_copy_(self._moved, self._moved_sources)

    def _plan_section(self, index: int, section: Section, world_size: int) -> None:
        for slot in section.slots:
            if slot.path is Path.DIRECT:
                self._plan_direct(index, section, slot, world_size)
            elif slot.path is Path.MOVED:
                self._plan_moved(index, section, slot, world_size)
            elif slot.path is Path.REPLICATED:
                own = self._full.at(index, slot.full_offset, slot.rows.chunk_numel)
                self._fill_own(own, self._shards.padded(section, slot))
        if section.packed_numel:
            self._plan_packed(index, section, world_size)

    def _plan_direct(self, index: int, section: Section, slot: Slot, world_size: int) -> None:
        block = self._full.at(index, slot.block_offset, world_size, slot.rows.chunk_numel)
        if block.numel():
            self._add_block(block, self._shards.padded(section, slot))

    def _plan_moved(self, index: int, section: Section, slot: Slot, world_size: int) -> None:
        rows = slot.rows
        if not rows.numel:
            return
        block = self._full.at(index, slot.block_offset, world_size, rows.chunk_numel)
        self.blocks.append(block)
        local_shape = rows.local_shape(self._rank)
        own = block[self._rank][: prod(local_shape)].view(local_shape)
        self._fill_own(own, self._shards.local(section, slot).movedim(slot.dim, 0))
        gathered = self._full.at(index, slot.block_offset, *rows.shape)
        self._moved.append(self._full.full(index, slot))
        self._moved_sources.append(gathered.movedim(0, slot.dim))

    def _plan_packed(self, index: int, section: Section, world_size: int) -> None:
        slots = section.by_path(Path.PACKED)
        ranks = section.packed_ranks
        block = self._full.at(index, section.staging_offset, world_size, section.packed_numel)
        self._add_block(block, self._shards.packed(section))
        sizes = [slot.rows.chunk_numel for slot in slots]
        outs = [self._full.at(index, s.full_offset, ranks, s.rows.chunk_numel) for s in slots]
        is_on_cpu = block.device.type == "cpu"
        runs = self._packed_runs(block, outs) if is_on_cpu else ([], [])
        self._packed.append(PackedBlock(block[:ranks], sizes, outs, *runs))

    def _packed_runs(self, block: Tensor, outs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        ranks, sizes = outs[0].shape[0], [out.shape[1] for out in outs]
        starts = [0, *accumulate(sizes)][:-1]
        full_starts = [int(out.storage_offset()) for out in outs]
        found: list[Tensor] = []
        found_columns: list[Tensor] = []
        for run in runs_of(sizes, starts, full_starts):
            size, (step, full_step) = sizes[run.first], run.steps
            shape = run.length, ranks, size
            first, out = block[:, starts[run.first] :], outs[run.first]
            found.append(out.as_strided(shape, (full_step, size, 1)))
            found_columns.append(first.as_strided(shape, (step, block.shape[1], 1)))
        return found, found_columns

    def _add_block(self, block: Tensor, source: Tensor) -> None:
        self.blocks.append(block)
        self.own_rows.append(source)
        self._fill_own(block[self._rank], source)

    @property
    def lendable(self) -> list[Tensor]:
        """``own_rows``, if there are some for all blocks; else nothing."""
        return self.own_rows if len(self.own_rows) == len(self.blocks) else []

    def _fill_own(self, own: Tensor, source: Tensor) -> None:
        self._own.append(own)
        self._own_sources.append(source)


class StagingBlock(NamedTuple):
    """Room for the packed gradients of one section, ``(world_size, packed_numel)``."""

    rows: Tensor
    owned: Tensor
    """The rows of the first ranks, which own something in it besides the flags."""
    flat: Tensor


class Staging:
    """Packed gradient blocks that are not in use: the next group of the same kind takes one.

    One block a kind is kept, since one reduction at a time is under way.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, StagingBlock] = {}
        self._ones: dict[Hashable, Tensor] = {}

    def take(self, kind: Hashable) -> StagingBlock | None:
        return self._idle.pop(kind, None)

    def give(self, kind: Hashable, block: StagingBlock) -> None:
        self._idle[kind] = block

    def ones(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The flags of all groups with so many parameters. Not to be written to."""
        kind = rows, columns, dtype, device
        found = self._ones.get(kind)
        if found is None:
            found = self._ones[kind] = torch.ones(rows, columns, dtype=dtype, device=device)
        return found

    def tensors(self) -> list[Tensor]:
        return [block.rows for block in self._idle.values()] + [*self._ones.values()]


def own_storage(local: Tensor) -> Tensor:
    """The same memory under a storage of its own, from offset 0.

    A DTensor takes over the offset of its local tensor, and then ``torch.save`` and ``deepcopy``
    take it for a tensor with memory of its own. Compilers refuse two that share a storage.
    Only for memory that is never freed by resizing: this storage would not notice.
    """
    if local.device.type == "meta":
        return local
    start = local.storage_offset() * local.itemsize
    storage = local.untyped_storage()[start : start + local.nbytes]
    return local.new_empty(0).set_(storage, 0, local.shape, local.stride())


def typed_view(memory: Tensor, start_nbytes: int, numel: int, dtype: object) -> Tensor:
    """``numel`` elements of ``dtype`` out of a buffer of bytes."""
    assert isinstance(dtype, torch.dtype)
    return memory.narrow(0, start_nbytes, numel * dtype.itemsize).view(dtype)
