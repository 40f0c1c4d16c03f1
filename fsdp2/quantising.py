"""Numbers of one byte: how parameters and gradients may travel, at a quarter of float32.

Neighbours share a scale, the largest magnitude among them over the largest number that the
byte can hold. What is read back is ``byte * scale``: for ``int8`` off by at most half a
scale, for a float8 by at most half a unit in its last place, relative.
A NaN or an infinity makes its scale one, and so every number that shares it: nothing that is
not finite turns into a number on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp2.layout import align

WIRE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

BLOCK_NUMEL = 128
"""Numbers that share a scale where no rows are known: 3 % more bytes than none."""

SHORTEST_ROW = 32
"""Shorter rows, such as those of a convolution's kernel, would pay too much for their scales."""

_SCALE_NBYTES = torch.float32.itemsize


@dataclass(frozen=True)
class WireFormat:
    """How a flat run of numbers is coded: first all bytes, then the scales.

    The last block of a run may be shorter.
    """

    dtype: torch.dtype
    block: int

    def nbytes(self, numel: int) -> int:
        return align(self._scales_start(numel) + -(-numel // self.block) * _SCALE_NBYTES, 1)

    def _scales_start(self, numel: int) -> int:
        return align(numel, 1)

    @property
    def _largest(self) -> float:
        is_float = self.dtype.is_floating_point
        return torch.finfo(self.dtype).max if is_float else float(torch.iinfo(self.dtype).max)

    def encode(self, values: Tensor, coded: Tensor) -> None:
        """Write ``values`` of shape ``(n, numel)`` into ``coded``, ``(n, nbytes(numel))`` uint8."""
        for numbers, bytes_, scales in self._blocks(values, coded):
            exact = numbers.float()
            largest = torch.linalg.vector_norm(exact, ord=torch.inf, dim=-1, keepdim=True)
            scales.copy_(largest / self._largest)
            steps = exact / torch.where(scales == 0, 1.0, scales)
            bytes_.copy_(steps if self.dtype.is_floating_point else steps.round_())

    def decode(self, coded: Tensor, values: Tensor) -> None:
        """Read back what ``encode`` wrote, in the dtype of ``values``, rounded once."""
        for numbers, bytes_, scales in self._blocks(values, coded):
            numbers.copy_(bytes_).mul_(scales)

    def _blocks(self, values: Tensor, coded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Numbers and bytes ``(n, blocks, numel of a block)``, scales ``(n, blocks, 1)``."""
        numel = values.shape[1]
        bytes_ = coded[:, :numel].view(self.dtype)
        scales = coded[:, self._scales_start(numel) :].view(torch.float32).unsqueeze(-1)
        whole = numel // self.block
        cut = whole * self.block
        if whole:
            shape = whole, self.block
            yield (
                values[:, :cut].unflatten(1, shape),
                bytes_[:, :cut].unflatten(1, shape),
                scales[:, :whole],
            )
        if cut < numel:
            last = scales[:, whole : whole + 1]
            yield values[:, cut:].unsqueeze(1), bytes_[:, cut:].unsqueeze(1), last


def may_be_coded(compute: torch.dtype, ndim: int) -> bool:
    """Matrices and what has more dimensions; norms and biases are small, and worth their bits."""
    return compute.is_floating_point and compute.itemsize > 1 and ndim > 1


def parameter_format(dtype: torch.dtype, shape: tuple[int, ...]) -> WireFormat:
    """A scale per row for float8, per ``BLOCK_NUMEL`` neighbours for int8.

    A row is what one output of a linear layer is computed from: the last dimension. Where
    that is short it is all that belongs to one index of the first one.
    """
    if not dtype.is_floating_point:
        return WireFormat(dtype, BLOCK_NUMEL)
    is_short = shape[-1] < SHORTEST_ROW
    return WireFormat(dtype, torch.Size(shape[1:]).numel() if is_short else shape[-1])


def gradient_format(dtype: torch.dtype) -> WireFormat:
    return WireFormat(dtype, BLOCK_NUMEL)
