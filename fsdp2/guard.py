"""The class of the parameters that the engine makes: DTensors that say when they are misread.

Outside its group's forward a parameter is a shard. Code that takes it for the full weight,
``self.head.weight @ h`` in the forward of another group or ``model.generate(x)`` that nobody
registered, mixes it with plain tensors, which DTensor refuses without saying whose parameter
it was. A :class:`GuardedShard` runs every operator as the ``DTensor`` that it is and explains
this one failure.

It costs nothing to hold or to read: attributes, ``to_local``, ``full_tensor`` are DTensor's. An
operator on it takes some microseconds more, so optimizers step on plain DTensors: their shards
change class before the step and back behind it, at 0.1 microseconds each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2 import _torch
from fsdp2.drawing import can_draw, draw
from fsdp2.errors import NotGatheredError

NAMES = "_fsdp2_names"
"""On a guarded tensor: full names of the parameter and of the module ``fully_shard`` got."""

_EMBEDDING = torch.ops.aten.embedding.default
"""DTensor looks a single token up in the shards, with a warning, and fails further on."""


class GuardedShard(_torch.DTensor):
    """A DTensor whose class is set on a finished one; :func:`guard` does it.

    On the CPU random numbers are drawn for the whole parameter, of which it keeps its rows.

    Views and casts of it are guarded too, since ``linear`` transposes its weight before it
    multiplies. Everything else that is computed from it is a plain ``DTensor``, and so are
    copies by ``pickle`` and ``deepcopy``.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on the same objects as plain DTensors.

        Raises:
            NotGatheredError: A guarded tensor met a plain one.
        """
        kwargs = kwargs or {}
        tensors = _tensors_in(args, kwargs)
        guarded = [tensor for tensor in tensors if type(tensor) is cls]
        if func is _EMBEDDING and len(guarded) < len(tensors):
            raise NotGatheredError(_explain(func, guarded[0], tensors))
        if can_draw(func, guarded[0]) and args[0] is guarded[0]:
            return draw(func, guarded[0], _names_of(guarded[0])[0], args[1:], kwargs)
        _set_class(guarded, _torch.DTensor)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if _torch.MIXED_TENSORS in str(error):
                raise NotGatheredError(_explain(func, guarded[0], tensors)) from None
            raise
        finally:
            _set_class(guarded, cls)
        if func.is_view or func in _torch.PIECES_AND_CASTS:
            _guard_results(result, *_names_of(guarded[0]))
        return result

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> _torch.DTensor:
        """Compilers expect their stand-in to have the class of the original."""
        made = _torch.DTensor.__tensor_unflatten__(*parts)
        made.__class__ = GuardedShard
        return cast(_torch.DTensor, made)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_plain(self):
            return _torch.DTensor.__reduce_ex__(self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_plain(self):
            return _torch.DTensor.__deepcopy__(self, memo)


def guard(shard: Tensor, name: str, module: str) -> None:
    """Make ``shard``, a DTensor, name itself when it is mixed with plain tensors.

    ``module`` is what ``fully_shard`` was called on. Call it again when the names change.
    """
    if type(shard) is _torch.DTensor:  # another library's subclass stays what it is
        _set_class([shard], GuardedShard)
    setattr(shard, NAMES, (name, module))


def unguard_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """A state dict post-hook: its entries are copies of the parameters, and plain DTensors."""
    copies = [v for v in state_dict.values() if type(v) is GuardedShard]
    for value in copies:
        if not isinstance(value, nn.Parameter):  # with keep_vars the entries are the parameters
            _set_class([value], _torch.DTensor)
            value.__dict__.pop(NAMES, None)


@contextmanager
def _as_plain(shard: Tensor) -> Iterator[None]:
    _set_class([shard], _torch.DTensor)
    try:
        yield
    finally:
        _set_class([shard], GuardedShard)


def _set_class(tensors: Iterable[Tensor], cls: type[_torch.DTensor]) -> None:
    for tensor in tensors:
        tensor.__class__ = cls


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What an operator got, also in its lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(each for each in value if isinstance(each, Tensor))
    return found


def _guard_results(result: Any, name: str, module: str) -> None:
    for tensor in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(tensor, _torch.DTensor):
            guard(tensor, name, module)


def _names_of(shard: Tensor) -> tuple[str, str]:
    """A compiler's stand-in has no names."""
    return cast(tuple[str, str], getattr(shard, NAMES, ("?", "?")))


def name_of(shard: Tensor) -> str:
    """The full name of a parameter, quoted; its shape where it has no name."""
    name, _ = _names_of(shard)
    return f"of shape {tuple(shard.shape)}" if name == "?" else f"'{name}'"


def _explain(func: Any, shard: Tensor, tensors: list[Tensor]) -> str:
    name, group = _names_of(shard)
    shapes = [tuple(t.shape) for t in tensors if not isinstance(t, _torch.DTensor)]
    is_write = func.name().partition(".")[0].endswith("_") and tensors[0] is shard
    return (
        f"{func} got {_torch.MIXED_TENSORS}: parameter '{name}' of module '{group}' is sharded "
        f"here, not gathered, and met plain tensors of shapes {shapes}. The full parameter is "
        f"there while '{group}' runs forward or is unsharded by hand. "
        + (_TO_WRITE if is_write else _TO_READ)
    )


_TO_READ = """Either
  - call the module instead of reading its parameter, or make it one group with the module that
    reads it: leave it to that module's fully_shard call, or fully_shard([a, b]);
  - for a method other than forward: fsdp2.register_fsdp_forward_method(module, "generate");
  - for other code: module.unshard() before it and module.reshard() after it, or
    `with fsdp2.full_parameters(model):` between steps"""

_TO_WRITE = """Either
  - shard the value alike: distribute_tensor(value, param.device_mesh, param.placements);
  - write to the full parameters: `with fsdp2.full_parameters(model, write_back=True):`"""


# Optimizers

_stepping: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()
_is_watching = False


def watch_steps() -> None:
    """From now on let every optimizer step on plain DTensors."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _is_watching = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    shards = _stepping.get(optimizer, [])  # of a step that raised
    for group in optimizer.param_groups:
        shards += [param for param in group["params"] if type(param) is GuardedShard]
    _set_class(shards, _torch.DTensor)
    _stepping[optimizer] = shards


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _set_class(_stepping.pop(optimizer, ()), GuardedShard)
