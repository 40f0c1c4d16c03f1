"""A deep copy of a sharded model is sharded and independent, and trains like one of the plain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp2
from fsdp2 import fully_shard
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


class Pair:
    """A sharded model and its plain reference, each with an optimizer of its own."""

    bound: dict[str, float] = {}
    """Where sums are not added in rank order."""

    def __init__(self, model: Any, reference: nn.Module, rate: float = 0.1) -> None:
        self.model = model
        self.reference = reference
        self.optimizers = [torch.optim.SGD(m.parameters(), rate) for m in (model, reference)]

    def copied(self, rate: float = 0.1) -> Pair:
        return Pair(copy.deepcopy(self.model), copy.deepcopy(self.reference), rate)

    def step(self, ranks: Ranks, batch: list[Tensor]) -> None:
        next_token_loss(self.model, batch[ranks.rank]).backward()
        data_parallel(self.reference, batch)
        assert_same_params(self.model, self.reference, **self.bound)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_params(self.model, self.reference, **self.bound)
        assert_idle(self.model)


def pair(**options: Any) -> Pair:
    torch.manual_seed(7)
    reference = Net(tied=options.pop("tied", False))
    return Pair(shard_blocks(copy.deepcopy(reference), **options), reference)


@distributed(2, 3)
@pytest.mark.parametrize("tied", [False, True])
def test_both_train(ranks: Ranks, tied: bool) -> None:
    """Copied before, in the middle of and between training, and copied again: all go their way."""
    first = pair(tied=tied)
    early = first.copied(rate=0.3)
    batches = token_batches(ranks.world_size, 6)
    first.step(ranks, batches[0])
    second = first.copied(rate=0.2)
    third = second.copied(rate=0.05)
    for batch in batches[1:3]:
        for each in (second, first, third, early):
            each.step(ranks, batch)
    names = [name for name, _ in first.model.named_parameters()]
    assert [name for name, _ in third.model.named_parameters()] == names
    assert all(isinstance(param, DTensor) for param in third.model.parameters())
    assert type(third.model) is type(first.model)


@distributed(2)
def test_between_forward_and_backward(ranks: Ranks) -> None:
    """Copied while a backward is due: the copy has no part in it, and the step goes on."""
    first = pair(reshard_after_forward=False)
    batches = token_batches(ranks.world_size, 3)
    loss = next_token_loss(first.model, batches[0][ranks.rank])
    second = first.copied()
    loss.backward()
    data_parallel(first.reference, batches[0])
    assert_same_params(first.model, first.reference)
    assert all(param.grad is None for param in second.model.parameters())
    for optimizer in first.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    second.step(ranks, batches[1])
    first.step(ranks, batches[2])


@distributed(2)
def test_gradients_stay_with_the_original(ranks: Ranks) -> None:
    """Gradients, reduced or kept back, are not copied, as for any module."""
    first = pair()
    batches = token_batches(ranks.world_size, 2)
    first.model.set_requires_gradient_sync(False)
    next_token_loss(first.model, batches[0][ranks.rank]).backward()
    second = Pair(copy.deepcopy(first.model), copy.deepcopy(first.reference))
    second.model.set_requires_gradient_sync(True)
    second.step(ranks, batches[1])
    assert_idle(second.model)


@distributed(4)
def test_replicas_are_copied(ranks: Ranks) -> None:
    """On a replicate and a shard dimension."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    first = pair(mesh=mesh)
    second = first.copied(rate=0.2)
    first.bound = second.bound = {"rtol": 1e-5, "atol": 1e-7}
    for batch in token_batches(ranks.world_size, 2):
        second.step(ranks, batch)
        first.step(ranks, batch)


