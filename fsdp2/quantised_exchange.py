"""Gradients that travel quantised between the ranks of the shard mesh.

Every rank sends the others what they own of its gradient, one byte a number, and sums what
it gets, and its own part as it is, in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.collectives import GatherPlan, Lent, Pending, Source, Transport
from fsdp2.quantising import WireFormat, gradient_format


class QuantisedExchange:
    """Another transport, but for the gradients of large parameters."""

    codes_gradients = True

    def __init__(self, inner: Transport, dtype: torch.dtype) -> None:
        self._inner = inner
        self._format = gradient_format(dtype)
        self.pack_below_nbytes = inner.pack_below_nbytes
        self.prefers_grouping = inner.prefers_grouping
        self.rank = inner.rank
        self.world_size = inner.world_size

    @property
    def name(self) -> str:
        return self._inner.name

    def plan_gather(
        self, blocks: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> GatherPlan:
        return self._inner.plan_gather(blocks, own)

    def exchange(self, sent: Tensor, received: Tensor, channel: int) -> Pending:
        return self._inner.exchange(sent, received, channel)

    def can_reduce_direct(self, divides: bool, gradient: torch.dtype, reduced: torch.dtype) -> bool:
        return self._inner.can_reduce_direct(divides, gradient, reduced)

    def describe_reduction(self, wire: object, reduced: object) -> str:
        return self._inner.describe_reduction(wire, reduced)

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        self._inner.reduce_over(group)

    def reduce(
        self, sources: Sequence[Source], channel: int, scale: float, may_lend: bool
    ) -> Pending:
        coded = [source for source in sources if source.may_be_coded]
        exact = [source for source in sources if not source.may_be_coded]
        pending = [self._reduce_coded(source, channel, scale) for source in coded]
        return QuantisedSums(pending, self._inner.reduce(exact, channel, scale, may_lend))

    def _reduce_coded(self, source: Source, channel: int, scale: float) -> QuantisedSum:
        nbytes = self._format.nbytes(source.chunk)
        shape = self.world_size, nbytes
        sent = torch.empty(shape, dtype=torch.uint8, device=source.flat.device)
        received = torch.empty_like(sent)
        self._encode(source, sent)
        pending = self._inner.exchange(sent, received, channel)
        return QuantisedSum(pending, sent, received, source, self.rank, self._format, scale)

    def _encode(self, source: Source, sent: Tensor) -> None:
        """The chunks of all ranks but this one; the last ones may be shorter, or empty."""
        flat, chunk = source.flat, source.chunk
        whole, rest = divmod(flat.numel(), chunk)
        for start, stop in ((0, self.rank), (self.rank + 1, self.world_size)):
            end = min(stop, whole)
            if start < end:
                chunks = flat[start * chunk : end * chunk].view(-1, chunk)
                self._format.encode(chunks, sent[start:end])
            if rest and start <= whole < stop:
                self._format.encode(flat[whole * chunk :].unsqueeze(0), sent[whole : whole + 1])


@dataclass
class QuantisedSum:
    """One gradient under way."""

    pending: Pending
    sent: Tensor
    received: Tensor
    source: Source
    rank: int
    format: WireFormat
    scale: float

    def finish(self) -> None:
        """Sum in rank order, so that the result does not depend on who comes first."""
        self.pending.wait()
        source = self.source
        own = source.flat[self.rank * source.chunk : (self.rank + 1) * source.chunk]
        out = source.out[: own.numel()]
        term = torch.empty_like(out)
        for rank, coded in enumerate(self.received):
            if rank == self.rank:
                term.copy_(own)
            elif own.numel():
                self.format.decode(coded.unsqueeze(0), term.unsqueeze(0))
            if rank == 0:
                out.zero_()
            out.add_(term, alpha=self.scale)


@dataclass
class QuantisedSums:
    """The quantised gradients of one group, and the others."""

    coded: list[QuantisedSum]
    exact: Pending

    def wait(self) -> None:
        for pending in self.coded:
            pending.finish()
        self.coded.clear()
        self.exact.wait()
        if isinstance(self.exact, Lent):
            self.exact.take_back()
