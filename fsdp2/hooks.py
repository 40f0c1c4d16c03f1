"""The hook points on modules and on autograd's graph, each one call into the schedule."""

from __future__ import annotations

import sys
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.calls import Call, Phase
from fsdp2.checks import (
    refuse_meta,
    refuse_offloaded_on_device,
    refuse_unjoined,
    refuse_untouched,
    warn_without_masters,
)
from fsdp2.compiling import untraced
from fsdp2.dealing import deal_state_dict
from fsdp2.find import Tie, is_container
from fsdp2.guard import unguard_state_dict
from fsdp2.late_ties import join_late_ties
from fsdp2.limits import DEFAULT_LIMIT, Auto
from fsdp2.nested import map_tensors, tensors_in
from fsdp2.param_group import GroupState, ParamGroup
from fsdp2.passes import withdraw
from fsdp2.pipelining import StageEnd
from fsdp2.replicas import check_replicas
from fsdp2.schedule import Schedule
from fsdp2.second_order import gather_behind
from fsdp2.sharded_param import ShardedParam
from fsdp2.streams import SharedStreams, Streams
from fsdp2.tracing import Trace

Args = tuple[tuple[Any, ...], dict[str, Any]]

_STATE = "_fsdp2_state"


class State(StageEnd):
    """What one ``fully_shard`` call left behind, one per call; ``fully_shard.state(module)``."""

    def __init__(self, modules: list[nn.Module], group: ParamGroup, follows_root: bool) -> None:
        self.begin(modules, group, follows_root)
        for module in modules:
            module.__dict__[_STATE] = self
            _torch.leave_state(module, self)
            module.register_state_dict_post_hook(unguard_state_dict)
            module.register_load_state_dict_pre_hook(deal_state_dict)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True)

    def begin(self, modules: list[nn.Module], group: ParamGroup, follows_root: bool) -> None:
        """The state of modules that have its hooks already, or get them next."""
        self.modules = modules
        self.group = group
        self.follows_root = follows_root
        """``reshard_after_forward=None``: kept after forward if this turns out to be the root."""
        self.schedule: Schedule | None = None
        self.is_root = False
        self.forward_prefetch: list[ParamGroup] | None = None
        self.backward_prefetch: list[ParamGroup] | None = None
        self._callable = {m for m in modules if not is_container(m)}
        """The modules of a list that forward calls; one that only holds others is not called."""
        self._not_called = set(self._callable)
        self._calls: list[Call] = []
        """Forward calls under way, innermost last."""
        self._outer_exception: BaseException | None = None
        self._early_streams: Streams | None = None
        """For gathers by hand before the first forward, when there is no schedule."""
        self.ignored: list[str] = []
        """Names of parameters that the user asked to leave alone."""
        self.joined: list[ShardedParam] = []
        """Tied parameters taken over from calls inside this one."""
        self.unjoined: list[Tie] = []
        """Attributes of the modules that hold parameters of other groups."""
        self._limit: int | Auto = DEFAULT_LIMIT
        self._optimizer_done: torch.Event | None = None
        self._uncast: dict[nn.Module, tuple[set[int], set[str]]] = {}
        self.shared_streams: SharedStreams | None = None
        self._trace: Trace | None = None
        self._is_last_backward = True
        self.is_emptied = False
        """``to_empty`` gave it memory without values, and no forward has run since."""
        self.forward_methods: list[tuple[nn.Module, str]] = []
        """Further methods that gather, by module and name."""

    @property
    def policy(self) -> _torch.MixedPrecisionPolicy:
        return self.group.policy

    # Forward

    @untraced
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Args:
        schedule = self.schedule or start_root(self)
        if self.is_root and not self.group.step.running:
            schedule.begin_forward(f"{type(module).__name__} (root)")
            self._outer_exception = sys.exc_info()[1]
        args, kwargs = self._cast_inputs(module, args, kwargs)
        schedule.enter_forward(self.group, self.forward_prefetch)
        call = Call(started=schedule.tick())
        self._calls.append(call)
        if torch.is_grad_enabled() and self.group.params:
            args, kwargs = self._hook_inputs(args, kwargs, call)
        return args, kwargs

    def _cast_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Args:
        """The root moves its inputs to the device; a policy casts floating-point ones."""
        dtype = self.group.input_dtype if self.policy.cast_forward_inputs else None
        device = self.group.mesh.device if self.is_root else None
        if dtype is None and (device is None or device.type == "cpu"):
            return args, kwargs

        def move(tensor: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device=device or tensor.device, dtype=wanted)

        uncast = getattr(self.policy, "uncast_inputs", ())
        if not uncast:
            return map_tensors(move, args), map_tensors(move, kwargs)
        positions, names = self._uncast_of(module, uncast)

        def bring(tensor: Tensor) -> Tensor:
            return tensor.to(device or tensor.device)

        return (
            tuple(map_tensors(bring if i in positions else move, a) for i, a in enumerate(args)),
            {k: map_tensors(bring if k in names else move, v) for k, v in kwargs.items()},
        )

    def _uncast_of(
        self, module: nn.Module, uncast: tuple[str | int, ...]
    ) -> tuple[set[int], set[str]]:
        """Positions and names of the arguments of ``module.forward`` that keep their dtype."""
        found = self._uncast.get(module)
        if found is None:
            order = list(signature(module.forward).parameters)
            names = {order[u] if isinstance(u, int) and u < len(order) else str(u) for u in uncast}
            positions = {order.index(n) for n in names if n in order}
            positions |= {u for u in uncast if isinstance(u, int)}
            found = self._uncast[module] = positions, names
        return found

    def _hook_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Args:
        """Learn when backward has left this call.

        Each input that needs a gradient is passed on as an alias. Autograd runs what is
        newest first, and everything that this call puts into the graph is newer than the
        aliases: when the gradient of one is asked for, the call's own backward is over.
        """
        schedule = self.schedule
        assert schedule is not None
        if schedule.phase is not Phase.BACKWARD:
            self.group.step.calls.add(call)
        passed = partial(self.passed, call)

        def alias(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            tensor = tensor.view_as(tensor)
            _torch.add_gradient_hook(tensor, passed)
            return tensor

        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            return (alias(args[0]),), kwargs
        return map_tensors(alias, args), map_tensors(alias, kwargs) if kwargs else kwargs

    @untraced
    def post_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Also called, with ``output=None``, where forward raised: memory is freed all the same."""
        schedule = self.schedule
        if schedule is None:
            return output
        call = self._calls.pop() if self._calls else Call(started=schedule.tick())
        call.ended = schedule.tick()
        needs_backward = torch.is_grad_enabled() and self._hook_outputs(output, call)
        self._not_called.discard(module)
        is_last_call = not self._not_called
        if is_last_call:
            self._not_called = set(self._callable)
        schedule.leave_forward(self.group, needs_backward, is_last_call)
        if self.is_root and not self.group.step.running:
            failed = output is None and sys.exc_info()[1] is not self._outer_exception
            schedule.end_forward(failed)
            self._outer_exception = None
        dtype = self.policy.output_dtype
        if dtype is None:
            return output
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    def _hook_outputs(self, output: Any, call: Call) -> bool:
        """Gather when the gradient of an output arrives. True if one can."""
        tensors = (output,) if isinstance(output, Tensor) else tensors_in(output)
        found = False
        for tensor in tensors:
            if tensor.requires_grad:
                found = True
                _torch.add_gradient_hook(tensor, partial(self.pre_backward, call))
                base = _torch.base_of(tensor)
                if base is not None and base.grad_fn is not None:
                    # An in-place change of a view drops the view's hook, not its base's.
                    _torch.add_gradient_hook(base, partial(self.pre_backward_of_base, call))
        return found

    # The names under which PyTorch's own `register_fsdp_forward_method` reaches the two

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Args:
        return self.pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self.post_forward(module, args, {}, output)

    # Backward

    @untraced
    def pre_backward(self, call: Call, gradient: Tensor) -> None:
        """The gradient of an output of ``call`` has arrived."""
        assert self.schedule is not None
        self.schedule.enter_backward(self.group, call, self.backward_prefetch)
        gather_behind(gradient, self.schedule, self.group)

    @untraced
    def pre_backward_of_base(self, call: Call, gradient: Tensor) -> None:
        """The same for what an output is a view of."""
        assert self.schedule is not None
        # A base from outside may be older than the call's own graph: then it is too late.
        if call.passed_in != self.schedule.backwards:
            self.schedule.enter_backward(self.group, call, self.backward_prefetch)

    @untraced
    def passed(self, call: Call, gradient: Tensor) -> None:
        """The gradient of an input of ``call`` is asked for: its own backward is over."""
        schedule = self.schedule
        assert schedule is not None
        if call.passed_in != schedule.backwards:  # a graph may be walked more than once
            call.passed_in = schedule.backwards
            schedule.passed(self.group, call)
        gather_behind(gradient, schedule, self.group)

    # By hand

    def unshard(self) -> None:
        group = self.group
        withdraw(group)
        if group.needs_gather:
            if self.schedule is not None:
                self.schedule.start_gather(group, "by hand")
            else:
                refuse_meta([self.group])
                shared = self.shared_streams or SharedStreams()
                self._early_streams = shared.of(group.mesh.device)
                group.start_gather(self._early_streams)

    def wait_for_unshard(self) -> None:
        if self.group.state is GroupState.ARRIVING:
            if self.schedule is not None:
                self.schedule.make_full(self.group)
            elif self._early_streams is not None:
                self.group.finish_gather(self._early_streams)
        self.group.take_back()  # who gathers by hand may write to the shards next

    def reshard(self) -> None:
        if self.schedule is not None:
            self.schedule.free(self.group)
        else:
            self.group.free()

    @property
    def limit(self) -> int:
        """What holds now."""
        if self.schedule is not None:
            return self.schedule.limit
        return self._limit if isinstance(self._limit, int) else DEFAULT_LIMIT

    @property
    def asked_limit(self) -> int | Auto:
        return self._limit if self.schedule is None else self.schedule.asked_limit

    def set_limit(self, limit: int | Auto) -> None:
        self._limit = limit
        if self.schedule is not None:
            self.schedule.set_limit(limit)

    def set_max_exchanges(self, count: int) -> None:
        self.group.switches.max_exchanges = count
        if self.schedule is not None:
            groups = self.schedule.groups
            largest = max(group.switches.max_exchanges for group in groups)
            self.schedule.reductions.max_exchanges = largest

    def set_optimizer_done(self, event: torch.Event) -> None:
        self._optimizer_done = event
        if self.schedule is not None:
            self.schedule.streams.wait_once(event)

    def share_streams(self, shared: SharedStreams) -> None:
        self.shared_streams = shared
        if self.schedule is not None:
            self.schedule.streams = shared.of(self.group.mesh.device)

    def set_trace(self, trace: Trace | None) -> None:
        self._trace = trace
        if self.schedule is not None:
            self.schedule.set_trace(trace)

    def set_is_last_backward(self, is_last: bool) -> None:
        self._is_last_backward = is_last
        if self.schedule is not None:
            self.schedule.is_last_backward = is_last

    def join(self, schedule: Schedule, is_root: bool) -> None:
        """Take part in a root's steps. What was set before the first forward is the root's say."""
        self.schedule = schedule
        self.is_root = is_root
        if is_root:
            if self._optimizer_done is not None:
                schedule.streams.wait_once(self._optimizer_done)
            schedule.set_trace(self._trace)
            schedule.set_limit(self._limit)
            schedule.is_last_backward = self._is_last_backward

    def reset(self) -> None:
        """Forget which modules were called before an exception."""
        self._calls.clear()
        self._not_called = set(self._callable)


def state_of(module: nn.Module) -> State | None:
    """What ``fully_shard`` left on this module itself."""
    return module.__dict__.get(_STATE)


def states_below(module: nn.Module) -> list[State]:
    """The states of ``module`` and everything below it, outermost first, each once."""
    found: dict[State, None] = {}
    for child in module.modules():
        state = state_of(child)
        if state is not None:
            found.setdefault(state)
    return list(found)


def start_root(state: State) -> Schedule:
    """First forward: the module that is called is the root of all below it."""
    states: dict[State, None] = {}
    for module in state.modules:
        states |= dict.fromkeys(states_below(module))
    members = list(states)
    name_groups(state.modules, members)
    groups = [member.group for member in members]
    for member in members:
        refuse_unjoined(member.group, member.unjoined)
    refuse_meta(groups)
    join_late_ties(state.group, groups)
    for group in groups:
        group.refresh()
    if any(member.is_emptied for member in members):
        refuse_untouched(state.modules, state.group.mesh)
    refuse_offloaded_on_device(groups)
    warn_without_masters(groups)
    check_replicas(groups)
    shared = state.shared_streams or SharedStreams()
    device = state.group.mesh.device
    schedule = Schedule(groups, shared.of(device))
    for member in members:
        previous = member.schedule
        if previous is not None and previous.phase is not Phase.IDLE:
            raise RuntimeError(
                f"'{member.group.name}' was called by itself and is still in "
                f"{previous.phase.value}; finish its step before calling the module around it"
            )
        if member.follows_root:
            member.group.switches.reshard_after_forward = member is not state
        member.join(schedule, is_root=member is state)
    return schedule


def name_groups(roots: list[nn.Module], members: list[State]) -> None:
    """Full names from ``roots`` on, for messages and traces."""
    names = {id(module): name for root in roots for name, module in root.named_modules()}
    for member in members:
        group = member.group
        group.name = ", ".join(names.get(id(m)) or "root" for m in group.modules)
        for param in group.params:
            param.group_name = group.name
            param.rename(names)
