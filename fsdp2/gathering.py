"""DTensors gathered and dealt out many at a time.

Tensors that are split over the same one mesh dim travel together, packed into buckets of
bounded size: one collective a bucket. Anything else, such as a tensor
that is split over two dims, travels by itself through DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch

BUCKET_NBYTES = 64 << 20
"""Bytes of full tensors that travel together. A larger tensor has a bucket to itself."""

_ALIGNMENT = 16
"""Bytes, so that a view of any dtype can start there."""


def wire_device(group: dist.ProcessGroup, device_type: str, found: torch.device) -> torch.device:
    """Where a tensor must be for ``group`` to take it: where it is, if the backend can.

    ``device_type`` is that of the group's mesh. An offloaded tensor lies on the CPU, which
    the backend of an accelerator cannot read.
    """
    backends = (part.split(":")[0] for part in dist.get_backend_config(group).split(","))
    if found.type in backends:
        return found
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this is the mesh's first rank."""
    coordinate = mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def own_part(full: Tensor, like: _torch.DTensor) -> Tensor:
    """What this rank keeps of a full tensor laid out like ``like``. No communication."""
    mesh, placements = like.device_mesh, like.placements
    return _torch.local_of(distribute_tensor(full, mesh, placements, src_data_rank=None))


def gather(
    tensors: Sequence[_torch.DTensor], only_first: bool = False
) -> Iterator[tuple[int, Tensor | None]]:
    """Each tensor's index and full form, a new plain tensor on its local tensor's device.

    All ranks of the meshes iterate in step; the order is a function of the layouts. One bucket
    is held at a time, and what the caller keeps. With ``only_first`` the first rank of each
    mesh gets the tensors and the others get None.
    """
    for bucket in _in_buckets(tensors):
        if isinstance(bucket, _Bucket):
            yield from bucket.gather(only_first)
        else:
            tensor = tensors[bucket]
            full = _full_alone(tensor)
            yield bucket, full if is_first(tensor.device_mesh) or not only_first else None


def scatter(
    tensors: Sequence[_torch.DTensor],
    fulls: Sequence[Tensor | None],
    at_most: int | None = None,
) -> None:
    """Fill the local tensors from the full ones that the first rank of each mesh has.

    The others pass None. Shapes are those of ``tensors``; other dtypes are cast. ``fulls`` is
    asked for a tensor when it is sent. A bucket is all that is held beside it; ``at_most`` limits
    its bytes further.
    """
    for bucket in _in_buckets(tensors, at_most):
        if isinstance(bucket, _Bucket):
            bucket.scatter(fulls)
        else:
            tensor, full = tensors[bucket], fulls[bucket]
            local = _torch.local_of(tensor)
            device = _device_of(tensor.device_mesh, local)
            if full is None:
                full = torch.empty(tensor.shape, dtype=local.dtype, device=device)
            received = full.to(device=device, dtype=local.dtype).contiguous()
            _spread(received, tensor.device_mesh)
            local.copy_(own_part(received, tensor))


def _spread(tensor: Tensor, mesh: DeviceMesh, but: int = -1) -> Tensor:
    """The first rank's tensor on all ranks of ``mesh``; not along the mesh dim ``but``."""
    for dim in range(mesh.ndim):
        if dim != but and mesh.size(dim) > 1:
            dist.broadcast(tensor, group=mesh.get_group(dim), group_src=0)
    return tensor


def _full_alone(tensor: _torch.DTensor) -> Tensor:
    local = _torch.local_of(tensor).detach()
    if not _splits(tensor):
        return local.clone()
    on_wire = local.to(_device_of(tensor.device_mesh, local))
    return _torch.dtensor(on_wire, _torch.spec_of(tensor)).full_tensor().to(local.device)


def _device_of(mesh: DeviceMesh, local: Tensor) -> torch.device:
    return wire_device(mesh.get_group(0), mesh.device_type, local.device)


# Buckets


class _Wire(NamedTuple):
    """Tensors with the same wire share buckets."""

    mesh: DeviceMesh
    dim: int
    """The mesh dim that splits them; all others repeat them."""
    device: torch.device


