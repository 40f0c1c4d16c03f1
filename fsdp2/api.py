"""``fully_shard`` and the functions around it. Arguments are checked here, nothing is decided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2._torch import DataParallelMeshDims
from fsdp2.arguments import (
    check_ignored,
    check_limit,
    check_memory,
    check_mesh,
    check_modules,
    check_placement_fn,
    check_policies,
    frees_after_forward,
    part_size_of,
)
from fsdp2.copying import copy_module
from fsdp2.errors import UsageError
from fsdp2.find import find_params, names_of
from fsdp2.forward_methods import gather_in_method
from fsdp2.guard import watch_steps
from fsdp2.hooks import State, name_groups, state_of, states_below
from fsdp2.mesh import ShardMesh
from fsdp2.module import FSDPModule
from fsdp2.optimizers import watch_optimizers
from fsdp2.param_group import ParamGroup
from fsdp2.placing import PlacementFn, Placing
from fsdp2.policies import CPUOffloadPolicy, OffloadPolicy, Switches
from fsdp2.replicas import broadcast_first_replica
from fsdp2.streams import SharedStreams
from fsdp2.ties import find_joins, join_ties
from fsdp2.tracing import Trace

_classes: dict[type, type] = {}
_NO_CASTS = _torch.MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: _torch.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: _torch.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: _torch.MixedPrecisionPolicy = _NO_CASTS,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    The parameters below ``module`` that no earlier call owns become one param group: they
    are gathered together when forward or backward reaches the module, freed behind it, and
    their gradients are reduced together. Call it on the blocks of a model first and on the
    model last. The module keeps its identity, its names and its state dict's keys; its
    parameters become ``nn.Parameter`` s over ``Shard(0)`` DTensors, and it gains the
    methods of :class:`FSDPModule`.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: One dimension splits the parameters; two, with names, repeat and split them,
            ``(replicate, shard)``. Default: all ranks split.
        reshard_after_forward: Free the full parameters after forward and gather them again
            in backward. ``None`` means ``True``, except for the root, which backward needs
            first. The root is the outermost module, found at the first forward. An int,
            a factor of the ranks that split: every so many neighbours keep the parameters
            between them after forward, and backward gathers over those only.
        shard_placement_fn: For each parameter ``None`` (``Shard(0)``), a ``Shard(dim)``, or
            a :class:`ShardPlacementResult` with a mesh of its own.
        mp_policy: The dtypes of computation and reduction.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on
            the host. On a CPU mesh it changes nothing.
        ignored_params: Left as they are: neither sharded, moved nor reduced.
        dp_mesh_dims: Which dimensions of ``mesh`` split and which repeat parameters, by name;
            several of a kind count as one. Parameters must be DTensors on ``mesh``,
            replicated over these dimensions, if it has further ones.

    Returns:
        ``module``, now also an :class:`FSDPModule`; for a list the list.

    Raises:
        ValueError: A container without ``forward``, or a mesh of more than two dimensions.
        UsageError: ``fully_shard`` was applied to the module before; a mesh without names or
            with names that deny what they would be used for; a dimension that a parameter
            does not have; tied parameters on different meshes.
        NotImplementedError: An int ``reshard_after_forward`` together with ``dp_mesh_dims``.

    Usage::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    check_modules(modules)
    check_policies(mp_policy, offload_policy)
    check_placement_fn(shard_placement_fn)
    owned = check_mesh(mesh, dp_mesh_dims)
    part_size = part_size_of(reshard_after_forward, owned)
    ignored = check_ignored(ignored_params)
    is_offloaded = isinstance(offload_policy, CPUOffloadPolicy)
    _move_to_device(modules, owned, ignored, is_offloaded)
    inner = [state for top in modules for state in states_below(top)]
    taken = {m for state in inner for m in state.modules}
    found = find_params(modules, Placing(owned, shard_placement_fn), ignored, taken)
    check_memory(found.params)
    switches = Switches(frees_after_forward(reshard_after_forward), part_size is not None)
    group = ParamGroup(modules, found.params, owned, mp_policy, offload_policy, switches, part_size)
    joining = find_joins(group, found.ties, inner)
    # From here on nothing is refused any more.
    for param in found.params:
        param.register()
    _cast_buffers(modules, taken, getattr(mp_policy, "buffer_dtype", None))
    state = State(modules, group, follows_root=reshard_after_forward is None)
    name_groups(modules, inner)
    join_ties(state, joining, found.ties, inner)
    state.ignored = names_of(modules, ignored)
    for each in modules:
        each.__class__ = _fsdp_class(type(each))
    watch_optimizers()
    watch_steps()
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _move_to_device(
    modules: list[nn.Module], mesh: ShardMesh, ignored: set[nn.Parameter], is_offloaded: bool
) -> None:
    """Bring parameters and buffers to the mesh's device; what is on meta stays there.

    Offloaded parameters stay where they are until they have been cut.
    """
    for top in modules:
        for module in top.modules():
            tables: list[dict[str, Any]] = [module._buffers]
            tables += [] if is_offloaded else [module._parameters]
            for table in tables:
                for tensor in table.values():
                    if tensor is None or tensor in ignored or isinstance(tensor, _torch.DTensor):
                        continue
                    if tensor.device != mesh.device and tensor.device.type != "meta":
                        tensor.data = tensor.data.to(mesh.device)


def _cast_buffers(
    modules: list[nn.Module], taken: set[nn.Module], dtype: torch.dtype | None
) -> None:
    """Floating-point buffers of the modules that this call shards."""
    visited = set(taken)
    cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    remaining = list(modules) if dtype is not None else []
    while remaining:
        module = remaining.pop()
        if module in visited:
            continue
        visited.add(module)
        remaining += module.children()
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                if id(buffer) not in cast:  # one table for all layers stays one
                    cast[id(buffer)] = buffer, buffer.to(dtype)
                module._buffers[name] = cast[id(buffer)][1]


def _fsdp_class(cls: type) -> type:
    """``FSDP<Name>``: the class itself with :class:`FSDPModule` in front."""
    made = _classes.get(cls)
    if made is None:
        body = {"__module__": cls.__module__, "__deepcopy__": copy_module}
        made = _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)
    return made


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather like ``forward``. Nothing happens on a plain module.

    Raises:
        ValueError: The module has no such method.
    """
    method = getattr(module, method_name, None)
    if method is None or not callable(method):
        raise UsageError(
            f"{type(module).__name__} has no method '{method_name}'; pass the name of a method of "
            f"{type(module).__name__} that computes like forward"
        )
    state = state_of(module)
    if state is not None:
        gather_in_method(state, module, method_name)


