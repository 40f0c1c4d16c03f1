"""Numbers that tell values apart."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
_PRIME = 0x5BD1E995


def checksum(tensor: Tensor) -> Tensor:
    """A 64-bit sum of the bits of ``tensor``, each weighted by its place."""
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(integer[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + len(piece) + 1, device=tensor.device)
        total += (piece * (places * _PRIME + 1)).sum()
    return total
