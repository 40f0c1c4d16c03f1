"""Backward through what a backward with ``create_graph=True`` computed.

The gradients that crossed the ends of a call are then part of a graph themselves, which reads
the full parameters again. Whoever walks that graph meets one of them before anything inside, so
each gathers; if that walk makes a graph as well, so does each gradient of the next.

Nothing is freed on such a walk. It reaches into the middle of the forward's own graph, which
comes last and frees each group as it leaves it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fsdp2.compiling import untraced
from fsdp2.param_group import ParamGroup
from fsdp2.schedule import Schedule


def gather_behind(gradient: Tensor, schedule: Schedule, group: ParamGroup) -> None:
    """``gradient`` has reached an output or an input of one of the group's calls."""
    if gradient.requires_grad:
        gradient.register_hook(partial(_reached, schedule, group))


@untraced
def _reached(schedule: Schedule, group: ParamGroup, gradient: Tensor) -> None:
    schedule.begin_backward()
    schedule.make_full(group)
    group.step.ran = True  # all ranks will reduce it, whatever gets a gradient on which
    gather_behind(gradient, schedule, group)
