"""Runs: blocks of one kind at equal distances, so that one view reaches all of them.

A group's small parameters are many, and each operator call on the CPU costs more than the bytes
that it moves. Layers repeat shapes, so a group's blocks fall into few runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Neighbours in a list of blocks: ``length`` of them, from the one at ``first`` on."""

    first: int
    length: int
    steps: tuple[int, ...]
    """From one block to the next, in each memory that has them; zero for a single one."""


def runs_of(kinds: Sequence[Hashable], *offsets: Sequence[int]) -> list[Run]:
    """Cut a list of blocks into runs.

    ``kinds`` tells blocks apart; each of ``offsets`` says where they begin in one memory.
    """
    places = list(zip(*offsets, strict=True))
    runs: list[Run] = []
    for index, (kind, place) in enumerate(zip(kinds, places, strict=True)):
        if runs and kinds[index - 1] == kind:
            first, length, steps = runs[-1]
            step = tuple(here - before for here, before in zip(place, places[index - 1]))
            if length == 1 or step == steps:
                runs[-1] = Run(first, length + 1, step)
                continue
        runs.append(Run(index, 1, (0,) * len(offsets)))
    return runs
