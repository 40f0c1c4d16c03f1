"""Where each parameter of a group lies in the group's buffers: arithmetic only.

A parameter of ``rows`` rows is dealt to N ranks in chunks of ``ceil(rows / N)``
rows, as ``torch.chunk`` and DTensor's ``Shard(0)`` do. Padding therefore sits
only behind the last real row, and the padded chunks of all ranks, one behind the
other, start with the parameter itself. A parameter that is split along another
dimension is laid out here with that dimension moved to the front.

Offsets and sizes are counted in elements unless their name says ``nbytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

ALIGNMENT = 16
"""Bytes. Below this NCCL leaves its fast path and vector loads split."""


class Path(Enum):
    """How one parameter travels in a gather or a reduction."""

    DIRECT = "direct"
    """Read and written where it lives."""
    MOVED = "moved"
    """Split along another dimension than the first: gathered beside it and copied into place."""
    CODED = "coded"
    """Quantised on the wire: gathered beside the full buffer and decoded into place."""
    SUBCLASS = "subclass"
    """Gathered in the form that its tensor subclass says, in memory of its own."""
    PACKED = "packed"
    """Copied into and out of a staging block that it shares with others."""
    REPLICATED = "replicated"
    """Kept whole on every rank; its gradient rides in the packed block."""


@dataclass(frozen=True)
class Rows:
    """How the rows of one parameter are dealt to the ranks of a shard mesh."""

    shape: tuple[int, ...]
    world_size: int

    @property
    def is_scalar(self) -> bool:
        return not self.shape

    @property
    def count(self) -> int:
        return 1 if self.is_scalar else self.shape[0]

    @property
    def row_numel(self) -> int:
        return prod(self.shape[1:])

    @property
    def per_rank(self) -> int:
        """Padded rows of every rank."""
        return self.count if self.is_scalar else -(-self.count // self.world_size)

    @property
    def chunk_numel(self) -> int:
        """Padded elements of every rank."""
        return self.per_rank * self.row_numel

    @property
    def numel(self) -> int:
        return self.count * self.row_numel

    @property
    def owners(self) -> int:
        """How many ranks have rows of it: the first ones."""
        if self.is_scalar:
            return self.world_size
        return -(-self.count // self.per_rank) if self.count else 0

    @property
    def divides(self) -> bool:
        return self.is_scalar or self.count % self.world_size == 0

    def bounds(self, rank: int) -> tuple[int, int]:
        """First row of ``rank`` and the row behind its last one; equal where it has none."""
        if self.is_scalar:
            return 0, 1
        start = min(rank * self.per_rank, self.count)
        return start, min(start + self.per_rank, self.count)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.is_scalar:
            return ()
        start, stop = self.bounds(rank)
        return (stop - start, *self.shape[1:])

    def local_numel(self, rank: int) -> int:
        start, stop = self.bounds(rank)
        return (stop - start) * self.row_numel


@dataclass(frozen=True)
class ParamSpec:
    """What the layout has to know of a parameter. Dtypes are opaque keys."""

    shape: tuple[int, ...]
    storage: Hashable
    storage_itemsize: int
    compute: Hashable
    compute_itemsize: int
    dim: int = 0
    """The dimension that is split; ``shape`` begins with it, wherever the parameter has it."""
    has_own_form: bool = False
    """Its tensor subclass says what travels: it has no place in the buffers."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter, as offsets from the start of its section."""

    index: int
    rows: Rows
    path: Path
    shard_offset: int
    full_offset: int
    block_offset: int
    """Where a gather puts the chunks of all ranks; packed ones share the staging block instead."""
    dim: int = 0
    """The dimension that is split; ``rows`` has it in front."""

    def shape_of(self, moved: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's own order of dimensions."""
        return (*moved[1 : self.dim + 1], *moved[:1], *moved[self.dim + 1 :])


@dataclass(frozen=True)
class Section:
    """The parameters of a group that share a storage dtype and a compute dtype.

    In the shard buffer it holds first the direct, moved and coded slots, then the packed ones
    without gaps (so that one copy moves them all), then the replicated ones. In the full
    buffer the same order is followed by the blocks of the moved slots and by the staging
    block of shape ``(world_size, packed_numel)``. Slots of subclasses are empty in both.
    Of that block only the rows of the first ``packed_ranks`` ranks hold real rows.
    """

    storage: Hashable
    compute: Hashable
    slots: tuple[Slot, ...]
    shard_start_nbytes: int
    shard_numel: int
    full_start_nbytes: int
    full_numel: int
    packed_start: int
    packed_numel: int
    packed_ranks: int
    staging_offset: int

    def by_path(self, path: Path) -> list[Slot]:
        return [slot for slot in self.slots if slot.path is path]


@dataclass(frozen=True)
class GroupLayout:
    """The shard buffer and the full buffer of one group."""

    world_size: int
    sections: tuple[Section, ...]
    shard_nbytes: int
    full_nbytes: int

    @property
    def slots(self) -> list[Slot]:
        """In the order of the group's parameters."""
        return sorted(
            (s for section in self.sections for s in section.slots), key=lambda s: s.index
        )


def align(offset: int, itemsize: int) -> int:
    """The next offset, in elements of ``itemsize`` bytes, whose address is aligned."""
    step = max(1, ALIGNMENT // itemsize)
    return -(-offset // step) * step


def plan_group(
    specs: Sequence[ParamSpec],
    world_size: int,
    path_of: Callable[[ParamSpec], Path],
    part_size: int | None = None,
) -> GroupLayout:
    """Lay out one group: a section per pair of dtypes, in order of first appearance.

    With ``part_size`` the full buffer has room for a gather over that many ranks too.
    """
    kinds: dict[tuple[Hashable, Hashable], list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault((spec.storage, spec.compute), []).append(index)
    sections: list[Section] = []
    shard_nbytes = full_nbytes = 0
    for members in kinds.values():
        section = _plan_section(
            specs, members, world_size, path_of, part_size, shard_nbytes, full_nbytes
        )
        sections.append(section)
        spec = specs[members[0]]
        shard_nbytes = align(shard_nbytes + section.shard_numel * spec.storage_itemsize, 1)
        full_nbytes = align(full_nbytes + section.full_numel * spec.compute_itemsize, 1)
    return GroupLayout(world_size, tuple(sections), shard_nbytes, full_nbytes)


def _plan_section(
    specs: Sequence[ParamSpec],
    members: Iterable[int],
    world_size: int,
    path_of: Callable[[ParamSpec], Path],
    part_size: int | None,
    shard_start_nbytes: int,
    full_start_nbytes: int,
) -> Section:
    paths = {i: _path(specs[i], path_of) for i in members}
    # Vectors behind matrices: optimizers give them other options, and step on neighbours together.
    ordered = sorted(paths, key=lambda i: (list(Path).index(paths[i]), len(specs[i].shape) < 2, i))
    first = specs[ordered[0]]
    rows = {i: Rows(specs[i].shape, world_size) for i in ordered}
    full_numel = _full_numel(specs, paths, [world_size, part_size or world_size])
    shard_offsets, shard_numel = _shard_offsets(ordered, paths, rows, first.storage_itemsize)
    at = 0
    full_offsets: dict[int, int] = {}
    for i in ordered:
        full_offsets[i] = at = align(at, first.compute_itemsize)
        at += full_numel[i]
    block_offsets = dict(full_offsets)
    for i in ordered:
        if paths[i] is Path.MOVED:
            block_offsets[i] = at = align(at, first.compute_itemsize)
            at += world_size * rows[i].chunk_numel
    packed = [i for i in ordered if paths[i] is Path.PACKED]
    packed_numel = sum(rows[i].chunk_numel for i in packed)
    staging_offset = align(at, first.compute_itemsize)
    return Section(
        storage=first.storage,
        compute=first.compute,
        slots=tuple(
            Slot(
                index=i,
                rows=rows[i],
                path=paths[i],
                shard_offset=shard_offsets[i],
                full_offset=full_offsets[i],
                block_offset=block_offsets[i],
                dim=specs[i].dim,
            )
            for i in ordered
        ),
        shard_start_nbytes=shard_start_nbytes,
        shard_numel=shard_numel,
        full_start_nbytes=full_start_nbytes,
        full_numel=staging_offset + world_size * packed_numel,
        packed_start=shard_offsets[packed[0]] if packed else 0,
        packed_numel=packed_numel,
        packed_ranks=max((rows[i].owners for i in packed), default=0),
        staging_offset=staging_offset,
    )


def _path(spec: ParamSpec, path_of: Callable[[ParamSpec], Path]) -> Path:
    if spec.has_own_form:
        return Path.SUBCLASS
    if not spec.shape:
        return Path.REPLICATED
    return Path.MOVED if spec.dim else path_of(spec)


def _full_numel(
    specs: Sequence[ParamSpec], paths: dict[int, Path], world_sizes: list[int]
) -> dict[int, int]:
    """Elements of each slot of the full buffer, with the padding behind the parameter."""
    numel: dict[int, int] = dict.fromkeys(paths, 0)
    for world_size in world_sizes:
        rows = {i: Rows(specs[i].shape, world_size) for i in paths}
        packed_ranks = max((rows[i].owners for i in paths if paths[i] is Path.PACKED), default=0)
        copies = {
            Path.DIRECT: world_size,
            Path.CODED: world_size,
            Path.PACKED: packed_ranks,
            Path.REPLICATED: 1,
            Path.SUBCLASS: 0,
        }
        for i, path in paths.items():
            needed = rows[i].chunk_numel * copies[path] if path in copies else rows[i].numel
            numel[i] = max(numel[i], needed)
    return numel


def _shard_offsets(
    ordered: list[int], paths: dict[int, Path], rows: dict[int, Rows], itemsize: int
) -> tuple[dict[int, int], int]:
    """Aligned, but for packed and replicated slots behind another of their kind."""
    offsets: dict[int, int] = {}
    at = 0
    before: Path | None = None
    for i in ordered:
        if paths[i] in (Path.DIRECT, Path.MOVED, Path.CODED) or paths[i] is not before:
            at = align(at, itemsize)
        offsets[i] = at
        at += 0 if paths[i] is Path.SUBCLASS else rows[i].chunk_numel
        before = paths[i]
    return offsets, at


def plan_part(
    layout: GroupLayout, world_size: int, itemsize_of: Callable[[Hashable], int]
) -> GroupLayout:
    """The same full buffer, gathered over ``world_size`` ranks that keep parts of it.

    The parts are in the compute dtype, decoded already. ``itemsize_of`` gives a dtype's bytes.
    """
    sections: list[Section] = []
    shard_nbytes = 0
    for whole in layout.sections:
        itemsize = itemsize_of(whole.compute)
        ordered = [slot.index for slot in whole.slots]
        paths: dict[int, Path] = {
            slot.index: Path.DIRECT if slot.path is Path.CODED else slot.path
            for slot in whole.slots
        }
        rows = {slot.index: Rows(slot.rows.shape, world_size) for slot in whole.slots}
        offsets, shard_numel = _shard_offsets(ordered, paths, rows, itemsize)
        packed = [i for i in ordered if paths[i] is Path.PACKED]
        section = replace(
            whole,
            storage=whole.compute,
            slots=tuple(
                replace(
                    slot,
                    rows=rows[slot.index],
                    path=paths[slot.index],
                    shard_offset=offsets[slot.index],
                )
                for slot in whole.slots
            ),
            shard_start_nbytes=shard_nbytes,
            shard_numel=shard_numel,
            packed_start=offsets[packed[0]] if packed else 0,
            packed_numel=sum(rows[i].chunk_numel for i in packed),
            packed_ranks=max((rows[i].owners for i in packed), default=0),
        )
        sections.append(section)
        shard_nbytes = align(shard_nbytes + shard_numel * itemsize, 1)
    return GroupLayout(world_size, tuple(sections), shard_nbytes, layout.full_nbytes)
