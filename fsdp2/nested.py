"""Tensors inside the nested arguments and outputs of a module.

Tuples, lists, dicts, named tuples, dataclasses, and containers that were registered with
PyTorch's pytrees are opened; everything else is a leaf. A container is rebuilt, with its
own type, only where something inside it changed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fsdp2 import _torch

_PLAIN = (int, float, bool, str, bytes, type(None))


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN):
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif _torch.is_registered_container(value):
        for leaf in _torch.flatten(value)[0]:
            yield from tensors_in(leaf)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of every tensor in its place; itself where nothing changed."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return _map_sequence(function, value)
    if _torch.is_registered_container(value) and not isinstance(value, dict):
        leaves, structure = _torch.flatten(value)
        mapped = [map_tensors(function, leaf) for leaf in leaves]
        return value if _same(mapped, leaves) else _torch.unflatten(mapped, structure)
    if isinstance(value, dict):
        mapped_items = {key: map_tensors(function, item) for key, item in value.items()}
        return (
            value if _same(mapped_items.values(), value.values()) else _refill(value, mapped_items)
        )
    if _is_dataclass(value):
        return _map_dataclass(function, value)
    return value


def _map_sequence(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    mapped = [map_tensors(function, item) for item in value]
    if _same(mapped, value):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*mapped)
    return type(value)(mapped)


def _refill(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of the same type: ordered and default dicts, and models' output classes."""
    filled = copy.copy(value)
    for key, item in items.items():
        filled[key] = item
    return filled


def _map_dataclass(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = map_tensors(function, before)
        if after is not before:
            changed[field.name] = after
    if not changed:
        return value
    filled = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(filled, name, item)  # frozen ones too
    return filled


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old))
