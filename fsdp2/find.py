"""Which parameters one ``fully_shard`` call takes: those below its modules that no other owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.sharded_param import (
    IS_FULL,
    IS_SHARD,
    Deal,
    Place,
    ShardedParam,
    has_own_form,
    owner_of,
)


class Tie(NamedTuple):
    """An attribute that holds a parameter which another call owns under another name."""

    param: ShardedParam
    place: Place


class Found(NamedTuple):
    """What lies below the modules of one call."""

    params: list[ShardedParam]
    ties: list[Tie]


def find_params(
    modules: list[nn.Module],
    deal_of: Callable[[str, nn.Parameter], Deal],
    ignored: set[nn.Parameter],
    owned: set[nn.Module],
) -> Found:
    """Cut shards of what lies below ``modules`` and no earlier call owns."""
    places: dict[nn.Parameter, list[Place]] = {}
    visited: set[nn.Module] = set(owned)
    for root in modules:
        _find_places(root, "", ignored, visited, places)
    ties: list[Tie] = []
    fresh: list[tuple[list[Place], Deal]] = []
    for param, found in places.items():
        owner = owner_of(param)
        if owner is not None:
            ties += [Tie(owner, place) for place in found]
        else:
            _check(found[0].name, param)
            fresh.append((found, deal_of(found[0].name, param)))
    return Found([ShardedParam(found, deal) for found, deal in fresh], ties)


def _find_places(
    module: nn.Module,
    prefix: str,
    ignored: set[nn.Parameter],
    visited: set[nn.Module],
    places: dict[nn.Parameter, list[Place]],
) -> None:
    """Depth first; a module that an earlier call owns ends the descent."""
    if module in visited:
        return
    visited.add(module)
    for attribute, param in module._parameters.items():
        is_taken = param is None or param in ignored or hasattr(param, IS_SHARD)
        if param is not None and not is_taken:
            places.setdefault(param, []).append(Place(module, attribute, prefix + attribute))
    for name, child in module.named_children():
        _find_places(child, f"{prefix}{name}.", ignored, visited, places)


def _check(name: str, param: nn.Parameter) -> None:
    full_name = getattr(param, IS_FULL, None)
    if full_name is not None:
        raise UsageError(
            f"parameter '{name}' is the full parameter '{full_name}' of a sharded module in the "
            "middle of its forward; call fully_shard before it runs, on inner modules first"
        )
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise UsageError(
            f"parameter '{name}' is not initialised yet; run the lazy module once first"
        )
    inner = _torch.local_of(param) if isinstance(param, _torch.DTensor) else param
    if has_own_form(name, inner):
        return
    if type(inner).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise NotImplementedError(
            f"parameter '{name}' is a {type(inner).__name__}, a tensor subclass with operators of "
            "its own that does not say how it is gathered; give it fsdp_pre_all_gather and "
            "fsdp_post_all_gather, or list it in ignored_params"
        )
    if not isinstance(param, _torch.DTensor) and param.layout is not torch.strided:
        raise UsageError(
            f"parameter '{name}' has layout {param.layout}; only dense ones shard: "
            "call .to_dense(), or list it in ignored_params"
        )


def names_of(modules: list[nn.Module], params: set[nn.Parameter]) -> list[str]:
    """The names below ``modules`` of those ``params`` that are there."""
    if not params:
        return []
    return [n for root in modules for n, param in root.named_parameters() if param in params]


def is_container(module: nn.Module) -> bool:
    """Whether it only holds modules and is never called."""
    has_forward = type(module).forward is not nn.Module.forward
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward
