"""Which group is used after which: recorded, predicted, nested, compared between ranks."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2.collectives import gather_values
from fsdp2.param_group import ParamGroup


class Order:
    """The order in which groups are used in one direction: recorded, and predicted from it."""

    def __init__(self) -> None:
        self._recorded: list[ParamGroup] = []
        self._current: list[ParamGroup] = []
        self._next = 0
        self._matches = False

    def begin(self, prediction: list[ParamGroup] | None = None) -> None:
        """Start a pass. Without a ``prediction`` the last pass is it."""
        self._recorded = self._current if prediction is None else prediction
        self._current = []
        self._next = 0
        self._matches = bool(self._recorded)

    def advance(self, group: ParamGroup) -> bool:
        """``group`` is used now. Whether that leaves the prediction: then nothing more is."""
        self._current.append(group)
        if not self._matches:
            return False
        at = self._next
        self._matches = at < len(self._recorded) and self._recorded[at] is group
        self._next = at + 1
        return not self._matches

    def upcoming(self) -> Iterator[ParamGroup]:
        if self._matches:
            for at in range(self._next, len(self._recorded)):
                yield self._recorded[at]

    @property
    def is_predicted(self) -> bool:
        return self._matches

    @property
    def used(self) -> list[ParamGroup]:
        return self._current


def enclosing(groups: list[ParamGroup]) -> dict[ParamGroup, set[ParamGroup]]:
    """For each group the groups whose modules lie around its own."""
    around: dict[ParamGroup, set[ParamGroup]] = {group: set() for group in groups}
    owner = {id(module): group for group in groups for module in group.modules}
    for outer in groups:
        for top in outer.modules:
            for module in top.modules():
                inner = owner.get(id(module), outer)
                if inner is not outer:
                    around[inner].add(outer)
    return around


def check_same_order(groups: list[ParamGroup], channel: int, phase: str) -> None:
    """In the first pass each way, compare with all ranks what each is about to gather.

    Ranks that disagree would wait for each other, or read each other's layers.
    """
    mesh = groups[0].mesh
    axes = [axis.group for axis in (mesh.shard, mesh.replicas) if axis.group is not None]
    channels = gather_values([channel], axes, mesh.device)
    if len(set(channels)) > 1:
        names = [*(f"'{group.name}'" for group in groups), f"the end of {phase}"]
        found = "; ".join(f"rank {rank}: {names[c]}" for rank, c in enumerate(channels))
        raise RuntimeError(
            f"ranks call the fully_shard modules in different orders. Next comes {found}. "
            "Every rank must call the same modules in the same order"
        )
