"""What one step did, as a list of events that tests pin and people read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from time import perf_counter
from typing import Protocol

from fsdp2 import trace_views
from fsdp2.events import Event
from fsdp2.transfers import Transfer, transfers_of

__all__ = ["Event", "Listener", "Trace", "waiting"]


class Listener(Protocol):
    """What is told of a step as it runs."""

    def add(self, name: str, group: str, detail: str = "") -> None:
        """Something happened to a group; ``Event.name`` lists what."""
        ...

    def waiting(self, name: str, group: str) -> AbstractContextManager[object]:
        """The scope of a wait for communication."""
        ...


@dataclass
class Trace:
    """The events of one root, oldest first. ``str(trace)`` is one line each, without times."""

    events: list[Event] = field(default_factory=list)
    limit: int = 2
    """Groups in flight that were allowed when it began."""
    _start: float = field(default_factory=perf_counter)

    def add(self, name: str, group: str, detail: str = "", seconds: float = 0.0) -> None:
        self.events.append(Event(name, group, detail, perf_counter() - self._start, seconds))

    def change_limit(self, group: str, limit: int, reason: str) -> None:
        """From now on ``limit`` groups are allowed in flight."""
        at = perf_counter() - self._start
        self.events.append(Event("limit", group, reason, at, limit=limit))

    @contextmanager
    def waiting(self, name: str, group: str) -> Iterator[None]:
        """The host is blocked on communication inside."""
        start = perf_counter()
        yield
        self.add(name, group, seconds=perf_counter() - start)

    @property
    def exposed_seconds(self) -> float:
        """Time that this rank spent blocked on communication, not hidden behind compute."""
        return sum(event.seconds for event in self.events)

    @property
    def transfers(self) -> list[Transfer]:
        """Every gather and reduction that was waited for, in the order of their ends."""
        return transfers_of(self.events, self.limit)

    def report(self) -> str:
        """A table: for each group what was hidden, what was exposed, and why."""
        return trace_views.table(self.transfers, self.events)

    def write_perfetto(self, path: str | PathLike[str]) -> None:
        """Write JSON that https://ui.perfetto.dev and ``chrome://tracing`` open."""
        trace_views.write_perfetto(path, self.events, self.transfers)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw wire and host over time, to a file of any format that matplotlib knows.

        Raises:
            ModuleNotFoundError: matplotlib is not installed: ``pip install 'fsdp2[plot]'``.
        """
        trace_views.plot(path, self.events, self.transfers)

    def clear(self) -> None:
        """Start over, for the next step."""
        self.limit = next((e.limit for e in reversed(self.events) if e.limit), self.limit)
        self.events.clear()
        self._start = perf_counter()

    def __str__(self) -> str:
        return "\n".join(str(event) for event in self.events)


_NO_TRACE = nullcontext()


def waiting(listener: Listener | None, name: str, group: str) -> AbstractContextManager[object]:
    """The scope of a wait; nothing where nobody listens."""
    return _NO_TRACE if listener is None else listener.waiting(name, group)
