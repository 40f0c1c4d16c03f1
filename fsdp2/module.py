"""The methods that ``fully_shard`` adds to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, NoReturn, cast

from torch import nn

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.hooks import State, state_of, states_below
from fsdp2.param_group import ParamGroup


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

    theirs = getattr(_torch.FSDPModule, name, None)
    if theirs is not None:
        refuse.__signature__ = signature(theirs)  # type: ignore[attr-defined]
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

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
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
            raise UsageError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
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
        states = list(self._states())
        for state in states:
            state.reset()
        for schedule in {state.schedule for state in states if state.schedule}:
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
