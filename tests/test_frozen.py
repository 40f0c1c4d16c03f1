"""Frozen parameters are gathered and never reduced; they may be frozen and unfrozen at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed, run
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


def freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not is_frozen(name))


def step_and_compare(ranks: Ranks, model: Any, reference: nn.Module, inputs: list[Tensor]) -> None:
    """One step of plain SGD on both; losses, gradients and values are equal bit by bit."""
    loss = next_token_loss(model, inputs[ranks.rank])
    loss.backward()
    assert_same(loss, data_parallel(reference, inputs)[ranks.rank], "loss")
    assert_same_params(model, reference)
    for each in (model, reference):
        for param in each.parameters():
            assert (param.grad is not None) == param.requires_grad
            if param.grad is not None:
                param.data.sub_(param.grad, alpha=0.1)
                param.grad = None


PATTERNS: dict[str, Callable[[str], bool]] = {
    "biases": lambda name: name.endswith("bias"),
    "weights": lambda name: name.endswith("weight"),
    "all_but_one": lambda name: name != "blocks.0.up.bias",
    "first_block": lambda name: name.startswith("blocks.0"),
    "last_block": lambda name: name.startswith("blocks.1"),
    "all_blocks": lambda name: name.startswith("blocks"),
    "root": lambda name: not name.startswith("blocks"),
    "embedding": lambda name: name.startswith("embedding"),
}


@distributed(1, 3)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_frozen_parameters(ranks: Ranks, pattern: str) -> None:
    """Frozen parts of groups and whole frozen groups: what trains does so as in one process."""
    reference = Net()
    freeze(reference, PATTERNS[pattern])
    frozen = {n: p.detach().clone() for n, p in reference.named_parameters() if not p.requires_grad}
    model = shard_blocks(copy.deepcopy(reference))
    for inputs in token_batches(ranks.world_size, 3):
        step_and_compare(ranks, model, reference, inputs)
    assert frozen
    for name, value in frozen.items():
        assert_same(model.get_parameter(name), value, name)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_frozen_parameters_equal_pytorchs(ranks: Ranks, pattern: str) -> None:
    """Losses and gradients are those of PyTorch's FSDP2, on 2 ranks, bit by bit."""
    plain = Net()
    freeze(plain, PATTERNS[pattern])
    ours = shard_blocks(copy.deepcopy(plain))
    theirs = shard_blocks(plain, torch_fully_shard)
    for inputs in token_batches(2, 3):
        losses = [next_token_loss(model, inputs[ranks.rank]) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        assert_same(*losses, "loss")
        assert_same_params(ours, theirs)
        with torch.no_grad():
            for model in (ours, theirs):
                for param in model.parameters():
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=0.1)
                        param.grad = None
    assert_idle(ours)


@distributed(1, 2, 3)
@pytest.mark.parametrize("reshard", [None, False])
def test_freezing_between_steps(ranks: Ranks, reshard: bool | None) -> None:
    """Each step trains what is not frozen then; what was frozen or unfrozen is noticed."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    nothing: Callable[[str], bool] = lambda name: False  # noqa: E731
    patterns = [nothing, *PATTERNS.values(), nothing]
    batches = token_batches(ranks.world_size, len(patterns))
    for pattern, inputs in zip(patterns, batches, strict=True):
        freeze(model, pattern)
        freeze(reference, pattern)
        step_and_compare(ranks, model, reference, inputs)
    assert_idle(model)


@distributed(2)
def test_everything_frozen(ranks: Ranks) -> None:
    """Nothing to train: forward runs, with and without a backward to the input."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 5)
            self.second = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    reference = Flow().requires_grad_(False)
    model = copy.deepcopy(reference)
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    for _ in range(2):
        x = torch.randn(3, 4)
        assert_same(model(x), reference(x))
        model.reshard()
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(ours).square().sum().backward()
        reference(theirs).square().sum().backward()
        assert_same(ours.grad, theirs.grad)
    assert all(param.grad is None for param in model.parameters())
    assert_idle(model)


def reduced_groups(ranks: Ranks, pattern: str) -> list[str]:
    model = shard_blocks(Net())
    freeze(model, PATTERNS[pattern])
    inputs = token_batches(ranks.world_size, 1)[0]
    with fsdp2.trace(model) as events:
        next_token_loss(model, inputs[ranks.rank]).backward()
    assert_idle(model)
    return sorted(event.group for event in events.events if event.name == "reduce")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("biases", ["blocks.0", "blocks.1", "root"]),
        ("all_but_one", ["blocks.0"]),
        ("first_block", ["blocks.1", "root"]),
        ("root", ["blocks.0", "blocks.1"]),
    ],
)
def test_frozen_groups_are_not_reduced(pattern: str, expected: list[str]) -> None:
    """A group in which nothing trains sends no gradients."""
    assert run(reduced_groups, 2, pattern) == [expected, expected]


