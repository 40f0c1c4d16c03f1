"""Weights that were tied after they had been sharded, as libraries do behind loading.

``head.weight = embedding.weight`` puts one group's shard into the table of a module that
another group owns: found at the first forward, where the root takes the weight over.
"""

from __future__ import annotations

from fsdp2.errors import UsageError
from fsdp2.param_group import ParamGroup
from fsdp2.sharded_param import ShardedParam


def join_late_ties(root: ParamGroup, groups: list[ParamGroup]) -> None:
    """Let one parameter stand for what the user has tied since ``fully_shard``."""
    owned = {id(param.shard): (param, group) for group in groups for param in group.params}
    for group in groups:
        for lost in group.params:
            kept, owner = owned.get(id(lost.registered), (None, group))
            if kept is None or kept is lost:
                continue
            _check(lost, kept)
            group.drop(lost)
            kept.add_places(lost.places)
            if owner is not root and group is not owner:
                root.take(kept, owner)
                owned[id(kept.shard)] = kept, root


def _check(lost: ShardedParam, kept: ShardedParam) -> None:
    if lost.mesh.mesh != kept.mesh.mesh or lost.spec.shape != kept.spec.shape:
        raise UsageError(
            f"parameter '{lost.name}', of shape {tuple(lost.spec.shape)} over {lost.mesh.mesh}, "
            f"was tied after fully_shard to '{kept.name}', of shape {tuple(kept.spec.shape)} over "
            f"{kept.mesh.mesh}: tied weights must agree in both; tie them before fully_shard"
        )
