"""``reset_parameters`` of modules without memory: alike on all ranks, each keeps its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fsdp2 import emptied
from fsdp2.cutting import filled_like, part_of
from fsdp2.deferred import recorded_in
from fsdp2.errors import UsageError
from fsdp2.hooks import State
from fsdp2.sharded_param import ShardedParam


class Slot(NamedTuple):
    """One entry of a module's table of parameters or buffers."""

    table: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Tensor:
        return cast(Tensor, self.table[self.name])


def is_empty(tensor: Tensor | None) -> bool:
    """Whether it is on the meta device and waits for memory."""
    is_lazy = isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    return tensor is not None and tensor.device.type == "meta" and not is_lazy


def full_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def unrecorded(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold something on the meta device without a record, and can reset it."""
    return {
        prefix: module
        for prefix, module in model.named_modules()
        if _resetter(module) is not None and _waiting(module)
    }


def reset_in_order(modules: dict[str, nn.Module], states: list[State], home: torch.device) -> None:
    """Reset one module after the other on full memory, and keep this rank's rows."""
    owned = {
        id(param.registered): (param, portion, state.group)
        for state in states
        for portion in state.group.portions
        for param in portion.params
    }
    made: dict[int, Tensor] = {}
    """Tied parameters stay tied."""
    for prefix, module in modules.items():
        waiting = _waiting(module)
        before = [slot.tensor for slot in waiting]
        for slot, tensor, whole in zip(waiting, before, _values_after_reset(prefix, module)):
            if id(tensor) in owned:
                param, portion, group = owned[id(tensor)]
                keep_rows(param, whole, portion.home)
                if not group.attributes.are_on_meta():
                    group.refresh()
                continue
            if id(tensor) not in made:
                made[id(tensor)] = filled_like(tensor, whole, full_name(prefix, slot.name), home)
            slot.table[slot.name] = made[id(tensor)]


def keep_rows(param: ShardedParam, whole: Tensor, home: torch.device) -> None:
    """Make this rank's part of ``whole`` the shard."""
    part = part_of(whole, param.spec, param.name)
    param.replace(torch.empty(part.shape, dtype=part.dtype, device=home).copy_(part))


def _resetter(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            return cast(Callable[[], object], found)
    return None


def _waiting(module: nn.Module) -> list[Slot]:
    recorded = recorded_in(module)
    return [
        Slot(table, name)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if is_empty(tensor) and name not in recorded
    ]


def _values_after_reset(prefix: str, module: nn.Module) -> list[Tensor]:
    """Whole values, on the CPU, of what the module waits for; its tables are as before."""
    waiting = _waiting(module)
    before = [slot.tensor for slot in waiting]
    for slot, tensor in zip(waiting, before):
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        emptied.mark(memory)
        is_param = isinstance(tensor, nn.Parameter)
        slot.table[slot.name] = nn.Parameter(memory, tensor.requires_grad) if is_param else memory
    reset = _resetter(module)
    assert reset is not None
    try:
        reset()
        found = [slot.tensor.detach() for slot in waiting]
    finally:
        for slot, tensor in zip(waiting, before):
            slot.table[slot.name] = tensor
    untouched = [
        full_name(prefix, slot.name)
        for slot, value in zip(waiting, found)
        if emptied.is_untouched(value)
    ]
    if untouched:
        raise UsageError(
            f"materialize: {type(module).__name__}.reset_parameters does not fill {untouched}; "
            "build the model under fsdp2.deferred_init(), which records what constructors compute"
        )
    return found
