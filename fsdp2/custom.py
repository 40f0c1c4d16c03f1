"""Collectives that users bring: the interfaces, and the transport that calls them.

Everything travels packed then, in one call per group and dtype, since one flat tensor in
and one out is what these interfaces speak of.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch
from fsdp2.collectives import GatherPlan, Pending, Source, Transport
from fsdp2.mesh import ShardMesh
from fsdp2.packing import PackedGather


class Comm(ABC):
    """Where the tensors of a collective come from."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of ``size`` that this collective may read or write."""


class AllGather(Comm):
    """Gathers equal pieces of all ranks."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor``, of ``group.size()`` times the elements, in rank order.

        Both are flat and of one dtype. With ``async_op`` the work to wait for is returned.
        """


class ReduceScatter(Comm):
    """Sums a tensor over all ranks and leaves each with its piece."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with this rank's piece of the sum; ``op`` is always ``SUM``.

        Both are flat and in the reduce dtype; pieces lie in rank order.
        """


class _FromGroup(Comm):
    """Memory from the process group's own allocator."""

    def __init__(self, allocate: Callable[..., Tensor]) -> None:
        self._allocate = allocate

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._allocate(torch.Size(size).numel(), dtype=dtype, device=device).view(*size)


class GroupAllGather(_FromGroup, AllGather):
    """The backend's own all-gather, on memory of its own."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _finished(_torch.all_gather_into(group, output_tensor, input_tensor), async_op)


class GroupReduceScatter(_FromGroup, ReduceScatter):
    """The backend's own reduce-scatter, on memory of its own."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _finished(_torch.reduce_scatter_into(group, output_tensor, input_tensor), async_op)


def _finished(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


@dataclass(frozen=True)
class CustomComms:
    """What a user put in the place of the transport's own collectives."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    is_ours: bool = False
    """Asked for by ``set_allocate_memory_from_process_group_for_comm``."""

    @property
    def is_set(self) -> bool:
        return self.all_gather is not None or self.reduce_scatter is not None


def group_allocated(mesh: ShardMesh) -> CustomComms:
    """The backend's own collectives on memory of its own, where it has an allocator."""
    group = mesh.shard.group
    allocate = None if group is None else _torch.allocator_of(group, mesh.device)
    if allocate is None:
        return CustomComms(is_ours=True)
    return CustomComms(GroupAllGather(allocate), GroupReduceScatter(allocate), is_ours=True)


class Custom:
    """The transport of a group with a collective of the user's; the other one stays ours."""

    name = "custom messages"
    pack_below_nbytes = sys.maxsize
    prefers_grouping = "a custom collective takes one flat tensor"
    codes_gradients = False

    def __init__(self, inner: Transport, group: dist.ProcessGroup, comms: CustomComms) -> None:
        self._inner = inner
        self._group = group
        self._reduce_group = group
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._comms = comms

    def plan_gather(
        self, blocks: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> GatherPlan:
        comm = self._comms.all_gather
        if comm is None:
            return self._inner.plan_gather(blocks, own)
        call = partial(comm, group=self._group, async_op=True)
        return PackedGather(blocks, self.rank, call, comm.allocate)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        if self._comms.reduce_scatter is not None:
            return False
        return self._inner.can_reduce_direct(divides, gradient, reduced)

    def describe_reduction(self, wire: object, reduced: object) -> str:
        if self._comms.reduce_scatter is None:
            return self._inner.describe_reduction(wire, reduced)
        return f"custom reduce-scatter in {reduced}"

    def exchange(self, sent: Tensor, received: Tensor, channel: int) -> Pending:
        return self._inner.exchange(sent, received, channel)

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._reduce_group = group
        self._inner.reduce_over(group)

    def reduce(
        self, sources: Sequence[Source], channel: int, scale: float, may_lend: bool
    ) -> Pending:
        comm = self._comms.reduce_scatter
        if comm is None:
            return self._inner.reduce(sources, channel, scale, may_lend)
        return CustomSums([self._reduce_one(comm, source, scale) for source in sources])

    def _reduce_one(self, comm: ReduceScatter, source: Source, scale: float) -> CustomSum:
        out = source.out
        pieces, total = (
            comm.allocate((source.flat.numel(),), dtype=out.dtype, device=out.device),
            comm.allocate((source.chunk,), dtype=out.dtype, device=out.device),
        )
        pieces.copy_(source.flat)
        if scale != 1.0:
            pieces.mul_(scale)
        work = comm(total, pieces, self._reduce_group, dist.ReduceOp.SUM, async_op=True)
        return CustomSum(work, pieces, total, out)


class CustomSum(NamedTuple):
    """One sum under way: ``total`` goes to ``out``, ``source`` must live until then."""

    work: dist.Work | None
    source: Tensor
    total: Tensor
    out: Tensor


class CustomSums:
    """Several sums, waited for together."""

    def __init__(self, sums: list[CustomSum]) -> None:
        self._sums = sums

    def wait(self) -> None:
        for work, _, total, out in self._sums:
            if work is not None:
                work.wait()
            out.copy_(total)
        self._sums.clear()
