"""The gathers of one portion, one after the other: started, waited for, taken back."""

from __future__ import annotations

from fsdp2.collectives import GatherPlan, Lent, Pending
from fsdp2.peer_gather import PeerGather, TruceRead
from fsdp2.truce import Truce


class Gathers:
    """What is under way, and what peers may still read of it."""

    def __init__(self) -> None:
        self.truce: Truce | None = None
        """Of the pass under way, as long as nobody may write to the shards."""
        self._plan: GatherPlan | None = None
        """Of the last one, as long as it holds staging."""
        self._pending: Pending | None = None
        self._lent: Lent | None = None

    @property
    def staging_nbytes(self) -> int:
        return 0 if self._plan is None else self._plan.staging_nbytes

    def start(self, plan: GatherPlan | None, channel: int) -> None:
        if plan is None:
            return
        self._plan = plan
        if self.truce is not None and isinstance(plan, PeerGather):
            self._pending = plan.read_during(self.truce)
        self._pending = self._pending or plan.start(channel)

    def wait(self) -> None:
        """What is under way has arrived. Peers may go on reading."""
        if self._pending is not None:
            self._pending.wait()
            self._lent = self._pending if isinstance(self._pending, Lent) else None
            self._pending = None
            self._plan = self._plan if self._lent is not None else None

    def take_back(self) -> None:
        """Return when the shards may be written to again, as far as these gathers go."""
        if self._lent is not None:
            self._lent.take_back()
            self._lent = self._plan = None

    def end(self) -> None:
        """Nothing of the last one is under way or lent any more."""
        if isinstance(self._pending, TruceRead):
            self._pending = self._plan = None  # nobody came for it, and nobody waits for us
        self.wait()
        self.take_back()
