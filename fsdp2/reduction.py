"""The reduction of one group's gradients: prepare, exchange, sum, hand over.

Every trainable parameter takes part on every rank, with zeros where this rank has no
gradient, so that ranks which used different parameters still send the same bytes. One
flag per parameter rides along and counts the ranks that had a gradient: a parameter
that no rank used keeps ``grad`` as it was.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.collectives import Pending, Source, Transport
from fsdp2.layout import GradientColumn, GradientSection, GroupLayout, Path, Section, Slot, plan_gradients
from fsdp2.mesh import ShardMesh
from fsdp2.policies import MixedPrecisionPolicy, reduce_dtype
from fsdp2.sharded_param import ShardedParam
from fsdp2.streams import Streams


class ReducedSection(NamedTuple):
    """The gradient buffer of one section, summed once its communication has been waited for."""

    plan: GradientSection
    buffer: Tensor
    """Flat, in the reduce dtype."""
    missing: list[int]
    """Parameters without a gradient on this rank."""


class Reduction(Protocol):
    """A reduction under way. ``finish`` hands the gradients to the shards; call it once."""

    def finish(self) -> None: ...


class LocalReduction:
    """With one rank there is nothing to wait for and nothing to copy."""

    def __init__(self, results: list[tuple[ShardedParam, Tensor]]) -> None:
        self._results = results

    @torch.no_grad()
    def finish(self) -> None:
        for param, gradient in self._results:
            param.set_gradient(gradient)
            param.run_user_hooks()
        self._results = []


class ExchangedReduction:
    """Holds the full gradients until all ranks have read them."""

    def __init__(
        self,
        plan: "ReductionPlan",
        sections: list[ReducedSection],
        sources: list[Source],
        pending: Pending,
        divisor: float,
        streams: Streams,
    ) -> None:
        self._plan = plan
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
            results.append(section.buffer.to(self._plan.storage_dtype(section.plan.section)))
        return results

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, sum, and hand the gradients to the shards."""
        if not self._streams.runs_ahead:
            self._results = self._sum()
        # Behind this event the compute stream may reuse the memory of the full gradients.
        self._streams.compute_waits(self._reduced)
        self._sources = []
        for section, result in zip(self._sections, self._results):
            used = self._used(section)
            for column in section.plan.columns:
                if column.slot.index in used:
                    self._plan.hand_over(column, result)

    def _used(self, section: ReducedSection) -> set[int]:
        """Parameters that some rank has a gradient for. Reads the flags only where in doubt."""
        columns = section.plan.columns
        used = {column.slot.index for column in columns}
        if section.missing:
            flags = section.buffer[section.plan.flags_offset :].tolist()
            used -= {
                column.slot.index
                for column, flag in zip(columns, flags)
                if flag == 0 and column.slot.index in section.missing
            }
        return used


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
        self._trainable = trainable
        self._sections = [
            self._plan_section(section, section.compute, trainable)
            for section in layout.sections
            if any(slot.index in trainable for slot in section.slots)
        ]

    def _plan_section(
        self, section: Section, gradient: object, trainable: tuple[int, ...]
    ) -> GradientSection:
        assert isinstance(gradient, torch.dtype)
        reduced = self.reduced_dtype(section)

        def path_of(slot: Slot) -> Path:
            transport = self._transport
            if transport and not transport.can_reduce_direct(slot.rows.divides, gradient, reduced):
                return Path.PACKED
            return Path.DIRECT

        return plan_gradients(section, trainable, path_of, reduced.itemsize)

    @property
    def sections(self) -> list[GradientSection]:
        return self._sections

    def reduced_dtype(self, section: Section) -> torch.dtype:
        assert isinstance(section.compute, torch.dtype)
        return reduce_dtype(self._policy, section.compute)

    def storage_dtype(self, section: Section) -> torch.dtype:
        assert isinstance(section.storage, torch.dtype)
        return section.storage

    # Prepare

    def accumulate(self) -> None:
        """Keep the gradients of this backward for a later reduction."""
        for plan in self._sections:
            reduced = self.reduced_dtype(plan.section)
            if reduced == plan.section.compute:
                continue  # autograd goes on accumulating in the full parameter's own gradient
            for column in plan.columns:
                param = self._params[column.slot.index]
                gradient = self._take(param)
                if gradient is None:
                    continue
                if param.accumulated is None:
                    param.accumulated = gradient.to(reduced)
                else:
                    param.accumulated.add_(gradient)

    def _take(self, param: ShardedParam) -> Tensor | None:
        full = param.full
        if full is None or full.grad is None:
            return None
        gradient = full.grad
        full.grad = None
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"parameter '{param.name}' of group '{self._group_name}' got a gradient of layout "
                f"{gradient.layout}; use dense gradients, for example nn.Embedding(sparse=False)"
            )
        return gradient

    def _take_all(self, param: ShardedParam) -> Tensor | None:
        """This backward's gradient and what was kept back before, summed."""
        gradient, param_kept = self._take(param), param.accumulated
        param.accumulated = None
        if param_kept is None:
            return gradient
        return param_kept if gradient is None else param_kept.add_(gradient)

    # Exchange

    @torch.no_grad()
    def start(
        self, streams: Streams, channel: int, is_accumulating: bool, divide_factor: float | None
    ) -> Reduction:
        """Issue the reduction of all gradients.

        ``is_accumulating`` says that some were kept back, in the reduce dtype, which then
        goes over the wire. ``divide_factor`` replaces the number of ranks.
        """
        divisor = divide_factor or float(self._mesh.world_size)
        scale = 1.0
        if any(self.reduced_dtype(plan.section) is torch.float16 for plan in self._sections):
            # A sum of float16 gradients overflows where their mean does not.
            scale, divisor = 1.0 / divisor, 1.0
        sections: list[ReducedSection] = []
        sources: list[Source] = []
        if self._transport is None:
            return LocalReduction(self._local_gradients(scale / divisor))
        sections: list[ReducedSection] = []
        sources: list[Source] = []
        with streams.reducing():
            for plan in self._sections:
                sections.append(self._prepare(plan, sources, is_accumulating))
            pending = self._transport.reduce(sources, channel, scale)
            return ExchangedReduction(self, sections, sources, pending, divisor, streams)

    def _local_gradients(self, scale: float) -> list[tuple[ShardedParam, Tensor]]:
        """With one rank the gradients are the sums already."""
        results = []
        for plan in self._sections:
            for column in plan.columns:
                param = self._params[column.slot.index]
                gradient = self._take_all(param)
                if gradient is not None:
                    gradient = gradient.to(self.reduced_dtype(plan.section))
                    gradient = gradient.mul_(scale) if scale != 1.0 else gradient
                    results.append((param, gradient.to(param.dtype)))
        return results

    def _prepare(
        self, plan: GradientSection, sources: list[Source], is_accumulating: bool
    ) -> ReducedSection:
        section = plan.section
        assert isinstance(section.compute, torch.dtype)
        reduced = self.reduced_dtype(section)
        wire = reduced if is_accumulating else section.compute
        gradients = {c.slot.index: self._take_all(self._params[c.slot.index]) for c in plan.columns}
        missing = [index for index, gradient in gradients.items() if gradient is None]
        device = self._mesh.device
        buffer = torch.empty(plan.numel, dtype=reduced, device=device)
        full: dict[int, Tensor] = {}
        for column in plan.columns:
            gradient = gradients[column.slot.index]
            if gradient is None:
                gradient = torch.zeros(column.slot.rows.shape, dtype=wire, device=device)
            full[column.slot.index] = gradient.to(wire).contiguous()
        for column in plan.by_path(Path.DIRECT):
            chunk = column.slot.rows.chunk_numel
            if chunk:
                out = buffer.narrow(0, column.offset, chunk)
                sources.append(Source(full[column.slot.index].view(-1), chunk, out))
        self._pack(plan, full, missing, buffer, wire, sources)
        return ReducedSection(plan, buffer, missing)

    def _pack(
        self,
        plan: GradientSection,
        full: dict[int, Tensor],
        missing: list[int],
        buffer: Tensor,
        wire: torch.dtype,
        sources: list[Source],
    ) -> None:
        """Row r of the packed block is what rank r owns of each small gradient, and the flags."""
        ranks = self._mesh.world_size
        columns: list[Tensor] = []
        for column in plan.by_path(Path.PACKED, Path.REPLICATED):
            gradient = full[column.slot.index]
            if gradient.numel():
                columns.append(gradient.expand(ranks, 1) if gradient.ndim == 0 else gradient)
        flags = torch.ones(len(plan.columns), dtype=wire, device=buffer.device)
        for i, column in enumerate(plan.columns):
            if column.slot.index in missing:
                flags[i] = 0
        columns.append(flags.expand(ranks, -1))
        packed = torch.empty(ranks, plan.packed_numel, dtype=wire, device=buffer.device)
        _torch.chunk_cat(columns, ranks, out=packed)
        out = buffer.narrow(0, plan.packed_offset, plan.packed_numel)
        sources.append(Source(packed.view(-1), plan.packed_numel, out))

    # Hand over

    def hand_over(self, column: GradientColumn, result: Tensor) -> None:
        rows = column.slot.rows
        rank = self._mesh.rank
        shape = rows.local_shape(rank)
        local = result.narrow(0, column.offset, rows.local_numel(rank)).view(shape)
        self._params[column.slot.index].set_gradient(local)
        self._params[column.slot.index].run_user_hooks()
