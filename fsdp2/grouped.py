"""The backend's own collectives, one call for all blocks of a group. For NCCL.

A gather of several blocks is one grouped call that writes them in place, unless that was
measured to be too slow (``direct_or_packed``): then it is one packed call with its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch
from fsdp2.collectives import GatherPlan, Pending, Source, Works
from fsdp2.direct_or_packed import Choice, choose_path
from fsdp2.packing import PackedGather


class Grouped:
    """The backend's collectives, one call for all blocks of a group."""

    name = "grouped messages"
    pack_below_nbytes = 256 << 10
    prefers_grouping = "the backend's cost per collective, and NCCL's per operation in a call"
    codes_gradients = False

    def __init__(self, group: dist.ProcessGroup, rank: int, is_measured: bool = False) -> None:
        """With ``is_measured`` the first gather of blocks finds out whether they go direct."""
        self.group = group
        self._reduce_group = group
        self.rank = rank
        self.world_size = group.size()
        self._is_measured = is_measured

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._reduce_group = group

    def plan_gather(
        self, blocks: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> GatherPlan:
        if len(blocks) == 1 or not self._is_measured:
            return GroupedGather(self, blocks)
        choice = choose_path(self.group, blocks)
        if choice.is_direct:
            return GroupedGather(self, blocks, choice)
        return OneGather(self, blocks, choice)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        return divides and gradient == reduced

    def describe_reduction(self, wire: object, reduced: object) -> str:
        if wire == reduced:
            return f"reduce-scatter in {reduced}"
        return f"all-to-all in {wire}, summed in {reduced}"

    def reduce(
        self, sources: Sequence[Source], channel: int, scale: float, may_lend: bool
    ) -> Pending:
        outs: list[Tensor] = []
        inputs: list[Tensor] = []
        exchanges: list[Exchange] = []
        for source in sources:
            flat, out = source.flat, source.out
            if flat.dtype != out.dtype:
                exchanges.append(self._exchange(flat, out))
                continue
            outs.append(out)
            inputs.append(flat if scale == 1.0 else flat.mul_(scale))
        works: list[dist.Work] = []
        if len(outs) == 1:
            works.append(_torch.reduce_scatter_into(self._reduce_group, outs[0], inputs[0]))
        elif outs:
            works.append(_torch.reduce_scatter_grouped(self._reduce_group, outs, inputs))
        return GroupedSum(works, exchanges, scale)

    def exchange(self, sent: Tensor, received: Tensor, channel: int) -> Pending:
        return Works([_torch.all_to_all_into(self._reduce_group, received, sent)])

    def _exchange(self, flat: Tensor, out: Tensor) -> Exchange:
        """All-to-all in the gradient's dtype: fewer bytes than a sum in the reduce dtype."""
        received = torch.empty_like(flat)
        work = _torch.all_to_all_into(self._reduce_group, received, flat)
        return Exchange(work, received.view(self.world_size, out.numel()), out)


class Exchange(NamedTuple):
    """An all-to-all whose rows are summed when they have arrived."""

    work: dist.Work
    received: Tensor
    out: Tensor

    def finish(self, scale: float) -> None:
        self.work.wait()
        torch.sum(self.received, dim=0, dtype=self.out.dtype, out=self.out)
        if scale != 1.0:
            self.out.mul_(scale)


class OneGather(PackedGather):
    """All blocks in one call of the backend's own all-gather, with its copies."""

    def __init__(
        self, transport: Grouped, blocks: Sequence[Tensor], choice: Choice | None = None
    ) -> None:
        super().__init__(blocks, transport.rank, partial(_torch.all_gather_into, transport.group))
        self.choice = choice
        """Why they do not go direct."""


class GroupedGather:
    """The outputs and inputs of one group's call; the inputs are the own rows of the outputs."""

    staging_nbytes = 0

    def __init__(
        self, transport: Grouped, blocks: Sequence[Tensor], choice: Choice | None = None
    ) -> None:
        self.choice = choice
        """Why they go direct; None where nothing else was tried."""
        self._group = transport.group
        self._outs = [block.view(-1) for block in blocks]
        self._owns = [block[transport.rank] for block in blocks]

    def start(self, channel: int) -> Pending:
        if len(self._outs) == 1:
            return Works([_torch.all_gather_into(self._group, self._outs[0], self._owns[0])])
        return Works([_torch.all_gather_grouped(self._group, self._outs, self._owns)])


@dataclass
class GroupedSum:
    """Reduce-scatters, which arrive summed, and exchanges, which do not."""

    works: list[dist.Work]
    exchanges: list[Exchange]
    scale: float

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for exchange in self.exchanges:
            exchange.finish(self.scale)
