"""Full parameters copied out of the shards of ranks on this host: each is read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fsdp2.collectives import Lent, Pending
from fsdp2.loans import Loan
from fsdp2.segments import Segments


class PeerGather:
    """One group's blocks, and this rank's rows of them where it keeps them, if it does.

    Rows that are cast on the way are lent as a copy: what is in the blocks belongs to forward.
    """

    def __init__(
        self,
        blocks: Sequence[Tensor],
        own: Sequence[Tensor],
        segments: Segments,
        group: dist.ProcessGroup,
        rank: int,
    ) -> None:
        self._own = list(own)
        self._rows = [block[rank] for block in blocks]
        self._segments = segments
        self._group = group
        self._rank = rank
        peers = [peer for peer in range(len(segments.processes)) if peer != rank]
        self._targets = {peer: [block[peer] for block in blocks] for peer in peers}
        self.staging_nbytes = 0 if own else sum(row.nbytes for row in self._rows)

    def start(self, channel: int) -> Pending:
        lent = self._own or [row.clone() for row in self._rows]
        loan = Loan(lent, self._segments, self._group, self._rank, 2 * channel)
        return PeerRead(loan, self._targets)


class PeerRead(Lent):
    """A gather under way: peers' rows are read when it is waited for."""

    def __init__(self, loan: Loan, targets: dict[int, list[Tensor]]) -> None:
        self._loan = loan
        self._targets = targets

    def wait(self) -> None:
        for peer, addresses in self._loan.addresses().items():
            self._loan.read(peer, self._targets[peer], addresses)
        self._loan.have_read()

    def take_back(self) -> None:
        self._loan.take_back()
