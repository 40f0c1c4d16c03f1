"""Whole matrices for computations that need them: each goes to one rank, and its result back.

The ranks of a shard mesh hold a part of every matrix. One all-to-all brings each matrix together
on its owner, a second one takes what the owner has computed apart again: no rank ever holds more
whole matrices than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.layout import Rows


class Matrix(NamedTuple):
    """The full shape of a matrix, and the dimension along which the ranks have cut it."""

    rows: int
    columns: int
    dim: int

    @property
    def cost(self) -> int:
        """Multiplications of one product of the matrix with its transpose, the smaller one."""
        return self.rows * self.columns * min(self.rows, self.columns)

    def bounds(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Of a rank's part: where it starts along ``dim``, and how long it is."""
        start, stop = Rows((self[self.dim],), num_ranks).bounds(rank)
        return start, stop - start

    def part_shape(self, rank: int, num_ranks: int) -> tuple[int, int]:
        length = self.bounds(rank, num_ranks)[1]
        return (length, self.columns) if self.dim == 0 else (self.rows, length)


def choose_owners(costs: Sequence[int], num_ranks: int) -> list[int]:
    """For each matrix its owner: the dearest first, each to the rank with least to do so far."""
    loads = [0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


class Owners:
    """Who computes on which of ``matrices``, the same on all ranks of ``group``."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._dtype, self._device = dtype, device
        self._rank = group.rank()
        self._size = group.size()
        self._matrices = matrices
        owners = choose_owners([matrix.cost for matrix in matrices], self._size)
        self._owned_by = [
            [i for i, owner in enumerate(owners) if owner == rank] for rank in range(self._size)
        ]
        self.own = self._owned_by[self._rank]
        """Indices of this rank's matrices."""

    def bring(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's whole matrices, of the parts of all matrices that each rank has."""
        sends = [[parts[i] for i in owned] for owned in self._owned_by]
        arriving = [
            [self._matrices[i].part_shape(rank, self._size) for i in self.own]
            for rank in range(self._size)
        ]
        received = self._exchange(sends, arriving)
        return [
            torch.cat(pieces, self._matrices[i].dim) for i, pieces in zip(self.own, zip(*received))
        ]

    def take_back(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of all matrices, from the owners of the whole ones."""
        sends = []
        for rank in range(self._size):
            bounds = [self._matrices[i].bounds(rank, self._size) for i in self.own]
            dims = [self._matrices[i].dim for i in self.own]
            sends.append([w.narrow(dim, *at) for w, dim, at in zip(wholes, dims, bounds)])
        arriving = [
            [self._matrices[i].part_shape(self._rank, self._size) for i in owned]
            for owned in self._owned_by
        ]
        parts: list[Tensor | None] = [None] * len(self._matrices)
        for owned, received in zip(self._owned_by, self._exchange(sends, arriving)):
            for i, part in zip(owned, received):
                parts[i] = part
        return [part for part in parts if part is not None]

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], arriving: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[Tensor]]:
        """One all-to-all: ``sends[r]`` to rank r, and from rank r tensors of ``arriving[r]``."""
        numels = [[rows * columns for rows, columns in shapes] for shapes in arriving]
        received = self._empty(sum(map(sum, numels)))
        flat = [tensor.reshape(-1) for tensors in sends for tensor in tensors]
        dist.all_to_all_single(
            received,
            torch.cat([self._empty(0), *flat]),
            [sum(each) for each in numels],
            [sum(tensor.numel() for tensor in tensors) for tensors in sends],
            group=self._group,
        )
        pieces = iter(received.split([numel for each in numels for numel in each]))
        return [[next(pieces).view(shape) for shape in shapes] for shapes in arriving]

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)
