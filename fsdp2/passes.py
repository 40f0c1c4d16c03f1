"""Forward and backward under a root: while one lasts, no rank writes to the shards.

A shard may be written to between passes, once the group's gradients have been handed over, and
after the group was gathered by hand.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from fsdp2 import segments
from fsdp2.param_group import ParamGroup
from fsdp2.portion import new_layout_number
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
        found: dict[ProcessGroup | None, Truce | None] = {}
        for group in self._groups:
            for portion in group.portions:
                wire = portion.mesh.shard.group
                if wire not in found:
                    found[wire] = self._truce(wire, is_backward)
                portion.gathers.truce = found[wire]
        self._truces = [truce for truce in found.values() if truce is not None]

    def _truce(self, wire: ProcessGroup | None, is_backward: bool) -> Truce | None:
        met = None if wire is None else segments.known(wire)
        if wire is None or met is None or not met.reads_peers:
            return None
        return Truce(met, is_backward, self._layout(), self._layouts.setdefault(wire, {}))

    def _layout(self) -> int:
        """Another number whenever shards of this rank have moved, or are about to."""
        if not all(group.attributes.are_ours() for group in self._groups):
            return new_layout_number()
        return max(portion.layout_number for g in self._groups for portion in g.portions)

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
