"""Streams and events of a device type; nothing on CPU.

On an accelerator gathers, reductions and sums over replicas each have a stream. A buffer
is allocated on the stream that fills it. Before such a stream touches memory it waits for
what the compute stream has been given so far: that covers the optimizer's writes to the
shards, and the last reader of any full buffer freed earlier, whose memory may be handed
out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch

Mark = Any
"""A moment: the host's clock on CPU, an event with a time on an accelerator."""


class Streams(Protocol):
    """Where communication runs."""

    runs_ahead: bool
    """Whether the host only enqueues: waiting then costs the host nothing."""

    def gathering(self) -> AbstractContextManager[object]:
        """The scope of a gather, behind all that compute was given so far."""
        ...

    def reducing(self) -> AbstractContextManager[object]:
        """The scope of a reduction, likewise."""
        ...

    def replicating(self, behind: torch.Event | None) -> AbstractContextManager[object]:
        """The scope of what follows a reduction, behind the event of its sums."""
        ...

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """A user's stream, behind the current one, which then waits for it."""
        ...

    def wait_once(self, event: torch.Event) -> None:
        """The next gather runs behind ``event`` instead of behind all that compute was given."""
        ...

    def event(self) -> torch.Event | None:
        """Record an event on the current stream."""
        ...

    def compute_waits(self, event: torch.Event | None) -> None:
        """What compute is given from now on runs behind ``event``."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """The scope of what depends on nothing that compute was given."""
        ...

    def host_waits(self, event: Mark) -> None:
        """Block the host until ``event`` has happened; it stalls a device that has nothing else."""
        ...

    def mark(self) -> Mark:
        """When compute comes to this point. Measured, on an accelerator, while it runs."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two marks that have happened."""
        ...


class HostStreams:
    """The CPU: a collective runs on its backend's threads and is waited for by the host."""

    runs_ahead = False

    def __init__(self) -> None:
        self._scope: nullcontext[None] = nullcontext()

    def gathering(self) -> AbstractContextManager[object]:
        return self._scope

    def reducing(self) -> AbstractContextManager[object]:
        return self._scope

    def replicating(self, behind: torch.Event | None) -> AbstractContextManager[object]:
        return self._scope

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return self._scope

    def wait_once(self, event: torch.Event) -> None:
        pass

    def event(self) -> torch.Event | None:
        return None

    def compute_waits(self, event: torch.Event | None) -> None:
        pass

    def aside(self) -> AbstractContextManager[object]:
        return self._scope

    def host_waits(self, event: Mark) -> None:
        pass

    def mark(self) -> Mark:
        return perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)


class DeviceStreams:
    """An accelerator: a stream each for gathers, reductions and sums over replicas."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        # High priority: a gather that waits behind compute kernels delays the next compute.
        self._gather = self._module.Stream(device=device, priority=-1)
        self._reduce = self._module.Stream(device=device, priority=-1)
        # Of its own: the next group's reduction need not wait behind this group's replicas.
        self._replicate = self._module.Stream(device=device, priority=-1)
        self._aside: torch.Stream | None = None
        self._device = device
        self._optimizer_done: torch.Event | None = None

    def gathering(self) -> AbstractContextManager[object]:
        event, self._optimizer_done = self._optimizer_done, None
        if event is None:
            return self._scope(self._gather)
        self._gather.wait_event(event)
        return self._module.stream(self._gather)

    def wait_once(self, event: torch.Event) -> None:
        self._optimizer_done = event

    def replicating(self, behind: torch.Event | None) -> AbstractContextManager[object]:
        if behind is not None:
            self._replicate.wait_event(behind)
        return self._module.stream(self._replicate)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        current = self._module.current_stream()
        stream.wait_stream(current)
        with self._module.stream(stream):
            yield
        current.wait_stream(stream)

    def reducing(self) -> AbstractContextManager[object]:
        return self._scope(self._reduce)

    def _scope(self, stream: torch.Stream) -> AbstractContextManager[object]:
        stream.wait_stream(self._module.current_stream())
        return self._module.stream(stream)

    def event(self) -> torch.Event | None:
        return self._module.current_stream().record_event()

    def compute_waits(self, event: torch.Event | None) -> None:
        if event is not None:
            self._module.current_stream().wait_event(event)

    def aside(self) -> AbstractContextManager[object]:
        if self._aside is None:
            self._aside = self._module.Stream(device=self._device)
        return self._module.stream(self._aside)

    def host_waits(self, event: Mark) -> None:
        event.synchronize()

    def mark(self) -> Mark:
        return self._module.current_stream().record_event(self._module.Event(enable_timing=True))

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) / 1e3  # it counts milliseconds


def streams_of(device: torch.device) -> Streams:
    """One set of streams per root: its groups share them."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device)


class SharedStreams:
    """One set of streams for several roots."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Streams] = {}

    def of(self, device: torch.device) -> Streams:
        if device not in self._streams:
            self._streams[device] = streams_of(device)
        return self._streams[device]
