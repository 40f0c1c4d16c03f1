"""Random numbers drawn into shards on the CPU.

DTensor has generators for accelerators that know which rows a rank holds. On the CPU it draws
into each rank's rows from the default generator, which gives equal rows to ranks with equal
seeds. Here the whole parameter is drawn on every rank and each keeps its rows: as many numbers
as without sharding, from the same generator, whatever the number of ranks.

That holds for draws into shards themselves. ``trunc_normal_`` draws again into a tensor of its
own, a plain DTensor, where PyTorch warns; ``materialize`` runs such initialisers on whole ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.cutting import part_of

_aten = torch.ops.aten

FILLS = frozenset(
    {
        _aten.uniform_.default,
        _aten.normal_.default,
        _aten.random_.default,
        _aten.random_.to,
        getattr(_aten.random_, "from"),
        _aten.bernoulli_.float,
        _aten.exponential_.default,
        _aten.log_normal_.default,
        _aten.cauchy_.default,
        _aten.geometric_.default,
    }
)
"""Operators that fill a tensor with random numbers and read nothing of it."""


def can_draw(fill: Any, shard: Tensor) -> bool:
    return fill in FILLS and _torch.local_of(shard).device.type == "cpu"


def draw(
    fill: _torch.OpOverload,
    shard: _torch.DTensor,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Fill the shard of parameter ``name`` as the whole parameter would be filled.

    For a moment it takes the memory of the whole parameter.
    """
    whole = torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
    fill(whole, *args, **kwargs)
    _torch.local_of(shard).copy_(part_of(whole, _torch.spec_of(shard), name))
    return shard
