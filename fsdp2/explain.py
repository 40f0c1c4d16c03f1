"""``explain(model)``: what each group looks like, which path it takes, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp2.api import _states_of
from fsdp2.hooks import State
from fsdp2.layout import Path, Section, Slot
from fsdp2.param_group import ParamGroup


@dataclass(frozen=True)
class ParamReport:
    """One parameter of a group."""

    name: str
    shape: tuple[int, ...]
    rows_per_rank: tuple[int, ...]
    """Real rows of each rank, in rank order."""
    storage_dtype: str
    compute_dtype: str
    reduce_dtype: str | None
    """None where the parameter is frozen."""
    padding_nbytes: int
    """Over all ranks, in the storage dtype."""
    gather: str
    reduction: str


@dataclass(frozen=True)
class GroupReport:
    """One group. ``str()`` of it is what ``explain`` prints."""

    name: str
    world_size: int
    params: tuple[ParamReport, ...]
    shard_nbytes: int
    full_nbytes: int
    padding_nbytes: int
    padding_share: float
    """Of all bytes in the shards of all ranks."""
    is_kept: bool
    """Whether the full parameters stay after forward."""
    transport: str
    limit: int

    def __str__(self) -> str:
        kept = "kept after forward" if self.is_kept else "freed after forward"
        lines = [
            f"{self.name}: {len(self.params)} parameters over {self.world_size} ranks, {kept}",
            f"  shard {self.shard_nbytes:,} B, full {self.full_nbytes:,} B, "
            f"padding {self.padding_nbytes:,} B ({self.padding_share:.1%}), "
            f"{self.transport}, limit {self.limit} in flight",
        ]
        for p in self.params:
            rows = "/".join(map(str, p.rows_per_rank[:8]))
            rows += "/..." if len(p.rows_per_rank) > 8 else ""
            dtypes = f"{p.storage_dtype} -> {p.compute_dtype} -> {p.reduce_dtype or 'frozen'}"
            lines.append(f"  {p.name} {p.shape}, rows {rows}, {dtypes}")
            lines.append(f"    gather: {p.gather}")
            lines.append(f"    reduction: {p.reduction}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The groups under one module, outermost first."""

    groups: tuple[GroupReport, ...]

    def __str__(self) -> str:
        return "\n".join(str(group) for group in self.groups)


def explain(model: nn.Module) -> Explanation:
    """Report every group below ``model``: layout, dtypes, paths with their reasons.

    Before the first forward the root is not known: it then reads "freed after forward",
    and names are the modules' types.

    Raises:
        UsageError: Nothing below ``model`` is sharded.
    """
    return Explanation(tuple(_report(state) for state in _states_of(model, "explain")))


def _report(state: State) -> GroupReport:
    group = state.group
    params = []
    for section in group.layout.sections:
        for slot in section.slots:
            params.append((slot.index, _report_param(group, section, slot)))
    padding = sum(report.padding_nbytes for _, report in params)
    shards_nbytes = group.layout.shard_nbytes * group.mesh.world_size
    transport = group.transport
    return GroupReport(
        name=group.name,
        world_size=group.mesh.world_size,
        params=tuple(report for _, report in sorted(params, key=lambda pair: pair[0])),
        shard_nbytes=group.layout.shard_nbytes,
        full_nbytes=group.full_nbytes,
        padding_nbytes=padding,
        padding_share=padding / shards_nbytes if shards_nbytes else 0.0,
        is_kept=not group.switches.reshard_after_forward,
        transport=f"{transport.name} messages" if transport else "no communication",
        limit=state.limit,
    )


def _report_param(group: ParamGroup, section: Section, slot: Slot) -> ParamReport:
    param = group.params[slot.index]
    ranks = group.mesh.world_size
    plan = group.reduction_plan((slot.index,)) if param.shard.requires_grad else None
    rows = [slot.rows.bounds(rank) for rank in range(ranks)]
    padding = 0 if slot.rows.is_scalar else slot.rows.chunk_numel * ranks - slot.rows.numel
    return ParamReport(
        name=param.name,
        shape=slot.rows.shape,
        rows_per_rank=tuple(stop - start for start, stop in rows),
        storage_dtype=str(section.storage),
        compute_dtype=str(section.compute),
        reduce_dtype=str(plan.sections[0].reduced) if plan else None,
        padding_nbytes=padding * param.dtype.itemsize,
        gather=_gather_reason(group, section, slot),
        reduction=_reduction_reason(group, section, slot) if plan else "none: it is frozen",
    )


def _gather_reason(group: ParamGroup, section: Section, slot: Slot) -> str:
    transport = group.transport
    cast = " after a cast" if section.storage != section.compute else ""
    if transport is None:
        return "none: one rank" + (" (a cast)" if cast else ", the full parameter is the shard")
    if slot.path is Path.REPLICATED:
        return "replicated: it has no rows, so every rank keeps it"
    limit = transport.pack_below_nbytes
    if slot.path is Path.PACKED:
        return f"packed{cast}: its shard is below {limit:,} B; {transport.prefers_grouping}"
    return f"direct{cast}: its shard has {limit:,} B or more"


def _reduction_reason(group: ParamGroup, section: Section, slot: Slot) -> str:
    transport = group.transport
    if transport is None:
        return "none: one rank"
    plan = group.reduction_plan((slot.index,))
    [column] = plan.sections[0].gradients.columns
    how = transport.describe_reduction(plan.sections[0].wire, plan.sections[0].reduced)
    if column.path is Path.DIRECT:
        return f"direct: {how}, read where autograd left the gradient"
    if column.path is Path.REPLICATED:
        return f"packed: {how}, its gradient goes to every rank"
    if slot.path is Path.PACKED:
        return f"packed: {how}, small like its shard"
    return f"packed: {how}, its rows do not divide or the reduction changes the dtype"
