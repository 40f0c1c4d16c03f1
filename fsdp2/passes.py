"""Forward and backward under a root: while one lasts, no rank writes to the shards.

A shard may be written to between passes, once the group's gradients have been handed over, and
after the group was gathered by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import ProcessGroup

from fsdp2 import segments
from fsdp2.param_group import ParamGroup
from fsdp2.portion import Portion, new_layout_number
from fsdp2.truce import Truce


class Passes:
    """The pass under way, and its truces between ranks that read each other's shards."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self._groups = groups
        self._truces: list[Truce] = []
        self._layouts: dict[ProcessGroup, dict[int, int]] = {}
        """Of the last truces: by process group and rank."""

    def begin(self, is_backward: bool) -> None:
        """A backward inside a forward ends the forward's truce: a step may follow it there."""
        self.end()
        truces = self._new_truces(is_backward)
        for portion in self._portions():
            portion.gathers.truce = truces.get(portion.mesh.shard.group)
        self._truces = list(truces.values())

    def _new_truces(self, is_backward: bool) -> dict[ProcessGroup | None, Truce]:
        """One for each process group whose ranks read each other's shards."""
        wires = dict.fromkeys(portion.mesh.shard.group for portion in self._portions())
        met = {wire: segments.known(wire) for wire in wires if wire is not None}
        readable = {wire: each for wire, each in met.items() if each and each.reads_peers}
        layout = self._layout(is_backward) if readable else 0
        return {
            wire: Truce(each, is_backward, layout, self._layouts.setdefault(wire, {}))
            for wire, each in readable.items()
        }

    def _portions(self) -> Iterator[Portion]:
        for group in self._groups:
            yield from group.portions

    def _layout(self, is_backward: bool) -> int:
        """Another number whenever shards of this rank have moved, or are about to.

        In backward none will: it reads what forward read.
        """
        if not is_backward and not all(group.attributes.are_ours() for group in self._groups):
            return new_layout_number()
        return max(portion.layout_number for portion in self._portions())

    def end(self, has_failed: bool = False) -> None:
        """Return when whoever called forward or backward may write to any shard.

        Not so where it ``has_failed``: peers may have failed too and never say anything again.
        """
        for truce in self._truces:
            truce.end()
        if has_failed:
            return
        for truce in self._truces:
            truce.take_back()
        self._truces = []
        for group in self._groups:
            group.take_back()


def withdraw(group: ParamGroup) -> None:
    """The group's shards may be written to before the pass ends: its gathers ask peers again."""
    for portion in group.portions:
        portion.gathers.truce = None
