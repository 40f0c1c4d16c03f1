"""Messages between all pairs of ranks, received in place and summed in rank order. For gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.collectives import GatherPlan, Pending, Source, Works

PIECE_NBYTES = 1 << 20
"""Larger messages use a TCP link in one direction at a time, smaller ones pay per call."""

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
        exchange = PairwiseSum(scale)
        # Receives first: a message that finds its buffer posted is not announced twice.
        for source in sources:
            exchange.parts += self._post_receives(source, tag)
        for source in sources:
            for peer in self.peers:
                chunk = source.flat[peer * source.chunk : (peer + 1) * source.chunk]
                for piece in _pieces(chunk):
                    exchange.sends.append(self._reduce_group.send([piece], peer, tag))
        return exchange

    def _post_receives(self, source: Source, tag: int) -> list[Part]:
        own = source.flat[self.rank * source.chunk : (self.rank + 1) * source.chunk]
        out = source.out[: own.numel()]
        parts: list[Part] = []
        for own_piece, out_piece in zip(_pieces(own), _pieces(out, own.element_size())):
            landing = _landing_rank(self.rank) if own.dtype == out.dtype else None
            terms: list[Tensor] = []
            arrivals: list[dist.Work] = []
            for rank in range(self.world_size):
                if rank == self.rank:
                    terms.append(own_piece)
                    continue
                term = out_piece if rank == landing else torch.empty_like(own_piece)
                arrivals.append(self._reduce_group.recv([term], rank, tag))
                terms.append(term)
            parts.append(Part(out_piece, terms, arrivals))
        return parts


def _landing_rank(rank: int) -> int:
    """The peer whose contribution is received into the result itself.

    It is one of the first two terms of the sum in rank order, where order does not matter.
    """
    return 1 if rank == 0 else 0


class Part(NamedTuple):
    """One piece of a sum: ``terms`` in rank order, of which ``arrivals`` are on their way."""

    out: Tensor
    terms: list[Tensor]
    arrivals: list[dist.Work]

    def finish(self, scale: float) -> None:
        for work in self.arrivals:
            work.wait()
        first, second, *rest = self.terms
        if scale != 1.0:
            self._finish_scaled(scale)
            return
        if first is self.out:
            first.add_(second)
        elif second is self.out:
            second.add_(first)
        else:
            self.out.copy_(first).add_(second)
        for term in rest:
            self.out.add_(term)

    def _finish_scaled(self, scale: float) -> None:
        """Scale each term before it is added, so that the sum cannot overflow."""
        first, second, *rest = self.terms
        if second is self.out:
            first, second = second, first
        if first is not self.out:
            self.out.copy_(first)
        self.out.mul_(scale).add_(second, alpha=scale)
        for term in rest:
            self.out.add_(term, alpha=scale)


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


@dataclass
class PairwiseSum:
    """An exchange whose pieces are summed when it is waited for."""

    scale: float

    def __post_init__(self) -> None:
        self.parts: list[Part] = []
        self.sends: list[dist.Work] = []

    def wait(self) -> None:
        for part in self.parts:
            part.finish(self.scale)
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
