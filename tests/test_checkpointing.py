"""Activation checkpointing, wherever it is put: the same numbers, and no more gathers than needed.

Forward gathers a group once. Running it again in backward gathers it once more, and its own
backward uses that gather, unless another group's came between the two.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fsdp2
from harness import Ranks, distributed
from models import Block, assert_idle, assert_same, assert_same_params, data_parallel, shard_blocks

Loss = Callable[[nn.Module, Tensor], Tensor]

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])


class Deep(nn.Module):
    """Four blocks, checkpointed at ``at``: inside a block, around one, or around two."""

    def __init__(self, at: str, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        inner = at == "inside"
        self.blocks = nn.ModuleList(Inner(reentrant) if inner else Block() for _ in range(4))
        self.at = at
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.at == "one":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.at == "two":
            for start in (0, 2):
                x = checkpoint(self._two, start, x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = block(x)
        return x

    def _two(self, start: int, x: Tensor) -> Tensor:
        return self.blocks[start + 1](self.blocks[start](x))


class Inner(nn.Module):
    """Checkpoints what is inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant) * self.scale


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def loss_of_checkpointed_root(reentrant: bool) -> Loss:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        # The reentrant form needs an input that requires a gradient.
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    return loss_of


def batches(world_size: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(4, 8, generator=generator) for _ in range(world_size)] for _ in range(3)]


def gathers(events: fsdp2.Trace) -> dict[str, int]:
    return dict(Counter(event.group for event in events.events if event.name == "gather"))


def train_like(
    reference: nn.Module, model: nn.Module, ranks: Ranks, loss_of: Loss, **bound: float
) -> fsdp2.Trace:
    """Three steps of SGD, by default equal bit by bit; returns what the last one did."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for inputs in batches(ranks.world_size):
        with fsdp2.trace(model) as events:
            loss = loss_of(model, inputs[ranks.rank])
            loss.backward()
        losses = data_parallel(reference, inputs, loss_of)
        exact = {"rtol": 0, "atol": 0}
        torch.testing.assert_close(loss.detach(), losses[ranks.rank], **(bound or exact))
        assert_same_params(model, reference, **bound)
        assert_idle(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return events


@distributed(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("at", ["inside", "one"])
@REENTRANT
def test_one_block(ranks: Ranks, reentrant: bool, at: str, reshard: bool) -> None:
    """Inside or around one block: it is run again with the gather that its backward needs."""
    reference = Deep(at, reentrant)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    events = train_like(reference, model, ranks, loss_of)
    times = 2 if reshard else 1
    assert gathers(events) == {
        "root": times,
        **{f"blocks.{i}": times for i in range(4)},
    }, str(events)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False])
@REENTRANT
def test_several_blocks(ranks: Ranks, reentrant: bool, reshard: bool) -> None:
    """Around two blocks: the last one that is run again stays, the one before is gathered again."""
    reference = Deep("two", reentrant)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    events = train_like(reference, model, ranks, loss_of)
    last, before = (2, 3) if reshard else (1, 1)
    counts = gathers(events)
    assert counts["blocks.3"] == counts["blocks.1"] == last, str(events)
    assert counts["blocks.2"] == counts["blocks.0"] == before, str(events)
    assert_idle(model)


@distributed(2)
@REENTRANT
def test_root(ranks: Ranks, reentrant: bool) -> None:
    """Around the root: the whole forward is run again inside backward."""
    reference = Deep("nowhere", reentrant)
    model = shard_blocks(copy.deepcopy(reference))
    events = train_like(reference, model, ranks, loss_of_checkpointed_root(reentrant))
    # The last block that is run again is the first that backward needs.
    assert gathers(events) == {
        "root": 1,
        "blocks.0": 3,
        "blocks.1": 3,
        "blocks.2": 3,
        "blocks.3": 2,
    }, str(events)
    reduced = [event.group for event in events.events if event.name == "reduce"]
    assert sorted(reduced) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "root"]
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("at", ["inside", "one", "two", "root"])
@pytest.mark.parametrize("early", [True, False])
def test_early_stop(ranks: Ranks, early: bool, at: str) -> None:
    """Running again may stop in the middle of a module, by an exception, or go to its end."""
    with set_checkpoint_early_stop(early):
        reference = Deep(at, reentrant=False)
        model = shard_blocks(copy.deepcopy(reference))
        loss = loss_of_checkpointed_root(False) if at == "root" else loss_of
        train_like(reference, model, ranks, loss)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("at", ["inside", "one", "two"])
@REENTRANT
def test_memory_while_running_again(ranks: Ranks, reentrant: bool, at: str) -> None:
    """What is run again counts like the rest: never more than two blocks are in memory at once."""
    model = shard_blocks(Deep(at, reentrant))
    x = batches(ranks.world_size)[0][ranks.rank]
    groups = [fsdp2.fully_shard.state(block).group for block in model.blocks]
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        storages = [group.params[0].full.untyped_storage() for group in groups]
        most = max(most, sum(storage.nbytes() > 0 for storage in storages))

    loss_of(model, x).backward()
    for block in model.blocks:
        for module in block.modules():
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)
    for param in (p for group in groups for p in group.params):
        param.full.register_hook(look)
    loss_of(model, x).backward()
    assert most == 2
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("at", ["inside", "one", "two"])
@REENTRANT
def test_as_in_pytorch(ranks: Ranks, reentrant: bool, at: str) -> None:
    """Losses and gradients are those of PyTorch's FSDP2, bit by bit."""
    theirs = Deep(at, reentrant)
    model = shard_blocks(copy.deepcopy(theirs))
    shard_blocks(theirs, torch_fully_shard)
    for inputs in batches(ranks.world_size):
        losses = [loss_of(m, inputs[ranks.rank]) for m in (model, theirs)]
        for loss in losses:
            loss.backward()
        assert_same(*losses)
    theirs.reshard()
    assert_same_params(model, theirs)
    assert_idle(model)


@distributed(2)
@REENTRANT
def test_twice_before_backward(ranks: Ranks, reentrant: bool) -> None:
    """Two checkpointed forwards meet in one loss, as in training on preferences.

    In the reentrant form each forward has a backward of its own, and each is reduced: sums
    over ranks and over forwards change places, which rounds otherwise.
    """
    reference = Deep("one", reentrant)
    model = shard_blocks(copy.deepcopy(reference))
    bound = {"rtol": 1e-5, "atol": 1e-7} if reentrant else {}
    train_like(reference, model, ranks, lambda m, x: (m(x) * m(x * 2)).mean(), **bound)
    assert_idle(model)


@distributed(2)
def test_dropout_is_replayed(ranks: Ranks) -> None:
    """The random state is the same when a block is run again: gathering draws no numbers."""
    reference = Deep("one", reentrant=False)
    for block in reference.blocks:
        block.norm = nn.Sequential(block.norm, nn.Dropout(0.5))
    model = shard_blocks(copy.deepcopy(reference))
    x = batches(ranks.world_size)[0][0]
    for m in (model, reference):
        torch.manual_seed(7)
        loss_of(m, x).backward()
    assert_same_params(model, reference)
    assert_idle(model)
