"""Who shares a parameter: the ranks that split it, and the ranks that repeat each shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from fsdp2 import _torch
from fsdp2.errors import UsageError

_OTHER_AXES = ("tp", "cp", "sp", "ep", "pp", "tensor", "context", "seq", "expert", "pipe")
_SPLITS = ("shard", "fsdp")
_REPEATS = ("replicate", "replica", "ddp")


@dataclass(frozen=True)
class Axis:
    """Ranks in one direction of a mesh, seen from this one."""

    group: dist.ProcessGroup | None
    """None where this rank is alone."""
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Axis:
        return cls(group if group.size() > 1 else None, group.rank(), group.size())


_ALONE = Axis(None, 0, 1)


@dataclass(frozen=True)
class ShardMesh:
    """How parameters are dealt: split along ``shard``, every shard repeated along ``replicas``."""

    mesh: DeviceMesh
    """What the shards' DTensors live on."""
    shard: Axis
    replicas: Axis
    shard_dim: int | None
    """The dimension of ``mesh`` that splits; None where nothing is split."""
    device: torch.device
    spmd: DeviceMesh | None = None
    """The user's whole mesh where ``dp_mesh_dims`` names its data-parallel dimensions."""
    data_names: tuple[str, ...] = ()
    """Those names."""

    @property
    def has_other_dims(self) -> bool:
        """Whether parameters may be laid out over further dimensions of the user's mesh."""
        return self.spmd is not None and self.spmd.ndim > len(self.data_names)

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def world_size(self) -> int:
        return self.shard.size

    @property
    def num_ranks(self) -> int:
        """Ranks whose gradients are summed."""
        return self.shard.size * self.replicas.size

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Of a parameter that is split along its dimension ``dim``, or not at all."""
        found: list[Placement] = [Replicate() for _ in range(self.mesh.ndim)]
        if dim is not None and self.shard_dim is not None:
            found[self.shard_dim] = Shard(dim)
        return tuple(found)


def shard_mesh(mesh: DeviceMesh | None) -> ShardMesh:
    """Check the user's mesh; without one, shard over all ranks."""
    mesh = _all_ranks() if mesh is None else mesh
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; name the dimensions to use "
            "with dp_mesh_dims, or slice the mesh"
        )
    device = mesh_device(mesh)
    if mesh.ndim == 1:
        return ShardMesh(mesh, Axis.of(mesh.get_group()), _ALONE, 0, device)
    if mesh.mesh_dim_names is None:
        raise UsageError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified; "
            f"got {mesh}, whose dimensions have no names"
        )
    _question_names(mesh, *mesh.mesh_dim_names)
    replicas, shard = Axis.of(mesh.get_group(0)), Axis.of(mesh.get_group(1))
    return ShardMesh(mesh, shard, replicas, 1, device)


def _question_names(mesh: DeviceMesh, first: str, second: str) -> None:
    """The first dimension of a 2-D mesh repeats, the second splits: names must not deny it."""
    doubts = [
        f"its first dimension '{first}', which would repeat parameters, names something else"
        for words in (_SPLITS, _OTHER_AXES)
        if _says(first, words)
    ]
    doubts += [
        f"its second dimension '{second}', which would split parameters, names something else"
        for words in (_REPEATS, () if _says(second, _SPLITS) else _OTHER_AXES)
        if _says(second, words)
    ]
    if doubts:
        raise UsageError(
            f"fully_shard reads the 2D mesh {mesh} as (replicate, shard), but {doubts[0]}. "
            f"Pass the dimension that splits, mesh['{first}'] or mesh['{second}'], or say which "
            f"is which: dp_mesh_dims=DataParallelMeshDims(shard=('{first}', '{second}'))"
        )


def _says(name: str, words: tuple[str, ...]) -> bool:
    parts = name.lower().replace("-", "_").split("_")
    return any(word in parts for word in words)


