"""Numbers that all ranks agree on while steps go on: the largest of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2.streams import Mark, Streams


class Agreement:
    """The largest of each number over all ranks, found behind what else is done.

    One mesh dimension after the other; each takes from one ``advance`` to the next.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], device: torch.device, streams: Streams
    ) -> None:
        self._groups = groups
        self._device = device
        self._streams = streams
        self._left: list[dist.ProcessGroup] = []
        self._numbers = torch.empty(0)
        """On the host, where an accelerator writes to it."""
        self._work: dist.Work | None = None
        self._arrived: Mark = None
        self.is_under_way = False

    def start(self, numbers: list[int]) -> None:
        pins = self._device.type != "cpu"
        self._numbers = torch.tensor(numbers, dtype=torch.int64, pin_memory=pins)
        self._left = list(self._groups)
        self.is_under_way = True
        self._issue()

    def _issue(self) -> None:
        if not self._left:
            return
        with self._streams.aside():
            numbers = self._numbers.to(self._device, non_blocking=True)
            group = self._left.pop(0)
            work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True)
            if self._streams.runs_ahead and work is not None:
                work.wait()  # of the stream: the host goes on
                self._numbers.copy_(numbers, non_blocking=True)
                self._arrived = self._streams.event()
            else:
                self._work = work

    def advance(self) -> list[int] | None:
        """Wait for what was issued last; the numbers, when no dimension is left."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._arrived is not None:
            self._streams.host_waits(self._arrived)
            self._arrived = None
        if self._left:
            self._issue()
            return None
        self.is_under_way = False
        return self._numbers.tolist()
