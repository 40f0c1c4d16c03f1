"""Forward calls, and what autograd's order tells of them.

Autograd runs what is newest first: when it reaches something that a call made, all that was
made later has been run or never will be. Calls are numbered as they start and end, so when
backward reaches one call, the calls that started after it ended are over.

A call lives as long as the graph that its hooks are in. A forward whose results were thrown
away takes its calls with it, and nothing waits for their backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from weakref import ref


class Phase(Enum):
    """What the root is doing."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    FAILED = "failed"
    """The root's forward raised; only ``reset`` leads out."""


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


@dataclass
class Step:
    """What happened to a group since the last backward ended. The schedule's notes."""

    running: int = 0
    """Forward calls of its modules under way."""
    ran: bool = False
    """A forward with gradients has used it: all ranks will reduce it."""
    calls: OpenCalls = field(default_factory=OpenCalls)
    """Forward calls whose backward has not left the group's modules yet."""
    in_backward: bool = False
    """Its backward has begun and its full parameters were not freed since."""
    is_fresh: bool = False
    """Gathered from its shards by the forward under way, which has not come to it since."""
    is_settled: bool = False
    """Its gradients were handed in once in this backward."""

    def end_backward(self, is_last: bool) -> None:
        """``is_last`` is false while more backwards of the same step are to come."""
        self.in_backward = self.is_settled = False
        if is_last:
            self.ran = False
            self.calls = OpenCalls()
