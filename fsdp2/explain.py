"""``explain(model)``: what each group looks like, which path it takes, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp2.api import _states_of
from fsdp2.custom import Custom
from fsdp2.gradients import ReductionPlan
from fsdp2.grouped import GroupedGather, OneGather
from fsdp2.hooks import State
from fsdp2.layout import Path, Section, Slot
from fsdp2.portion import Portion
from fsdp2.quantising import parameter_format


@dataclass(frozen=True)
class ParamReport:
    """One parameter of a group."""

    name: str
    shape: tuple[int, ...]
    dim: int
    """The dimension that is split; "rows" are slices along it."""
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
    """Ranks that split each parameter."""
    replicas: int
    """Ranks that hold each shard."""
    params: tuple[ParamReport, ...]
    shard_nbytes: int
    full_nbytes: int
    part_nbytes: int
    """Kept between forward and backward, for a backward that gathers over fewer ranks."""
    padding_nbytes: int
    padding_share: float
    """Of all bytes in the shards of all ranks."""
    is_kept: bool
    """Whether the full parameters stay after forward."""
    is_offloaded: bool
    """Whether the shards live on the host of an accelerator."""
    transport: str
    limit: int
    joined: tuple[str, ...]
    """Tied parameters that it took over from groups inside it, with the names they are tied to."""
    ignored: tuple[str, ...]
    """Parameters left alone on request: their gradients are not reduced."""

    def __str__(self) -> str:
        kept = "kept after forward" if self.is_kept else "freed after forward"
        if self.part_nbytes:
            kept = f"{self.part_nbytes:,} B kept after forward"
        split = f"over {self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self.replicas > 1:
            split += f", repeated {self.replicas} times"
        host = ", shards on the host" if self.is_offloaded else ""
        lines = [
            f"{self.name}: {len(self.params)} parameters {split}, {kept}",
            f"  shard {self.shard_nbytes:,} B, full {self.full_nbytes:,} B, "
            f"padding {self.padding_nbytes:,} B ({self.padding_share:.1%}), "
            f"{self.transport}, limit {self.limit} in flight{host}",
        ]
        lines += [f"  tied: {names}, owned by this group" for names in self.joined]
        lines += [f"  ignored: {name}, its gradient is yours to reduce" for name in self.ignored]
        for p in self.params:
            rows = "/".join(map(str, p.rows_per_rank[:8]))
            rows += "/..." if len(p.rows_per_rank) > 8 else ""
            dim = f" along dim {p.dim}" if p.dim else ""
            dtypes = f"{p.storage_dtype} -> {p.compute_dtype} -> {p.reduce_dtype or 'frozen'}"
            lines.append(f"  {p.name} {p.shape}, rows {rows}{dim}, {dtypes}")
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
    and its name is its type.

    Raises:
        UsageError: Nothing below ``model`` is sharded.
    """
    return Explanation(tuple(_report(state) for state in _states_of(model, "explain")))


def _report(state: State) -> GroupReport:
    group = state.group
    params: list[ParamReport] = []
    shards_nbytes = 0
    for portion in group.portions:
        slots = [(s, slot) for s in portion.layout.sections for slot in s.slots]
        slots.sort(key=lambda pair: pair[1].index)
        params += [_report_param(portion, section, slot) for section, slot in slots]
        shards_nbytes += portion.layout.shard_nbytes * portion.mesh.world_size
    padding = sum(report.padding_nbytes for report in params)
    transports = [portion.transport for portion in group.portions if portion.transport]
    names = sorted({transport.name for transport in transports})
    return GroupReport(
        name=group.name,
        world_size=group.mesh.world_size,
        replicas=group.mesh.replicas.size,
        params=tuple(params),
        shard_nbytes=sum(portion.layout.shard_nbytes for portion in group.portions),
        full_nbytes=group.full_nbytes,
        part_nbytes=sum(p.part_nbytes for p in group.portions if group.switches.keeps_part),
        padding_nbytes=padding,
        padding_share=padding / shards_nbytes if shards_nbytes else 0.0,
        is_kept=not group.switches.reshard_after_forward,
        is_offloaded=any(portion.is_offloaded for portion in group.portions),
        transport=" and ".join(names) or "no communication",
        limit=state.limit,
        joined=tuple(" = ".join(place.name for place in p.places) for p in state.joined),
        ignored=tuple(state.ignored),
    )


