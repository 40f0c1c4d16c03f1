"""Over which mesh and along which dimension each parameter of one call is dealt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.mesh import ShardMesh, mesh_from_info, shard_mesh
from fsdp2.sharded_param import Deal


class ShardPlacementResult(NamedTuple):
    """What ``shard_placement_fn`` returns to deal a parameter over a mesh of its own."""

    placement: Shard | None
    """None is ``Shard(0)``."""
    mesh: DeviceMesh | None
    """One- or two-dimensional, like the argument of ``fully_shard``; None is that one."""


PlacementFn = Callable[[nn.Parameter], Any]


class Placing:
    """Asks the user's ``shard_placement_fn`` for each parameter and checks the answer."""

    def __init__(self, mesh: ShardMesh, placement_fn: PlacementFn | None) -> None:
        self._mesh = mesh
        self._placement_fn = placement_fn
        self._meshes: dict[DeviceMesh, ShardMesh] = {}

    def __call__(self, name: str, param: nn.Parameter) -> Deal:
        answer = self._placement_fn(param) if self._placement_fn is not None else None
        placement, mesh = self._read(name, answer)
        if mesh.has_other_dims and not isinstance(param, _torch.DTensor):
            raise UsageError(
                f"parameter '{name}' is a plain tensor, but the mesh {mesh.spmd} has dimensions "
                "that dp_mesh_dims does not name: parameters must be DTensors on it then, "
                "for example through torch.distributed.tensor.distribute_module"
            )
        return Deal(mesh, self._dim(name, param, placement))

    def _read(self, name: str, answer: Any) -> tuple[Shard | None, ShardMesh]:
        if answer is None or isinstance(answer, Shard):
            return answer, self._mesh
        if isinstance(answer, ShardPlacementResult):
            return answer.placement, self._own_mesh(answer.mesh)
        if hasattr(answer, "placement") and hasattr(answer, "mesh_info"):
            return answer.placement, mesh_from_info(answer.mesh_info)
        raise UsageError(
            f"shard_placement_fn returned {answer!r} for parameter '{name}'; it returns None, "
            "a Shard(dim), or a ShardPlacementResult(Shard(dim), mesh)"
        )

    def _own_mesh(self, mesh: DeviceMesh | None) -> ShardMesh:
        if mesh is None:
            return self._mesh
        found = self._meshes.get(mesh)
        if found is None:
            found = self._meshes[mesh] = shard_mesh(mesh)
        return found

    def _dim(self, name: str, param: nn.Parameter, placement: Shard | None) -> int:
        if placement is None or param.ndim == 0:
            return 0
        dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < param.ndim:
            raise UsageError(
                f"parameter '{name}': Shard dim {placement.dim} is invalid for {param.ndim}D "
                f"tensor of shape {tuple(param.shape)}; return a dimension that it has, or None"
            )
        return dim
