"""While a pass lasts no rank writes to its shards, so peers read them without asking each time.

A rank says once that its pass has begun, and once that it has read all that it needs: two
notes to each peer, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.segments import READ, WRITTEN, Segments

_CHANNEL = -1
"""Groups have the others."""


class Truce:
    """One pass between the ranks of one process group. Its first read begins it."""

    def __init__(self, segments: Segments, is_backward: bool) -> None:
        self._segments = segments
        self._notes = segments.notes
        self._is_backward = is_backward
        self.lasts = True
        self._number: int | None = None
        self._is_agreed = False

    def begin(self) -> None:
        """The shards of this rank are what peers may read. More than one call does no harm."""
        if self._number is None:
            self._number = self._segments.number(_CHANNEL)
            about = int(self._is_backward), self._segments.layouts
            for peer in self._segments.peers:
                self._notes.send(peer, WRITTEN + self._number, about)

    def wait(self) -> None:
        """Return when all peers have begun too.

        Raises:
            RuntimeError: A peer has begun another pass, or lays its shards out in another way.
        """
        if self._number is None or self._is_agreed:
            return
        self._is_agreed = True
        for peer in self._segments.peers:
            self._compare(peer, self._notes.receive(peer, WRITTEN + self._number))

    def _compare(self, peer: int, said: Sequence[int]) -> None:
        rank, (is_backward, layouts) = self._segments.rank, said
        if is_backward != self._is_backward:
            ours, theirs = _PASSES[self._is_backward], _PASSES[is_backward]
            raise RuntimeError(
                f"rank {rank} begins {ours} where rank {peer} begins {theirs}: one of them has "
                "probably raised and gone on alone; its own output says why. Ranks that catch "
                "exceptions must do so together"
            )
        if layouts != self._segments.layouts:
            raise RuntimeError(
                f"rank {rank} has laid out groups {self._segments.layouts} times, rank {peer} "
                f"{layouts} times: parameters were replaced or moved on some ranks only; do the "
                "same on all of them"
            )

    def end(self) -> None:
        """This rank reads no more. More than one call does no harm."""
        if self.lasts and self._number is not None:
            for peer in self._segments.peers:
                self._notes.send(peer, READ + self._number)
        self.lasts = False

    def take_back(self) -> None:
        """After ``end``: return when no peer reads any more, so that shards may be written to."""
        if self._number is not None:
            self.wait()
            for peer in self._segments.peers:
                self._notes.receive(peer, READ + self._number)


_PASSES = "a forward", "a backward"
