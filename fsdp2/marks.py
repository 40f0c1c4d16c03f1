"""What users did to the shards of one group: wrote to them, froze or thawed them.

The full parameters follow at each gather, so that autograd treats them as it would have treated
the parameters themselves.
"""

from __future__ import annotations

import torch

from fsdp2 import _torch
from fsdp2.sharded_param import ShardedParam

Seen = tuple[list[int], list[bool]]
"""Of each shard its version counter, and whether it is trainable."""


class Marks:
    """The shards' version counters and whether they are trainable, as of the last gather."""

    def __init__(self, params: list[ShardedParam]) -> None:
        self._params = params
        self._shards = [param.shard for param in params]
        self._versions: list[int] = []
        self._are_trainable: list[bool] = []

    def begin(self) -> None:
        """The full parameters have just been made."""
        self._versions, _ = self.look()
        self._are_trainable = []

    def look(self) -> Seen:
        return _torch.marks_of(self._shards)

    def were_written(self, seen: Seen) -> bool:
        """Whether a shard was written to after it had been gathered."""
        return seen[0] != self._versions

    @property
    def trainable(self) -> tuple[int, ...]:
        return tuple(i for i, flag in enumerate(self._are_trainable) if flag)

    def follow(self, seen: Seen, is_gathered: bool) -> bool:
        """Mark the full parameters like the shards. True if others are trainable than before.

        ``is_gathered`` says that their values come from the shards now.
        """
        versions, flags = seen
        if is_gathered and self.were_written(seen):
            self._count_writes(versions)
        if flags == self._are_trainable:
            return False
        for param, flag in zip(self._params, flags):
            assert param.full is not None
            if param.full.requires_grad != flag:
                param.full.requires_grad_(flag)
        self._are_trainable = flags
        return True

    def _count_writes(self, versions: list[int]) -> None:
        """A shard that was written to counts as an in-place change of the full parameter.

        Autograd then refuses a backward through its old value.
        """
        changed = [
            param.full
            for param, now, before in zip(self._params, versions, self._versions)
            if now != before and param.full is not None
        ]
        torch.autograd.graph.increment_version(changed)
        self._versions = versions
