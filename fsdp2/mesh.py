"""The shard mesh: which ranks a parameter is dealt to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.errors import UsageError


@dataclass(frozen=True)
class ShardMesh:
    """A one-dimensional mesh, with what is asked of it all the time."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    world_size: int
    device: torch.device


def shard_mesh(mesh: DeviceMesh | None) -> ShardMesh:
    """Check the user's mesh; without one, shard over all ranks."""
    mesh = _all_ranks() if mesh is None else mesh
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UsageError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified; "
            f"got {mesh}, whose dimensions have no names"
        )
    if mesh.ndim == 2:
        raise NotImplementedError(
            f"argument 'mesh': hybrid sharding over the 2D mesh {mesh} is not built yet; "
            "pass a 1D mesh, for example mesh['" + str((mesh.mesh_dim_names or ("",))[-1]) + "']"
        )
    group = mesh.get_group()
    return ShardMesh(mesh, group, group.rank(), group.size(), mesh_device(mesh))


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
