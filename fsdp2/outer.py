"""Parameters that others laid out before: the mesh and placements of both layouts together."""

from __future__ import annotations

from math import prod

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.mesh import ShardMesh


def data_dims(outer: _torch.DTensorSpec, mesh: ShardMesh) -> tuple[int, ...]:
    """The dimensions of the parameter's own mesh over which gradients are summed here."""
    ours = mesh.data_names
    return tuple(i for i, name in enumerate(outer.mesh.mesh_dim_names or ()) if name in ours)


def joint_layout(
    name: str, outer: _torch.DTensorSpec, mesh: ShardMesh, dim: int | None
) -> tuple[_torch.DeviceMesh, tuple[Placement, ...]]:
    """The mesh and placements of the shards of a parameter that is a DTensor already."""
    if mesh.spmd is not None:
        joint = mesh.mesh
        theirs = _spmd_placements(name, outer, mesh)
    else:
        joint = _concatenated(name, outer.mesh, mesh)
        theirs = dict(enumerate(outer.placements, start=mesh.mesh.ndim))
    found: list[Placement] = [theirs.get(i, Replicate()) for i in range(joint.ndim)]
    if dim is not None and mesh.shard_dim is not None:
        behind = range(mesh.shard_dim + 1, joint.ndim)
        sizes = [joint.size(i) for i in behind if found[i].is_shard(dim)]
        found[mesh.shard_dim] = _torch.shard_of(dim, prod(sizes))
    return joint, tuple(found)


def _spmd_placements(name: str, outer: _torch.DTensorSpec, mesh: ShardMesh) -> dict[int, Placement]:
    """Of the dimensions that are not data parallel, by their place in the shards' mesh."""
    if outer.mesh != mesh.spmd:
        raise UsageError(
            f"parameter '{name}' must be a DTensor on the same mesh as the argument mesh, "
            f"{mesh.spmd}, when dp_mesh_dims is given; its mesh is {outer.mesh}"
        )
    names = mesh.mesh.mesh_dim_names or ()
    theirs: dict[int, Placement] = {}
    for own_name, placement in zip(outer.mesh.mesh_dim_names or (), outer.placements):
        if own_name not in mesh.data_names:
            theirs[names.index(own_name)] = placement
        elif not placement.is_replicate():
            raise UsageError(
                f"Expected Replicate() for parameter '{name}' on the data-parallel mesh dim "
                f"'{own_name}' but got {placement}; fully_shard itself splits it there"
            )
    return theirs


def _concatenated(name: str, theirs: _torch.DeviceMesh, mesh: ShardMesh) -> _torch.DeviceMesh:
    if theirs.device_type != mesh.mesh.device_type:
        raise ValueError(
            f"parameter '{name}': Requires DTensor to have mesh of the same type as the FSDP mesh "
            f"but got {theirs.device_type} for DTensor and {mesh.mesh.device_type} for FSDP"
        )
    theirs, root = _cut_from(_torch.root_mesh(mesh.mesh), theirs), _torch.root_mesh(mesh.mesh)
    if not theirs.mesh_dim_names or not mesh.mesh.mesh_dim_names:
        raise UsageError(
            f"parameter '{name}' is a DTensor on {theirs} and fully_shard deals it over "
            f"{mesh.mesh}: both need names to be put together; cut both from one "
            "init_device_mesh(..., mesh_dim_names=...)"
        )
    if _torch.root_mesh(theirs) != root:
        raise UsageError(
            f"parameter '{name}' is a DTensor on {theirs}, which is not cut from the same mesh as "
            f"{mesh.mesh}; cut both from one init_device_mesh(..., mesh_dim_names=...)"
        )
    if set(theirs.mesh_dim_names or ()) & set(mesh.mesh.mesh_dim_names or ()):
        raise UsageError(
            f"parameter '{name}' is a DTensor on {theirs}, which shares a dimension with the "
            f"data-parallel mesh {mesh.mesh}; for a mesh that holds both pass dp_mesh_dims"
        )
    return _torch.concatenated([mesh.mesh, theirs])


def _cut_from(root: _torch.DeviceMesh, mesh: _torch.DeviceMesh) -> _torch.DeviceMesh:
    """The part of ``root`` that equals ``mesh``: DTensors may hold an equal part of another."""
    names = mesh.mesh_dim_names
    if names and set(names) <= set(root.mesh_dim_names or ()):
        part = root if names == root.mesh_dim_names else root[names]
        return part if part == mesh else mesh
    return mesh
