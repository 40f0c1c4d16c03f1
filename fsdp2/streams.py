"""Streams and events of a device type; nothing on CPU.

On an accelerator gathers and reductions each have a stream. A buffer is allocated on the
stream that fills it. Before such a stream touches memory it waits for what the compute
stream has been given so far: that covers the optimizer's writes to the shards, and the
last reader of any full buffer freed earlier, whose memory may be handed out again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


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

    def event(self) -> torch.Event | None:
        """Record an event on the current stream."""
        ...

    def compute_waits(self, event: torch.Event | None) -> None:
        """What compute is given from now on runs behind ``event``."""
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

    def event(self) -> torch.Event | None:
        return None

    def compute_waits(self, event: torch.Event | None) -> None:
        pass


class DeviceStreams:
    """An accelerator: one stream for gathers and one for reductions."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        # High priority: a gather that waits behind compute kernels delays the next compute.
        self._gather = self._module.Stream(device=device, priority=-1)
        self._reduce = self._module.Stream(device=device, priority=-1)

    def gathering(self) -> AbstractContextManager[object]:
        return self._scope(self._gather)

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


def streams_of(device: torch.device) -> Streams:
    """One set of streams per root: its groups share them."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(device)
