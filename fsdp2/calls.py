"""Forward calls, and what autograd's order tells of them.

Autograd runs what is newest first: when it reaches something that a call made, all that was
made later has been run or never will be. Calls are numbered as they start and end, so when
backward reaches one call, the calls that started after it ended are over.

A call lives as long as the graph that its hooks are in. A forward whose results were thrown
away takes its calls with it, and nothing waits for their backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref


@dataclass(eq=False)
class Call:
    """One forward call of a module of a group."""

    started: int
    ended: int = -1
    passed_in: int = -1
    """The last backward that has left the call."""


class OpenCalls:
    """The calls of one group that backward has not left yet."""

    def __init__(self) -> None:
        self._calls: list[ref[Call]] = []

    def add(self, call: Call) -> None:
        self._calls.append(ref(call))

    def pass_newer(self, started: int) -> None:
        """Backward has left what started at ``started`` or later."""
        calls = ((reference, reference()) for reference in self._calls)
        self._calls = [r for r, call in calls if call is not None and call.started < started]

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._calls)
