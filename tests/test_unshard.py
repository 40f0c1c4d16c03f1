"""Gathering and freeing by hand, and methods other than forward that gather."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import fully_shard, register_fsdp_forward_method
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


def pair(**options: Any) -> tuple[Any, Net]:
    """A sharded model and the plain one with the same values."""
    torch.manual_seed(11)
    plain = Net()
    return shard_blocks(copy.deepcopy(plain), **options), plain


def one_step(model: Any, plain: nn.Module, rank: int) -> None:
    """Forward and backward of both, whose losses and gradients must be equal bit by bit."""
    [batch] = token_batches(2, 1)
    losses = data_parallel(plain, batch)
    loss = next_token_loss(model, batch[rank])
    assert_same(loss, losses[rank])
    loss.backward()
    assert_same_params(model, plain)


def gathers(events: fsdp2.Trace) -> list[str]:
    return [event.group for event in events.events if event.name == "gather"]


@distributed(2)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_unshard_and_reshard(ranks: Ranks, after_a_step: bool) -> None:
    """Attributes become the full parameters and shards again; listings stay shards throughout."""
    model, plain = pair()
    if after_a_step:
        one_step(model, plain, ranks.rank)
    block, expected = model.blocks[0], plain.blocks[0]
    shards = list(block.parameters())
    assert block.unshard() is None
    for name, value in expected.named_parameters():
        found = block.get_submodule(name.rpartition(".")[0]).__getattribute__(name.split(".")[-1])
        assert not isinstance(found, DTensor)
        assert_same(found, value, name)
    assert all(a is b for a, b in zip(block.parameters(), shards, strict=True))
    assert isinstance(model.blocks[1].up.weight, DTensor), "not what lies beside it"
    block.unshard()  # a second time changes nothing
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    block.reshard()
    assert_idle(model)
    model.zero_grad()
    plain.zero_grad()
    one_step(model, plain, ranks.rank)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_async_before_forward(ranks: Ranks, after_a_step: bool, waits: bool) -> None:
    """Gathers started early are not repeated in forward, which waits where nobody has."""
    model, plain = pair()
    if after_a_step:
        one_step(model, plain, ranks.rank)
        model.zero_grad()
        plain.zero_grad()
    handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
    for handle in handles:
        assert isinstance(handle, fsdp2.UnshardHandle)
        if waits:
            handle.wait()
            handle.wait()  # once more does no harm
    if waits:
        full = model.blocks[1].down.weight
        assert not isinstance(full, DTensor)
        assert_same(full, plain.blocks[1].down.weight)
    [batch] = token_batches(2, 1)
    with fsdp2.trace(model) as events, torch.no_grad():
        assert_same(model(batch[0]), plain(batch[0]))
    assert gathers(events) == []
    one_step(model, plain, ranks.rank)
    assert_idle(model)


@distributed(2)
def test_late_wait(ranks: Ranks) -> None:
    """Waiting for a gather that forward has used and freed already changes nothing."""
    model, plain = pair()
    one_step(model, plain, ranks.rank)
    handle = model.blocks[0].unshard(async_op=True)
    model.zero_grad()
    plain.zero_grad()
    one_step(model, plain, ranks.rank)
    handle.wait()
    assert_idle(model)


@distributed(2)
def test_reshard_while_arriving(ranks: Ranks) -> None:
    """Freeing what is on its way ends the gather, and the next one is right."""
    model, plain = pair()
    for _ in range(2):
        handle = model.unshard(async_op=True)
        model.reshard()
        handle.wait()
        assert_idle(model)
        one_step(model, plain, ranks.rank)
        model.zero_grad()
        plain.zero_grad()
    assert_idle(model)


@distributed(2)
def test_unshard_without_parameters(ranks: Ranks) -> None:
    """A module all of whose parameters belong to inner calls: its own gather is empty."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        handle = model.unshard(async_op=True)
        handle.wait()
        assert model.unshard() is None
        assert isinstance(model[0].weight, DTensor)
        model.reshard()
        inputs = [torch.randn(4, 3) for _ in range(2)]
        data_parallel(plain, inputs, lambda net, x: net(x).square().sum())
        model(inputs[ranks.rank]).square().sum().backward()
        assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