def named_mesh(mesh: DeviceMesh | None, dims: _torch.DataParallelMeshDims) -> ShardMesh:
    """The dimensions of ``mesh`` that ``dims`` names; several of a kind are flattened.

    Raises:
        ValueError: No names, unknown ones, one in both roles or out of the mesh's order.
    """
    if mesh is None or mesh.mesh_dim_names is None:
        raise UsageError(
            f"mesh must have mesh_dim_names when dp_mesh_dims is provided; got mesh={mesh}"
        )
    split, repeat = _names(dims.shard), _names(dims.replicate)
    if not split and not repeat:
        raise UsageError(
            "At least one of shard or replicate must be set in DataParallelMeshDims; got neither"
        )
    known = mesh.mesh_dim_names
    for name in (*split, *repeat):
        if name not in known:
            raise UsageError(
                f"dp_mesh_dims: Mesh dim name '{name}' not found in mesh.mesh_dim_names {known}; "
                "use one of these"
            )
    twice = set(split) & set(repeat)
    if twice:
        raise UsageError(
            f"dp_mesh_dims: mesh dim '{sorted(twice)[0]}' is named as shard and as replicate; use "
            "it for one of them"
        )
    for names in (split, repeat):
        if list(names) != sorted(set(names), key=known.index):
            raise UsageError(
                f"dp_mesh_dims: mesh dims {names} must stand in the order of the mesh's, {known}, "
                "each once"
            )
    return _flattened(mesh, split, repeat)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _flattened(mesh: DeviceMesh, split: tuple[str, ...], repeat: tuple[str, ...]) -> ShardMesh:
    known = mesh.mesh_dim_names
    assert known is not None
    shard = Axis.of(_torch.flattened(mesh, split).get_group()) if split else _ALONE
    replicas = Axis.of(_torch.flattened(mesh, repeat).get_group()) if repeat else _ALONE
    device, spmd = mesh_device(mesh), mesh
    if len(split) > 1:
        # A DTensor that is split over several dimensions is cut in another way than over one.
        parts = []
        for name in known:
            if name == split[0]:
                parts.append(_torch.flattened(mesh, split))
            elif name not in split:
                parts.append(mesh[name])
        mesh = parts[0] if len(parts) == 1 else _torch.concatenated(parts)
    names = mesh.mesh_dim_names
    assert names is not None
    joined = "_".join(split)
    return ShardMesh(
        mesh,
        shard,
        replicas,
        names.index(joined) if split else None,
        device,
        spmd,
        (*split, *repeat),
    )


def mesh_from_info(info: Any) -> ShardMesh:
    """What PyTorch's description of a data-parallel mesh says. Its class is private."""
    if info.dp_mesh_dims is not None:
        return named_mesh(
            info.spmd_mesh if info.spmd_mesh is not None else info.mesh, info.dp_mesh_dims
        )
    mesh, split, repeat = info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim
    return ShardMesh(
        mesh,
        _ALONE if split is None else Axis.of(mesh.get_group(split)),
        _ALONE if repeat is None else Axis.of(mesh.get_group(repeat)),
        split,
        mesh_device(mesh),
    )


def part_group(mesh: ShardMesh, size: int) -> Axis:
    """``size`` neighbours of the shard mesh, this rank among them."""
    assert mesh.shard.group is not None
    ranks = dist.get_process_group_ranks(mesh.shard.group)
    start = mesh.rank // size * size
    return Axis.of(group_of(tuple(ranks[start : start + size]), "part"))


def group_of(ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
    """A process group of these ranks for one purpose; the groups of a model share it."""
    key = dist.group.WORLD, ranks, purpose
    group = _groups.get(key)
    if group is None:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        _groups[key] = group
    return group


_groups: dict[tuple[dist.ProcessGroup | None, tuple[int, ...], str], dist.ProcessGroup] = {}
"""Each costs threads and connections."""


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank: the current one where a host has several."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def _all_ranks() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group() "
            "first (torchrun sets the environment for it), or pass mesh="
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))
