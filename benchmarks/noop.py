"""A process group whose collectives complete at once and move nothing.

One process can be rank 0 of any number of ranks with it, and what is left of a
sharded step is the engine's own work. Outputs keep whatever they held before.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

# All the names where a release has renamed one, so that an engine may call either.
_COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
)


class DoneWork(dist.Work):
    """The handle of a collective that has completed."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


_DONE = DoneWork()


class NoopGroup(dist.ProcessGroup):
    """Rank ``rank`` of ``size`` ranks, of which the others need not exist."""

    def __init__(self, store: object, rank: int, size: int, timeout: timedelta) -> None:
        # A group written in Python has no C++ backends and is made from two
        # numbers, a constructor that the type stubs leave out.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own_name = ""

    # PyTorch's C++ class looks for a group's name in its backends, and there are none.
    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    @property
    def group_name(self) -> Any:
        return self._own_name

    def getGroupName(self) -> str:  # noqa: N802  (C++ asks for it by this name)
        return self._own_name

    def getBackendName(self) -> str:  # noqa: N802
        return "noop"


def _complete_at_once(group: NoopGroup, *arguments: Any, **options: Any) -> DoneWork:
    return _DONE


for _name in _COLLECTIVES:
    setattr(NoopGroup, _name, _complete_at_once)


def start(world_size: int) -> None:
    """Make this process rank 0 of ``world_size`` ranks in the default process group."""
    if not hasattr(dist.Backend, "NOOP"):
        dist.Backend.register_backend("noop", NoopGroup, devices=["cpu", "cuda"])
    dist.init_process_group("noop", store=dist.HashStore(), rank=0, world_size=world_size)
