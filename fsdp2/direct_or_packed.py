"""Whether several blocks are gathered in place by one grouped call, or packed by one plain call.

The direct path saves two copies, but a backend may run a group of collectives slower than one
of all their bytes. Nobody can know without trying, so the first gather of such blocks tries
both, and goes direct where that reaches 95 % of the packed one's bandwidth.

The collectives alone are timed, without the copies of the packed path. These cost little time
where the wire is slow and much where it is fast, but always memory bandwidth, which the kernels
computed meanwhile need too: for them, 5 % of the wire's is what the direct path may cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch

ENOUGH = 0.95
"""Of the packed path's bandwidth, for the direct path to be taken."""

_WARMUPS = 3
_ROUNDS = 9


@dataclass(frozen=True)
class Choice:
    """What both ways took on the slowest rank, in seconds. ``str()`` of it says which and why."""

    direct: float
    packed: float

    @property
    def bandwidth(self) -> float:
        """Of the direct path, as a fraction of the packed one's."""
        return self.packed / self.direct

    @property
    def is_direct(self) -> bool:
        return self.bandwidth >= ENOUGH

    def __str__(self) -> str:
        only = "" if self.is_direct else "only "
        return (
            f"a grouped gather reached {only}{self.bandwidth:.3f} of a packed one's bandwidth, "
            f"where {ENOUGH} is enough"
        )


_choices: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Choice]] = WeakKeyDictionary()


def choose_path(group: dist.ProcessGroup, blocks: Sequence[Tensor]) -> Choice:
    """Try both ways of gathering ``blocks``, each ``(world_size, n)``, between the ranks.

    Param groups of the same sizes share one answer. The first call for ``group`` and these
    sizes communicates: all of its ranks make it, and agree. It takes as much memory again for
    a moment, and what the blocks hold is lost.
    """
    known = _choices.setdefault(group, {})
    sizes = tuple(block.shape[1] * block.itemsize for block in blocks)
    if sizes not in known:
        known[sizes] = Choice(*slowest(group, measure(group, blocks), blocks[0].device))
    return known[sizes]


def measure(group: dist.ProcessGroup, blocks: Sequence[Tensor]) -> list[float]:
    """Seconds of a gather of ``blocks`` in one grouped call, and as one packed block."""
    rank = group.rank()
    outs, owns = [block.view(-1) for block in blocks], [block[rank] for block in blocks]
    nbytes = sum(own.nbytes for own in owns)
    packed = torch.empty((group.size(), nbytes), dtype=torch.uint8, device=blocks[0].device)
    return median_seconds(
        [
            lambda: _torch.all_gather_grouped(group, outs, owns).wait(),
            lambda: _torch.all_gather_into(group, packed.view(-1), packed[rank]).wait(),
        ]
    )


def median_seconds(ways: Sequence[Callable[[], object]]) -> list[float]:
    """What each of ``ways`` takes on the current CUDA stream; they take turns.

    All is enqueued before the first result is looked at, so that ranks stay in step by their
    collectives alone and the host's own time hides behind that of the device.
    """
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in ways]
    for _ in range(_WARMUPS + _ROUNDS):
        for way, own in zip(ways, marks):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            way()
            end.record()
            own.append((start, end))
    torch.cuda.current_stream().synchronize()
    return [median(start.elapsed_time(end) for start, end in own[_WARMUPS:]) / 1e3 for own in marks]


def slowest(
    group: dist.ProcessGroup, seconds: Sequence[float], device: torch.device
) -> list[float]:
    """For each entry the largest of all ranks, which therefore conclude alike."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()
