"""Optimizers that were built before their model was sharded."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp2.errors import UsageError
from fsdp2.sharded_param import owner_of

_checked: WeakSet[Optimizer] = WeakSet()
_is_watching = False


def watch_optimizers() -> None:
    """From now on look at every optimizer once, at its first step."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_check)
        _is_watching = True


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Such an optimizer would step on tensors that no module uses, and change nothing."""
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            owner = owner_of(param)
            if owner is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} was built before fully_shard: it holds the old "
                    f"tensor of parameter '{owner.name}', which the model no longer uses; build it "
                    "after fully_shard, from model.parameters()"
                )
    _checked.add(optimizer)
