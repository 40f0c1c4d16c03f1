"""How bytes travel: between the ranks of one shard mesh, and between replicas.

A transport gathers *blocks*, contiguous tensors of shape ``(world_size, n)`` in which
this rank has filled its own row, and reduces *sources*, each of which becomes one chunk
on every rank. It knows nothing of parameters. There are two for several ranks, chosen in
``transports``:

============  ====================================================================
``Pairwise``  messages between pairs of ranks, in pieces, each received where it
              belongs. For gloo: half the bytes of its reduce-scatter, both
              directions of a link at once, and nothing is staged.
``Grouped``   the backend's own collectives, several in one call. For NCCL, and
              for any backend that we know nothing better of.
============  ====================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch


class Sums:
    """A flat buffer in the reduce dtype, whose memory is there from the first look at it on.

    Where peers' gradients are read in place that is when the full parameters are gone.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self.held: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        if self.held is None:
            self.held = self._make()
        return self.held


class Source(NamedTuple):
    """One reduction: chunk r of ``flat`` is summed over the ranks into rank r's ``out``.

    ``flat`` is one-dimensional and contiguous; chunk r is
    ``flat[r * chunk : (r + 1) * chunk]``, shorter or empty at the end.
    """

    flat: Tensor
    chunk: int
    sums: Sums
    offset: int
    """Where ``out`` begins there."""
    may_be_coded: bool = False
    """Whether it may travel quantised: no flags ride in it."""

    @property
    def out(self) -> Tensor:
        """``chunk`` elements. What lies behind those of this rank is not written."""
        buffer = self.sums.buffer
        is_all = self.chunk == buffer.numel()  # as in groups of nothing but small parameters
        return buffer if is_all else buffer.narrow(0, self.offset, self.chunk)


class Pending(Protocol):
    """Communication under way. ``wait`` may be called once."""

    def wait(self) -> None: ...


class Lent(ABC):
    """Communication whose bytes peers read in place: they stay until ``take_back`` returns."""

    @abstractmethod
    def wait(self) -> None: ...

    @abstractmethod
    def take_back(self) -> None:
        """Wait until all peers have read. After ``wait``; may be called once."""


class Transport(Protocol):
    """Moves blocks and sources between the ranks of one shard mesh."""

    rank: int
    world_size: int
    pack_below_nbytes: int
    """A parameter whose shard is smaller travels packed."""
    prefers_grouping: str
    """Why, in words, for ``explain``."""
    codes_gradients: bool
    """Whether gradients of large parameters travel quantised."""

    @property
    def name(self) -> str: ...

    def plan_gather(
        self, blocks: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> GatherPlan:
        """``own`` may be lent, and what is under way then is ``Lent``.

        They are this rank's rows of the blocks where it keeps them; without any, copies are lent.
        With None nothing is lent.
        """
        ...

    def reduce(
        self, sources: Sequence[Source], channel: int, scale: float, may_lend: bool
    ) -> Pending:
        """Sum ``sources`` times ``scale`` in the dtype of their ``out``.

        With ``may_lend`` what is under way may be ``Lent``, and then waits for its peers. Without,
        it does not need them to do anything, as long as ranks may not be at the same group.
        """
        ...

    def exchange(self, sent: Tensor, received: Tensor, channel: int) -> Pending:
        """Row r of ``sent`` goes to rank r; row r of ``received`` comes from it.

        Both are contiguous ``(world_size, n)``, and keep what they have in this rank's row,
        or not.
        """
        ...

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        """Whether a gradient may be reduced from where autograd left it."""
        ...

    def describe_reduction(self, wire: object, reduced: object) -> str:
        """In words, for ``explain``."""
        ...

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        """From now on reductions use ``group``, of the same ranks; gathers keep theirs."""
        ...


class GatherPlan(Protocol):
    """The gather of one group's blocks, whose addresses never change."""

    @property
    def staging_nbytes(self) -> int:
        """What it takes beside the blocks: while it travels, or until it is taken back."""
        ...

    def start(self, channel: int) -> Pending: ...


class Nothing:
    """Communication that there was no need for."""

    def wait(self) -> None:
        pass


NOTHING = Nothing()


class Works:
    """Several works of a process group, waited for together."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class Replicas:
    """The ranks that hold the same shard: they add up what each has reduced."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, buffers: Sequence[Tensor]) -> Pending:
        """Sum every buffer over the replicas, in place."""
        works = [dist.all_reduce(b, group=self.group, async_op=True) for b in buffers if b.numel()]
        return Works([work for work in works if work is not None])


def gather_values(
    values: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[int]:
    """The integers of all ranks that ``groups`` lead to, one group after the other.

    With the shard and then the replicate group of a 2-D mesh: those of replica 0 first.
    """
    found = torch.tensor(values, dtype=torch.int64, device=device)
    for group in groups:
        everyone = found.repeat(group.size())
        _torch.all_gather_into(group, everyone, found).wait()
        found = everyone
    return found.tolist()
