"""What a sharded model holds on this rank right now, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from fsdp2 import _torch, segments
from fsdp2.api import _states_of
from fsdp2.hooks import State
from fsdp2.param_group import ParamGroup


@dataclass(frozen=True)
class Memory:
    """Bytes that are alive on this rank. ``str()`` of it is a table.

    Between steps, with AdamW in float32 and after ``zero_grad``, they are 12 bytes for each
    parameter that this rank owns, padding included; gradients are 4 more. During a step come
    the groups in flight.
    """

    parameters: int
    """Shards, and parameters that are not sharded."""
    gradients: int
    """Of the same; and sums of gradients that wait for the other replicas."""
    optimizer: int
    buffers: int
    """Those of the modules."""
    full_parameters: int
    """Of groups that are gathered or kept in part, what they are decoded from, and copies of
    shards in another dtype that peers read."""
    full_gradients: int
    """Of groups in backward, and those that are kept back until a later one."""
    staging: int
    """Gradients under way to the shards, blocks kept for the next ones, and segments that ranks
    of this host share. Messages that are arriving during a backward are not counted."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        rows = [(field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self)]
        return "\n".join(
            f"{n / 1e6:12.3f} MB  {name}" for name, n in [*rows, ("total", self.total)]
        )


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Count what is alive on this rank: for ``model``, and for ``optimizer`` if it is given.

    Activations are not counted. Communicates nothing, and may be called at any time, also by
    hooks in the middle of a step.

    Raises:
        UsageError: Nothing below ``model`` is sharded.
    """
    states = _states_of(model, "memory")
    groups = [state.group for state in states]
    census = _Census()
    states_of_optimizer = optimizer.state.values() if optimizer is not None else ()
    return Memory(
        parameters=_parameters(model, groups, census),
        gradients=_gradients(model, groups, census),
        optimizer=census.add(v for entry in states_of_optimizer for v in entry.values()),
        buffers=census.add(model.buffers()),
        full_parameters=sum(portion.held_nbytes for g in groups for portion in g.portions),
        full_gradients=_full_gradients(groups, census),
        staging=_staging(states, census),
    )


class _Census:
    """Counts the memory behind tensors, each storage once."""

    def __init__(self) -> None:
        self._counted: set[int] = set()

    def add(self, tensors: Iterable[object]) -> int:
        """What was not counted before, in bytes."""
        found = 0
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            local = tensor.to_local() if isinstance(tensor, _torch.DTensor) else tensor
            for part in _with_memory(local):
                storage = part.untyped_storage()
                if storage.data_ptr() not in self._counted and storage.nbytes():
                    self._counted.add(storage.data_ptr())
                    found += storage.nbytes()
        return found


def _with_memory(tensor: Tensor) -> list[Tensor]:
    """Itself, or what a subclass wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _with_memory(getattr(tensor, name))]


def _parameters(model: nn.Module, groups: list[ParamGroup], census: _Census) -> int:
    """Shards lie in the buffers of their groups, unless they have a form of their own."""
    owned = [param for group in groups for param in group.params]
    others = {id(p): p for p in model.parameters()}
    for param in owned:
        others.pop(id(param.shard), None)
    found = census.add(portion.shards.memory for group in groups for portion in group.portions)
    found += census.add(param.local for param in owned if param.has_own_form)
    return found + census.add(others.values())


def _gradients(model: nn.Module, groups: list[ParamGroup], census: _Census) -> int:
    sums = [total for g in groups for portion in g.portions for total in portion.partial.sums]
    return census.add(param.grad for param in model.parameters()) + census.add(sums)


def _full_gradients(groups: list[ParamGroup], census: _Census) -> int:
    params = [param for group in groups for param in group.params]
    found = census.add(param.full.grad for param in params if param.full is not None)
    return found + census.add(param.accumulated for param in params)


def _staging(states: list[State], census: _Census) -> int:
    schedules = {id(s.schedule): s.schedule for s in states if s.schedule is not None}
    found = sum(census.add(schedule.reductions.tensors()) for schedule in schedules.values())
    meshes = {portion.mesh for state in states for portion in state.group.portions}
    wires = {mesh.shard.group for mesh in meshes if mesh.shard.group is not None}
    return found + sum(segments.held_nbytes(group) for group in wires)
