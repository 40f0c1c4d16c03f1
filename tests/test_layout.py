"""The layout: every parameter has its place, aligned, apart from all others, cut as chunk cuts.

Arithmetic only: no process group, and tensors only to compare with `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.gradient_layout import GradientColumn, GradientSection, plan_gradients
from fsdp2.layout import (
    ALIGNMENT,
    GroupLayout,
    ParamSpec,
    Path,
    Rows,
    Section,
    Slot,
    align,
    plan_group,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8, torch.int64]
WORLD_SIZES = st.integers(1, 9)
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.tuples(st.integers(0, 70))


@st.composite
def specs(draw: st.DrawFn) -> ParamSpec:
    storage = draw(st.sampled_from(DTYPES))
    compute = draw(st.sampled_from([storage, torch.bfloat16]))
    return ParamSpec(draw(SHAPES), storage, storage.itemsize, compute, compute.itemsize)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[ParamSpec], GroupLayout]:
    """A group of any shapes and dtypes, each parameter direct or packed as chance will have it."""
    members = draw(st.lists(specs(), max_size=8))
    threshold = draw(st.sampled_from([0, 4, 20, 1 << 20]))

    def path_of(spec: ParamSpec) -> Path:
        numel = torch.Size(spec.shape).numel()
        return Path.PACKED if numel < threshold else Path.DIRECT

    return members, plan_group(members, draw(WORLD_SIZES), path_of)


def holds_for(*strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`given`, with the same examples in every run and no limit on the time of one."""
    fixed = settings(deadline=None, max_examples=100, derandomize=True, database=None)
    return lambda test: fixed(given(*strategies)(test))


def parameter(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)


def dtype_of(key: object) -> torch.dtype:
    assert isinstance(key, torch.dtype)
    return key


def assert_apart(spans: list[tuple[int, int]], end: int) -> None:
    """Half-open ranges lie inside ``[0, end)`` and none overlaps another; empty ones may touch."""
    filled = sorted(span for span in spans if span[0] < span[1])
    for (_, stop), (start, _) in pairwise(filled):
        assert stop <= start
    for start, stop in spans:
        assert 0 <= start <= stop <= end


# ---- Rows


@holds_for(SHAPES, WORLD_SIZES)
def test_rows_are_cut_as_chunk_cuts_them(shape: tuple[int, ...], world_size: int) -> None:
    """Each rank's rows are `torch.chunk`'s of that rank, or none where chunk gives fewer pieces."""
    rows = Rows(shape, world_size)
    whole = parameter(shape)
    if not shape:
        assert rows.is_scalar
        assert all(rows.local_shape(rank) == () for rank in range(world_size))
        assert all(rows.local_numel(rank) == 1 for rank in range(world_size))
        return
    chunks = torch.chunk(whole, world_size) if shape[0] else [whole]
    for rank in range(world_size):
        start, stop = rows.bounds(rank)
        chunk = chunks[rank] if rank < len(chunks) else whole[:0]
        assert torch.equal(whole[start:stop], chunk)
        assert rows.local_shape(rank) == tuple(chunk.shape)
        assert rows.local_numel(rank) == chunk.numel()
        assert rows.local_numel(rank) <= rows.chunk_numel


@holds_for(SHAPES.filter(bool), WORLD_SIZES)
def test_padded_shards_in_rank_order_begin_with_the_parameter(
    shape: tuple[int, ...], world_size: int
) -> None:
    """The concatenation of all padded shards is the parameter, flat, and then padding."""
    rows = Rows(shape, world_size)
    whole = parameter(shape)
    padded = []
    for rank in range(world_size):
        start, stop = rows.bounds(rank)
        padded.append(torch.full((rows.chunk_numel,), -1))
        padded[rank][: rows.local_numel(rank)] = whole[start:stop].flatten()
    gathered = torch.cat(padded)
    assert torch.equal(gathered[: rows.numel].view(shape), whole)
    assert bool((gathered[rows.numel :] == -1).all())


@holds_for(SHAPES, WORLD_SIZES)
def test_padding_is_less_than_a_row_per_rank(shape: tuple[int, ...], world_size: int) -> None:
    """Fewer than world_size rows are padding, and none at all where the rows divide."""
    rows = Rows(shape, world_size)
    if rows.is_scalar:
        assert rows.divides and rows.chunk_numel == rows.numel == 1
        return
    padding = rows.per_rank * world_size - rows.count
    assert 0 <= padding < world_size
    assert rows.divides == (padding == 0)
    assert rows.numel == torch.Size(shape).numel()


