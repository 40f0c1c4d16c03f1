"""The names through which ``torch.distributed.pipelining`` ends the step of a sharded stage.

Its schedules run every backward of a stage with reductions off and call these once behind
the last micro-batch. They exist in PyTorch 2.11 to 2.13, on the object that
``fully_shard.state(module)`` returns.
"""

from __future__ import annotations

from typing import NamedTuple

from fsdp2.schedule import Schedule


class Context(NamedTuple):
    """What a schedule walks through, reducing group by group."""

    all_states: tuple[()] = ()
    """Nothing: one call ends the step of all groups."""


class StageEnd:
    """The end of a step, as a pipeline schedule asks for it."""

    schedule: Schedule | None

    @property
    def _state_ctx(self) -> Context:
        return Context()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what the backwards of this step have kept back, and wait for it."""
        if self.schedule is not None:
            self.schedule.end_backward()
