"""Which parameters of an optimizer one flat tensor can stand for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from fsdp2 import _torch
from fsdp2.buffers import ShardBuffer, shard_buffers
from fsdp2.spans import Piece, Span, States, holds


def join(
    params: Iterable[Tensor],
    states: States,
    may_join: Callable[[Piece], bool],
    known: Iterable[Span],
) -> list[Span]:
    """Spans over ``params``, which have gradients; ``known`` ones are taken again if they fit.

    Neighbours in a shard buffer are joined where their gradients are neighbours too and the
    optimizer has kept the same kind of state for them, with the same number of steps.
    """
    fitting = {tuple(id(m.param) for m in span.members): span for span in known}
    spans = []
    for run in _runs([Piece.of(param) for param in params], states, may_join):
        span = fitting.get(tuple(id(piece.param) for piece in run.pieces))
        if span is None or not (span.has_entries_of(states) and span.is_current()):
            span = Span(run.pieces, run.buffer, states)
            is_current = span.is_current()
            assert is_current, "all lies as it did a moment ago"
        spans.append(span)
    return spans


def _runs(
    pieces: Iterable[Piece], states: States, may_join: Callable[[Piece], bool]
) -> Iterator[_Run]:
    buffers = _Buffers()
    empty: dict[Hashable, list[Piece]] = {}
    placed: list[tuple[_Place, Hashable, Piece]] = []
    for piece in pieces:
        kind = _kind(piece, states[piece.param]) if may_join(piece) else None
        place = buffers.place_of(piece.local)
        if kind is not None and not piece.local.numel():
            empty.setdefault(kind, []).append(piece)
        elif kind is None or place is None:
            yield _Run([piece])
        else:
            placed.append((place, kind, piece))
    runs: dict[Hashable, list[_Run]] = {}
    for place, kind, piece in sorted(placed, key=itemgetter(0)):
        found = runs.setdefault(kind, [])
        if not found or not found[-1].takes(piece, place):
            found.append(_Run([piece], place, buffers.found[place.number]))
    for kind, without_rows in empty.items():
        if kind in runs:
            runs[kind][0].pieces += without_rows  # they take no room anywhere
        else:
            yield _Run(without_rows)
    for found in runs.values():
        yield from found


class _Place(NamedTuple):
    """Where a parameter lies: which buffer, and as which of its parameters with rows."""

    number: int
    order: int


class _Run:
    """Neighbours, and the buffer that they lie in; ``last`` is the place of the last one."""

    def __init__(
        self, pieces: list[Piece], last: _Place | None = None, buffer: ShardBuffer | None = None
    ) -> None:
        self.pieces = pieces
        self.last = last
        self.buffer = buffer

    def takes(self, piece: Piece, place: _Place) -> bool:
        """Add a piece if it is the next one, in the shard buffer and in the gradient buffer."""
        assert self.last is not None
        if place != (self.last.number, self.last.order + 1):
            return False
        first = self.pieces[0]
        distance = piece.local.data_ptr() - first.local.data_ptr()
        numel = distance // first.local.itemsize + piece.local.numel()
        if piece.grad.data_ptr() - first.grad.data_ptr() != distance:
            return False
        if not holds(first.grad, numel):
            return False
        self.pieces.append(piece)
        self.last = place
        return True


class _Buffers:
    """The live shard buffers, to look addresses up in."""

    def __init__(self) -> None:
        self.found = shard_buffers()
        self._addresses = [buffer.memory.data_ptr() for buffer in self.found]
        self._orders: dict[int, dict[int, int]] = {}

    def place_of(self, local: Tensor) -> _Place | None:
        """Which buffer it lies in, and as which of its parameters."""
        address = local.data_ptr()
        number = bisect_right(self._addresses, address) - 1
        if number < 0:
            return None
        if number not in self._orders:
            self._orders[number] = {start: i for i, start in enumerate(self.found[number].starts)}
        order = self._orders[number].get(address)
        return None if order is None else _Place(number, order)


def _kind(piece: Piece, entry: dict[str, Any]) -> Hashable | None:
    """Equal for parameters that one tensor can stand for; None if it must stay alone."""
    param, local, grad = piece
    if local is param or local.dtype != grad.dtype:
        return None
    if not (local.is_contiguous() and grad.is_contiguous()):
        return None
    kept: list[Hashable] = []
    for key, value in entry.items():
        if isinstance(value, _torch.DTensor):
            if _torch.local_of(value).shape != local.shape:
                return None
            kept.append((key, value.dtype))
        elif isinstance(value, Tensor):
            if value.ndim:
                return None
            kept.append((key, value.dtype, value.item()))
        elif isinstance(value, Hashable):
            kept.append((key, value))
        else:
            return None
    return local.dtype, local.device, *kept
