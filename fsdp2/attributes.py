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

    def are_ours(self) -> bool:
        """Whether every place holds the shard that we put there, over our own rows."""
        for table, _, name, param in self._entries:
            if table.get(name) is not param.shard:
                return False
            if _torch.local_of(param.shard) is not param.local:
                return False
        return True

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
