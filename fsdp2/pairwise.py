"""Messages between all pairs of ranks, received in place and summed in rank order. For gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.collectives import GatherPlan, Pending, Source, Works

PIECE_NBYTES = 1 << 20
"""Larger messages use a TCP link in one direction at a time, smaller ones pay per call."""

IN_FLIGHT = 16
"""Pieces that have room of their own to arrive in, of one reduction: as many as saturate a link.
However large the gradients are, they take no more; with more peers one piece of each does."""

_TAG_BASE = 0x5D2 << 16
"""Our point-to-point tags start here, clear of the small numbers that users pick."""


class Pairwise:
    """Send and receive between all pairs of ranks, received in place and summed in rank order."""

    name = "pairwise messages"
    pack_below_nbytes = 64 << 10
    prefers_grouping = "a message costs about as much as 64 KiB on the wire"
    codes_gradients = False

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.group = group
        self._reduce_group = group
        self.rank = rank
        self.world_size = group.size()
        # Everyone starts with another partner, so that no rank is everybody's first.
        self.peers = [(rank + step) % self.world_size for step in range(1, self.world_size)]

    def plan_gather(
        self, blocks: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> GatherPlan:
        return PairwiseGather(self, blocks)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        return True

    def describe_reduction(self, wire: object, reduced: object) -> str:
        return f"exchanged in {wire}, summed in {reduced}"

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._reduce_group = group

    def exchange(self, sent: Tensor, received: Tensor, channel: int) -> Pending:
        tag = _TAG_BASE + 2 * channel + 1
        group = self._reduce_group
        receives = [(piece, peer) for peer in self.peers for piece in _pieces(received[peer])]
        sends = [(piece, peer) for peer in self.peers for piece in _pieces(sent[peer])]
        works = [group.recv([piece], peer, tag) for piece, peer in receives]
        return Works(works + [group.send([piece], peer, tag) for piece, peer in sends])

    def reduce(
        self, sources: Sequence[Source], channel: int, scale: float, may_lend: bool
    ) -> Pending:
        tag = _TAG_BASE + 2 * channel + 1
        # Who waits for room that a peer makes when it comes here has to be sure that it comes.
        exchange = PairwiseSum(scale, self._in_flight if may_lend else None)
        # Receives first: a message that finds its buffer posted is not announced twice.
        landing = self._landing_rank(sources)
        for source in sources:
            exchange.parts += self._parts_of(source, tag, landing)
        exchange.post()
        for source in sources:
            for peer in self.peers:
                chunk = source.flat[peer * source.chunk : (peer + 1) * source.chunk]
                for piece in _pieces(chunk):
                    exchange.sends.append(self._reduce_group.send([piece], peer, tag))
        return exchange

    @property
    def _in_flight(self) -> int:
        """In parts, each of which has at most one piece of every peer's."""
        return max(1, IN_FLIGHT // len(self.peers))

    def _landing_rank(self, sources: Sequence[Source]) -> int | None:
        """The peer whose contributions are received into the results themselves.

        They are one of the first two terms of a sum in rank order, where order does not matter.
        Where some sources are cast, none land: of one peer all pieces land or none do, for they
        are received in the order in which it sends them.
        """
        if any(source.flat.dtype != source.sums.buffer.dtype for source in sources):
            return None
        return 1 if self.rank == 0 else 0

    def _parts_of(self, source: Source, tag: int, landing: int | None) -> list[Part]:
        own = source.flat[self.rank * source.chunk : (self.rank + 1) * source.chunk]
        out = source.out[: own.numel()]
        pairs = zip(_pieces(own), _pieces(out, own.element_size()))
        return [Part(self._reduce_group, tag, self.rank, landing, *pair) for pair in pairs]


class Part:
    """One piece of a sum: what all ranks have of it, in rank order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        rank: int,
        landing: int | None,
        own: Tensor,
        out: Tensor,
    ) -> None:
        self._group = group
        self._tag = tag
        self._own = own
        self._out = out
        self._terms: dict[int, Tensor] = {rank: own}
        self._arrivals: list[dist.Work] = []
        self._landing = landing

    def _receive(self, rank: int, term: Tensor) -> None:
        self._terms[rank] = term
        self._arrivals.append(self._group.recv([term], rank, self._tag))

    def post_landing(self) -> None:
        """Receive what needs no room of its own."""
        if self._landing is not None:
            self._receive(self._landing, self._out)

    def post_rest(self) -> None:
        for rank in range(self._group.size()):
            if rank not in self._terms:
                self._receive(rank, torch.empty_like(self._own))

    def finish(self, scale: float) -> None:
        for work in self._arrivals:
            work.wait()
        first, second, *rest = (self._terms[rank] for rank in sorted(self._terms))
        if second is self._out:
            first, second = second, first
        if first is not self._out:
            self._out.copy_(first)
        if scale != 1.0:  # before they are added, so that the sum cannot overflow
            self._out.mul_(scale)
        for term in (second, *rest):
            self._out.add_(term, alpha=scale)
        self._terms.clear()


class PairwiseGather:
    """The pieces that one group sends and receives, cut once."""

    staging_nbytes = 0

    def __init__(self, transport: Pairwise, blocks: Sequence[Tensor]) -> None:
        self._transport = transport
        self._sends: list[tuple[Tensor, int]] = []
        self._receives: list[tuple[Tensor, int]] = []
        rank = transport.rank
        for block in blocks:
            for peer in transport.peers:
                self._receives += [(piece, peer) for piece in _pieces(block[peer])]
                self._sends += [(piece, peer) for piece in _pieces(block[rank])]

    def start(self, channel: int) -> Pending:
        tag = _TAG_BASE + 2 * channel
        transport = self._transport
        works = [transport.group.recv([piece], peer, tag) for piece, peer in self._receives]
        works += [transport.group.send([piece], peer, tag) for piece, peer in self._sends]
        return Works(works)


class PairwiseSum:
    """An exchange whose pieces are summed when it is waited for."""

    def __init__(self, scale: float, in_flight: int | None) -> None:
        """``in_flight`` parts at a time have room to arrive in; with None all do."""
        self.parts: list[Part] = []
        self.sends: list[dist.Work] = []
        self._scale = scale
        self._in_flight = in_flight

    def post(self) -> None:
        for part in self.parts:
            part.post_landing()
        for part in self.parts[: self._in_flight]:
            part.post_rest()

    def wait(self) -> None:
        ahead = self.parts[self._in_flight :] if self._in_flight is not None else []
        for part in self.parts:
            part.finish(self._scale)
            if ahead:
                ahead.pop(0).post_rest()
        self.parts.clear()
        for work in self.sends:
            work.wait()
        self.sends.clear()


def _pieces(flat: Tensor, itemsize: int | None = None) -> list[Tensor]:
    """Cut a flat tensor; ``itemsize`` is that of the tensor it shares its cuts with."""
    numel = flat.numel()
    step = PIECE_NBYTES // (itemsize or flat.element_size())
    if numel <= step:
        return [flat] if numel else []
    return list(flat.split(step))
