"""One thing that happened to one group in a traced step."""

from __future__ import annotations

from dataclasses import dataclass


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
