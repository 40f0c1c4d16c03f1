"""``materialize``: the memory and the values of a model that was built without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp2 import _torch, emptied
from fsdp2.checksums import checksum
from fsdp2.collectives import gather_values
from fsdp2.cutting import filled_like, part_of
from fsdp2.deferred import Recorded, attributes_of, forget, recorded_in
from fsdp2.errors import UsageError
from fsdp2.hooks import State, name_groups, states_below
from fsdp2.param_group import ParamGroup
from fsdp2.resetting import (
    full_name,
    is_empty,
    keep_rows,
    reset_in_order,
    unrecorded,
)
from fsdp2.sharded_param import ShardedParam
from fsdp2.tape import Cell, Region, leaves, map_leaves, replay


class Target(NamedTuple):
    """A tensor of the model that waits for its values."""

    name: str
    recorded: Recorded
    tensor: Tensor
    give: Callable[[Tensor], None]
    """Takes the whole values, on the CPU."""


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give ``model`` memory, and the values that its constructors left or would leave.

    What was built under :func:`deferred_init` holds afterwards, bit by bit, what the same
    constructor gives in one process on the CPU under the same seed, for every number of ranks
    and every mesh. It is replayed one param group at a time, and each rank keeps its own rows:
    beside the shards there is never more memory than one group takes. Parameters that no group
    owns, buffers and other tensors are filled whole. A model that was not sharded becomes the
    plain one.

    What was built under ``torch.device("meta")`` has no record: the modules'
    ``reset_parameters`` run instead, in the order of ``model.modules()``, on full parameters of
    one module at a time. All ranks draw alike, and each keeps its rows.

    Call it on all ranks, behind ``fully_shard`` and before the optimizer is built: parameters
    become new objects, as with ``to_empty``. Casts in between (``model.bfloat16()``) count.

    Args:
        model: Parts of it may have values already; they keep them.
        device: Where to put a model that is not sharded; default: the CPU. Shards go to the
            device of their mesh, or to the host if they are offloaded, and the rest with them.

    Returns:
        ``model``.

    Raises:
        UsageError: Ranks were built or would draw under different seeds; a tensor was changed
            after ``deferred_init``; something has neither a record nor a ``reset_parameters``
            that fills it. All are named.
    """
    states = states_below(model)
    if not any(state.schedule for state in states):
        name_groups([model], states)
    home = _home(states, device)
    resets = unrecorded(model)
    _check_same_seeds(model, states, bool(resets))
    for state in states:
        state.group.refresh()
        targets = _targets_of_group(state.group)
        if targets and len(targets) == len(state.group.params):
            state.is_emptied = True  # the first forward refuses it if this ends before its time
            _check_unchanged(targets)
            _allocate(state.group)
        _replay(targets)
        if not state.group.attributes.are_on_meta():
            state.group.refresh()
    _replay(_targets_outside(model, home))
    _fill_attributes(model)
    reset_in_order(resets, states, home)
    _refuse_empty(model)
    for state in states:
        state.is_emptied = False
    forget(model)
    return model


def _home(states: list[State], device: torch.device | str | None) -> torch.device:
    """Where what no group owns goes."""
    ours = states[0].group.mesh.device if states else torch.device("cpu")
    if device is None:
        return ours
    asked = torch.device(device)
    if states and asked.type != ours.type:
        raise UsageError(
            f"materialize: the model is sharded over a mesh on {ours}, not on {asked}; leave the "
            "device out, or shard over a mesh on that one"
        )
    return asked


# What was recorded


def _replay(targets: list[Target]) -> None:
    """Fill each target as soon as its values are complete."""
    waiting: dict[Cell, list[Target]] = {}
    _check_unchanged(targets)
    for target in targets:
        waiting.setdefault(target.recorded.value.cell, []).append(target)
    _warn_of_uninitialised(targets)
    for cell, storage in replay(waiting):
        for target in waiting[cell]:
            whole = target.recorded.value.over(storage)
            target.give(whole.to(target.tensor.dtype))
            del whole
        del storage


def _targets_of_group(group: ParamGroup) -> list[Target]:
    found = []
    for portion in group.portions:
        for param in portion.params:
            recorded = _record_of(param)
            if recorded is not None:
                give = partial(_fill_rows, param, home=portion.home)
                found.append(Target(param.name, recorded, param.shard, give))
    return found


def _allocate(group: ParamGroup) -> None:
    """The shards' memory before any whole parameter's: freed behind it, that leaves no holes."""
    for portion in group.portions:
        for param in portion.params:
            local = torch.empty(param.local.shape, dtype=param.dtype, device=portion.home)
            emptied.mark(local)
            param.replace(local)
    group.refresh()


