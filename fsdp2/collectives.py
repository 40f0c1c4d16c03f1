"""How bytes travel: between the ranks of one shard mesh, and between replicas.

A transport gathers *blocks*, contiguous tensors of shape ``(world_size, n)`` in which
this rank has filled its own row, and reduces *sources*, each of which becomes one chunk
on every rank. It knows nothing of parameters. There are two for several ranks:

============  ====================================================================
``Pairwise``  messages between pairs of ranks, in pieces, each received where it
              belongs. For gloo: half the bytes of its reduce-scatter, both
              directions of a link at once, and nothing is staged.
``Grouped``   the backend's own collectives, several in one call. For NCCL, and
              for any backend that we know nothing better of.
============  ====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch

PIECE_NBYTES = 1 << 20
"""Larger messages use a TCP link in one direction at a time, smaller ones pay per call."""

_TAG_BASE = 0x5D2 << 16
"""Our point-to-point tags start here, clear of the small numbers that users pick."""


class Source(NamedTuple):
    """One reduction: chunk r of ``flat`` is summed over the ranks into rank r's ``out``.

    ``flat`` is one-dimensional and contiguous; chunk r is
    ``flat[r * chunk : (r + 1) * chunk]``, shorter or empty at the end. ``out`` has the
    reduce dtype and at least this rank's elements; what lies behind them is not written.
    """

    flat: Tensor
    chunk: int
    out: Tensor


class Pending(Protocol):
    """Communication under way. ``wait`` may be called once."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Moves blocks and sources between the ranks of one shard mesh."""

    name: str
    pack_below_nbytes: int
    """A parameter whose shard is smaller travels packed."""
    prefers_grouping: str
    """Why, in words, for ``explain``."""

    def plan_gather(self, blocks: Sequence[Tensor]) -> GatherPlan: ...

    def reduce(self, sources: Sequence[Source], channel: int, scale: float) -> Pending:
        """Sum ``sources`` times ``scale`` in the dtype of their ``out``."""
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


class Pairwise:
    """Send and receive between all pairs of ranks, received in place and summed in rank order."""

    name = "pairwise"
    pack_below_nbytes = 64 << 10
    prefers_grouping = "a message costs about as much as 64 KiB on the wire"

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.group = group
        self._reduce_group = group
        self.rank = rank
        self.world_size = group.size()
        # Everyone starts with another partner, so that no rank is everybody's first.
        self.peers = [(rank + step) % self.world_size for step in range(1, self.world_size)]

    def plan_gather(self, blocks: Sequence[Tensor]) -> GatherPlan:
        return PairwiseGather(self, blocks)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        return True

    def describe_reduction(self, wire: object, reduced: object) -> str:
        return f"exchanged in {wire}, summed in {reduced}"

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._reduce_group = group

    def reduce(self, sources: Sequence[Source], channel: int, scale: float) -> Pending:
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


class Grouped:
    """The backend's collectives, one call for all blocks of a group."""

    name = "grouped"
    pack_below_nbytes = 256 << 10
    prefers_grouping = "the backend's cost per collective, and NCCL's per operation in a call"

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.group = group
        self._reduce_group = group
        self.rank = rank
        self.world_size = group.size()

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._reduce_group = group

    def plan_gather(self, blocks: Sequence[Tensor]) -> GatherPlan:
        return GroupedGather(self, blocks)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        return divides and gradient == reduced

    def describe_reduction(self, wire: object, reduced: object) -> str:
        if wire == reduced:
            return f"reduce-scatter in {reduced}"
        return f"all-to-all in {wire}, summed in {reduced}"

    def reduce(self, sources: Sequence[Source], channel: int, scale: float) -> Pending:
        sums = [s for s in sources if s.flat.dtype == s.out.dtype]
        exchanges = [s for s in sources if s.flat.dtype != s.out.dtype]
        if scale != 1.0:
            for source in sums:
                source.flat.mul_(scale)
        works: list[dist.Work] = []
        if len(sums) == 1:
            works.append(_torch.reduce_scatter_into(self._reduce_group, sums[0].out, sums[0].flat))
        elif sums:
            outs, inputs = [s.out for s in sums], [s.flat for s in sums]
            works.append(_torch.reduce_scatter_grouped(self._reduce_group, outs, inputs))
        return GroupedSum(works, [self._exchange(s) for s in exchanges], scale)

    def _exchange(self, source: Source) -> Exchange:
        """All-to-all in the gradient's dtype: fewer bytes than a sum in the reduce dtype."""
        received = torch.empty_like(source.flat)
        work = _torch.all_to_all_into(self._reduce_group, received, source.flat)
        return Exchange(work, received.view(self.world_size, source.chunk), source)


class Exchange(NamedTuple):
    """An all-to-all whose rows are summed when they have arrived."""

    work: dist.Work
    received: Tensor
    source: Source

    def finish(self, scale: float) -> None:
        self.work.wait()
        torch.sum(self.received, dim=0, dtype=self.source.out.dtype, out=self.source.out)
        if scale != 1.0:
            self.source.out.mul_(scale)


class GroupedGather:
    """The outputs and inputs of one group's call; the inputs are the own rows of the outputs."""

    def __init__(self, transport: Grouped, blocks: Sequence[Tensor]) -> None:
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


def choose_transport(group: dist.ProcessGroup, rank: int, device: torch.device) -> Transport:
    """Pairwise messages on gloo, the backend's own collectives elsewhere."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if backends.get(device.type) == "gloo":
        return Pairwise(group, rank)
    return Grouped(group, rank)
