"""Ranks that use different parameters of the same groups, in the first step and later."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import assert_idle, assert_same_params, data_parallel


class Tower(nn.Module):
    """Two layers in one group, of which a rank may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if all_of_it else y


class Towers(nn.Module):
    """Groups beside each other whose inputs need no gradients, or in a row."""

    def __init__(self, in_a_row: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tower() for _ in range(3))
        self.in_a_row = in_a_row

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        if not self.in_a_row:
            return sum((block(x, all_of_it) for block in self.blocks), torch.zeros(()))
        for block in self.blocks:
            x = torch.tanh(block(x, all_of_it))
        return x


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        return self.inner(x, all_of_it)


def loss_of(model: nn.Module, args: tuple[Tensor, bool]) -> Tensor:
    return model(*args).square().sum()


@distributed(2, 3, timeout=20)
@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("first", ["alike", "divergent"])
def test_a_rank_that_leaves_parameters_out(
    ranks: Ranks, in_a_row: bool, forwards: int, first: str
) -> None:
    """The others do not wait for it for ever; gradients are those of one process, bit by bit.

    Also after a forward that no backward followed.
    """
    reference = Towers(in_a_row)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        inputs = [
            (x, rank > 0 or (step == 0 and first == "alike"))
            for rank, x in enumerate(torch.randn(ranks.world_size, 2, 3, generator=generator))
        ]
        for _ in range(forwards):
            loss = loss_of(model, inputs[ranks.rank])
        loss.backward()
        data_parallel(reference, inputs, loss_of)
        assert_same_params(model, reference)
        for each in (model, reference):
            each.zero_grad()
    assert_idle(model)


@distributed(2, 3, timeout=20)
@pytest.mark.parametrize("in_a_row", [True, False])
def test_a_rank_that_leaves_parameters_out_under_another_root(ranks: Ranks, in_a_row: bool) -> None:
    """Ranks compare their orders again, and nothing waits for a peer before they have."""
    reference = Towers(in_a_row)
    inner = copy.deepcopy(reference)
    for block in inner.blocks:
        fully_shard(block)
    fully_shard(inner)
    model: nn.Module = inner
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if step == 2:
            model = fully_shard(Around(inner))
        inputs = [
            (x, rank > 0 or step < 2)
            for rank, x in enumerate(torch.randn(ranks.world_size, 2, 3, generator=generator))
        ]
        loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
        assert_same_params(inner, reference)
        for each in (model, reference):
            each.zero_grad()
    assert_idle(model)


@distributed(4, timeout=20)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_a_rank_that_leaves_parameters_out_of_put_off_sums(
    ranks: Ranks, shape: tuple[int, int]
) -> None:
    """With sums that wait in each replica, all ranks reduce each group equally often.

    The first micro-batch uses all of it on some ranks, the last one on others.
    """
    model = Tower().double()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=ranks.mesh(*shape, names=("replicate", "shard")))
    generator = torch.Generator().manual_seed(1)
    for micro_batch in range(3):
        xs = torch.randn(4, 2, 3, generator=generator).double()
        inputs = [(x, rank % 3 == micro_batch) for rank, x in enumerate(xs)]
        model.set_requires_all_reduce(micro_batch == 2)
        loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
    assert_same_params(model, reference, rtol=1e-12, atol=1e-12)
    assert_idle(model)
