"""The reductions under way: how many at once, and in which order they end.

A group's gradients are exchanged and summed; where there are replicas, or where the shards
live on the host, a second stage follows. The groups of a root pass through the stages one
behind the other, so that the bytes of one travel while another is summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fsdp2.buffers import Staging
from fsdp2.param_group import ParamGroup
from fsdp2.passes import withdraw
from fsdp2.reduction import Reduction
from fsdp2.streams import Streams
from fsdp2.tracing import Listener, waiting

Started = tuple[ParamGroup, list[Reduction]]


class UnderWay:
    """The reductions of all groups under one root."""

    def __init__(self, max_exchanges: int) -> None:
        self.max_exchanges = max_exchanges
        """Exchanges that stay under way behind a start; each holds its group's full gradients."""
        self._staging = Staging()
        self._exchanging: list[Started] = []
        self._adding: list[Started] = []
        """In the second stage: one group at a time."""

    def start(self, group: ParamGroup, streams: Streams, trace: Listener | None) -> None:
        """Issue one group's, then sum what is too many while its bytes travel."""
        self._exchanging.append((group, group.start_reduce(streams, self._staging)))
        while len(self._exchanging) > self.max_exchanges:
            self._sum(self._exchanging.pop(0), trace)

    def end_lent(self, trace: Listener | None) -> None:
        """End what peers read in place, once the group is freed and before the next one arrives.

        There is nothing to hide: no bytes travel, and peers have come as far. So the gradients
        of ``max_exchanges`` groups are alive at once, the next one's among them, and not of one
        more. Messages go on travelling behind compute.
        """
        while len(self._exchanging) >= self.max_exchanges:
            if not any(reduction.is_lent for reduction in self._exchanging[0][1]):
                return
            self._sum(self._exchanging.pop(0), trace)

    def _sum(self, started: Started, trace: Listener | None) -> None:
        """Make the sums of one group; finish those of the group before it."""
        group, reductions = started
        earlier, self._adding = self._adding, []
        if any(reduction.has_second_stage for reduction in reductions):
            with waiting(trace, "summed", group.name):
                for reduction in reductions:
                    reduction.advance()
            self._adding.append(started)
        else:
            earlier.append(started)
        self._hand_over(earlier, trace)

    def _hand_over(self, ending: list[Started], trace: Listener | None) -> None:
        for group, reductions in ending:
            withdraw(group)  # hooks on the gradients may step the optimizer
            with waiting(trace, "reduced", group.name):
                for reduction in reductions:
                    reduction.finish()

    def finish(self, trace: Listener | None) -> None:
        """Wait for all."""
        while self._exchanging:
            self._sum(self._exchanging.pop(0), trace)
        earlier, self._adding = self._adding, []
        self._hand_over(earlier, trace)

    def tensors(self) -> Iterator[Tensor | None]:
        """What is under way, and blocks kept for the next ones."""
        for _, reductions in (*self._exchanging, *self._adding):
            for reduction in reductions:
                yield from reduction.tensors()
        yield from self._staging.tensors()

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Inside, starting waits for nothing."""
        held, self.max_exchanges = self.max_exchanges, 1 << 30
        try:
            yield
        finally:
            self.max_exchanges = held

    def drop(self) -> None:
        """Let the messages arrive, and forget them."""
        for _, reductions in [*self._adding, *self._exchanging]:
            for reduction in reductions:
                reduction.drop()
        self._adding.clear()
        self._exchanging.clear()
