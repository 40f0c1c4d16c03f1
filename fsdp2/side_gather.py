"""Parameters that travel in another form than they compute in, beside the full buffer.

A side gather has memory of its own and takes part in the gather of its portion: it fills in
what this rank has, travels, and makes the full parameters of what has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp2.collectives import GatherPlan, Pending, Transport
from fsdp2.layout import align
from fsdp2.quantising import WireFormat


class SideGather(Protocol):
    """One gather beside that of the full buffer."""

    @property
    def nbytes(self) -> int:
        """What it adds to memory while it is in flight."""
        ...

    @property
    def held_nbytes(self) -> int:
        """What it holds now."""
        ...

    def fill(self) -> None:
        """Allocate, and write what this rank contributes."""
        ...

    def start(self, channel: int) -> None:
        """Let it travel."""
        ...

    def complete(self) -> None:
        """Wait, and make the full parameters."""
        ...

    def free(self) -> None:
        """Give the memory back, from any state."""
        ...


class SideBlocks:
    """Bytes of all ranks for several tensors, with one gather for all of them.

    ``each_nbytes`` are the bytes that every rank contributes to each tensor.
    """

    def __init__(
        self,
        each_nbytes: Sequence[int],
        world_size: int,
        rank: int,
        transport: Transport | None,
        device: torch.device,
    ) -> None:
        starts: list[int] = []
        at = 0
        for nbytes in each_nbytes:
            starts.append(at)
            at = align(at + world_size * nbytes, 1)
        self.nbytes = at
        memory = torch.empty(at, dtype=torch.uint8, device=device)
        self.storage = memory.untyped_storage()
        self.blocks = [
            memory.narrow(0, start, world_size * nbytes).view(world_size, nbytes)
            for start, nbytes in zip(starts, each_nbytes)
        ]
        """Per tensor ``(world_size, nbytes)``."""
        self.own = [block[rank] for block in self.blocks]
        travelling = [block for block in self.blocks if block.numel()]
        self._plan: GatherPlan | None = None
        if transport is not None and travelling:
            self._plan = transport.plan_gather(travelling)
        self._pending: Pending | None = None

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)

    def start(self, channel: int) -> None:
        if self._plan is not None:
            self._pending = self._plan.start(channel)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def free(self) -> None:
        self.wait()  # peers' messages still land here
        self.storage.resize_(0)


class CodedParam(NamedTuple):
    """One parameter that travels quantised."""

    shard: Tensor
    """This rank's padded rows, flat."""
    block: Tensor
    """Where the padded rows of all ranks belong, ``(world_size, chunk_numel)``."""
    format: WireFormat


class CodedGather:
    """All quantised parameters of a portion.

    The own rows are decoded too: every rank computes with the same parameters.
    """

    def __init__(self, params: list[CodedParam], rank: int, transport: Transport) -> None:
        self._params = params
        each = [p.format.nbytes(p.shard.numel()) for p in params]
        first = params[0].block
        self._side = SideBlocks(each, first.shape[0], rank, transport, first.device)
        self._side.free()

    @property
    def nbytes(self) -> int:
        return self._side.nbytes

    @property
    def held_nbytes(self) -> int:
        return self._side.storage.nbytes()

    def fill(self) -> None:
        self._side.allocate()
        for param, own in zip(self._params, self._side.own):
            param.format.encode(param.shard.unsqueeze(0), own.unsqueeze(0))

    def start(self, channel: int) -> None:
        self._side.start(channel)

    def complete(self) -> None:
        self._side.wait()
        for param, block in zip(self._params, self._side.blocks):
            param.format.decode(block, param.block)
        self._side.free()

    def free(self) -> None:
        self._side.free()
