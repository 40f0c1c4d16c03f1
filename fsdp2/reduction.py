"""The reduction of one group's gradients: prepare, exchange, sum, hand over.

Every trainable parameter takes part on every rank, with zeros where this rank has no
gradient, so that ranks which used different parameters still send the same bytes. One
flag per parameter rides along and counts the ranks that had a gradient: a parameter
that no rank used keeps ``grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.buffers import Staging
from fsdp2.collectives import Pending, Source, Transport
from fsdp2.layout import (
    GradientColumn,
    GradientSection,
    GroupLayout,
    Path,
    Section,
    Slot,
    plan_gradients,
)
from fsdp2.mesh import ShardMesh
from fsdp2.policies import MixedPrecisionPolicy, reduce_dtype
from fsdp2.sharded_param import ShardedParam
from fsdp2.streams import Streams


class ReducedSection(NamedTuple):
    """The gradient buffer of one section, summed once its communication has been waited for."""

    plan: SectionPlan
    buffer: Tensor
    """Flat, in the reduce dtype."""
    missing: list[int]
    """Parameters without a gradient on this rank."""
    held: list[Tensor]
    """The full gradients: their memory must not be reused before all has been read."""
    packed: Tensor
    """The staging block, ``(world_size, packed_numel)``."""

    @property
    def kind(self) -> Hashable:
        """Blocks of one kind have the same shape, and their flags in the same place."""
        return _kind(self.plan, self.packed.dtype)


def _kind(plan: SectionPlan, wire: torch.dtype) -> Hashable:
    gradients = plan.gradients
    return gradients.packed_numel, len(gradients.columns), gradients.packed_ranks, wire


class Reduction(Protocol):
    """A reduction under way, which ends in one of two ways."""

    def finish(self) -> None:
        """Hand the gradients to the shards."""
        ...

    def drop(self) -> None:
        """Let the messages arrive, which peers have sent already, and forget them."""
        ...


class LocalReduction:
    """With one rank there is nothing to wait for and nothing to copy."""

    def __init__(self, results: list[tuple[ShardedParam, Tensor]]) -> None:
        self._results = results

    @torch.no_grad()
    def finish(self) -> None:
        for param, gradient in self._results:
            param.set_gradient(gradient)
        self._results = []

    def drop(self) -> None:
        self._results = []


class ExchangedReduction:
    """Holds the full gradients until all ranks have read them."""

    def __init__(
        self,
        sections: list[ReducedSection],
        sources: list[Source],
        pending: Pending,
        divisor: float,
        streams: Streams,
        staging: Staging,
    ) -> None:
        self._staging = staging
        self._sections = sections
        self._sources = sources
        self._pending = pending
        self._divisor = divisor
        self._streams = streams
        self._results: list[Tensor] = []
        self._reduced: torch.Event | None = None
        if streams.runs_ahead:
            self._results = self._sum()
            self._reduced = streams.event()

    def _sum(self) -> list[Tensor]:
        """Per section the gradient buffer in the storage dtype."""
        self._pending.wait()
        results = []
        for section in self._sections:
            if self._divisor != 1.0:
                section.buffer.div_(self._divisor)
            results.append(section.buffer.to(section.plan.storage))
        return results

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, sum, and hand the gradients to the shards."""
        if not self._streams.runs_ahead:
            self._results = self._sum()
        # Behind this event the compute stream may reuse the memory of the full gradients.
        self._streams.compute_waits(self._reduced)
        self._sources = []
        sections, self._sections = self._sections, []
        for section, result in zip(sections, self._results):
            unused = self._unused(section) if section.missing else ()
            for view in section.plan.views:
                if view.index not in unused:
                    local = torch.as_strided(result, view.shape, view.stride, view.offset)
                    view.param.set_gradient(local)
            # On an accelerator the caching allocator does better: blocks belong to streams.
            if not section.missing and not self._streams.runs_ahead:
                self._staging.give(section.kind, section.packed)

    @torch.no_grad()
    def drop(self) -> None:
        if not self._streams.runs_ahead:
            self._pending.wait()
        self._streams.compute_waits(self._reduced)
        self._sources, self._sections, self._results = [], [], []

    def _unused(self, section: ReducedSection) -> set[int]:
        """Parameters that no rank has a gradient for. Reading the flags makes the host wait."""
        plan = section.plan.gradients
        flags = section.buffer[plan.flags_offset :].tolist()
        return {c.slot.index for c, flag in zip(plan.columns, flags) if flag == 0}