@holds_for(st.integers(0, 1000), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_align_gives_the_next_aligned_offset(offset: int, itemsize: int) -> None:
    """The result is the smallest multiple of 16 bytes, in elements, that is not below."""
    found = align(offset, itemsize)
    expected = next(n for n in range(offset, offset + 17) if n * itemsize % ALIGNMENT == 0)
    assert found == expected


# ---- The shard buffer and the full buffer


@holds_for(groups())
def test_every_parameter_has_one_slot(group: tuple[list[ParamSpec], GroupLayout]) -> None:
    """Each parameter appears once, with its shape, in the section of its two dtypes."""
    members, layout = group
    assert [slot.index for slot in layout.slots] == list(range(len(members)))
    for section in layout.sections:
        for slot in section.slots:
            spec = members[slot.index]
            assert slot.rows == Rows(spec.shape, layout.world_size)
            assert (section.storage, section.compute) == (spec.storage, spec.compute)
            assert (slot.path is Path.REPLICATED) == (spec.shape == ())
    kinds = [(section.storage, section.compute) for section in layout.sections]
    assert len(kinds) == len(set(kinds))


def shard_span(section: Section, slot: Slot) -> tuple[int, int]:
    itemsize = dtype_of(section.storage).itemsize
    start = section.shard_start_nbytes + slot.shard_offset * itemsize
    return start, start + slot.rows.chunk_numel * itemsize


def full_span(section: Section, slot: Slot, world_size: int) -> tuple[int, int]:
    itemsize = dtype_of(section.compute).itemsize
    start = section.full_start_nbytes + slot.full_offset * itemsize
    copies = {Path.DIRECT: world_size, Path.PACKED: section.packed_ranks, Path.REPLICATED: 1}
    return start, start + copies[slot.path] * slot.rows.chunk_numel * itemsize


@holds_for(groups())
def test_shards_lie_apart_and_inside(group: tuple[list[ParamSpec], GroupLayout]) -> None:
    """In bytes, over all sections: no padded shard overlaps another or leaves the buffer."""
    _, layout = group
    spans = [shard_span(section, slot) for section in layout.sections for slot in section.slots]
    assert_apart(spans, layout.shard_nbytes)


@holds_for(groups())
def test_full_parameters_and_staging_lie_apart_and_inside(
    group: tuple[list[ParamSpec], GroupLayout],
) -> None:
    """In bytes: the slices of the full parameters, and the staging blocks, share nothing."""
    _, layout = group
    spans = []
    for section in layout.sections:
        spans += [full_span(section, slot, layout.world_size) for slot in section.slots]
        itemsize = dtype_of(section.compute).itemsize
        start = section.full_start_nbytes + section.staging_offset * itemsize
        staged = layout.world_size * section.packed_numel * itemsize
        spans.append((start, start + staged))
    assert_apart(spans, layout.full_nbytes)


@holds_for(groups())
def test_all_real_rows_are_copied_out(group: tuple[list[ParamSpec], GroupLayout]) -> None:
    """The first `packed_ranks` rows of a staging block hold every rank's rows that are real."""
    _, layout = group
    for section in layout.sections:
        ranks_with_rows = [
            sum(slot.rows.local_shape(rank)[0] > 0 for rank in range(layout.world_size))
            for slot in section.by_path(Path.PACKED)
        ]
        assert section.packed_ranks == max(ranks_with_rows, default=0)
        for slot in section.slots:
            start, stop = full_span(section, slot, layout.world_size)
            assert slot.rows.numel * dtype_of(section.compute).itemsize <= stop - start


@holds_for(groups())
def test_what_is_read_in_place_is_aligned(group: tuple[list[ParamSpec], GroupLayout]) -> None:
    """Sections, direct shards, packed blocks, staging and full parameters start at 16 bytes."""
    _, layout = group
    for section in layout.sections:
        storage, compute = dtype_of(section.storage), dtype_of(section.compute)
        assert section.shard_start_nbytes % ALIGNMENT == 0
        assert section.full_start_nbytes % ALIGNMENT == 0
        assert section.packed_start * storage.itemsize % ALIGNMENT == 0
        assert section.staging_offset * compute.itemsize % ALIGNMENT == 0
        for slot in section.slots:
            assert full_span(section, slot, layout.world_size)[0] % ALIGNMENT == 0
            if slot.path is Path.DIRECT:
                assert shard_span(section, slot)[0] % ALIGNMENT == 0


@holds_for(groups())
def test_packed_shards_have_no_gaps(group: tuple[list[ParamSpec], GroupLayout]) -> None:
    """One copy moves all packed shards: they lie behind each other, in the staging's order."""
    _, layout = group
    for section in layout.sections:
        at = section.packed_start
        for slot in section.by_path(Path.PACKED):
            assert slot.shard_offset == at
            at += slot.rows.chunk_numel
        assert at - section.packed_start == section.packed_numel


@holds_for(groups())
def test_shards_written_by_the_layout_read_back(
    group: tuple[list[ParamSpec], GroupLayout],
) -> None:
    """Filling every rank's shard buffer and gathering slot by slot gives every parameter back."""
    members, layout = group
    buffers = torch.zeros(layout.world_size, layout.shard_nbytes, dtype=torch.uint8)
    values = [
        torch.randint(0, 255, (*spec.shape, spec.storage_itemsize), dtype=torch.uint8)
        for spec in members
    ]
    slots = [(section, slot) for section in layout.sections for slot in section.slots]
    for section, slot in slots:
        for rank in range(layout.world_size):
            start, _ = shard_span(section, slot)
            first, last = slot.rows.bounds(rank)
            value = values[slot.index]
            flat = (value if slot.rows.is_scalar else value[first:last]).flatten()
            buffers[rank, start : start + flat.numel()] = flat
    for section, slot in slots:
        start, stop = shard_span(section, slot)
        ranks = 1 if slot.rows.is_scalar else layout.world_size
        value = values[slot.index]
        gathered = buffers[:ranks, start:stop].flatten()[: value.numel()]
        assert torch.equal(gathered.view(value.shape), value)


@holds_for(st.lists(specs(), max_size=8), WORLD_SIZES)
def test_equal_groups_have_equal_layouts(members: list[ParamSpec], world_size: int) -> None:
    """A layout is a value: ranks that plan the same group get the same plan."""

    def path_of(spec: ParamSpec) -> Path:
        return Path.PACKED if spec.shape[0] % 2 else Path.DIRECT

    copied = [ParamSpec(**vars(spec)) for spec in members]
    assert plan_group(members, world_size, path_of) == plan_group(copied, world_size, path_of)


# ---- The gradient buffer


@st.composite
def gradient_plans(draw: st.DrawFn) -> tuple[set[int], int, GradientSection]:
    """One section's gradients: any subset of its parameters trains, any direct one is packed."""
    members, layout = draw(groups().filter(lambda group: bool(group[1].sections)))
    section = draw(st.sampled_from(layout.sections))
    indices = [slot.index for slot in section.slots]
    trainable = set(draw(st.lists(st.sampled_from(indices), unique=True)))
    packed_anyway = set(draw(st.lists(st.sampled_from(indices), unique=True)))
    itemsize = draw(st.sampled_from([2, 4, 8]))

    def path_of(slot: Slot) -> Path:
        return Path.PACKED if slot.index in packed_anyway else Path.DIRECT

    return trainable, itemsize, plan_gradients(section, trainable, path_of, itemsize)


def column_span(column: GradientColumn) -> tuple[int, int]:
    return column.offset, column.offset + column.slot.rows.chunk_numel


@holds_for(gradient_plans())
def test_trainable_parameters_have_one_column(
    planned: tuple[set[int], int, GradientSection],
) -> None:
    """A gradient section holds the trainable parameters, each once, and no frozen one."""
    trainable, _, plan = planned
    found = [column.slot.index for column in plan.columns]
    assert len(found) == len(trainable)
    assert set(found) == trainable
    for column in plan.columns:
        expected = {Path.DIRECT: {Path.DIRECT, Path.PACKED}}
        assert column.path in expected.get(column.slot.path, {column.slot.path})


@holds_for(gradient_plans())
def test_gradient_columns_and_flags_lie_apart_and_inside(
    planned: tuple[set[int], int, GradientSection],
) -> None:
    """No two columns overlap, nor one and the flags, and all lie inside the buffer."""
    _, _, plan = planned
    flags = (plan.flags_offset, plan.flags_offset + len(plan.columns))
    assert_apart([*map(column_span, plan.columns), flags], plan.numel)


@holds_for(gradient_plans())
def test_direct_gradients_are_aligned(planned: tuple[set[int], int, GradientSection]) -> None:
    """Direct columns and the packed row start at 16 bytes of the reduce dtype."""
    _, itemsize, plan = planned
    assert plan.packed_offset * itemsize % ALIGNMENT == 0
    for column in (c for c in plan.columns if c.path is Path.DIRECT):
        assert column.offset * itemsize % ALIGNMENT == 0


@holds_for(gradient_plans())
def test_the_packed_row_has_no_gaps(planned: tuple[set[int], int, GradientSection]) -> None:
    """Packed and replicated columns and then the flags fill the row from its start to its end."""
    _, _, plan = planned
    at = plan.packed_offset
    for column in (c for c in plan.columns if c.path is not Path.DIRECT):
        assert column.offset == at
        at += column.slot.rows.chunk_numel
    assert at == plan.flags_offset
    assert plan.flags_offset + len(plan.columns) == plan.packed_offset + plan.packed_numel
    assert plan.packed_offset + plan.packed_numel == plan.numel
