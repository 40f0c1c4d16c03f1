"""Tensors that have memory and no values yet, told apart from those that somebody has filled.

``to_empty`` leaves what it finds in memory, and a table that no ``reset_parameters`` computes
again, such as a rotary embedding's, stays like this without an error. Here such memory gets a
pattern that no initialiser leaves, and the first forward looks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp2 import _torch


def mark(tensor: Tensor) -> None:
    """Fill it with the pattern."""
    if tensor.dtype is not torch.bool:
        _bytes_of(tensor).fill_(_pattern(tensor))


def mark_below(module: nn.Module) -> None:
    """Every parameter and buffer below ``module`` that has memory."""
    for tensor in held_below(module).values():
        if tensor.device.type != "meta":
            mark(tensor)


def is_untouched(tensor: Tensor) -> bool:
    """Whether all of it still has the pattern. Reads one byte as a rule."""
    if tensor.dtype is torch.bool or tensor.device.type == "meta":
        return False
    found, pattern = _bytes_of(tensor), _pattern(tensor)
    return len(found) > 0 and int(found[0]) == pattern and bool((found == pattern).all())


def held_below(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _pattern(tensor: Tensor) -> int:
    """Every byte of it. Numbers of such bytes are NaN, and large and negative integers."""
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xFA


def _bytes_of(tensor: Tensor) -> Tensor:
    local = _torch.local_of(tensor) if isinstance(tensor, _torch.DTensor) else tensor
    return local.detach().data.contiguous().view(-1).view(torch.uint8)
