"""``fully_shard`` and the methods that it adds to a module. Arguments are checked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp2 import _torch
from fsdp2._torch import DataParallelMeshDims
from fsdp2.errors import UsageError
from fsdp2.hooks import State, forward_method, state_of, states_below
from fsdp2.mesh import ShardMesh, shard_mesh
from fsdp2.optimizers import watch_optimizers
from fsdp2.param_group import ParamGroup
from fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Switches
from fsdp2.sharded_param import find_params
from fsdp2.tracing import Trace

_classes: dict[type, type] = {}


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
) -> "FSDPModule": ...


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
) -> "list[FSDPModule]": ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
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
        raise NotImplementedError("argument 'offload_policy': CPU offload is not built yet; omit it")
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


def _move_to_device(
    modules: list[nn.Module], mesh: ShardMesh, ignored: set[nn.Parameter]
) -> None:
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


class UnshardHandle(_torch.UnshardHandle):
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: State) -> None:
        self._state: State | None = state

    def wait(self) -> None:
        """Return with the full parameters readable. More than one call does no harm."""
        state, self._state = self._state, None
        if state is not None:
            state.wait_for_unshard()


def _not_built(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not built yet")

    refuse.__name__ = name
    refuse.__doc__ = "Not built yet: raises ``NotImplementedError``."
    return refuse


class FSDPModule(_torch.FSDPModule):
    """The methods that ``fully_shard`` adds to a module.

    A setter with ``recurse`` reaches every FSDP module below this one.
    """

    _orig_cls_mro_index = 3
    """Behind FSDP<Name>, this class and PyTorch's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Slicing a sharded ``Sequential`` calls its class: that gives a plain one."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def _get_fsdp_state(self) -> State:  # type: ignore[override]
        return cast(State, state_of(cast(nn.Module, self)))

    def _states(self, recurse: bool = True) -> Iterator[State]:
        if recurse:
            yield from states_below(cast(nn.Module, self))
        else:
            yield self._get_fsdp_state()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` and so on change the shards; full ones would be stale."""
        for state in self._states():
            state.reshard()
        return super(_torch.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]

    # Gather and free by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own full parameters, not those of modules below.

        With ``async_op`` it returns at once with a handle; the module's forward waits too.
        """
        state = self._get_fsdp_state()
        state.unshard()
        if async_op:
            return UnshardHandle(state)
        state.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this module's own full parameters."""
        self._get_fsdp_state().reshard()

    # What happens in a step

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward, or keep them full and in the reduce dtype until later."""
        for state in self._states(recurse):
            state.group.switches.reduces_gradients = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends the step: only then are all gradients waited for."""
        self._get_fsdp_state().set_is_last_backward(is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the full parameters after forward, or keep them for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(
                f"reshard_after_forward must be a bool, got {reshard_after_forward!r}"
            )
        for state in self._states(recurse):
            state.follows_root = False
            state.group.switches.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free the full parameters after backward, or keep them for the next forward."""
        for state in self._states(recurse):
            state.group.switches.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's own parameters: an embedding's does not."""
        self._get_fsdp_state().group.switches.unshard_in_backward = unshard_in_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's own gradient sums by ``factor`` instead of the number of ranks."""
        self._get_fsdp_state().group.switches.divide_factor = float(factor)

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """What to gather before this module's forward computes, instead of the recorded order."""
        self._get_fsdp_state().forward_prefetch = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """What to gather before this module's backward computes, instead of the recorded order."""
        self._get_fsdp_state().backward_prefetch = _groups_of(modules)

    def reset_iter_state(self) -> None:
        """Make the model usable again after forward or backward raised. Call it on the root.

        Gradients that had not reached the shards are lost; the shards' own stay.
        """
        schedules = set()
        for state in self._states():
            state.reset()
            schedules.add(state.schedule)
        for schedule in schedules - {None}:
            schedule.reset()

    set_requires_all_reduce = _not_built("set_requires_all_reduce")
    set_all_reduce_hook = _not_built("set_all_reduce_hook")
    set_post_optim_event = _not_built("set_post_optim_event")
    set_reduce_scatter_divide_factor = _not_built("set_reduce_scatter_divide_factor")
    set_reduce_scatter_max_input_buffers = _not_built("set_reduce_scatter_max_input_buffers")
    set_reduce_scatter_unused_params = _not_built("set_reduce_scatter_unused_params")
    set_separate_reduce_scatter_group = _not_built("set_separate_reduce_scatter_group")
    set_custom_all_gather = _not_built("set_custom_all_gather")
    set_custom_reduce_scatter = _not_built("set_custom_reduce_scatter")
    set_force_sum_reduction_for_comms = _not_built("set_force_sum_reduction_for_comms")
    set_symm_mem_for_comm = _not_built("set_symm_mem_for_comm")
    set_allocate_memory_from_process_group_for_comm = _not_built(
        "set_allocate_memory_from_process_group_for_comm"
    )
    _set_unshard_async_op = _not_built("_set_unshard_async_op")


def _groups_of(modules: list[Any]) -> list[ParamGroup]:
    groups = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise UsageError(
                f"prefetch lists hold FSDP modules; got a {type(module).__name__}, "
                "on which fully_shard was not called"
            )
        groups.append(state.group)
    return groups


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

    Groups that are kept after forward, the root for one, do not count; they are there in
    any case. A group that compute needs right now is gathered whatever the limit says.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UsageError(f"the limit on groups in flight is a whole number from 1 on, got {limit!r}")
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
