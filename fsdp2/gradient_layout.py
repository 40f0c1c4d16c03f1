"""Where each gradient lies in the gradient buffer of a section: arithmetic only.

Offsets and sizes are counted in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdp2.layout import Path, Section, Slot, align


@dataclass(frozen=True)
class GradientColumn:
    """The gradient of one parameter inside a gradient section, of this rank."""

    slot: Slot
    path: Path
    offset: int


@dataclass(frozen=True)
class GradientSection:
    """The gradient buffer of one section: direct chunks, then one packed row.

    The packed row ends in one flag per parameter, which counts the ranks that had a gradient.
    """

    section: Section
    columns: tuple[GradientColumn, ...]
    packed_offset: int
    packed_numel: int
    packed_ranks: int
    """The first ranks, which own something in the packed block besides the flags."""
    numel: int

    @property
    def flags_offset(self) -> int:
        return self.numel - len(self.columns)


def plan_gradients(
    section: Section,
    trainable: Iterable[int],
    path_of: Callable[[Slot], Path],
    itemsize: int,
) -> GradientSection:
    """Lay out the gradient buffer of the ``trainable`` parameters of one section.

    ``itemsize`` is that of the reduce dtype, in bytes; ``path_of`` may turn a direct
    slot into a packed one, never the reverse.
    """
    wanted = set(trainable)
    slots = [slot for slot in section.slots if slot.index in wanted]
    never_direct = (Path.PACKED, Path.REPLICATED)
    paths = [slot.path if slot.path in never_direct else path_of(slot) for slot in slots]
    columns: list[GradientColumn] = []
    at = 0
    for slot, path in zip(slots, paths):
        if path is Path.DIRECT:
            at = align(at, itemsize)
            columns.append(GradientColumn(slot, path, at))
            at += slot.rows.chunk_numel
    packed_offset = at = align(at, itemsize)
    for slot, path in zip(slots, paths):
        if path is not Path.DIRECT:
            columns.append(GradientColumn(slot, path, at))
            at += slot.rows.chunk_numel
    numel = at + len(columns)
    packed = [column.slot.rows.owners for column in columns if column.path is not Path.DIRECT]
    return GradientSection(
        section=section,
        columns=tuple(columns),
        packed_offset=packed_offset,
        packed_numel=numel - packed_offset,
        packed_ranks=max(packed, default=0),
        numel=numel,
    )