@distributed(2)
def test_settings_are_copied(ranks: Ranks) -> None:
    """Policies, limits, prefetch orders, methods and hooks are those of the original."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    first = shard_blocks(Net(), mp_policy=policy, reshard_after_forward=False)
    first.set_modules_to_forward_prefetch([first.blocks[1]])
    fsdp2.set_inflight_limit(first, 3)
    calls: list[str] = []
    first.register_forward_hook(lambda module, args, output: calls.append("hook"))
    second = copy.deepcopy(first)
    state, ours = fully_shard.state(first), fully_shard.state(second)
    assert ours is not state and ours.group is not state.group
    assert ours.group.policy is policy and ours.limit == 3
    assert ours.forward_prefetch == [fully_shard.state(second.blocks[1]).group]
    assert ours.group.switches == state.group.switches
    tokens = torch.ones(2, 3, dtype=torch.int64)
    assert_same(first(tokens), second(tokens))
    assert calls == ["hook", "hook"]
    for found, expected in zip(second.parameters(), first.parameters(), strict=True):
        assert_same(found, expected)
    for model in (first, second):
        model.reshard()
        for block in model.blocks:
            block.reshard()


class Sampler(nn.Linear):
    def sample(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias).tanh()


@distributed(2)
def test_registered_methods_are_the_copys(ranks: Ranks) -> None:
    """A registered method of the copy gathers and computes with the copy."""
    plain = Sampler(3, 3)
    model = fully_shard(copy.deepcopy(plain))
    fsdp2.register_fsdp_forward_method(model, "sample")
    second = copy.deepcopy(model)
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    x = torch.ones(2, 3)
    assert_same(model.sample(x), plain.sample(x))
    assert_same(second.sample(x), torch.zeros(2, 3))


@distributed(2)
def test_part_of_a_model(ranks: Ranks) -> None:
    """A block alone, a wrapper of sharded modules, and a list that is one group."""
    first = pair()
    first.step(ranks, token_batches(ranks.world_size, 1)[0])
    block = copy.deepcopy(first.model.blocks[0])
    x = torch.randn(2, 8)
    expected = first.reference.blocks[0](x)
    assert_same(block(x), expected)
    wrapped = copy.deepcopy(nn.Sequential(first.model.blocks[0], first.model.blocks[1]))
    assert_same(wrapped[0](x), expected)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    grouped = copy.deepcopy(layers)
    fully_shard(list(grouped))
    again = copy.deepcopy(grouped)
    assert fully_shard.state(again[0]) is fully_shard.state(again[1])
    assert_same(again(torch.ones(1, 4)), layers(torch.ones(1, 4)))


@distributed(2)
def test_tied_outside_is_refused(ranks: Ranks) -> None:
    """A part that needs a weight of the module around it cannot be copied alone."""
    model = Net(tied=True)
    fully_shard(model.embedding)
    fully_shard(model.head)
    fully_shard(model)
    with pytest.raises(fsdp2.UsageError, match="'weight' of FSDPEmbedding is tied to one outside"):
        copy.deepcopy(model.embedding)
    assert_same(copy.deepcopy(model)(torch.ones(1, 2).long()), model(torch.ones(1, 2).long()))


class Copier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        copy.deepcopy(self)
        return self.weight


@distributed(2)
def test_during_forward_is_refused(ranks: Ranks) -> None:
    """Inside forward the full parameters are in the tables."""
    with pytest.raises(fsdp2.UsageError, match="while its forward runs"):
        fully_shard(Copier())()


@distributed(2, 3)
def test_moving_average(ranks: Ranks) -> None:
    """`AveragedModel` of a sharded model: the plain model's average, bit by bit, and it runs."""
    first = pair()
    average = AveragedModel(first.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference = AveragedModel(first.reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in token_batches(ranks.world_size, 4):
        first.step(ranks, batch)
        average.update_parameters(first.model)
        reference.update_parameters(first.reference)
    assert_same_params(average.module, reference.module)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    assert_same(average(tokens), reference(tokens))
    assert_idle(first.model)


@distributed(2)
@pytest.mark.parametrize("keywords", [{}, {"use_buffers": True}, {"avg_fn": "own"}])
def test_other_averages(ranks: Ranks, keywords: dict[str, Any]) -> None:
    """The plain mean, buffers too, and an average function of one's own."""
    if "avg_fn" in keywords:
        keywords = {"avg_fn": lambda average, value, count: average * 0.5 + value * 0.5}
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model = fully_shard(copy.deepcopy(plain))
    average, reference = (AveragedModel(m, **keywords) for m in (model, plain))
    for step in range(3):
        for each in (model, plain):
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(0.9).add_(step)
                each[1].running_mean.add_(step)
        average.update_parameters(model)
        reference.update_parameters(plain)
    assert_same_params(average.module, reference.module)
    assert_same(average.module[1].running_mean, reference.module[1].running_mean)
