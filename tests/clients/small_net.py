"""A network whose rows divide by no 2 ranks, the usual way to shard it, and inputs for it."""

from __future__ import annotations

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 9


def small_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, WIDTH))
        for _ in range(3)
    )
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 5))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """The function is looked up when it is called, as in a user's module that imports it."""
    for block in model[:-1]:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    return model


def batch(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
