"""What one step did, as a list of events that tests pin and people read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(frozen=True)
class Event:
    """One thing that happened to one group."""

    name: str
    """``gather``, ``wait``, ``forward``, ``free``, ``keep part``, ``backward``, ``reduce``,
    ``summed`` or ``reduced``."""
    group: str
    detail: str
    at: float
    """Seconds since the trace was switched on."""
    seconds: float = 0.0
    """How long the host was blocked."""

    def __str__(self) -> str:
        return f"{self.name:<8} {self.group}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Trace:
    """The events of one root, oldest first. ``str(trace)`` is one line each, without times."""

    events: list[Event] = field(default_factory=list)
    _start: float = field(default_factory=perf_counter)

    def add(self, name: str, group: str, detail: str = "", seconds: float = 0.0) -> None:
        self.events.append(Event(name, group, detail, perf_counter() - self._start, seconds))

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

    def clear(self) -> None:
        """Start over, for the next step."""
        self.events.clear()
        self._start = perf_counter()

    def __str__(self) -> str:
        return "\n".join(str(event) for event in self.events)


_NO_TRACE = nullcontext()


def waiting(trace: Trace | None, name: str, group: str) -> AbstractContextManager[object]:
    """The scope of a wait; nothing without a trace."""
    return _NO_TRACE if trace is None else trace.waiting(name, group)
