"""Replicas of a shard start equal: checked at the first forward, or made so on request."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from fsdp2.checksums import checksum
from fsdp2.collectives import gather_values
from fsdp2.param_group import ParamGroup
from fsdp2.portion import Portion
from fsdp2.sharded_param import ShardedParam


@torch.no_grad()
def check_replicas(groups: Iterable[ParamGroup]) -> None:
    """Compare a checksum of every shard with the other replicas, one exchange per mesh.

    Raises:
        RuntimeError: On all ranks of the mesh, naming the first parameter that differs.
    """
    of_mesh: dict[object, list[ShardedParam]] = {}
    portions: dict[object, Portion] = {}
    for group in groups:
        for portion in group.portions:
            if portion.replicas is not None:
                of_mesh.setdefault(portion.mesh, []).extend(portion.params)
                portions[portion.mesh] = portion
    for key, params in of_mesh.items():
        _compare(portions[key], params)


def _compare(portion: Portion, params: list[ShardedParam]) -> None:
    mesh = portion.mesh
    assert mesh.replicas.group is not None
    device = mesh.device
    sums = torch.stack([checksum(param.local) for param in params]).tolist()
    everyone = gather_values(sums, [mesh.replicas.group], device)
    count = len(params)
    differs = (i for i in range(count) if len(set(everyone[i::count])) > 1)
    first = next(differs, count)
    if mesh.shard.group is not None:
        # Rows that differ may be on other ranks of the shard mesh.
        first = min(gather_values([first], [mesh.shard.group], device))
    if first < len(params):
        raise RuntimeError(
            f"parameter '{params[first].name}' has different values on different replicas of "
            f"{mesh.mesh}; start all ranks from one seed or one checkpoint, or call "
            "fsdp2.sync_replicas(model) before the first forward"
        )


@torch.no_grad()
def broadcast_first_replica(groups: Iterable[ParamGroup]) -> None:
    """Give every replica the shards of the first one, one broadcast per group and mesh."""
    for group in groups:
        group.refresh()
        for portion in group.portions:
            replicas = portion.mesh.replicas.group
            if replicas is None:
                continue
            shards = portion.shards.memory.to(portion.mesh.device)
            dist.broadcast(shards, group=replicas, group_src=0)
            if shards is not portion.shards.memory:
                portion.shards.memory.copy_(shards)