def _report_param(portion: Portion, section: Section, slot: Slot) -> ParamReport:
    param = portion.params[slot.index]
    ranks = portion.mesh.world_size
    plan = portion.reduction_plan((slot.index,)) if param.shard.requires_grad else None
    rows = [slot.rows.bounds(rank) for rank in range(ranks)]
    padding = 0 if slot.rows.is_scalar else slot.rows.chunk_numel * ranks - slot.rows.numel
    return ParamReport(
        name=param.name,
        shape=param.shape,
        dim=slot.dim,
        rows_per_rank=tuple(stop - start for start, stop in rows),
        storage_dtype=str(section.storage),
        compute_dtype=str(section.compute),
        reduce_dtype=str(plan.sections[0].reduced) if plan else None,
        padding_nbytes=padding * param.dtype.itemsize,
        gather=_gather_reason(portion, section, slot),
        reduction=_reduction_reason(portion, plan, slot) if plan else "none: it is frozen",
    )


def _gather_reason(portion: Portion, section: Section, slot: Slot) -> str:
    transport = portion.transport
    cast = " after a cast" if section.storage != section.compute else ""
    if transport is None:
        return "none: one rank" + (" (a cast)" if cast else ", the full parameter is the shard")
    if slot.path is Path.REPLICATED:
        return "replicated: it has no rows, so every rank keeps it"
    if slot.path is Path.SUBCLASS:
        kind = type(portion.params[slot.index].local).__name__
        return f"as {kind} says: its fsdp_pre_all_gather decides what travels"
    if slot.path is Path.CODED:
        assert portion.wire_dtype is not None
        block = parameter_format(portion.wire_dtype, slot.rows.shape).block
        return f"quantised: {portion.wire_dtype} with a scale per {block} numbers, then decoded"
    limit = transport.pack_below_nbytes
    if slot.path is Path.MOVED:
        return f"moved{cast}: split along dim {slot.dim}, copied into place behind the gather"
    if slot.path is Path.PACKED and transport.name == Custom.name:
        return f"packed{cast}: {transport.prefers_grouping}"
    if slot.path is Path.PACKED:
        return f"packed{cast}: its shard is below {limit:,} B; {transport.prefers_grouping}"
    plan = portion.gather_plan
    choice = plan.choice if isinstance(plan, (GroupedGather, OneGather)) else None
    path = "direct" if choice is None or choice.is_direct else "packed"
    tried = "" if choice is None else f"; {choice}"
    return f"{path}{cast}: its shard has {limit:,} B or more{tried}"


def _reduction_reason(portion: Portion, plan: ReductionPlan, slot: Slot) -> str:
    transport = portion.transport
    replicas = f" over {portion.mesh.replicas.size} replicas"
    if transport is None:
        return "all-reduce" + replicas if portion.replicas else "none: one rank"
    [column] = plan.sections[0].gradients.columns
    if transport.codes_gradients and column.path is Path.DIRECT:
        how = f"exchanged quantised, summed in {plan.sections[0].reduced}"
        return how + (f", then an all-reduce{replicas}" if portion.replicas else "")
    how = transport.describe_reduction(plan.sections[0].wire, plan.sections[0].reduced)
    if portion.replicas:
        how += ", then an all-reduce" + replicas
    if column.path is Path.DIRECT and slot.dim:
        return f"copied with dim {slot.dim} in front: {how}"
    if column.path is Path.DIRECT:
        return f"direct: {how}, read where autograd left the gradient"
    if column.path is Path.REPLICATED:
        return f"packed: {how}, its gradient goes to every rank"
    if slot.path is Path.PACKED:
        return f"packed: {how}, small like its shard"
    return f"packed: {how}, its rows do not divide or the reduction changes the dtype"
