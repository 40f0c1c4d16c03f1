"""Parameters that several ``fully_shard`` calls reach: joined into the outermost owner.

The second call to reach a tied weight finds that the first one owns it. It leaves it alone,
and a later call around both takes it over into its own group, which is in memory while
either module computes.
"""

from __future__ import annotations

from fsdp2.errors import UsageError
from fsdp2.find import Tie
from fsdp2.hooks import State
from fsdp2.sharded_param import ShardedParam


def join_ties(state: State, ties: list[Tie], inner: list[State]) -> None:
    """Take over what ``inner`` calls share with each other or with this one.

    ``ties`` are attributes of this call's own modules. What lies outside stays unjoined.
    """
    names = {id(m): name for root in state.modules for name, m in root.named_modules()}
    owner_of = {id(param): each for each in inner for param in each.group.params}
    waiting: dict[ShardedParam, list[Tie]] = {}
    for tie in [*ties, *(tie for each in inner for tie in each.unjoined)]:
        waiting.setdefault(tie.param, []).append(tie)
    for param, found in waiting.items():
        owner = owner_of.get(id(param))
        if owner is None:
            state.unjoined += [tie for tie in found if tie in ties]
            continue
        _check(param, found, state)
        param.add_places([tie.place for tie in found])
        param.rename(names)
        state.group.take(param, owner.group)
        state.joined.append(param)
        for each in inner:
            each.unjoined = [tie for tie in each.unjoined if tie.param is not param]


def _check(param: ShardedParam, found: list[Tie], state: State) -> None:
    ours = state.group.mesh
    if param.mesh.mesh != ours.mesh:
        raise UsageError(
            f"parameter '{param.name}' is already managed by another fully_shard call, over "
            f"{param.mesh.mesh}, and tied to '{found[0].place.name}' below a module that is "
            f"sharded over {ours.mesh}: tied weights must be on one mesh; pass the same mesh to "
            "both calls, or untie them"
        )
