"""The methods that ``fully_shard`` adds to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.arguments import check_divide_factor
from fsdp2.custom import AllGather, CustomComms, ReduceScatter, group_allocated
from fsdp2.emptied import mark_below
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

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module; the first forward refuses what nobody has filled by then."""
        found = super().to_empty(*args, **kwargs)  # type: ignore[misc]
        mark_below(cast(nn.Module, self))
        for state in self._states():
            state.is_emptied = True
        return found

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` and so on change the shards; full ones would be stale."""
        for state in self._states():
            state.reshard()
        empty = [state.group for state in self._states() if state.group.attributes.are_on_meta()]
        found = super(_torch.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in empty:
            if not group.attributes.are_on_meta():
                group.refresh()  # initialisers must meet shards that are ours
        return found

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
        """Reduce gradients in backward, or keep them full and in the reduce dtype until later.

        It sets :meth:`set_requires_all_reduce` alike.
        """
        for state in self._states(recurse):
            state.group.switches.reduces_gradients = requires_gradient_sync
            state.group.switches.all_reduces = requires_gradient_sync

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
            state.group.switches.keeps_part = False

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free the full parameters after backward, or keep them for the next forward."""
        for state in self._states(recurse):
            state.group.switches.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's own parameters: an embedding's does not."""
        self._get_fsdp_state().group.switches.unshard_in_backward = unshard_in_backward

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

    # Reductions

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a mesh with replicas: sum gradients over them too, or keep this replica's for later.

        What is kept adds up in float32, 1/N per rank.
        """
        for state in self._states(recurse):
            state.group.switches.all_reduces = requires_all_reduce

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook(gradients)`` in backward with this module's own reduced gradients.

        ``gradients`` is flat, in the reduce dtype and divided already: all of one dtype's at
        once. What the hook writes there becomes the gradient. It runs on ``stream``.

        Raises:
            ValueError: ``stream`` on a mesh with replicas, whose sums have a stream already.
        """
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook expects a callable, got {hook!r}")
        group = self._get_fsdp_state().group
        if stream is not None and any(portion.replicas for portion in group.portions):
            raise ValueError("stream cannot be set when using native HSDP")
        group.switches.all_reduce_hook = hook
        group.switches.all_reduce_stream = stream

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's own gradient sums by ``factor`` instead of the number of ranks.

        The sum is over all ranks of the mesh, replicas included: 1.0 gives the plain sum.
        """
        self._get_fsdp_state().group.switches.divide_factor = check_divide_factor(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give parameters that no rank used gradients of zeros; otherwise theirs stay as they are.

        Ranks that use different parameters are handled in either case.
        """
        for state in self._states(recurse):
            state.group.switches.fills_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions stay under way, each with its group's full gradients. Default 1.

        One more is there for a moment, when the next is issued before the oldest is summed.
        The largest number below a root is the root's.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers is an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise UsageError(f"max_input_buffers is 1 or more, got {max_input_buffers}")
        for state in self._states(recurse):
            state.set_max_exchanges(max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a process group of its own, so that gathers do not queue behind reductions.

        Collective: call it on all ranks alike, between steps.
        """
        for state in self._states(recurse):
            state.group.separate_reductions(enable)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to force: gradients are always summed by communication and divided after."""

    # Communication of the user's

    def set_custom_all_gather(self, comm: AllGather) -> None:  # type: ignore[override]
        """Gather this module's own parameters through ``comm``: one call per dtype, packed."""
        self._use_custom("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:  # type: ignore[override]
        """Reduce this module's own gradients through ``comm``: one call per dtype, packed."""
        self._use_custom("set_custom_reduce_scatter", reduce_scatter=comm)

    def _use_custom(self, setter: str, **comms: Any) -> None:
        for comm in comms.values():
            has_allocate = callable(getattr(comm, "allocate", None))
            if isinstance(comm, type) or not callable(comm) or not has_allocate:
                raise TypeError(
                    f"{setter} expects an object with allocate() and __call__(), like "
                    f"fsdp2.AllGather and fsdp2.ReduceScatter; got {comm!r}"
                )
        group = self._get_fsdp_state().group
        group.use(replace(CustomComms() if group.custom.is_ours else group.custom, **comms))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Stage in memory from the process group's allocator, where its backend has one.

        Where it has none, gloo for example, nothing changes.
        """
        group = self._get_fsdp_state().group
        if group.custom.is_set and not group.custom.is_ours:
            raise UsageError(
                "set_allocate_memory_from_process_group_for_comm cannot be used together with "
                "set_custom_all_gather or set_custom_reduce_scatter, which allocate themselves"
            )
        group.use(group_allocated(group.mesh) if enable else CustomComms())

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Not available: raises ``NotImplementedError``, which is a ``RuntimeError``."""
        raise NotImplementedError(
            f"set_symm_mem_for_comm({backend!r}): fsdp2 gathers into the parameters themselves and "
            "has no staging buffer to take from symmetric memory; leave it out, or allocate it in "
            "a collective of your own, set_custom_all_gather(comm)"
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next gather wait for ``event`` instead of all work given to the device so far.

        Call it on the root after each optimizer step. On CPU there is nothing to wait for.
        """
        self._get_fsdp_state().set_optimizer_done(event)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to set: gathers are always asynchronous."""


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
