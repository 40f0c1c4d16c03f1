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
from typing import Any

from torch import nn

from fsdp2 import _torch
from fsdp2.sharded_param import ShardedParam

Named = dict[str, nn.Parameter]

InModule = tuple[dict[str, nn.Parameter | None], dict[str, Any], Named]
"""A module's table and namespace, and what goes there. Plain tuples: they are read all the time."""


class Attributes:
    """All places of one group's parameters."""

    def __init__(self, params: list[ShardedParam]) -> None:
        self._params = params
        self.remember()

    def are_ours(self) -> bool:
        """Whether every place holds the shard that we put there, over our own rows."""
        for get, name, shard in self._held:
            if get(name) is not shard:
                return False
        return all(map(is_, _torch.locals_of(self._shards), self._locals))

    def are_on_meta(self) -> bool:
        """Whether some place holds a parameter without memory."""
        found = (get(name) for get, name, _ in self._held)
        return any(shard is not None and shard.device.type == "meta" for shard in found)

    def remember(self) -> None:
        """What every place holds now is ours. There are no full parameters yet."""
        self._held = [
            (place.module._parameters.get, place.attribute, param.shard)
            for param in self._params
            for place in param.places
        ]
        self._shards = [param.shard for param in self._params]
        self._locals = [param.local for param in self._params]
        self._sharded = self._by_module({param: param.shard for param in self._params})
        self._full: list[InModule] = []

    def remember_full(self) -> None:
        """The full parameters have been made."""
        self._full = self._by_module({p: p.full for p in self._params if p.full is not None})

    def _by_module(self, found: dict[ShardedParam, nn.Parameter]) -> list[InModule]:
        named: dict[nn.Module, Named] = {}
        for param, tensor in found.items():
            for place in param.places:
                named.setdefault(place.module, {})[place.attribute] = tensor
        return [(m._parameters, m.__dict__, each) for m, each in named.items()]

    def attach(self) -> None:
        """The full parameters can be read: they become the attributes."""
        for _, namespace, full in self._full:
            namespace.update(full)

    def detach(self) -> None:
        """The full parameters are about to go."""
        for _, namespace, full in self._full:
            for name in full:
                namespace.pop(name, None)

    def show(self) -> None:
        """Forward begins: the table holds the full parameters too."""
        for table, _, full in self._full:
            table.update(full)

    def hide(self) -> None:
        """Forward is over."""
        for table, _, shards in self._sharded:
            table.update(shards)