def share_comm_ctx(modules: list[Any]) -> None:
    """Let several roots share their streams, like the stages of one pipeline on this rank.

    Raises:
        ValueError: Something in the list is not an FSDP module.
    """
    shared = SharedStreams()
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise UsageError(
                f"share_comm_ctx expects a list of FSDPModules but got {type(module).__name__}, "
                "on which fully_shard was not called"
            )
        for each in states_below(module):
            each.share_streams(shared)


def sync_replicas(model: nn.Module) -> None:
    """Give all replicas of a hybrid-sharded model the first replica's parameters.

    Call it on all ranks between steps. Without a replicate mesh nothing happens.

    Raises:
        UsageError: Nothing below ``model`` is sharded.
    """
    broadcast_first_replica(state.group for state in _states_of(model, "sync_replicas"))


def set_inflight_limit(
    model: nn.Module, limit: int | Literal["auto"], budget: int | None = None
) -> None:
    """Hold at most ``limit`` groups gathered that are freed behind their use. Default 2.

    Groups that are kept after forward, the root for one, and groups around the one that
    computes do not count; they are there in any case. A group that compute needs right now
    is gathered whatever the limit says. Call it on all ranks alike.

    ``"auto"`` begins with 2 and finds the limit while training. All ranks have the same one:
    the worst rank's figures count, in one small all-reduce per step and mesh dimension, hidden
    behind the next step. It is raised by one while more than 2% of a step is spent waiting
    for gathers that could have been issued earlier; a raise that hides less than a tenth of
    that is taken back and tried again after 100 steps. It is lowered for good when the
    allocator had to retry, or when memory comes within 5% of the budget. A trace has each
    change with its reason. Evaluation uses the limit that training found.

    Args:
        model: A model below which ``fully_shard`` was called.
        limit: A whole number from 1 on, or ``"auto"``.
        budget: With ``"auto"``, bytes per rank. On an accelerator they are compared with the
            peak of all that PyTorch allocated, whose statistics are reset in every step; on
            CPU with the full parameters that are gathered at once, as nothing else is known.

    Raises:
        UsageError: Another limit, a budget that is no positive whole number or comes without
            ``"auto"``, or nothing below ``model`` is sharded.
    """
    wanted = check_limit(limit, budget)
    for state in _states_of(model, "set_inflight_limit"):
        state.set_limit(wanted)


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what the steps inside do. ``str(trace)`` is one event a line.

    Usage::

        with fsdp2.trace(model) as events:
            model(x).sum().backward()
        print(events)             # the schedule
        print(events.report())    # what was hidden, what was waited for, and why
    """
    states = _states_of(model, "trace")
    events = Trace(limit=max(state.limit for state in states))
    for state in states:
        state.set_trace(events)
    try:
        yield events
    finally:
        for state in states:
            state.set_trace(None)


def _states_of(model: nn.Module, what: str) -> list[State]:
    states = states_below(model)
    if not states:
        raise UsageError(
            f"{what}: fully_shard was called on no module of {type(model).__name__}; call "
            "fully_shard on it first"
        )
    return states
