"""Full parameters copied out of the shards of ranks on this host: each is read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp2.collectives import Lent, Pending
from fsdp2.loans import PIECE_NBYTES, Loan
from fsdp2.segments import Segments
from fsdp2.truce import Truce


class PeerGather:
    """One group's blocks, and this rank's rows of them where it keeps them, cast or not.

    Without such rows those in the blocks are lent as a copy: what is in the blocks belongs to
    forward.
    """

    def __init__(
        self,
        blocks: Sequence[Tensor],
        own: Sequence[Tensor],
        segments: Segments,
    ) -> None:
        self._own = list(own)
        self._rows = [block[segments.rank] for block in blocks]
        self._dtypes = [row.dtype for row in own or self._rows]
        self._segments = segments
        self._targets = {peer: [block[peer] for block in blocks] for peer in segments.peers}
        self._addresses: dict[int, list[int]] = {}
        """Of the peers' rows, once they have been announced; copies have new ones each time."""
        self.staging_nbytes = 0 if own else sum(row.nbytes for row in self._rows)

    def start(self, channel: int) -> Pending:
        """Ask the peers, and answer them."""
        lent = self._own or [row.clone() for row in self._rows]
        return PeerRead(self, Loan(lent, self._segments, 2 * channel))

    def read_during(self, truce: Truce) -> Pending | None:
        """Ask nobody. None where that is not possible: then all ranks must ``start``."""
        if not self._own or not truce.holds():  # a rank without addresses has peers that have some
            return None
        return TruceRead(self) if self._addresses else None

    def remember(self, addresses: dict[int, list[int]]) -> None:
        if self._own:
            self._addresses = addresses

    def read(self, addresses: dict[int, list[int]] | None = None) -> None:
        for peer, each in (addresses or self._addresses).items():
            self._read_from(peer, each)

    def _read_from(self, peer: int, addresses: Sequence[int]) -> None:
        rows = list(zip(self._targets[peer], addresses, self._dtypes))
        plain = [(target, address) for target, address, dtype in rows if target.dtype is dtype]
        if plain:
            self._segments.read(peer, *zip(*plain))
        for target, address, dtype in rows:
            if target.dtype is not dtype:
                self._read_cast(peer, target, address, dtype)

    def _read_cast(self, peer: int, target: Tensor, address: int, dtype: torch.dtype) -> None:
        """In pieces that stay in a core's cache between the two copies."""
        step = PIECE_NBYTES // dtype.itemsize
        scratch = torch.empty(min(step, target.numel()), dtype=dtype)
        for start in range(0, target.numel(), step):
            piece = target[start : start + step]
            room = scratch[: piece.numel()]
            self._segments.read(peer, [room], [address + start * dtype.itemsize])
            piece.copy_(room)


class PeerRead(Lent):
    """A gather under way that asked its peers: their rows are read when it is waited for."""

    def __init__(self, gather: PeerGather, loan: Loan) -> None:
        self._gather = gather
        self._loan = loan

    def wait(self) -> None:
        addresses = self._loan.addresses()
        self._gather.read(addresses)
        self._gather.remember(addresses)
        self._loan.have_read()

    def take_back(self) -> None:
        self._loan.take_back()


class TruceRead:
    """A gather under way that asks nobody."""

    def __init__(self, gather: PeerGather) -> None:
        self._gather = gather

    def wait(self) -> None:
        self._gather.read()
