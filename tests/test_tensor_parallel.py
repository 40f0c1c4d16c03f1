"""Sharding what tensor parallelism has laid out: right to the last row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import assert_idle, assert_same, whole

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "dp x tp": ((2, 2), ("dp", "tp"), ("dp",)),
    "dp x 1": ((4, 1), ("dp", "tp"), ("dp",)),
    "1 x tp": ((1, 4), ("dp", "tp"), ("dp",)),
}


class Feed(nn.Module):
    """A hidden size that may divide by neither axis."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feed(dim, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def laid_out(model: Stack, tp: DeviceMesh) -> Stack:
    for block in model.blocks:
        # A local output of uneven size could not be put together again.
        up = ColwiseParallel(use_local_output=False)
        parallelize_module(block, tp, {"up": up, "down": RowwiseParallel()})
    return model


def sharded(model: Stack, mesh: DeviceMesh, dp: tuple[str, ...], **options: Any) -> Stack:
    laid_out(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh[dp] if len(dp) > 1 else mesh[dp[0]], **options)
    fully_shard(model, mesh=mesh[dp] if len(dp) > 1 else mesh[dp[0]], **options)
    return model


@distributed(4)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(("dim", "hidden"), [(8, 12), (8, 13), (6, 5), (3, 2)])
def test_full_tensors_are_the_originals(ranks: Ranks, kind: str, dim: int, hidden: int) -> None:
    """Every combination of placements, also where rows divide on neither axis."""
    shape, names, dp = MESHES[kind]
    model = Stack(dim, hidden)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded(model, ranks.mesh(*shape, names=names), dp)
    for name, param in model.named_parameters():
        assert_same(param.full_tensor(), expected[name], name)


@distributed(4)
def test_placements(ranks: Ranks) -> None:
    """Column-wise weights are split twice along dim 0, row-wise ones along both dims."""
    model = sharded(Stack(), ranks.mesh(2, 2, names=("dp", "tp")), ("dp",))
    up, down = model.blocks[0].up, model.blocks[0].down
    assert up.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert up.weight.placements[1] == Shard(0)
    assert up.weight.placements[0].is_shard(0) or "StridedShard" in repr(up.weight.placements[0])
    assert down.weight.placements == (Shard(0), Shard(1))
    assert down.bias.placements == (Shard(0), Replicate())


@distributed(4)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("hidden", [12, 13])
def test_training_equals_one_process(ranks: Ranks, kind: str, hidden: int) -> None:
    """Losses and parameters over 5 steps, to rounding: tensor parallelism adds in another order."""
    shape, names, dp = MESHES[kind]
    mesh = ranks.mesh(*shape, names=names)
    model = Stack(hidden=hidden)
    reference = copy.deepcopy(model)
    sharded(model, mesh, dp)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    generator = torch.Generator().manual_seed(1)
    replicas = mesh["dp"].size()
    for _ in range(5):
        inputs = torch.randn(replicas, 3, 8, generator=generator)
        loss = model(inputs[mesh["dp"].get_local_rank()]).square().mean()
        loss.backward()
        expected = reference(inputs.flatten(0, 1)).square().mean()
        expected.backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(
                whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(whole(ours), theirs.detach(), rtol=1e-3, atol=1e-4)
    assert_idle(model)


@distributed(4)
def test_full_parameter_in_forward_is_the_tensor_parallel_one(ranks: Ranks) -> None:
    """Forward sees a DTensor on the tp mesh alone."""
    seen: list[Any] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight)
            return super().forward(x)

    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    model = nn.Sequential(Spy(4, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 4)).sum().backward()
    [weight] = seen
    assert isinstance(weight, DTensor) and weight.device_mesh == mesh["tp"]
    assert weight.placements == (Shard(0),)


@distributed(4)
def test_sequence_parallel_norms(ranks: Ranks) -> None:
    """A norm on a split sequence has Partial gradients: they are summed over tp first."""
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(4))
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})
    fully_shard(model, mesh=mesh["dp"])
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2, 1, 6, 4, generator=generator)
    dp_rank, tp_rank = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    mine = inputs[dp_rank].chunk(2, dim=1)[tp_rank]
    output = model(DTensor.from_local(mine, mesh["tp"], [Shard(1)]))
    output.square().sum().backward()
    (reference(inputs.flatten(0, 1)).square().sum() / 2).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-5, atol=1e-5)


@distributed(8, timeout=180)
def test_hybrid_and_tensor_parallel_on_eight_ranks(ranks: Ranks) -> None:
    """2 x 2 x 2: replicate, shard, tp."""
    mesh = ranks.mesh(2, 2, 2, names=("replicate", "shard", "tp"))
    model = Stack(hidden=13)
    reference = copy.deepcopy(model)
    sharded(model, mesh, ("replicate", "shard"))
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        assert_same(whole(ours), theirs.detach(), name)
    inputs = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    data_rank = 2 * mesh["replicate"].get_local_rank() + mesh["shard"].get_local_rank()
    model(inputs[data_rank]).square().mean().backward()
    reference(inputs.flatten(0, 1)).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(
            whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m
        )
    assert_idle(model)
