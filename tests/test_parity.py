"""Sharded training computes what one process computes, and what PyTorch's FSDP2 computes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    whole,
)

STEPS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


class Wide(nn.Module):
    """Its weights take all paths on up to 4 ranks; its rows divide by 2 and 4, and not by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1024)  # a shard of a few KiB
        self.up = nn.Linear(1024, 1100)  # a shard of more than 1 MiB
        self.down = nn.Linear(1100, 100)  # a shard between 64 KiB and 1 MiB

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@distributed(2, 3, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_bit_by_bit(ranks: Ranks, name: str) -> None:
    """Losses, gradients and parameters of 6 fp32 steps are those of one process.

    The reference adds the ranks' gradients in rank order, as the reduction does, so nothing
    is rounded differently.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizer = OPTIMIZERS[name](model.parameters())
    reference_optimizer = OPTIMIZERS[name](reference.parameters())
    first = [param.detach().clone() for param in reference.parameters()]
    for inputs in token_batches(ranks.world_size, STEPS):
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        expected = data_parallel(reference, inputs)
        assert_same(loss, expected[ranks.rank], "loss")
        assert_same_params(model, reference)
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
    assert_same_params(model, reference)
    trained = list(reference.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(first, trained, strict=True))
    assert_idle(model)


@distributed(2, 3, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_whole_batch(ranks: Ranks, name: str) -> None:
    """Training on slices of a batch follows the unsharded model on all of it.

    Only the order of additions differs: 6 steps keep the losses within 1e-5 of each other,
    relatively, which is about 80 roundings in fp32.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizer = OPTIMIZERS[name](model.parameters())
    reference_optimizer = OPTIMIZERS[name](reference.parameters())
    for inputs in token_batches(ranks.world_size, STEPS):
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = next_token_loss(reference, torch.cat(inputs))
        expected.backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / ranks.world_size, expected, rtol=1e-5, atol=0)
    # AdamW divides by the root of a second moment: gradients near zero amplify roundings.
    assert_same_params(model, reference, rtol=1e-3, atol=1e-4)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_pytorchs_bit_by_bit(ranks: Ranks, name: str, reshard: bool | None) -> None:
    """On 2 ranks losses, gradients and parameters of 6 fp32 steps are PyTorch's FSDP2's."""
    plain = Net()
    ours = shard_blocks(copy.deepcopy(plain), reshard_after_forward=reshard)
    theirs = shard_blocks(plain, torch_fully_shard, reshard_after_forward=reshard)
    ours_optimizer = OPTIMIZERS[name](ours.parameters())
    theirs_optimizer = OPTIMIZERS[name](theirs.parameters())
    for inputs in token_batches(2, STEPS):
        loss = next_token_loss(ours, inputs[ranks.rank])
        loss.backward()
        expected = next_token_loss(theirs, inputs[ranks.rank])
        expected.backward()
        assert_same(loss, expected, "loss")
        assert_same_params(ours, theirs)
        ours_optimizer.step()
        theirs_optimizer.step()
        ours_optimizer.zero_grad()
        theirs_optimizer.zero_grad()
    assert_same_params(ours, theirs)
    assert_idle(ours)


