"""The limit on groups in flight, found while training: measured, agreed on, applied.

While it is on, it listens to the schedule where a trace otherwise does, and passes on to the
trace what it hears; while it is off nothing is measured and nothing is sent. At the end of
each backward the figures of the step go to all ranks in one all-reduce of a few numbers per
mesh dimension, which is waited for at the end of the next backward, when it has long arrived.
So all ranks judge the same figures at the same point.

On an accelerator the host is ahead of what it measures: figures are a step older there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from fsdp2.agreement import Agreement
from fsdp2.limits import DEFAULT_LIMIT, NEAR, Auto, Figures, Rule
from fsdp2.measuring import Watch, memory_of
from fsdp2.order import Order
from fsdp2.param_group import ParamGroup
from fsdp2.streams import Streams
from fsdp2.tracing import Listener, Trace, waiting

_NO_BUDGET = -(1 << 62)
"""Stands for an excess where no budget was given: there is always room."""


class Limiter(Protocol):
    """Says how many groups of one root may be in flight, and is told of passes."""

    @property
    def limit(self) -> int: ...

    def listener(self, trace: Trace | None) -> Listener | None:
        """What the schedule tells of events, for the limiter's sake or the trace's."""
        ...

    def begin_forward(self, order: Order) -> None: ...

    def begin_backward(self, order: Order) -> None: ...

    def end_backward(self) -> int:
        """The limit from here on. Also called, by all ranks alike, where a backward raised."""
        ...

    def close(self) -> None:
        """End it, by all ranks alike: nothing stays under way."""
        ...


class Fixed:
    """A limit that was given."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def listener(self, trace: Trace | None) -> Listener | None:
        return trace

    def begin_forward(self, order: Order) -> None:
        pass

    def begin_backward(self, order: Order) -> None:
        pass

    def end_backward(self) -> int:
        return self.limit

    def close(self) -> None:
        pass


def limiter_of(limit: int | Auto, groups: list[ParamGroup], streams: Streams) -> Limiter:
    return Fixed(limit) if isinstance(limit, int) else Adapting(limit, groups, streams)


class Adapting:
    """Finds the limit."""

    def __init__(self, auto: Auto, groups: list[ParamGroup], streams: Streams) -> None:
        self._trace: Trace | None = None
        self._budget = auto.budget
        self._groups = groups
        self._travelling = {
            group.name
            for group in groups
            if any(portion.transport is not None for portion in group.portions)
        }
        self._rule = Rule(min(DEFAULT_LIMIT, _useful_limit(groups)))
        self._watch = Watch(streams)
        self._memory = memory_of(groups)
        self._has_gathered = False
        """Whether ranks have communicated since figures were sent."""
        mesh = groups[0].mesh
        axes = [axis.group for axis in (mesh.shard, mesh.replicas) if axis.group is not None]
        self._agreement = Agreement(axes, mesh.device, streams)

    @property
    def limit(self) -> int:
        return self._rule.limit

    def listener(self, trace: Trace | None) -> Listener:
        self._trace = trace
        return self

    # What the schedule tells of

    def add(self, name: str, group: str, detail: str = "") -> None:
        if name == "gather":
            self._has_gathered = self._has_gathered or group in self._travelling
        if self._budget is not None:
            self._memory.add(name, group)
        if self._trace is not None:
            self._trace.add(name, group, detail)

    def waiting(self, name: str, group: str) -> AbstractContextManager[object]:
        scope = waiting(self._trace, name, group)
        return self._watch.waiting(scope) if name == "wait" else scope

    def begin_forward(self, order: Order) -> None:
        self._watch.begin()
        self._watch.begin_pass(order)

    def begin_backward(self, order: Order) -> None:
        self._watch.begin_pass(order)

    def end_backward(self) -> int:
        self._watch.end()
        if not self._has_gathered:
            # Nothing to learn; and ranks need not take as many steps without communication.
            return self.limit
        if self._agreement.is_under_way:
            found = self._agreement.advance()
            if found is None:
                return self.limit
            self._judge(found)
        seen = self._watch.take()
        if seen is not None:
            self._agreement.start(self._figures(*seen))
            self._has_gathered = False
        return self.limit

    def close(self) -> None:
        while self._agreement.is_under_way:
            self._agreement.advance()

    # What is done about it

    def _figures(self, exposed: float, seconds: float) -> list[int]:
        """As whole numbers whose largest counts."""
        retries, excess = self._memory.take_retries(), self._take_excess()
        largest = max(group.full_nbytes for group in self._groups)
        return [round(exposed * 1e6), round(seconds * 1e6), retries, excess, largest]

    def _take_excess(self) -> int:
        """Bytes above what the budget allows since the last call."""
        if self._budget is None:
            return _NO_BUDGET
        return self._memory.take_peak_nbytes() - int(self._budget * NEAR)

    def _judge(self, numbers: list[int]) -> None:
        exposed, seconds, retries, excess, largest = numbers
        figures = Figures(
            exposed / 1e6, seconds / 1e6, retries, None if excess == _NO_BUDGET else excess, largest
        )
        change = self._rule.judge(figures, _useful_limit(self._groups))
        if change is not None:
            # What was measured since under the old limit says nothing about the new one.
            self._watch.forget()
            self._take_excess()
            self._memory.take_retries()
            if self._trace is not None:
                self._trace.change_limit(self._groups[0].name, change.after, str(change))


def _useful_limit(groups: list[ParamGroup]) -> int:
    """Groups that are freed behind their use; where all are kept, all may be gathered at once."""
    present = [group for group in groups if group.params]
    freed = [group for group in present if group.switches.reshard_after_forward]
    return max(len(freed or present), 1)