class LateWeight(nn.Module):
    """Its trainable bias has its gradient first; then backward goes on through a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)
        freeze(self, lambda name: name != "down.bias")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def assert_stack_trains(ranks: Ranks, reference: nn.Module) -> Any:
    model = shard_blocks(copy.deepcopy(reference))
    generator = torch.Generator().manual_seed(11)
    for _ in range(4):
        inputs = list(torch.randn(ranks.world_size, 3, 6, generator=generator))
        loss = square_loss(model, inputs[ranks.rank])
        loss.backward()
        assert_same(loss, data_parallel(reference, inputs, square_loss)[ranks.rank], "loss")
        assert_same_params(model, reference)
        for each in (model, reference):
            for param in each.parameters():
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=0.1)
                    param.grad = None
    return model


@distributed(1, 2, 3)
def test_weights_stay_until_backward_has_passed(ranks: Ranks) -> None:
    """A group whose trainable gradients come early keeps the weights that backward still needs.

    Were they freed with the reduction, the gradients below would be computed with freed memory.
    """
    model = assert_stack_trains(ranks, Stack(LateWeight))
    assert model.enter.weight.grad is None
    assert_idle(model)


class LowRank(nn.Module):
    """A frozen linear layer and two trainable factors beside it."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, 6) / 3)
        self.b = nn.Parameter(torch.zeros(6, rank))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())


@distributed(1, 2, 3)
def test_low_rank_adapters(ranks: Ranks) -> None:
    """Adapters train beside a frozen base, whose values never change."""
    reference = Stack(LowRank)
    reference.enter.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    model = assert_stack_trains(ranks, reference)
    for name, param in model.named_parameters():
        is_adapter = name.endswith((".a", ".b"))
        changed = not torch.equal(param.full_tensor(), before[name])
        assert changed == is_adapter, name
    assert_idle(model)


@distributed(2)
def test_only_adapters_in_the_optimizer(ranks: Ranks) -> None:
    """An optimizer built over what requires gradients trains that, in bf16 with an fp32 sum too."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = Stack(LowRank)
    ours = shard_blocks(copy.deepcopy(plain), mp_policy=policy)
    theirs = shard_blocks(plain, torch_fully_shard, mp_policy=policy)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for model in (ours, theirs)
    ]
    generator = torch.Generator().manual_seed(ranks.rank)
    for _ in range(4):
        x = torch.randn(3, 6, generator=generator)
        losses = [square_loss(model, x) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        assert_same(*losses, "loss")
        assert_same_params(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(ours, theirs)
    assert_idle(ours)


@distributed(1, 2)
def test_freezing_while_gradients_are_accumulated(ranks: Ranks) -> None:
    """A gradient kept back before its parameter was frozen is not lost and not counted twice.

    Unfrozen again, the parameter's next reduction holds what was kept back and what was added.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    first, second, third = token_batches(ranks.world_size, 3)
    model.set_requires_gradient_sync(False)
    next_token_loss(model, first[ranks.rank]).backward()
    for each in (model, reference):
        freeze(each, PATTERNS["biases"])
    next_token_loss(model, second[ranks.rank]).backward()
    for each in (model, reference):
        freeze(each, lambda name: False)
    model.set_requires_gradient_sync(True)
    next_token_loss(model, third[ranks.rank]).backward()
    data_parallel(reference, first)
    freeze(reference, PATTERNS["biases"])
    data_parallel(reference, second)
    freeze(reference, lambda name: False)
    data_parallel(reference, third)
    # The reference adds over ranks first and over batches then: fp32 roundings apart.
    assert_same_params(model, reference, rtol=1e-5, atol=1e-7)
    assert_idle(model)


@distributed(1, 2)
def test_freezing_what_is_kept_in_memory(ranks: Ranks) -> None:
    """Freezing is noticed also where the full parameters stay from step to step."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    patterns = [lambda name: False, PATTERNS["biases"], PATTERNS["weights"], lambda name: False]
    batches = token_batches(ranks.world_size, len(patterns))
    for pattern, inputs in zip(patterns, batches, strict=True):
        for each in (model, reference):
            freeze(each, pattern)
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference)
        for each in (model, reference):
            each.zero_grad()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert_idle(model)