@dataclass(frozen=True)
class _Piece:
    """One tensor in a bucket: in every row the elements of one rank, padded alike."""

    index: int
    local: Tensor
    shape: tuple[int, ...]
    tensor_dim: int
    world_size: int

    @property
    def chunk(self) -> int:
        """Indices of the split dim that a rank has at most, as ``torch.chunk`` deals them."""
        return -(-self.shape[self.tensor_dim] // self.world_size)

    @property
    def nbytes(self) -> int:
        """Bytes in a row."""
        numel = self.chunk * prod(self.shape[: self.tensor_dim] + self.shape[self.tensor_dim + 1 :])
        return -(-numel * self.local.element_size() // _ALIGNMENT) * _ALIGNMENT

    def view(self, row: Tensor, start: int, rank: int) -> Tensor:
        """What ``rank`` has, in its shape, in that rank's row of bytes."""
        size = self.shape[self.tensor_dim]
        own = min(self.chunk, max(0, size - rank * self.chunk))
        shape = (*self.shape[: self.tensor_dim], own, *self.shape[self.tensor_dim + 1 :])
        nbytes = prod(shape) * self.local.element_size()
        return row.narrow(0, start, nbytes).view(self.local.dtype).view(shape)

    def join(self, rows: Tensor, start: int) -> Tensor:
        parts = [self.view(row, start, rank) for rank, row in enumerate(rows.unbind())]
        return torch.cat(parts, dim=self.tensor_dim).to(self.local.device)

    def split(self, full: Tensor, rows: Tensor, start: int) -> None:
        parts = full.split(self.chunk, dim=self.tensor_dim) if self.chunk else ()
        for rank, part in enumerate(parts):
            self.view(rows[rank], start, rank).copy_(part)


class _Bucket:
    """Tensors that travel in one collective."""

    def __init__(self, wire: _Wire) -> None:
        self.wire = wire
        self.group = wire.mesh.get_group(wire.dim)
        self.world_size = self.group.size()
        self.rank = self.group.rank()
        self.pieces: list[tuple[int, _Piece]] = []
        """Each with the byte of a row at which it starts."""
        self.row_nbytes = 0

    def fits(self, piece: _Piece, limit: int) -> bool:
        nbytes = (self.row_nbytes + piece.nbytes) * self.world_size
        return not self.pieces or nbytes <= limit

    def add(self, piece: _Piece) -> None:
        self.pieces.append((self.row_nbytes, piece))
        self.row_nbytes += piece.nbytes

    def _bytes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.wire.device)

    @property
    def _is_in_first_line(self) -> bool:
        """Whether the first rank of the mesh is among those that this bucket travels between."""
        coordinate = self.wire.mesh.get_coordinate() or ()
        return not any(at for dim, at in enumerate(coordinate) if dim != self.wire.dim)

    @torch.no_grad()
    def gather(self, only_first: bool) -> Iterator[tuple[int, Tensor | None]]:
        if only_first and not self._is_in_first_line:
            yield from ((piece.index, None) for _, piece in self.pieces)
            return
        own = self._bytes(self.row_nbytes)
        for start, piece in self.pieces:
            piece.view(own, start, self.rank).copy_(piece.local)
        receives = self.rank == 0 or not only_first
        rows = self._bytes(self.world_size if receives else 0, self.row_nbytes)
        if not self.row_nbytes:
            pass  # tensors without elements
        elif only_first:
            dist.gather(own, list(rows.unbind()) or None, group=self.group, group_dst=0)
        else:
            _torch.all_gather_into(self.group, rows.view(-1), own).wait()
        del own
        for start, piece in self.pieces:
            yield piece.index, piece.join(rows, start) if receives else None

    @torch.no_grad()
    def scatter(self, fulls: Sequence[Tensor | None]) -> None:
        if not self.row_nbytes:
            return
        sends = self._is_in_first_line and self.rank == 0
        rows = self._bytes(self.world_size if sends else 0, self.row_nbytes)
        own = rows[0] if sends else self._bytes(self.row_nbytes)
        if self._is_in_first_line:
            for start, piece in self.pieces:
                full = fulls[piece.index]
                if full is not None:
                    piece.split(full, rows, start)
            dist.scatter(own, list(rows.unbind()) or None, group=self.group, group_src=0)
        _spread(own, self.wire.mesh, but=self.wire.dim)
        for start, piece in self.pieces:
            piece.local.copy_(piece.view(own, start, self.rank))


def _in_buckets(
    tensors: Sequence[_torch.DTensor], at_most: int | None = None
) -> Iterator[_Bucket | int]:
    """Buckets, and the indices of tensors that travel alone."""
    limit = BUCKET_NBYTES if at_most is None else min(at_most, BUCKET_NBYTES)
    open_buckets: dict[_Wire, _Bucket] = {}
    for index, tensor in enumerate(tensors):
        dim = _only_split_dim(tensor)
        if dim is None:
            yield index
            continue
        mesh, local = tensor.device_mesh, _torch.local_of(tensor).detach()
        group = mesh.get_group(dim)
        wire = _Wire(mesh, dim, wire_device(group, mesh.device_type, local.device))
        placement = tensor.placements[dim]
        assert isinstance(placement, Shard)
        piece = _Piece(index, local, tuple(tensor.shape), placement.dim, group.size())
        bucket = open_buckets.get(wire)
        if bucket is None or not bucket.fits(piece, limit):
            if bucket is not None:
                yield bucket
            bucket = open_buckets[wire] = _Bucket(wire)
        bucket.add(piece)
    yield from open_buckets.values()


def _splits(tensor: _torch.DTensor) -> list[tuple[int, Placement]]:
    """The mesh dims that do not just repeat the tensor."""
    return [
        (dim, placement)
        for dim, placement in enumerate(tensor.placements)
        if tensor.device_mesh.size(dim) > 1 and not placement.is_replicate()
    ]


def _only_split_dim(tensor: _torch.DTensor) -> int | None:
    """The one mesh dim that splits the tensor, if it does so in even chunks."""
    splits = _splits(tensor)
    if len(splits) == 1 and type(splits[0][1]) is Shard:
        return splits[0][0]
    return None
