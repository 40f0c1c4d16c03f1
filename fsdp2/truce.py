"""While a pass lasts no rank writes to its shards, so peers read them without asking each time.

A rank says once that its pass has begun, and once that it has read all that it needs: two
notes to each peer, whatever the number of groups.
"""

from __future__ import annotations

from fsdp2.segments import READ, WRITTEN, Segments

_CHANNEL = -1
"""Groups have the others."""


class Truce:
    """One pass between the ranks of one process group. Its first read begins it."""

    def __init__(
        self, segments: Segments, is_backward: bool, layout: int, layouts: dict[int, int]
    ) -> None:
        """``layout`` changes whenever shards of this rank move; ``layouts`` has those of the last
        truce, by rank."""
        self._segments = segments
        self._notes = segments.notes
        self._is_backward = is_backward
        self._layout = layout
        self._layouts = layouts
        self._number: int | None = None
        self._holds: bool | None = None
        self._has_ended = False

    def holds(self) -> bool:
        """Whether shards may be read where they were found before: as all ranks see it alike.

        Not where those of some rank have moved: then all gathers of the pass ask again. The first
        call begins the truce, and waits until all peers have begun theirs.

        Raises:
            RuntimeError: A peer has begun another pass.
        """
        if self._has_ended:
            return False
        if self._holds is None:
            self._begin()
            self._holds = self._compare()
        return self._holds

    def _begin(self) -> None:
        """The shards of this rank are what peers may read."""
        self._number = self._segments.number(_CHANNEL)
        about = int(self._is_backward), self._layout
        for peer in self._segments.peers:
            self._notes.send(peer, WRITTEN + self._number, about)

    def _compare(self) -> bool:
        assert self._number is not None
        before, rank = dict(self._layouts), self._segments.rank
        self._layouts[rank] = self._layout
        for peer in self._segments.peers:
            is_backward, self._layouts[peer] = self._notes.receive(peer, WRITTEN + self._number)
            if is_backward != self._is_backward:
                ours, theirs = _PASSES[self._is_backward], _PASSES[is_backward]
                raise RuntimeError(
                    f"rank {rank} begins {ours} where rank {peer} begins {theirs}: one of them has "
                    "probably raised and gone on alone; its own output says why. Ranks that catch "
                    "exceptions must do so together"
                )
        return self._layouts == before

    def end(self) -> None:
        """This rank reads no more. More than one call does no harm."""
        if not self._has_ended and self._number is not None:
            for peer in self._segments.peers:
                self._notes.send(peer, READ + self._number)
        self._has_ended = True

    def take_back(self) -> None:
        """After ``end``: return when no peer reads any more, so that shards may be written to."""
        if self._number is not None:
            for peer in self._segments.peers:
                self._notes.receive(peer, READ + self._number)


_PASSES = "a forward", "a backward"
