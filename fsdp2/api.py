"""``fully_shard`` and the functions around it. Arguments are checked here, nothing is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp2 import _torch
from fsdp2._torch import DataParallelMeshDims
from fsdp2.errors import UsageError
from fsdp2.hooks import State, forward_method, state_of, states_below
from fsdp2.mesh import ShardMesh, shard_mesh
from fsdp2.module import FSDPModule
from fsdp2.optimizers import watch_optimizers
from fsdp2.param_group import ParamGroup
from fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Switches
from fsdp2.sharded_param import find_params
from fsdp2.tracing import Trace

_classes: dict[type, type] = {}
_NO_CASTS = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
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
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = _NO_CASTS,
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
        mesh: One-dimensional. Default: all ranks.
        reshard_after_forward: Free the full parameters after forward and gather them again
            in backward. ``None`` means ``True``, except for the root, which backward needs
            first. The root is the outermost module, found at the first forward.
        mp_policy: The dtypes of computation and reduction.
        ignored_params: Left as they are: neither sharded, moved nor reduced.

    Returns:
        ``module``, now also an :class:`FSDPModule`; for a list the list.

    Raises:
        ValueError: A container without ``forward``, a mesh of more than two dimensions, or
            a parameter that another call owns.
        UsageError: ``fully_shard`` was applied to the module before.
        NotImplementedError: An argument that is not built yet, by name.

    Usage::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    _refuse_unbuilt(reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims)
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    owned = shard_mesh(mesh)
    ignored = ignored_params or set()
    _move_to_device(modules, owned, ignored)
    taken = {m for top in modules for s in states_below(top) for m in s.modules}
    params = find_params(modules, owned, ignored, taken)
    switches = Switches(reshard_after_forward=reshard_after_forward in (None, True))
    group = ParamGroup(modules, params, owned, mp_policy, switches)
    State(modules, group, follows_root=reshard_after_forward is None)
    for each in modules:
        each.__class__ = _fsdp_class(type(each))
    watch_optimizers()
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _refuse_unbuilt(
    reshard_after_forward: bool | int | None,
    shard_placement_fn: object,
    offload_policy: OffloadPolicy,
    dp_mesh_dims: object,
) -> None:
    """An option that is not there yet is never ignored in silence."""
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"argument 'reshard_after_forward': {reshard_after_forward!r}, a smaller group to "
            "gather over in backward, is not built yet; pass True, False or None"
        )
    if shard_placement_fn is not None:
        raise NotImplementedError("argument 'shard_placement_fn' is not built yet; omit it")
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise NotImplementedError(
            "argument 'offload_policy': CPU offload is not built yet; omit it"
        )
    if dp_mesh_dims is not None:
        raise NotImplementedError("argument 'dp_mesh_dims' is not built yet; pass a 1D mesh")


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise UsageError("fully_shard got an empty list of modules")
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise UsageError(f"fully_shard shards nn.Modules and got a {name}")
        if state_of(module) is not None:
            raise UsageError(
                f"module '{name}': fully_shard was applied to it before. Each distinct composable "
                "distributed API can only be applied to a module once."
            )
        has_forward = type(module).forward is not nn.Module.forward
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {name}; "
                "shard its members, or pass them as a list"
            )


def _move_to_device(modules: list[nn.Module], mesh: ShardMesh, ignored: set[nn.Parameter]) -> None:
    """Bring parameters and buffers to the mesh's device; what is on meta stays there."""
    for top in modules:
        for module in top.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for table in tables:
                for tensor in table.values():
                    if tensor is None or tensor in ignored or isinstance(tensor, _torch.DTensor):
                        continue
                    if tensor.device != mesh.device and tensor.device.type != "meta":
                        tensor.data = tensor.data.to(mesh.device)


def _fsdp_class(cls: type) -> type:
    """``FSDP<Name>``: the class itself with :class:`FSDPModule` in front."""
    made = _classes.get(cls)
    if made is None:
        body = {"__module__": cls.__module__, "__deepcopy__": _refuse_deepcopy}
        made = _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)
    return made


def _refuse_deepcopy(self: nn.Module, memo: object) -> NoReturn:
    raise UsageError(
        f"FSDP does not support deepcopy of a sharded module ({type(self).__name__}); copy the "
        "model before fully_shard, or its state_dict() after"
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather like ``forward``. Nothing happens on a plain module.

    Raises:
        ValueError: The module has no such method.
    """
    method = getattr(module, method_name, None)
    if method is None or not callable(method):
        raise UsageError(f"{type(module).__name__} has no method '{method_name}'")
    state = state_of(module)
    if state is None:
        return
    bound = forward_method(state, method).__get__(module)
    module.__dict__[method_name] = bound


def set_inflight_limit(model: nn.Module, limit: int) -> None:
    """Hold at most ``limit`` groups gathered that are freed behind their use. Default 2.

    Groups that are kept after forward, the root for one, and groups around the one that
    computes do not count; they are there in any case. A group that compute needs right now
    is gathered whatever the limit says.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UsageError(
            f"the limit on groups in flight is a whole number from 1 on, got {limit!r}"
        )
    for state in _states_of(model, "set_inflight_limit"):
        state.set_limit(limit)


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what the steps inside do. ``str(trace)`` is one event a line.

    Usage::

        with fsdp2.trace(model) as events:
            model(x).sum().backward()
        print(events)
    """
    states = _states_of(model, "trace")
    events = Trace()
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
        raise UsageError(f"{what}: fully_shard was called on no module of {type(model).__name__}")
    return states
