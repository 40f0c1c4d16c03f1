"""A full state dict of one rank, dealt to all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.checkpoint.meeting import Meeting
from fsdp2.checkpoint.model_state import Entry, detached, entries, is_tensor, materialised, replace
from fsdp2.errors import CheckpointError
from fsdp2.gathering import own_part, scatter, wire_device
from fsdp2.hooks import states_below


def load_full(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load the full state dict that the first rank has, parameters and buffers.

    Small tensors travel together, up to the size of the largest, larger ones by themselves; one
    such load is all that a rank holds beside its shards. Each rank gets its own rows. Only
    what is split over two mesh dims, or lies on another mesh on other ranks, reaches every rank
    whole. Parameters and buffers on the meta device are made on the device of their mesh.

    Args:
        state_dict: On the first rank, under the plain model's names; its values are asked for
            one at a time, so a mapping that reads them from a file is enough. None on others.
        strict: The names of model and ``state_dict`` must be the same.
        process_group: The ranks that train this model; None for all.

    Raises:
        CheckpointError: On all ranks, when a name or a shape does not fit. Nothing was loaded.
    """
    for state in states_below(model):
        state.reshard()
    found = entries(model)
    meeting = Meeting(process_group)
    try:
        plan = _agree(meeting, found, state_dict, strict)
    finally:
        meeting.close()
    with torch.no_grad():
        _fill(model, found, plan, state_dict if meeting.is_first else None, process_group)


@dataclass(frozen=True)
class _Plan:
    """By the entry's position: the name of its value; an extra state itself."""

    names: dict[int, str]
    packed: dict[int, bytes]
    dealt: set[int]
    """What can be dealt from the first rank of its mesh, since that is where the values are."""


def _agree(
    meeting: Meeting, found: list[Entry], state_dict: Mapping[str, Any] | None, strict: bool
) -> _Plan:
    def find() -> set[int]:
        return {
            index
            for index, entry in enumerate(found)
            if isinstance(entry.value, _torch.DTensor)
            and int(entry.value.device_mesh.mesh.flatten()[0]) == meeting.ranks[0]
        }

    def plan(dealt: list[set[int]]) -> list[_Plan]:
        if state_dict is None:
            raise CheckpointError("the first rank has no state dict; pass the full one there")
        plan = _planned(found, state_dict, strict)
        plan.dealt.update(set.intersection(*dealt))
        return [plan] * meeting.size

    return meeting.agree("load_full", find, plan)


def _planned(found: list[Entry], state_dict: Mapping[str, Any], strict: bool) -> _Plan:
    plan = _Plan({}, {}, set())
    for index, entry in enumerate(found):
        name = next((name for name in entry.names if name in state_dict), None)
        if name is None:
            if strict:
                raise CheckpointError(f"the state dict lacks '{entry.name}'")
            continue
        if not is_tensor(entry):
            buffer = io.BytesIO()
            torch.save(state_dict[name], buffer)
            plan.packed[index] = buffer.getvalue()
            continue
        shape, wanted = tuple(state_dict[name].shape), tuple(entry.value.shape)
        if shape != wanted:
            raise CheckpointError(f"'{name}' is {shape} in the state dict and {wanted} here")
        plan.names[index] = name
    known = {name for entry in found for name in entry.names}
    unknown = [name for name in state_dict if name not in known]
    if unknown and strict:
        raise CheckpointError(f"the model has no '{unknown[0]}' ({len(unknown)} such names)")
    return plan


def _fill(
    model: nn.Module,
    found: list[Entry],
    plan: _Plan,
    state_dict: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
) -> None:
    fresh: list[tuple[Entry, Tensor]] = []
    shards: list[_torch.DTensor] = []
    names: list[str] = []
    for index, name in plan.names.items():
        entry = found[index]
        if entry.value.is_meta:
            target = materialised(entry.value, model)
            fresh.append((entry, target))
        else:
            target = detached(entry.value)
        if isinstance(target, _torch.DTensor) and index in plan.dealt:
            shards.append(target)
            names.append(name)
        else:
            _broadcast(target, None if state_dict is None else state_dict[name], group)
    if shards:
        largest = max(shard.numel() * shard.element_size() for shard in shards)
        scatter(shards, _Values(names, state_dict), at_most=largest)
    for entry, made in fresh:
        replace(model, entry, made)
    for index, content in plan.packed.items():
        module = model.get_submodule(found[index].keys[0].rpartition(".")[0])
        module.set_extra_state(torch.load(io.BytesIO(content), weights_only=False))


def _broadcast(target: Tensor, value: Tensor | None, group: dist.ProcessGroup | None) -> None:
    """To all ranks whole; of a DTensor each keeps its part."""
    is_shard = isinstance(target, _torch.DTensor)
    local = _torch.local_of(target) if is_shard else target
    device = local.device
    if dist.is_initialized():
        world = group or dist.group.WORLD
        assert world is not None
        device = wire_device(world, local.device.type, local.device)
    if value is None:
        whole = torch.empty(target.shape, dtype=local.dtype, device=device)
    else:
        whole = value.detach().to(device=device, dtype=local.dtype).contiguous()
    if dist.is_initialized():
        dist.broadcast(whole, group=group, group_src=0)
    local.copy_(own_part(whole, target) if isinstance(target, _torch.DTensor) else whole)


class _Values(Sequence[Tensor | None]):
    """The state dict's values, each asked for when it is sent; None on ranks without."""

    def __init__(self, names: list[str], state_dict: Mapping[str, Any] | None) -> None:
        self._names = names
        self._state_dict = state_dict

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor | None]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return None if self._state_dict is None else self._state_dict[self._names[index]]
