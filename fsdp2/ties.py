"""Parameters that several ``fully_shard`` calls reach: joined into the outermost owner.

The second call to reach a tied weight finds that the first one owns it. It leaves it alone,
and a later call around both takes it over into its own group, which is in memory while
either module computes.
"""

from __future__ import annotations

from fsdp2.errors import UsageError
from fsdp2.find import Tie
from fsdp2.hooks import State
from fsdp2.param_group import ParamGroup
from fsdp2.sharded_param import ShardedParam


def find_joins(
    group: ParamGroup, ties: list[Tie], inner: list[State]
) -> dict[ShardedParam, list[Tie]]:
    """What ``inner`` calls share with each other or with this one, checked and not yet changed.

    ``ties`` are attributes of this call's own modules.
    """
    owned = {id(param) for each in inner for param in each.group.params}
    joining: dict[ShardedParam, list[Tie]] = {}
    for tie in [*ties, *(tie for each in inner for tie in each.unjoined)]:
        if id(tie.param) in owned:
            _check(tie, group)
            joining.setdefault(tie.param, []).append(tie)
    return joining


def join_ties(
    state: State, joining: dict[ShardedParam, list[Tie]], ties: list[Tie], inner: list[State]
) -> None:
    """Take over the parameters of ``joining``; ties to what lies outside wait for a later call."""
    names = {id(m): name for root in state.modules for name, m in root.named_modules()}
    owner_of = {id(param): each for each in inner for param in each.group.params}
    state.unjoined += [tie for tie in ties if tie.param not in joining]
    for param, found in joining.items():
        param.add_places([tie.place for tie in found])
        param.rename(names)
        state.group.take(param, owner_of[id(param)].group)
        state.joined.append(param)
        for each in inner:
            each.unjoined = [tie for tie in each.unjoined if tie.param is not param]


def _check(tie: Tie, group: ParamGroup) -> None:
    param, ours = tie.param, group.mesh
    if param.mesh.mesh != ours.mesh:
        raise UsageError(
            f"parameter '{param.name}' is already managed by another fully_shard call, over "
            f"{param.mesh.mesh}, and tied to '{tie.place.name}' below a module that is "
            f"sharded over {ours.mesh}: tied weights must be on one mesh; pass the same mesh to "
            "both calls, or untie them"
        )
