"""One thing that happened to one group in a traced step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One thing that happened to one group."""

    name: str
    """``gather``, ``wait``, ``forward``, ``free``, ``keep part``, ``backward``, ``reduce``,
    ``summed``, ``reduced`` or ``limit``."""
    group: str
    detail: str
    at: float
    """Seconds since the trace was switched on."""
    seconds: float = 0.0
    """How long the host was blocked."""
    limit: int = 0
    """Of ``limit``: how many groups may be in flight from here on."""

    def __str__(self) -> str:
        return f"{self.name:<8} {self.group}" + (f" ({self.detail})" if self.detail else "")
