"""What a rank lends to its peers on this host: memory that they read in place.

A rank sends where its bytes lie, and each peer answers when it has read them. Nothing is
written for anyone, and nothing is received; until the last answer the bytes stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.peer_memory import read_all
from fsdp2.segments import READ, WRITTEN, Segments


class Loan:
    """One exchange: ``tensors`` of this rank, and the same number of every peer's."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        segments: Segments,
        group: dist.ProcessGroup,
        rank: int,
        channel: int,
    ) -> None:
        self.rank = rank
        self.world_size = group.size()
        self._processes = segments.processes
        self._tensors = list(tensors)
        """Alive as long as peers may read."""
        self._group = group
        self._segments = segments
        self._peers = [peer for peer in range(self.world_size) if peer != rank]
        self._number = number = segments.number(channel)
        own = torch.tensor([tensor.data_ptr() for tensor in tensors])
        self._arriving = {peer: torch.empty_like(own) for peer in self._peers}
        # Receives first: a message that finds its buffer posted is not announced twice.
        self._arrivals = [
            group.recv([addresses], peer, WRITTEN + number)
            for peer, addresses in self._arriving.items()
        ]
        # Nobody looks at what an answer says.
        answers = [group.recv([torch.empty(1)], peer, READ + number) for peer in self._peers]
        sends = [group.send([own], peer, WRITTEN + number) for peer in self._peers]
        self._ending = [*answers, *sends]
        """Waited for when the loan is taken back."""
        segments.messages[number] = [self._arrivals, self._ending]

    def addresses(self) -> dict[int, list[int]]:
        """By peer, where its tensors lie. Waits until all peers have lent them."""
        for work in self._arrivals:
            work.wait()
        return {peer: addresses.tolist() for peer, addresses in self._arriving.items()}

    def read(self, peer: int, targets: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Fill ``targets`` with what a peer has at ``addresses``.

        Raises:
            RuntimeError: The peer has ended, or has given its memory back in spite of the loan.
        """
        try:
            read_all(targets, self._processes[peer], addresses)
        except OSError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} could not read what rank {peer} has lent: "
                f"{error.strerror}; that rank has probably ended, and its own output says why"
            ) from error

    def have_read(self) -> None:
        """Answer: this rank has read all that it needs of its peers."""
        sends = [self._group.send([torch.empty(1)], p, READ + self._number) for p in self._peers]
        self._ending += sends

    def take_back(self) -> None:
        """Wait until all peers have read."""
        for work in self._ending:
            work.wait()
        del self._segments.messages[self._number]
        self._tensors.clear()
