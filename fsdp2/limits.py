"""How many groups may be in flight: given, or found while training. Arithmetic only, no torch.

The rule, over figures that all ranks agreed on:

* The allocator retried, or memory is near the budget: lower, and never come back to that limit.
* A raise must prove itself: where it did not shorten what was exposed it is taken back, and not
  tried again for a while.
* Gathers were waited for that a higher limit could hide: raise by one, if memory allows.

What is exposed is noisy, so raises look at the median of several steps; memory is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

DEFAULT_LIMIT = 2
"""One group computing, one arriving."""
NEAR = 0.95
"""The share of a budget that may be used."""

_WINDOW = 5
"""Steps that a raise is judged by."""
_TOLERATED = 0.02
"""The share of a step that may be exposed before a raise is tried."""
_GAIN = 0.1
"""The share of what was exposed that a raise must hide."""
_REST = 100
"""Steps before a raise that was taken back is tried again."""


@dataclass(frozen=True)
class Auto:
    """The limit is to be found."""

    budget: int | None = None
    """Bytes per rank."""


@dataclass(frozen=True)
class Figures:
    """What one step showed, the worst of all ranks."""

    exposed: float
    """Seconds that gathers were waited for which a higher limit could have issued earlier."""
    seconds: float
    """From the start of forward to the end of backward."""
    retries: int = 0
    """How often the allocator had to free its cache and try again."""
    excess_nbytes: int | None = None
    """How much more was held than the budget allows, negative where there is room."""
    group_nbytes: int = 0
    """What one more group in flight may take."""


class Change(NamedTuple):
    """A new limit, and why. ``str`` is ``2 -> 3: 8.1 ms of 120.0 ms exposed``."""

    before: int
    after: int
    reason: str

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}: {self.reason}"


@dataclass
class Rule:
    """The limit of one root, and what is known about others."""

    limit: int = DEFAULT_LIMIT
    _ceiling: int | None = None
    """The highest limit that memory allows, once one was too high."""
    _before: float | None = None
    """What was exposed with one group less, while a raise is on trial."""
    _rest: int = 0
    """Steps until a raise may be tried."""
    _window: list[Figures] = field(default_factory=list)

    def judge(self, seen: Figures, highest: int) -> Change | None:
        """Change the limit after one step, or leave it. Above ``highest`` none is of use."""
        if seen.retries:
            times = "once" if seen.retries == 1 else f"{seen.retries} times"
            return self._fall(self.limit - 1, f"the allocator retried {times}")
        if seen.excess_nbytes is not None and seen.excess_nbytes > 0:
            groups = -(-seen.excess_nbytes // max(seen.group_nbytes, 1))
            reason = f"{seen.excess_nbytes / 1e6:.1f} MB above {NEAR:.0%} of the budget"
            return self._fall(self.limit - groups, reason)
        self._rest = max(self._rest - 1, 0)
        self._window.append(seen)
        return self._weigh(highest) if len(self._window) == _WINDOW else None

    def _weigh(self, highest: int) -> Change | None:
        """Is there a gain from the last raise, and a reason for the next?"""
        steps, self._window = self._window, []
        exposed = median(step.exposed for step in steps)
        seconds = median(step.seconds for step in steps)
        before, self._before = self._before, None
        if before is not None and exposed > before * (1 - _GAIN):
            self._rest = _REST
            reason = f"{exposed * 1e3:.1f} ms exposed, {before * 1e3:.1f} ms with one group less"
            return self._set(self.limit - 1, reason)
        is_wanted = exposed > seconds * _TOLERATED and not self._rest
        if not is_wanted or self.limit >= highest or not all(map(self._fits_one_more, steps)):
            return None
        self._before = exposed
        reason = f"{exposed * 1e3:.1f} ms of {seconds * 1e3:.1f} ms exposed"
        return self._set(self.limit + 1, reason)

    def _fits_one_more(self, seen: Figures) -> bool:
        is_below = self._ceiling is None or self.limit < self._ceiling
        has_room = seen.excess_nbytes is None or seen.excess_nbytes + seen.group_nbytes <= 0
        return is_below and has_room

    def _fall(self, limit: int, reason: str) -> Change | None:
        """Memory does not allow the present limit, now or later."""
        self._ceiling = max(limit, 1)
        self._before = None
        return self._set(self._ceiling, reason)

    def _set(self, limit: int, reason: str) -> Change | None:
        before, self.limit = self.limit, limit
        self._window.clear()
        return Change(before, limit, reason) if limit != before else None
