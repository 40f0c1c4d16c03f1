"""What the modules of a group see under their parameters' names.

==================  ==================================  ================================
when                the module's table of parameters    the attribute
==================  ==================================  ================================
sharded             the shard                           the shard
full, outside       the shard                           the full parameter
full, in forward    the full parameter                  the full parameter
==================  ==================================  ================================

The table is what ``parameters()`` and ``state_dict()`` read, so outside forward they give
the shards whatever is gathered. An attribute in the module's ``__dict__`` hides the table.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

from torch import nn

from fsdp2 import _torch
from fsdp2.sharded_param import ShardedParam


class Entry(NamedTuple):
    """One place of one parameter."""

    table: dict[str, nn.Parameter | None]
    namespace: dict[str, Any]
    name: str
    param: ShardedParam


class Attributes:
    """All places of one group's parameters."""

    def __init__(self, params: list[ShardedParam]) -> None:
        self._entries = [
            Entry(place.module._parameters, place.module.__dict__, place.attribute, param)
            for param in params
            for place in param.places
        ]
        self._places = [(entry.table, entry.name) for entry in self._entries]
        self.remember()

    def are_ours(self) -> bool:
        """Whether every place holds the shard that we put there, over our own rows."""
        found = [table.get(name) for table, name in self._places]
        if not all(map(is_, found, self._shards)):
            return False
        return all(map(is_, _torch.locals_of(self._shards), self._locals))

    def are_on_meta(self) -> bool:
        """Whether some place holds a parameter without memory."""
        found = (table.get(name) for table, name in self._places)
        return any(shard is not None and shard.device.type == "meta" for shard in found)

    def remember(self) -> None:
        """What every place holds now is ours."""
        self._shards = [entry.param.shard for entry in self._entries]
        self._locals = [entry.param.local for entry in self._entries]

    def attach(self) -> None:
        """The full parameters can be read: they become the attributes."""
        for _, namespace, name, param in self._entries:
            namespace[name] = param.full

    def detach(self) -> None:
        """The full parameters are about to go."""
        for _, namespace, name, _ in self._entries:
            namespace.pop(name, None)

    def show(self) -> None:
        """Forward begins: the table holds the full parameters too."""
        for table, _, name, param in self._entries:
            table[name] = param.full

    def hide(self) -> None:
        """Forward is over."""
        for table, _, name, param in self._entries:
            table[name] = param.shard