@distributed(2, 3, 4)
def test_every_path_equals_one_process_bit_by_bit(ranks: Ranks) -> None:
    """Packed, direct, and direct in several messages: all give the numbers of one process."""
    reference = Wide()
    model = fully_shard(copy.deepcopy(reference))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        inputs = [torch.randn(2, 1024, generator=generator) for _ in range(ranks.world_size)]
        loss = square_loss(model, inputs[ranks.rank])
        loss.backward()
        expected = data_parallel(reference, inputs, square_loss)
        assert_same(loss, expected[ranks.rank], "loss")
        assert_same_params(model, reference)
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
    assert_same_params(model, reference)

    [group] = fsdp2.explain(model).groups
    params = {param.name: param for param in group.params}
    nbytes = {name: -(-param.shape[0] // ranks.world_size) * 4 for name, param in params.items()}
    nbytes["up.weight"] *= 1024
    nbytes["down.weight"] *= 1100
    assert nbytes["up.weight"] > 1 << 20 > nbytes["down.weight"] >= 64 << 10
    for name, param in params.items():
        path = "direct" if name in ("up.weight", "down.weight") else "packed"
        assert param.gather.startswith(path), f"{name}: {param.gather}"
        assert param.reduction.startswith(path), f"{name}: {param.reduction}"
    assert_idle(model)


@distributed(2)
def test_every_path_equals_pytorchs_bit_by_bit(ranks: Ranks) -> None:
    """Also with large weights losses, gradients and parameters are PyTorch's, on 2 ranks."""
    plain = Wide()
    ours, theirs = fully_shard(copy.deepcopy(plain)), torch_fully_shard(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    generator = torch.Generator().manual_seed(7 + ranks.rank)
    for _ in range(5):
        x = torch.randn(2, 1024, generator=generator)
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


@distributed(2)
def test_one_group_or_many_give_the_same(ranks: Ranks) -> None:
    """How a model is divided into groups changes no bit of its gradients."""
    plain = Net(tied=True)
    many = shard_blocks(copy.deepcopy(plain))
    one = fully_shard(plain)
    for inputs in token_batches(2, 3):
        for model in (one, many):
            next_token_loss(model, inputs[ranks.rank]).backward()
        assert_same_params(many, one)
    assert_idle(one)
    assert_idle(many)


class Collectives(TorchDispatchMode):
    """Names of the process groups' operations that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@distributed(1, 2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_trains_without_collectives(ranks: Ranks, name: str) -> None:
    """On one rank the numbers are those of the plain model and no collective is called.

    The run on 2 ranks shows that collectives would have been seen.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizer = OPTIMIZERS[name](model.parameters())
    reference_optimizer = OPTIMIZERS[name](reference.parameters())
    batches = token_batches(ranks.world_size, STEPS)
    losses = []
    with Collectives() as collectives:
        for inputs in batches:
            optimizer.zero_grad()
            loss = next_token_loss(model, inputs[ranks.rank])
            loss.backward()
            optimizer.step()
            losses.append(loss)
    assert bool(collectives.called) == (ranks.world_size > 1), collectives.called
    for inputs, loss in zip(batches, losses, strict=True):
        reference_optimizer.zero_grad()
        expected = data_parallel(reference, inputs)
        reference_optimizer.step()
        assert_same(loss, expected[ranks.rank], "loss")
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_the_gradient_norm(ranks: Ranks, norm_type: float) -> None:
    """`clip_grad_norm_` sees the norm of all shards, and training goes on as if unsharded.

    The norm is added up in another order: 1e-5 is about 80 roundings in fp32.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for inputs in token_batches(ranks.world_size, 5):
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type=norm_type)
        assert expected > 0.05  # so that it does clip
        assert isinstance(total, DTensor)
        torch.testing.assert_close(whole(total), expected, rtol=1e-5, atol=0)
        assert_same_params(model, reference, rtol=1e-5, atol=1e-7)
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
    assert_same_params(model, reference, rtol=1e-5, atol=1e-7)
    assert_idle(model)


@contextlib.contextmanager
def views_are_fine() -> Iterator[None]:
    """PyTorch's FSDP2 warns where a module returns a view."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*view.*", category=UserWarning)
        yield


class Halves(nn.Module):
    """Returns two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.linear(x).split(5, dim=-1)
        return first, second


@distributed(2)
def test_view_outputs_equal_pytorchs_bit_by_bit(ranks: Ranks) -> None:
    """Outputs that are views of one tensor train as PyTorch's FSDP2 trains them."""
    plain = nn.ModuleDict({"halves": Halves(), "head": nn.Linear(5, 3)})
    pair = []
    for shard, model in ((fully_shard, copy.deepcopy(plain)), (torch_fully_shard, plain)):
        shard(model["halves"])
        shard(model["head"])
        pair.append(model)
    generator = torch.Generator().manual_seed(ranks.rank)
    for _ in range(5):
        x = torch.randn(4, 6, generator=generator)
        losses = []
        for model in pair:
            with views_are_fine():
                first, second = model["halves"](x)
                losses.append(model["head"](first * second.sigmoid()).square().sum())
                losses[-1].backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.01 * param.grad
        assert_same(*losses, "loss")
        assert_same_params(*pair)
    assert_idle(pair[0])