def test_unshard_sees_the_optimizers_step(ranks: Ranks) -> None:
    """What was gathered by hand before the optimizer's step is gathered again for forward."""
    model, plain = pair()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, plain)]
    one_step(model, plain, ranks.rank)
    for module in (model, *model.blocks):
        module.unshard()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    one_step(model, plain, ranks.rank)
    assert_idle(model)


@distributed(2)
def test_reshard_between_forward_and_backward(ranks: Ranks) -> None:
    """Kept groups that are freed by hand are gathered again in backward, with equal gradients."""
    model, plain = pair(reshard_after_forward=False)
    [batch] = token_batches(2, 1)
    for _ in range(2):
        data_parallel(plain, batch)
        with fsdp2.trace(model) as events:
            loss = next_token_loss(model, batch[ranks.rank])
            forward = gathers(events)
            events.clear()
            for module in (model, *model.blocks):
                module.reshard()
            assert_idle(model)
            loss.backward()
        assert sorted(forward) == sorted(gathers(events)) == ["blocks.0", "blocks.1", "root"]
        assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
def test_kept_after_backward(ranks: Ranks) -> None:
    """`set_reshard_after_backward(False)` saves the next forward's gathers until `reshard`."""
    model, plain = pair()
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    one_step(model, plain, ranks.rank)
    with fsdp2.trace(model) as events:
        one_step(model, plain, ranks.rank)
    assert gathers(events) == []
    for module in (model, *model.blocks):
        module.reshard()
    assert_idle(model)


# ---- Methods other than forward


class Coder(nn.Module):
    """Has a method that uses its parameters, beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.outer = nn.Linear(3, 4)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        code = self.inner(x).tanh() * scale
        return code, {"norm": code.norm()}

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


class Recoder(Coder):
    """Its forward goes through the method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.encode(x)[0])


def encoded_loss(model: Any, x: Tensor) -> Tensor:
    code, extra = model.encode(x, scale=2.0)
    return code.square().sum() + extra["norm"]


@distributed(2)
@pytest.mark.parametrize("inner_is_sharded", [False, True])
def test_registered_method_gathers(ranks: Ranks, inner_is_sharded: bool) -> None:
    """It computes and trains like the plain module's, before and after the first forward."""
    torch.manual_seed(6)
    plain = Coder()
    model: Any = copy.deepcopy(plain)
    if inner_is_sharded:
        fully_shard(model.inner)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    inputs = [torch.randn(5, 4) for _ in range(2)]
    for loss_of in (encoded_loss, lambda net, x: net(x).square().sum(), encoded_loss):
        losses = data_parallel(plain, inputs, loss_of)
        loss = loss_of(model, inputs[ranks.rank])
        assert_same(loss, losses[ranks.rank])
        loss.backward()
        assert_same_params(model, plain)
        assert_idle(model)


@distributed(2)
def test_registering_on_a_plain_module_does_nothing(ranks: Ranks) -> None:
    """The function may be called whether a model is sharded or not."""
    model = Coder()
    register_fsdp_forward_method(model, "encode")
    assert "encode" not in vars(model)
    fully_shard(model)
    with pytest.raises(Exception, match="DTensor"):
        model.encode(torch.randn(5, 4))  # not registered: the attributes are shards
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("is_root", [True, False])
def test_registered_method_inside_forward(ranks: Ranks, is_root: bool) -> None:
    """A forward that calls the registered method keeps its parameters until it returns."""
    torch.manual_seed(6)
    plain = nn.Sequential(Recoder(), nn.Linear(4, 2))
    model: Any = copy.deepcopy(plain)
    plain, model = (plain[0], model[0]) if is_root else (plain, model)
    coder = model if is_root else model[0]
    fully_shard(coder)
    register_fsdp_forward_method(coder, "encode")
    if not is_root:
        fully_shard(model)
    inputs = [torch.randn(5, 4) for _ in range(2)]
    for _ in range(2):
        losses = data_parallel(plain, inputs, lambda net, x: net(x).square().sum())
        loss = model(inputs[ranks.rank]).square().sum()
        assert_same(loss, losses[ranks.rank])
        loss.backward()
        assert_same_params(model, plain)
        assert_idle(model)
