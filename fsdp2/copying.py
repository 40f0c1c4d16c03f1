"""``copy.deepcopy`` of sharded modules: the copy is sharded alike and independent.

The outermost sharded module that is copied makes the copies of all states below it known to
``deepcopy``, which then finds them wherever a hook or an attribute refers to one. When all
modules are there, each copied state gets a group over copied shards.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp2 import _torch
from fsdp2.checks import refuse_unjoined
from fsdp2.errors import UsageError
from fsdp2.forward_methods import gather_in_method
from fsdp2.hooks import State, state_of, states_below
from fsdp2.module import FSDPModule
from fsdp2.param_group import ParamGroup
from fsdp2.sharded_param import IS_SHARD, ShardedParam

Memo = dict[int, Any]
"""What ``deepcopy`` has copied so far, by the ``id`` of the original."""


def copy_module(self: nn.Module, memo: Memo) -> nn.Module:
    """``__deepcopy__`` of sharded modules. The copy is the root of its own steps.

    Values, policies, settings and hooks are copied; gradients are not, as for any module. The
    communication of both goes over the same process groups: copy on all ranks.

    Raises:
        UsageError: Forward is running, or a parameter below is owned by a call further out.
    """
    state = state_of(self)
    assert state is not None
    if id(state) in memo:
        return _copy_one(self, memo)
    states = list(dict.fromkeys(s for module in state.modules for s in states_below(module)))
    for each in states:
        _check(each)
        each.group.refresh()
    shards = {id(param.shard) for each in states for param in each.group.params}
    for module in state.modules:
        _refuse_foreign(module, shards)
    for each in states:
        memo[id(each)] = State.__new__(State)
        for param in each.group.params:
            # The copied group's buffer takes the rows over, but for what has no place in it.
            local = param.local.clone() if param.has_own_form else param.local
            memo[id(param.shard)] = param.shard_over(local, param.shard)
            if param.full is not None:
                memo[id(param.full)] = None  # an attribute while it is gathered; taken out below
    for module in state.modules:
        copy.deepcopy(module, memo)
    for each in states:
        _finish(each, memo)
    for each in states:
        _finish_prefetch(each, memo)
    found: nn.Module = memo[id(self)]
    return found


def _check(state: State) -> None:
    refuse_unjoined(state.group, state.unjoined)
    if state.group.step.running:
        raise UsageError(
            f"deepcopy of '{state.group.name}' while its forward runs; copy it between steps"
        )


def _refuse_foreign(module: nn.Module, ours: set[int]) -> None:
    for name, param in module.named_parameters(remove_duplicate=False):
        if hasattr(param, IS_SHARD) and id(param) not in ours:
            raise UsageError(
                f"deepcopy: parameter '{name}' of {type(module).__name__} is tied to one outside, "
                "and owned by a fully_shard call around both; copy the module of that call"
            )


def _copy_one(module: nn.Module, memo: Memo) -> nn.Module:
    """A module whose state is known to ``memo``."""
    original = type(module).__mro__[FSDPModule._orig_cls_mro_index]
    theirs = getattr(original, "__deepcopy__", None)
    if theirs is not None:
        found: nn.Module = theirs(module, memo)
        return found
    made: nn.Module = object.__new__(type(module))
    memo[id(module)] = made
    for name, value in module.__dict__.items():
        made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _finish(state: State, memo: Memo) -> None:
    """Give the copied state a group over the copies of modules and shards."""
    group, made = state.group, memo[id(state)]
    params = [_copy_param(param, memo) for param in group.params]
    modules = [memo[id(module)] for module in group.modules]
    copied = ParamGroup(
        modules,
        params,
        group.mesh,
        group.policy,
        group.offload,
        replace(group.switches),
        group.part_size,
    )
    copied.separate_reductions(group.reduces_apart)
    if group.custom.is_set:
        copied.use(group.custom)
    memo[id(group)] = copied
    made.begin([memo[id(module)] for module in state.modules], copied, state.follows_root)
    made.ignored = list(state.ignored)
    made.joined = [param for old, param in zip(group.params, params) if old in state.joined]
    made.set_limit(state.asked_limit)
    for module, name in state.forward_methods:
        memo[id(module)].__dict__.pop(name)
        gather_in_method(made, memo[id(module)], name)


def _copy_param(param: ShardedParam, memo: Memo) -> ShardedParam:
    made = copy.copy(param)
    made.places = [place._replace(module=memo[id(place.module)]) for place in param.places]
    for place in made.places:
        place.module.__dict__.pop(place.attribute, None)
    made.shard = memo[id(param.shard)]
    made.local = _torch.local_of(made.shard)
    made.full = None
    made.accumulated = None
    return made


def _finish_prefetch(state: State, memo: Memo) -> None:
    """Explicit orders hold in the copy where all of their groups were copied."""
    made = memo[id(state)]
    for kind in ("forward_prefetch", "backward_prefetch"):
        groups = getattr(state, kind)
        if groups is not None and all(id(group) in memo for group in groups):
            setattr(made, kind, [memo[id(group)] for group in groups])
