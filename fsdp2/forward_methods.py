"""Methods of a module, beside forward, that gather its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp2.hooks import State


def gather_in_method(state: State, module: nn.Module, name: str) -> None:
    """Let a method of an FSDP module do what happens around its forward."""
    state.forward_methods.append((module, name))
    module.__dict__[name] = _forward_method(state, getattr(module, name)).__get__(module)


def _forward_method(state: State, method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.group.step.running:
            return method(*args, **kwargs)  # forward itself calls it
        args, kwargs = state.pre_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = state.post_forward(module, args, kwargs, output)
        return output

    return wrapped
