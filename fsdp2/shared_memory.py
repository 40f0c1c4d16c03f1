"""Ranks of one host read each other's memory instead of sending it.

Where the system lets processes read any memory of each other, a rank lends its shards and its
gradients where they lie: see ``loans``. Elsewhere it writes what its peers need into a segment,
once, and sends each of them the segment's address: four numbers. A peer reads the numbers where
they lie, straight into its full parameters or its sum, and answers; then the segment may be
written again. What is read, and the order in which it is summed, is the same as with messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.collectives import GatherPlan, Pending, Source
from fsdp2.layout import align
from fsdp2.loans import Loan
from fsdp2.pairwise import Pairwise
from fsdp2.peer_gather import PeerGather
from fsdp2.peer_sum import PeerSum
from fsdp2.segments import READ, WRITTEN, Segments, meet

_CACHED_NBYTES = 1 << 19
"""Sums of more than two terms are made in pieces that stay in a core's cache."""


class SharedMemory:
    """Shared memory where all ranks can map each other's, which the first gather finds out."""

    pack_below_nbytes = Pairwise.pack_below_nbytes
    prefers_grouping = Pairwise.prefers_grouping
    codes_gradients = False

    def __init__(self, messages: Pairwise) -> None:
        self._messages = messages
        self.group = messages.group
        self.rank = messages.rank
        self.world_size = messages.world_size
        self._segments: Segments | None = None

    @property
    def name(self) -> str:
        return self._messages.name if self._segments is None else "shared memory"

    def plan_gather(
        self, blocks: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> GatherPlan:
        self._segments = meet(self.group)
        if self._segments is None:
            return self._messages.plan_gather(blocks)
        if own is not None and self._segments.reads_peers:
            return PeerGather(blocks, own, self._segments)
        return SharedGather(self._segments, blocks)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        return True

    def describe_reduction(self, wire: object, reduced: object) -> str:
        return self._messages.describe_reduction(wire, reduced)

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._messages.reduce_over(group)

    def exchange(self, sent: Tensor, received: Tensor, channel: int) -> Pending:
        return self._messages.exchange(sent, received, channel)

    def reduce(
        self, sources: Sequence[Source], channel: int, scale: float, may_lend: bool
    ) -> Pending:
        segments = self._segments
        if segments is None or (segments.reads_peers and not may_lend):
            return self._messages.reduce(sources, channel, scale, may_lend)
        if segments.reads_peers:
            return self._lend(segments, sources, 2 * channel + 1, scale)
        places, nbytes = _places([s.chunk * self.world_size * s.flat.itemsize for s in sources])
        announcement = Announcement(segments, nbytes, 2 * channel + 1)
        memory = announcement.memory
        targets: list[Tensor] = []
        written: list[Tensor] = []
        for source, place in zip(sources, places):
            chunk, flat = source.chunk, source.flat
            own = self.rank * chunk  # which may lie behind the end
            for start, stop in ((0, min(own, flat.numel())), (own + chunk, flat.numel())):
                if start < stop:
                    at = place + start * flat.itemsize
                    targets.append(_typed(memory, at, stop - start, flat.dtype))
                    written.append(flat[start:stop])
        torch._foreach_copy_(targets, written)
        announcement.send()
        return SharedSum(announcement, sources, places, self.rank, self.world_size, scale)

    def _lend(
        self, segments: Segments, sources: Sequence[Source], channel: int, scale: float
    ) -> Pending:
        loan = Loan([source.flat for source in sources], segments, channel)
        return PeerSum(loan, segments, sources, scale)


class Announcement:
    """One use of a segment: written by us, announced, read by all peers; and theirs by us."""

    def __init__(self, segments: Segments, nbytes: int, channel: int) -> None:
        self._segments = segments
        self._segment = segments.take(nbytes)
        self.memory = self._segment.memory
        self._number = segments.number(channel)

    def send(self) -> None:
        """What this rank contributes is written."""
        for peer in self._segments.peers:
            self._segments.notes.send(peer, WRITTEN + self._number, self._segment.address)
        self._segment.answers = [(peer, READ + self._number) for peer in self._segments.peers]

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        """Each peer and its memory, once it has written."""
        for peer in self._segments.peers:
            address = self._segments.notes.receive(peer, WRITTEN + self._number)
            yield peer, self._segments.of_peer(peer, address)

    def have_read(self, peer: int) -> None:
        self._segments.notes.send(peer, READ + self._number)

    def end(self) -> None:
        """This rank has read all that it needs."""
        self._segment.is_in_use = False


class SharedGather:
    """One group's blocks: own rows are written to a segment, the others' read from theirs."""

    staging_nbytes = 0

    def __init__(self, segments: Segments, blocks: Sequence[Tensor]) -> None:
        self._segments = segments
        self._blocks = list(blocks)
        self._own = [block[segments.rank] for block in blocks]
        self._places, self._nbytes = _places([row.numel() * row.itemsize for row in self._own])

    def start(self, channel: int) -> Pending:
        announcement = Announcement(self._segments, self._nbytes, 2 * channel)
        torch._foreach_copy_(self._rows_in(announcement.memory), self._own)
        announcement.send()
        return SharedRead(self, announcement)

    def _rows_in(self, memory: Tensor) -> list[Tensor]:
        """One rank's rows in its segment."""
        return [
            _typed(memory, place, row.numel(), row.dtype)
            for place, row in zip(self._places, self._own)
        ]

    def read(self, peer: int, memory: Tensor) -> None:
        torch._foreach_copy_([block[peer] for block in self._blocks], self._rows_in(memory))


class SharedRead:
    """A gather under way: the copies are made when it is waited for."""

    def __init__(self, gather: SharedGather, announcement: Announcement) -> None:
        self._gather = gather
        self._announcement = announcement

    def wait(self) -> None:
        for peer, memory in self._announcement.arrivals():
            self._gather.read(peer, memory)
            self._announcement.have_read(peer)
        self._announcement.end()


class SharedSum:
    """A reduction under way: the sums are made when it is waited for."""

    def __init__(
        self,
        announcement: Announcement,
        sources: Sequence[Source],
        places: list[int],
        rank: int,
        world_size: int,
        scale: float,
    ) -> None:
        self._announcement = announcement
        self._sources = sources
        self._places = places
        self._rank = rank
        self._world_size = world_size
        self._scale = scale

    def wait(self) -> None:
        memories = dict(self._announcement.arrivals())
        for source, place in zip(self._sources, self._places):
            chunk, flat = source.chunk, source.flat
            own = flat[self._rank * chunk : (self._rank + 1) * chunk]
            start = place + self._rank * chunk * flat.itemsize
            terms = [
                own if rank == self._rank else _typed(memories[rank], start, own.numel(), own.dtype)
                for rank in range(self._world_size)
            ]
            _sum(source.out[: own.numel()], terms, self._scale)
        for peer in memories:
            self._announcement.have_read(peer)
        self._announcement.end()


def _sum(out: Tensor, terms: list[Tensor], scale: float) -> None:
    """In rank order, in the dtype of ``out``."""
    if len(terms) == 2 and scale == 1.0 and terms[0].dtype == out.dtype:
        torch.add(terms[0], terms[1], out=out)
        return
    step = max(1, _CACHED_NBYTES // out.itemsize)
    for start in range(0, out.numel(), step):
        piece = out[start : start + step]
        first, *rest = (term[start : start + step] for term in terms)
        piece.copy_(first)
        if scale != 1.0:  # before they are added, so that the sum cannot overflow
            piece.mul_(scale)
        for term in rest:
            piece.add_(term, alpha=scale)


def _places(each_nbytes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of several runs of bytes starts, and what all of them take."""
    places: list[int] = []
    at = 0
    for nbytes in each_nbytes:
        places.append(at)
        at = align(at + nbytes, 1)
    return places, at


def _typed(memory: Tensor, place: int, numel: int, dtype: torch.dtype) -> Tensor:
    return memory[place : place + numel * dtype.itemsize].view(dtype)
