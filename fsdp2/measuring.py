"""What the limit on groups in flight is found from: time and memory of a step, on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from fsdp2.order import Order
from fsdp2.param_group import ParamGroup
from fsdp2.streams import Mark, Streams


class Measured(NamedTuple):
    """One step, or what was seen of it."""

    start: Mark
    waits: list[tuple[Mark, Mark]]
    end: Mark


class Watch:
    """How long the gathers of a step were waited for, where an earlier start would have helped.

    The first wait of each pass is left out, nothing computes before it; so is what was not
    expected, which no limit gathers ahead.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._order: Order | None = None
        self._is_first = True
        self._start: Mark = None
        self._waits: list[tuple[Mark, Mark]] = []
        self._measured: list[Measured] = []

    def begin(self) -> None:
        """What was seen since the last backward was an evaluation."""
        self._start, self._waits = self._streams.mark(), []

    def begin_pass(self, order: Order) -> None:
        self._order, self._is_first = order, True

    @contextmanager
    def waiting(self, scope: AbstractContextManager[object]) -> Iterator[None]:
        is_first, self._is_first = self._is_first, False
        counts = not is_first and self._order is not None and self._order.is_predicted
        start = self._streams.mark() if counts else None
        with scope:
            yield
        if counts:
            self._waits.append((start, self._streams.mark()))

    def end(self) -> None:
        """Backward has ended; the next may follow without a forward."""
        end, self._order = self._streams.mark(), None
        if self._start is not None:
            self._measured.append(Measured(self._start, self._waits, end))
        self._start, self._waits = end, []

    def take(self) -> tuple[float, float] | None:
        """Seconds exposed and seconds in all per step, of the steps whose marks have happened."""
        is_behind = self._streams.runs_ahead
        steps = self._measured[:-1] if is_behind else self._measured
        if not steps:
            return None
        self._measured = self._measured[-1:] if is_behind else []
        self._streams.host_waits(steps[-1].end)
        seconds = self._streams.seconds
        exposed = sum(seconds(*wait) for step in steps for wait in step.waits)
        in_all = sum(seconds(step.start, step.end) for step in steps)
        return exposed / len(steps), in_all / len(steps)

    def forget(self) -> None:
        self._measured.clear()


class Counted:
    """On CPU: the bytes of full parameters, which is all that is known there."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self._groups = {group.name: group for group in groups}
        self._held: dict[str, int] = {}
        self._now = 0
        self._peak = 0

    def add(self, event: str, name: str) -> None:
        """What happened to a group."""
        if event in ("gather", "free", "keep part"):
            self._now -= self._held.pop(name, 0)
        if event == "gather" and name in self._groups:
            self._held[name] = self._groups[name].full_nbytes
            self._now += self._held[name]
            self._peak = max(self._peak, self._now)

    def take_peak_nbytes(self) -> int:
        """The most since the last call."""
        peak, self._peak = self._peak, self._now
        return peak

    def take_retries(self) -> int:
        """How often the allocator retried since the last call."""
        return 0


class Allocator:
    """On an accelerator: what its caching allocator says of all that was allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._retries = self._all_retries()

    def add(self, event: str, name: str) -> None:
        pass

    def take_peak_nbytes(self) -> int:
        peak = int(self._module.max_memory_allocated(self._device))
        self._module.reset_peak_memory_stats(self._device)
        return peak

    def take_retries(self) -> int:
        before, self._retries = self._retries, self._all_retries()
        return self._retries - before

    def _all_retries(self) -> int:
        return int(self._module.memory_stats(self._device).get("num_alloc_retries", 0))


def memory_of(groups: list[ParamGroup]) -> Counted | Allocator:
    device = groups[0].mesh.device
    return Counted(groups) if device.type == "cpu" else Allocator(device)
