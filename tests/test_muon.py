"""`fsdp2.Muon`: whole matrices on their owners, the numbers of `torch.optim.Muon`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import fully_shard, local_step
from fsdp2.owners import choose_owners
from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.02},
    "like adamw": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "other": {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.0, "ns_steps": 3},
}


def split_params(model: nn.Module) -> tuple[list[Any], list[Any]]:
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def optimizers(model: nn.Module, muon: Any, **options: Any) -> list[torch.optim.Optimizer]:
    matrices, others = split_params(model)
    return [muon(matrices, **options), torch.optim.AdamW(others, lr=1e-2)]


def train(
    ranks: Ranks, model: Any, own: list[Any], reference: Any, expected: list[Any], steps: int = 5
) -> None:
    """The sharded model and the unsharded one, with the mean gradients of all ranks."""
    for batch in token_batches(ranks.world_size, steps):
        next_token_loss(model, batch[ranks.rank]).backward()
        data_parallel(reference, batch)
        for optimizer in own + expected:
            optimizer.step()
            optimizer.zero_grad()


@distributed(2, 3, 4)
@pytest.mark.parametrize("name", OPTIONS)
def test_same_bits_as_unsharded(ranks: Ranks, name: str) -> None:
    """5 steps are those of `torch.optim.Muon` on the unsharded model, bit by bit: tall and wide
    matrices, rows that do not divide, ranks without any. State is a part of each matrix."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    own = optimizers(model, fsdp2.Muon, **OPTIONS[name])
    local_step(own[1])
    expected = optimizers(reference, torch.optim.Muon, **OPTIONS[name])
    train(ranks, model, own, reference, expected)
    assert_same_params(model, reference)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        entry = own[0].state.get(ours, {})
        assert list(entry) == list(expected[0].state.get(theirs, {}))
        for key, value in entry.items():
            assert isinstance(value, DTensor) and value.placements == (Shard(0),)
            assert value.to_local().shape == ours.to_local().shape
            assert_same(value, expected[0].state[theirs][key])
    assert_idle(model)


@distributed(2, 4)
def test_two_exchanges_a_step(ranks: Ranks) -> None:
    """However many matrices and param groups: one all-to-all there and one back."""
    model = shard_blocks(Net())
    matrices, _ = split_params(model)
    optimizer = fsdp2.Muon([{"params": matrices[:2], "lr": 0.1}, {"params": matrices[2:]}])
    next_token_loss(model, token_batches(ranks.world_size, 1)[0][ranks.rank]).backward()
    with CommDebugMode() as communication:
        optimizer.step()
    assert communication.get_total_counts() == 2, communication.get_comm_counts()


@distributed(4)
def test_hsdp_columns_and_frozen(ranks: Ranks) -> None:
    """On a 2-D mesh, with one weight split by columns, one frozen and one that nobody uses: with
    the same gradients the same bits."""
    reference = Net()
    unused = nn.Parameter(torch.ones(4, 4))
    reference.register_parameter("unused", unused)
    reference.blocks[1].up.weight.requires_grad_(False)
    model = copy.deepcopy(reference)
    columns = model.blocks[0].up.weight
    shard_blocks(
        model,
        mesh=ranks.mesh(2, 2, names=("replicate", "shard")),
        shard_placement_fn=lambda p: Shard(1) if p is columns else None,
    )
    own = fsdp2.Muon(split_params(model)[0], lr=0.02)
    expected = torch.optim.Muon(split_params(reference)[0], lr=0.02)
    before = model.unused.full_tensor()
    for batch in token_batches(4, 3):
        next_token_loss(model, batch[ranks.rank]).backward()
        for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = None if param.grad is None else param.grad.full_tensor()
        own.step()
        expected.step()
        own.zero_grad()
    for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same(param, theirs)
    assert_same(model.unused, before)
    assert own.state[model.blocks[0].up.weight]["momentum_buffer"].placements[1] == Shard(1)


@distributed(2)
def test_state_dict_is_torchs(ranks: Ranks) -> None:
    """A state dict of `torch.optim.Muon` over the same DTensors can be loaded: from there on the
    bits are those of the unsharded model that starts with the same values and momentum."""
    model = shard_blocks(Net())
    matrices = split_params(model)[0]
    theirs = torch.optim.Muon(matrices, lr=0.02)
    batches = token_batches(2, 3)
    for batch in batches[:2]:
        next_token_loss(model, batch[ranks.rank]).backward()
        theirs.step()
        theirs.zero_grad()
    ours = fsdp2.Muon(matrices, lr=0.02)
    ours.load_state_dict(theirs.state_dict())
    whole = [nn.Parameter(param.full_tensor().detach()) for param in matrices]
    reference = torch.optim.Muon(whole, lr=0.02)
    next_token_loss(model, batches[2][ranks.rank]).backward()
    for mine, other in zip(matrices, whole, strict=True):
        other.grad = mine.grad.full_tensor()
        momentum = ours.state[mine]["momentum_buffer"].full_tensor()
        reference.state[other]["momentum_buffer"] = momentum
    ours.step()
    reference.step()
    for mine, other in zip(matrices, whole, strict=True):
        assert_same(mine, other)
    assert_idle(model)


@distributed(4)
def test_mistakes_are_named(ranks: Ranks) -> None:
    """Vectors, and matrices that tensor parallelism has cut too, are refused by name."""
    model = fully_shard(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="2D"):
        fsdp2.Muon(model.parameters())
    grid = ranks.mesh(2, 2, names=("dp", "tp"))
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, grid["tp"], [Shard(1)]))
    fully_shard(layer, mesh=grid["dp"])
    optimizer = fsdp2.Muon(layer.parameters())
    layer.weight.grad = torch.zeros_like(layer.weight)
    with pytest.raises(fsdp2.UsageError, match=r"parameter .*split over more than one"):
        optimizer.step()


def test_work_is_spread_by_cost() -> None:
    """The dearest matrix has a rank for itself, and equal ones go round."""
    assert choose_owners([100, 30, 30, 30], 2) == [0, 1, 1, 1]
    assert choose_owners([5] * 6, 3) == [0, 1, 2, 0, 1, 2]
    assert choose_owners([], 3) == []
