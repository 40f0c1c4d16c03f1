"""How the gradients of one portion are prepared for their reduction.

Every trainable parameter takes part on every rank, with zeros where this rank has no
gradient, so that ranks which used different parameters still send the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.buffers import Staging, StagingBlock
from fsdp2.collectives import NOTHING, Pending, Replicas, Source, Sums, Transport
from fsdp2.gradient_layout import GradientColumn, plan_gradients
from fsdp2.layout import GroupLayout, Path, Section, Slot
from fsdp2.mesh import ShardMesh
from fsdp2.policies import reduce_dtype
from fsdp2.quantising import may_be_coded
from fsdp2.reduction import (
    Ending,
    ExchangedReduction,
    GradientRun,
    GradientView,
    LocalReduction,
    ReducedSection,
    Reduction,
    SectionPlan,
    kind_of,
)
from fsdp2.runs import runs_of
from fsdp2.sharded_param import ShardedParam
from fsdp2.streams import Streams


class ReductionPlan:
    """How the gradients of one set of trainable parameters are reduced. Made once per set."""

    def __init__(
        self,
        layout: GroupLayout,
        params: list[ShardedParam],
        trainable: tuple[int, ...],
        mesh: ShardMesh,
        policy: _torch.MixedPrecisionPolicy,
        transport: Transport | None,
        replicas: Replicas | None,
    ) -> None:
        self._params = params
        self._mesh = mesh
        self._policy = policy
        self._transport = transport
        self._replicas = replicas
        self.sections = [
            self._plan_section(section, trainable)
            for section in layout.sections
            if any(slot.index in trainable for slot in section.slots)
        ]
        self._new: Callable[..., Tensor] = torch.empty
        """How gradient buffers are made."""
        self._has_outer = any(param.outer is not None for param in params)
        self._is_float16 = any(plan.reduced is torch.float16 for plan in self.sections)

    def _plan_section(self, section: Section, trainable: tuple[int, ...]) -> SectionPlan:
        storage, compute = section.storage, section.compute
        assert isinstance(storage, torch.dtype) and isinstance(compute, torch.dtype)
        reduced = reduce_dtype(self._policy, compute)

        def path_of(slot: Slot) -> Path:
            transport = self._transport
            if self._is_coded(slot, compute):
                return Path.DIRECT
            if transport and not transport.can_reduce_direct(slot.rows.divides, compute, reduced):
                return Path.PACKED
            return Path.DIRECT

        gradients = plan_gradients(section, trainable, path_of, reduced.itemsize)
        views = [self._view(column) for column in gradients.columns]
        runs = runs_of([view.shape for view in views], [view.offset for view in views])
        rows = [column.slot.rows for column in gradients.columns]
        is_direct = [column.path is Path.DIRECT for column in gradients.columns]
        sent = [i for i, each in enumerate(rows) if each.numel]
        return SectionPlan(
            gradients=gradients,
            storage=storage,
            compute=compute,
            reduced=reduced,
            wire=compute if compute.itemsize < reduced.itemsize else reduced,
            params=[view.param for view in views],
            direct=[i for i in sent if is_direct[i]],
            packed=[i for i in sent if not is_direct[i]],
            has_scalars=any(each.is_scalar for each in rows),
            views=views,
            runs=[GradientRun.over(views, run) for run in runs],
            coded=frozenset(s.index for s in section.slots if self._is_coded(s, compute)),
        )

    def _is_coded(self, slot: Slot, compute: torch.dtype) -> bool:
        """Whether its gradient travels quantised; then its own path does not matter."""
        is_asked = self._transport is not None and self._transport.codes_gradients
        return is_asked and may_be_coded(compute, len(slot.rows.shape))

    def _view(self, column: GradientColumn) -> GradientView:
        index = column.slot.index
        shape = column.slot.rows.local_shape(self._mesh.rank)
        stride = torch.empty(shape, device="meta").stride()
        dim = column.slot.dim
        return GradientView(index, self._params[index], shape, stride, column.offset, dim)

    # Prepare

    @_torch.no_grad
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
        _check_dense(param, gradient)
        return gradient if param.outer is None else param.plain(gradient)

    def _take_all(self, param: ShardedParam) -> Tensor | None:
        """This backward's gradient and what was kept back before, summed."""
        gradient = self._take(param)
        kept, param.accumulated = param.accumulated, None
        if kept is None:
            return gradient
        return kept if gradient is None else kept.add_(gradient)

    # Exchange

    @_torch.no_grad
    def start(
        self,
        streams: Streams,
        staging: Staging,
        channel: int,
        is_accumulating: bool,
        may_lend: bool,
        ending: Ending,
    ) -> Reduction:
        """Issue the reduction of all gradients.

        ``is_accumulating`` says that some were kept back, in the reduce dtype, which then
        goes over the wire; ``may_lend`` that peers can be waited for.
        """
        is_alone = self._transport is None and self._replicas is None
        if is_alone and ending.hook is None and ending.to_host is None:
            return LocalReduction(self._local_gradients(ending.divisor, ending.fills_unused))
        # A hook sees the padding too, which the sums do not write.
        self._new = torch.empty if ending.hook is None else torch.zeros
        scale = 1.0
        if self._is_float16:
            # A sum of float16 gradients overflows where their mean does not.
            scale, ending = 1.0 / ending.divisor, ending._replace(divisor=1.0)
        sources: list[Source] = []
        with streams.reducing():
            pending: Pending = NOTHING
            if self._transport is None:
                sections = [self._prepare_unsplit(plan, staging, scale) for plan in self.sections]
            else:
                sections = [
                    self._prepare(plan, sources, staging, is_accumulating) for plan in self.sections
                ]
                pending = self._transport.reduce(sources, channel, scale, may_lend)
            return ExchangedReduction(sections, sources, pending, ending, streams, staging)

    def _local_gradients(
        self, divisor: float, fills_unused: bool
    ) -> list[tuple[ShardedParam, Tensor]]:
        """With one rank the gradients are the sums already."""
        results = []
        for plan in self.sections:
            for view in plan.views:
                gradient = self._take_all(view.param)
                if gradient is None and fills_unused:
                    gradient = torch.zeros(
                        view.param.shape, dtype=plan.reduced, device=self._mesh.device
                    )
                if gradient is not None:
                    gradient = gradient.to(plan.reduced)
                    gradient = gradient.div_(divisor) if divisor != 1.0 else gradient
                    results.append((view.param, gradient.to(plan.storage)))
        return results

    def _prepare_unsplit(self, plan: SectionPlan, staging: Staging, scale: float) -> ReducedSection:
        """With whole parameters on every rank: all gradients into the buffer to be summed."""
        sums = self._sums(plan)
        buffer = sums.buffer
        missing: list[int] = []
        places: list[Tensor] = []
        found: list[Tensor] = []
        for view in plan.views:
            gradient = self._take_all(view.param)
            if gradient is None:
                missing.append(view.index)
                view.of(buffer).zero_()
            else:
                places.append(view.of(buffer))
                found.append(gradient)
        if found:
            torch._foreach_copy_(places, found)
            if scale != 1.0:
                torch._foreach_mul_(places, scale)
        flags = self._flags(plan, missing, staging, plan.reduced, 1)
        buffer[plan.gradients.flags_offset :] = flags[0]
        return ReducedSection(plan, sums, missing, found, None)

    def _prepare(
        self,
        plan: SectionPlan,
        sources: list[Source],
        staging: Staging,
        is_accumulating: bool,
    ) -> ReducedSection:
        """Make the gradient buffer of one section, and of its gradients what goes into it."""
        wire = plan.reduced if is_accumulating else plan.wire
        full, missing = self._full_gradients(plan, wire, is_accumulating)
        sums = self._sums(plan)
        for i in plan.direct:
            column = plan.gradients.columns[i]
            index, chunk = column.slot.index, column.slot.rows.chunk_numel
            flat, is_coded = full[i].view(-1), index in plan.coded
            sources.append(Source(flat, chunk, sums, column.offset, is_coded))
        packed = self._pack(plan, full, missing, staging, wire)
        gradients = plan.gradients
        sources.append(Source(packed.flat, gradients.packed_numel, sums, gradients.packed_offset))
        return ReducedSection(plan, sums, missing, full, packed)

    def _full_gradients(
        self, plan: SectionPlan, wire: torch.dtype, is_accumulating: bool
    ) -> tuple[list[Tensor], list[int]]:
        """Rows in front and in order, in the dtype that travels; and which are only zeros."""
        found = self._take_each(plan.params, is_accumulating)
        full: list[Tensor] = []
        missing: list[int] = []
        try:
            for view, gradient in zip(plan.views, found):
                if gradient is None:
                    missing.append(view.index)
                    shape = view.param.rows.shape
                    gradient = torch.zeros(shape, dtype=wire, device=self._mesh.device)
                elif view.dim or gradient.dtype is not wire or not gradient.is_contiguous():
                    rows = gradient.movedim(view.dim, 0) if view.dim else gradient
                    gradient = rows.to(wire).contiguous()
                full.append(gradient)
        except RuntimeError:
            for param, gradient in zip(plan.params, found):
                _check_dense(param, gradient)  # others have no order that could be asked for
            raise
        return full, missing

    def _take_each(
        self, params: list[ShardedParam], is_accumulating: bool
    ) -> Sequence[Tensor | None]:
        """Most often autograd's gradients as they are."""
        full = [param.full for param in params if param.full is not None]
        if is_accumulating or self._has_outer or len(full) < len(params):
            return [self._take_all(param) for param in params]
        return _torch.take_gradients(full)

    def _sums(self, plan: SectionPlan) -> Sums:
        numel, device = plan.gradients.numel, self._mesh.device
        return Sums(partial(self._new, numel, dtype=plan.reduced, device=device))

    def _pack(
        self,
        plan: SectionPlan,
        full: list[Tensor],
        missing: list[int],
        staging: Staging,
        wire: torch.dtype,
    ) -> StagingBlock:
        """Row r of the packed block is what rank r owns of each small gradient, and the flags."""
        gradients = plan.gradients
        owners = gradients.packed_ranks
        flags = self._flags(plan, missing, staging, wire, max(owners, 1))
        packed = staging.take(kind_of(plan, wire))
        is_new = packed is None
        if packed is None:
            shape = self._mesh.world_size, gradients.packed_numel
            rows = torch.empty(shape, dtype=wire, device=self._mesh.device)
            packed = StagingBlock(rows, rows[:owners], rows.view(-1))
        if owners:
            columns = [full[i] for i in plan.packed]
            if plan.has_scalars:
                columns = [c.expand(owners, 1) if c.ndim == 0 else c for c in columns]
            columns.append(flags)
            _torch.chunk_cat(columns, owners, out=packed.owned)
        if is_new or missing:  # what the other ranks get besides the flags only a hook reads
            start = gradients.packed_numel - len(gradients.columns)
            packed.rows[owners:, :start] = 0
            packed.rows[owners:, start:] = flags[0]
        return packed

    def _flags(
        self,
        plan: SectionPlan,
        missing: list[int],
        staging: Staging,
        wire: torch.dtype,
        owners: int,
    ) -> Tensor:
        """One per parameter: 1 where this rank has a gradient. Once for each of ``owners`` ranks.

        Repeated in memory, since a strided column among them makes packing twice as slow.
        """
        columns = plan.gradients.columns
        flags = staging.ones(owners, len(columns), wire, self._mesh.device)
        if missing:
            flags = flags.clone()
            for i, column in enumerate(columns):
                if column.slot.index in missing:
                    flags[:, i] = 0
        return flags


def _check_dense(param: ShardedParam, gradient: Tensor | None) -> None:
    if gradient is not None and gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"parameter '{param.name}' got a gradient of layout {gradient.layout}; use dense "
            "gradients, for example nn.Embedding(sparse=False)"
        )
