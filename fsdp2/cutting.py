"""Which part of a whole tensor lies on this rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fsdp2 import _torch
from fsdp2.errors import UsageError


def part_of(whole: Tensor, spec: _torch.DTensorSpec, name: str) -> Tensor:
    """A view of this rank's part of the parameter ``name``, laid out as ``spec`` says.

    Raises:
        UsageError: ``spec`` has placements that are not cuts, such as partial sums.
    """
    mesh = spec.mesh
    coordinate = mesh.get_coordinate()
    dims = range(mesh.ndim)
    strided = [i for i in dims if isinstance(spec.placements[i], _torch.StridedShard)]
    # Strided cuts are made in what the dimensions behind them have cut already.
    for i in [*(i for i in dims if i not in strided), *reversed(strided)]:
        placement = spec.placements[i]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _torch.StridedShard)):
            raise UsageError(
                f"parameter '{name}' has placement {placement} on {mesh}; only Shard and "
                "Replicate can be filled from the whole parameter"
            )
        chunks = whole.chunk(mesh.size(i), placement.dim)
        index = len(chunks) if coordinate is None else coordinate[i]
        empty = whole.narrow(placement.dim, 0, 0)
        whole = chunks[index] if index < len(chunks) else empty
    return whole


def filled_like(tensor: Tensor, whole: Tensor, name: str, home: torch.device) -> Tensor:
    """What takes the place of ``tensor``, a parameter or buffer that has no memory.

    ``whole`` is taken over where it is on ``home`` already.
    """
    made = whole.to(home)
    if isinstance(tensor, _torch.DTensor):
        spec = _torch.spec_of(tensor)
        made = _torch.dtensor(part_of(made, spec, name).contiguous(), spec)
    if not isinstance(tensor, nn.Parameter):
        return made
    kind = nn.Parameter if isinstance(tensor, _torch.DTensor) else type(tensor)
    param = kind(made, requires_grad=tensor.requires_grad)
    theirs = ("_local_tensor", "_spec")
    param.__dict__.update({k: v for k, v in tensor.__dict__.items() if k not in theirs})
    return param