@dataclass(frozen=True)
class GradientView:
    """Where the gradient of this rank's rows of one parameter lies in the gradient buffer."""

    index: int
    param: ShardedParam
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SectionPlan(NamedTuple):
    """One section of a reduction, with everything that can be known beforehand."""

    gradients: GradientSection
    storage: torch.dtype
    compute: torch.dtype
    reduced: torch.dtype
    wire: torch.dtype
    """The narrower of gradient and reduce dtype: a sum in a wider one loses nothing by it."""
    direct: list[GradientColumn]
    packed: list[GradientColumn]
    views: list[GradientView]


class ReductionPlan:
    """How the gradients of one set of trainable parameters are reduced. Made once per set."""

    def __init__(
        self,
        group_name: str,
        layout: GroupLayout,
        params: list[ShardedParam],
        trainable: tuple[int, ...],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        transport: Transport | None,
    ) -> None:
        self._group_name = group_name
        self._params = params
        self._mesh = mesh
        self._policy = policy
        self._transport = transport
        self.sections = [
            self._plan_section(section, trainable)
            for section in layout.sections
            if any(slot.index in trainable for slot in section.slots)
        ]
        self._all_present: dict[tuple[int, torch.dtype], Tensor] = {}
        self._is_float16 = any(plan.reduced is torch.float16 for plan in self.sections)

    def _plan_section(self, section: Section, trainable: tuple[int, ...]) -> SectionPlan:
        storage, compute = section.storage, section.compute
        assert isinstance(storage, torch.dtype) and isinstance(compute, torch.dtype)
        reduced = reduce_dtype(self._policy, compute)

        def path_of(slot: Slot) -> Path:
            transport = self._transport
            if transport and not transport.can_reduce_direct(slot.rows.divides, compute, reduced):
                return Path.PACKED
            return Path.DIRECT

        gradients = plan_gradients(section, trainable, path_of, reduced.itemsize)
        return SectionPlan(
            gradients=gradients,
            storage=storage,
            compute=compute,
            reduced=reduced,
            wire=compute if compute.itemsize < reduced.itemsize else reduced,
            direct=[c for c in gradients.by_path(Path.DIRECT) if c.slot.rows.numel],
            packed=[
                c for c in gradients.by_path(Path.PACKED, Path.REPLICATED) if c.slot.rows.numel
            ],
            views=[self._view(column) for column in gradients.columns],
        )

    def _view(self, column: GradientColumn) -> GradientView:
        index = column.slot.index
        shape = column.slot.rows.local_shape(self._mesh.rank)
        stride = torch.empty(shape, device="meta").stride()
        return GradientView(index, self._params[index], shape, stride, column.offset)

    # Prepare

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep the gradients of this backward for a later reduction."""
        for plan in self.sections:
            if plan.reduced == plan.compute:
                continue  # autograd goes on accumulating in the full parameter's own gradient
            for column in plan.gradients.columns:
                param = self._params[column.slot.index]
                gradient = self._take(param)
                if gradient is None:
                    continue
                if param.accumulated is None:
                    param.accumulated = gradient.to(plan.reduced)
                else:
                    param.accumulated.add_(gradient)

    def _take(self, param: ShardedParam) -> Tensor | None:
        full = param.full
        gradient = None if full is None else full.grad
        if full is None or gradient is None:
            return None
        full.grad = None
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"parameter '{param.name}' of group '{self._group_name}' got a gradient of layout "
                f"{gradient.layout}; use dense gradients, for example nn.Embedding(sparse=False)"
            )
        return gradient

    def _take_all(self, param: ShardedParam) -> Tensor | None:
        """This backward's gradient and what was kept back before, summed."""
        gradient = self._take(param)
        kept, param.accumulated = param.accumulated, None
        if kept is None:
            return gradient
        return kept if gradient is None else kept.add_(gradient)

    # Exchange

    @torch.no_grad()
    def start(
        self,
        streams: Streams,
        staging: Staging,
        channel: int,
        is_accumulating: bool,
        divide_factor: float | None,
    ) -> Reduction:
        """Issue the reduction of all gradients.

        ``is_accumulating`` says that some were kept back, in the reduce dtype, which then
        goes over the wire. ``divide_factor`` replaces the number of ranks.
        """
        divisor = divide_factor or float(self._mesh.world_size)
        if self._transport is None:
            return LocalReduction(self._local_gradients(1.0 / divisor))
        scale = 1.0
        if self._is_float16:
            # A sum of float16 gradients overflows where their mean does not.
            scale, divisor = 1.0 / divisor, 1.0
        sources: list[Source] = []
        with streams.reducing():
            sections = [
                self._prepare(plan, sources, staging, is_accumulating) for plan in self.sections
            ]
            pending = self._transport.reduce(sources, channel, scale)
            return ExchangedReduction(sections, sources, pending, divisor, streams, staging)

    def _local_gradients(self, scale: float) -> list[tuple[ShardedParam, Tensor]]:
        """With one rank the gradients are the sums already."""
        results = []
        for plan in self.sections:
            for view in plan.views:
                gradient = self._take_all(view.param)
                if gradient is not None:
                    gradient = gradient.to(plan.reduced)
                    gradient = gradient.mul_(scale) if scale != 1.0 else gradient
                    results.append((view.param, gradient.to(plan.storage)))
        return results

    def _prepare(
        self,
        plan: SectionPlan,
        sources: list[Source],
        staging: Staging,
        is_accumulating: bool,
    ) -> ReducedSection:
        """Make the gradient buffer of one section, and of its gradients what goes into it."""
        wire = plan.reduced if is_accumulating else plan.wire
        missing: list[int] = []
        full: dict[int, Tensor] = {}
        for view in plan.views:
            gradient = self._take_all(view.param)
            if gradient is None:
                missing.append(view.index)
                shape = view.param.rows.shape
                gradient = torch.zeros(shape, dtype=wire, device=self._mesh.device)
            elif gradient.dtype is not wire or not gradient.is_contiguous():
                gradient = gradient.to(wire).contiguous()
            full[view.index] = gradient
        buffer = torch.empty(plan.gradients.numel, dtype=plan.reduced, device=self._mesh.device)
        for column in plan.direct:
            chunk = column.slot.rows.chunk_numel
            out = buffer.narrow(0, column.offset, chunk)
            sources.append(Source(full[column.slot.index].view(-1), chunk, out))
        packed = self._pack(plan, full, missing, staging, wire)
        packed_numel = plan.gradients.packed_numel
        out = buffer.narrow(0, plan.gradients.packed_offset, packed_numel)
        sources.append(Source(packed.view(-1), packed_numel, out))
        return ReducedSection(plan, buffer, missing, list(full.values()), packed)

    def _pack(
        self,
        plan: SectionPlan,
        full: dict[int, Tensor],
        missing: list[int],
        staging: Staging,
        wire: torch.dtype,
    ) -> Tensor:
        """Row r of the packed block is what rank r owns of each small gradient, and the flags."""
        gradients = plan.gradients
        owners = gradients.packed_ranks
        flags = self._flags(plan, missing, wire)
        packed = staging.take(_kind(plan, wire))
        is_new = packed is None
        if packed is None:
            shape = self._mesh.world_size, gradients.packed_numel
            packed = torch.empty(shape, dtype=wire, device=self._mesh.device)
        if owners:
            columns = [full[column.slot.index] for column in plan.packed]
            columns = [c.expand(owners, 1) if c.ndim == 0 else c for c in columns]
            columns.append(flags.expand(owners, -1))
            _torch.chunk_cat(columns, owners, out=packed[:owners])
        if is_new or missing:  # what the other ranks get besides the flags they do not read
            packed[owners:, gradients.packed_numel - len(flags) :] = flags
        return packed

    def _flags(self, plan: SectionPlan, missing: list[int], wire: torch.dtype) -> Tensor:
        """One per parameter: 1 where this rank has a gradient."""
        columns = plan.gradients.columns
        flags = self._all_present.get((len(columns), wire))
        if flags is None:
            flags = torch.ones(len(columns), dtype=wire, device=self._mesh.device)
            self._all_present[len(columns), wire] = flags
        if missing:
            flags = flags.clone()
            for i, column in enumerate(columns):
                if column.slot.index in missing:
                    flags[i] = 0
        return flags
