"""What travelled in a traced step: how long behind compute, how long waited for, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from fsdp2.events import Event


class Why(Enum):
    """What made the host wait for a transfer."""

    FIRST = "first of its pass: nothing computes before it"
    UNKNOWN = "no prefetch yet: the order is being recorded"
    LIMIT = "limit reached: see set_inflight_limit"
    SURPRISE = "not expected here: another order than last time, or asked for by hand"
    SLOW = "link slower than compute"
    LAST = "last of backward: nothing computes behind it"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class Transfer:
    """One gather or one reduction of one group. Times are seconds since the trace began."""

    kind: str
    """``gather`` or ``reduction``."""
    group: str
    start: float
    waited_from: float
    """When the host came for it."""
    end: float
    why: Why

    @property
    def hidden(self) -> float:
        """It was under way while the host did other things; it may have arrived before."""
        return self.waited_from - self.start

    @property
    def exposed(self) -> float:
        """The host was blocked."""
        return self.end - self.waited_from


NEGLIGIBLE = 50e-6
"""Seconds that a wait takes which finds everything there."""


def transfers_of(events: Sequence[Event], limit: int) -> list[Transfer]:
    """Pair each start with its wait. What was freed before anyone came for it is left out."""
    reader = _Reader(limit)
    for event in events:
        reader.read(event)
    return reader.found


@dataclass
class _Reader:
    """Reads events in their order."""

    limit: int
    found: list[Transfer] = field(default_factory=list)
    gathers: dict[str, tuple[Event, Why]] = field(default_factory=dict)
    reductions: dict[str, list[Event]] = field(default_factory=dict)
    summed: dict[str, list[int]] = field(default_factory=dict)
    """Reductions in ``found`` that have a second stage, not over yet."""
    in_flight: set[str] = field(default_factory=set)
    computing: str = ""
    """``forward`` or ``backward``: the pass; empty before its first group computes."""
    has_prefetched: set[str] = field(default_factory=set)
    """Passes in which a gather was issued ahead."""

    def read(self, event: Event) -> None:
        match event.name:
            case "gather":
                self.gathers[event.group] = event, self._why(event)
                self.in_flight.add(event.group)
            case "wait" if event.group in self.gathers:
                start, why = self.gathers.pop(event.group)
                self._add("gather", start, event, why)
            case "free" | "keep part":
                self.gathers.pop(event.group, None)
                self.in_flight.discard(event.group)
            case "forward" | "backward":
                self.computing = event.name
            case "limit":
                self.limit = event.limit
            case "reduce":
                self.reductions.setdefault(event.group, []).append(event)
            case "reduced" if self.summed.get(event.group):
                self._wait_again(self.summed[event.group].pop(0), event)
            case "summed" | "reduced" if self.reductions.get(event.group):
                is_last = not any(
                    len(g) > 0 for n, g in self.reductions.items() if n != event.group
                )
                why = Why.LAST if is_last else Why.SLOW
                start = self.reductions[event.group].pop(0)
                self._add("reduction", start, event, why)
                if event.name == "summed":
                    self.summed.setdefault(event.group, []).append(len(self.found) - 1)
                if is_last and not self.reductions[event.group]:
                    self.computing = ""

    def _wait_again(self, index: int, end: Event) -> None:
        """A second stage is part of the same reduction."""
        first = self.found[index]
        waited_from = end.at - end.seconds - first.exposed
        is_hidden = end.at - waited_from < NEGLIGIBLE
        why = Why.HIDDEN if is_hidden else Why.SLOW if first.why is Why.HIDDEN else first.why
        self.found[index] = replace(first, waited_from=waited_from, end=end.at, why=why)

    def _why(self, gather: Event) -> Why:
        """Should it be waited for, the reason."""
        if gather.detail in ("ahead", "as listed"):
            self.has_prefetched.add(self.computing)
            return Why.SLOW
        if not self.computing:
            return Why.FIRST
        if self.computing not in self.has_prefetched:
            return Why.UNKNOWN
        return Why.LIMIT if len(self.in_flight) >= self.limit else Why.SURPRISE

    def _add(self, kind: str, start: Event, end: Event, why: Why) -> None:
        if end.seconds < NEGLIGIBLE:
            why = Why.HIDDEN
        waited_from = end.at - end.seconds
        self.found.append(Transfer(kind, start.group, start.at, waited_from, end.at, why))
