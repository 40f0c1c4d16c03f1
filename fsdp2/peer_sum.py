"""Gradients summed where their ranks have them: each rank reads what it owns of its peers'."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp2.collectives import Lent, Source
from fsdp2.loans import PIECE_NBYTES, Loan
from fsdp2.segments import Segments


class PeerSum(Lent):
    """One group's gradients: lent to the peers, and summed from theirs when waited for."""

    def __init__(
        self, loan: Loan, segments: Segments, sources: Sequence[Source], scale: float
    ) -> None:
        self._loan = loan
        self._segments = segments
        self._sources = list(sources)
        self._scale = scale

    def wait(self) -> None:
        addresses = self._loan.addresses()
        scratch = torch.empty(PIECE_NBYTES, dtype=torch.uint8)
        for index, source in enumerate(self._sources):
            self._sum(source, {peer: each[index] for peer, each in addresses.items()}, scratch)
        self._sources.clear()
        self._loan.have_read()

    def take_back(self) -> None:
        self._loan.take_back()

    def _sum(self, source: Source, addresses: dict[int, int], scratch: Tensor) -> None:
        """In rank order, in the dtype of ``out``.

        Of the first two terms the order does not matter: a peer's comes first, and is read into
        the sum itself.
        """
        flat, rank = source.flat, self._segments.rank
        ranks = range(len(self._segments.processes))
        order = ranks if rank else (1, 0, *ranks[2:])
        start = rank * source.chunk
        own, sums = flat[start : start + source.chunk], source.out
        step = PIECE_NBYTES // flat.itemsize
        for first in range(0, own.numel(), step):
            term = own[first : first + step]
            out = sums[first : first + term.numel()]
            room = scratch[: term.nbytes].view(flat.dtype)
            at = (start + first) * flat.itemsize
            for other in order:
                is_first = other == order[0]
                if other == rank:
                    self._add(out, term, is_first)
                    continue
                landing = out if is_first and out.dtype == flat.dtype else room
                self._segments.read(other, [landing], [addresses[other] + at])
                self._add(out, landing, is_first)

    def _add(self, out: Tensor, term: Tensor, is_first: bool) -> None:
        if not is_first:
            out.add_(term, alpha=self._scale)
            return
        if term is not out:
            out.copy_(term)
        if self._scale != 1.0:  # before they are added, so that the sum cannot overflow
            out.mul_(self._scale)