def _fill_rows(param: ShardedParam, whole: Tensor, home: torch.device) -> None:
    if param.shard.device.type == "meta":
        keep_rows(param, whole, home)
    else:
        param.local.copy_(part_of(whole, param.spec, param.name))


def _record_of(param: ShardedParam) -> Recorded | None:
    if param.shard.device.type != "meta":
        return None
    found = (recorded_in(place.module).get(place.attribute) for place in param.places)
    return next((recorded for recorded in found if recorded is not None), None)


def _targets_outside(model: nn.Module, home: torch.device) -> list[Target]:
    """Parameters that no group owns, and buffers."""
    found: dict[Tensor, Target] = {}
    places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for prefix, module in model.named_modules():
        recorded = recorded_in(module)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if name in recorded and is_empty(tensor):
                    places.setdefault(tensor, []).append((table, name))
                    give = _giver_outside(tensor, places[tensor], full_name(prefix, name), home)
                    target = Target(full_name(prefix, name), recorded[name], tensor, give)
                    found.setdefault(tensor, target)
    return list(found.values())


def _giver_outside(
    tensor: Tensor, places: list[tuple[dict[str, Any], str]], name: str, home: torch.device
) -> Callable[[Tensor], None]:
    def give(whole: Tensor) -> None:
        made = filled_like(tensor, whole, name, home)
        for table, attribute in places:
            table[attribute] = made

    return give


def _check_unchanged(targets: list[Target]) -> None:
    for name, recorded, tensor, _ in targets:
        shape = recorded.value.shape
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f"'{name}' has shape {tuple(tensor.shape)} and had {shape} when deferred_init "
                "ended; change shapes inside deferred_init, or behind materialize"
            )
        is_ours = isinstance(tensor, _torch.DTensor)
        if tensor._version > (0 if is_ours else recorded.version):
            raise UsageError(
                f"'{name}' was written to after deferred_init, while it had no memory: that is "
                "lost. Write to it inside deferred_init, or behind materialize"
            )


def _warn_of_uninitialised(targets: list[Target]) -> None:
    names = [target.name for target in targets if target.recorded.value.cell.last is None]
    if names:
        warnings.warn(
            f"their constructors leave {names} uninitialised: zeros here, where a plain "
            "constructor leaves what it finds in memory",
            stacklevel=4,
        )


def _fill_attributes(model: nn.Module) -> None:
    """Tensors that modules hold neither as parameters nor as buffers; they stay on the CPU."""
    for module in model.modules():
        for name, template in attributes_of(module).items():
            if not _has_meta(module.__dict__.get(name)):
                continue
            memory = dict(replay({r.cell: None for r in leaves(template) if isinstance(r, Region)}))

            def real(leaf: Any, memory: Any = memory) -> Any:
                return leaf.over(memory[leaf.cell]) if isinstance(leaf, Region) else leaf

            module.__dict__[name] = map_leaves(real, template)


def _has_meta(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and is_empty(leaf) for leaf in leaves(value))


# What all ranks must agree on, and what must not be left


def _check_same_seeds(model: nn.Module, states: list[State], draws: bool) -> None:
    """Ranks with different seeds would keep rows of different models."""
    began = {r.began for module in model.modules() for r in recorded_in(module).values()}
    now = int(checksum(torch.get_rng_state())) if draws else 0
    mine = [min(began, default=0), now]
    for mesh in dict.fromkeys(portion.mesh for s in states for portion in s.group.portions):
        groups = [axis.group for axis in (mesh.shard, mesh.replicas) if axis.group is not None]
        everyone = gather_values(mine, groups, mesh.device)
        if any(everyone[i] != mine[i % 2] for i in range(len(everyone))):
            raise UsageError(
                f"materialize: the ranks of {mesh.mesh} have different states of the default "
                "generator, so that each would keep rows of another model; call "
                "torch.manual_seed with one seed on all ranks before deferred_init, or before "
                "materialize where reset_parameters draws"
            )


def _refuse_empty(model: nn.Module) -> None:
    names = [
        full_name(prefix, name)
        for prefix, module in model.named_modules()
        for name, value in (module._parameters | module._buffers | module.__dict__).items()
        if isinstance(value, Tensor) and is_empty(value)
    ]
    if names:
        raise UsageError(
            f"materialize: {names} are on the meta device, were not built under deferred_init, "
            "and their modules have no reset_parameters. Build the model under "
            "fsdp2.deferred_init(), or call model.to_empty(device=...) and fill them yourself"
        )
