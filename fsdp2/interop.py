"""Libraries that call PyTorch's ``fully_shard`` use this one, unchanged.

accelerate, transformers, Lightning, torchtitan and others import ``fully_shard`` from
``torch.distributed.fsdp`` or from an older path that re-exports it, some when they are
imported and some in the function that shards. :func:`use_in_torch` exchanges the functions
wherever a loaded module has them as an attribute; a module that is loaded later finds them
exchanged in ``torch.distributed.fsdp``.

Functions alone are exchanged. The types that those libraries test with ``isinstance`` stay
PyTorch's: ``FSDPModule`` and ``UnshardHandle`` of this package derive from them, and the
policies are the same classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from fsdp2 import _torch
from fsdp2.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp2.module import FSDPModule

__all__ = ["InTorch", "use_in_torch"]

Function = Callable[..., Any]

_users = 0
"""How many calls of `use_in_torch` have not been undone."""


class InTorch:
    """One call of :func:`use_in_torch`: a context manager whose end undoes that call."""

    def __init__(self) -> None:
        self._is_on = True

    def __enter__(self) -> InTorch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Put PyTorch's functions back, unless another call still wants ours. Twice is no harm."""
        global _users
        if self._is_on:
            self._is_on = False
            _users -= 1
            if _users == 0:
                _exchange({id(ours): (ours, theirs) for theirs, ours in _stand_ins()})


def use_in_torch() -> InTorch:
    """Put this package's ``fully_shard`` in the place of PyTorch's, for all libraries.

    As a call it stays on, as a context manager until the block ends::

        fsdp2.use_in_torch()                 # at the top of a training script

        with fsdp2.use_in_torch():           # or around what shards the model
            model, optimizer = accelerator.prepare(model, optimizer)

    Models stay with the implementation that sharded them, whatever is switched on later. Calls
    may be nested; PyTorch's functions are back, in every module and under every name, when all
    of them were undone. Call it on every rank.

    It exchanges ``fully_shard`` with its ``state``, ``register_fsdp_forward_method`` and
    ``share_comm_ctx``. References in other places than a module's attributes are not found:
    in a ``functools.partial``, a default argument or a container that was made before.
    """
    global _users
    _exchange({id(theirs): (theirs, ours) for theirs, ours in _stand_ins()})
    _users += 1
    return InTorch()


def _exchange(places: dict[int, tuple[Function, Function]]) -> None:
    """In every loaded module, let the names that are bound to ``old`` be bound to ``new``."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)  # not getattr, which makes lazy modules import
        for name, value in list(names.items()):
            old, new = places.get(id(value), (None, None))
            if value is old and new is not None:
                names[name] = new


@functools.cache
def _stand_ins() -> tuple[tuple[Function, Function], ...]:
    """PyTorch's functions, as they are before the first exchange, and what stands in for them.

    The stand-ins are functions of their own and not those of this package: so a module that
    is loaded meanwhile and imports PyTorch's can be told from one that imports ours.
    """
    torch_fsdp = import_module("torch.distributed.fsdp")
    makers: dict[str, Callable[[Function], Function]] = {
        "fully_shard": _fully_shard_for,
        "register_fsdp_forward_method": _register_for,
        "share_comm_ctx": _share_for,
    }
    theirs = [(getattr(torch_fsdp, name, None), make) for name, make in makers.items()]
    return tuple((function, make(function)) for function, make in theirs if function is not None)


def _fully_shard_for(theirs: Any) -> Function:
    @functools.wraps(fully_shard)
    def stand_in(module: Any, *args: Any, **kwargs: Any) -> Any:
        return fully_shard(module, *args, **kwargs)

    def state(module: nn.Module) -> Any:
        return theirs.state(module) if _is_theirs(module) else fully_shard.state(module)  # type: ignore[attr-defined]

    stand_in.state = state  # type: ignore[attr-defined]
    return stand_in


def _register_for(theirs: Function) -> Function:
    @functools.wraps(register_fsdp_forward_method)
    def stand_in(module: nn.Module, method_name: str) -> None:
        register = theirs if _is_theirs(module) else register_fsdp_forward_method
        register(module, method_name)

    return stand_in


def _share_for(theirs: Function) -> Function:
    @functools.wraps(share_comm_ctx)
    def stand_in(modules: Sequence[nn.Module]) -> None:
        ours = [module for module in modules if isinstance(module, FSDPModule)]
        others = [module for module in modules if not isinstance(module, FSDPModule)]
        if ours:
            share_comm_ctx(ours)
        if others:
            theirs(others)

    return stand_in


def _is_theirs(module: object) -> bool:
    """Whether PyTorch's ``fully_shard`` was applied to the module itself."""
    return isinstance(module, _torch.FSDPModule) and not isinstance(module, FSDPModule)
