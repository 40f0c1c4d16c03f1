"""What a rank lends to its peers on this host: memory that they read in place.

A rank says where its bytes lie, and each peer answers when it has read them. Nothing is
written for anyone, and nothing is received; until the last answer the bytes stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fsdp2.segments import READ, WRITTEN, Segments

PIECE_NBYTES = 1 << 19
"""A piece that was read stays in a core's cache until it has been cast or added."""


class Loan:
    """One exchange: ``tensors`` of this rank, and the same number of every peer's."""

    def __init__(self, tensors: Sequence[Tensor], segments: Segments, channel: int) -> None:
        self._tensors = list(tensors)
        """Alive as long as peers may read."""
        self._peers = segments.peers
        self._notes = segments.notes
        self._number = segments.number(channel)
        addresses = [tensor.data_ptr() for tensor in tensors]
        for peer in self._peers:
            self._notes.send(peer, WRITTEN + self._number, addresses)

    def addresses(self) -> dict[int, list[int]]:
        """By peer, where its tensors lie. Waits until all peers have lent them."""
        tag = WRITTEN + self._number
        return {peer: self._notes.receive(peer, tag) for peer in self._peers}

    def have_read(self) -> None:
        """Answer: this rank has read all that it needs of its peers."""
        for peer in self._peers:
            self._notes.send(peer, READ + self._number)

    def take_back(self) -> None:
        """Wait until all peers have read."""
        for peer in self._peers:
            self._notes.receive(peer, READ + self._number)
        self._tensors.clear()
