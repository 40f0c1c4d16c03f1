"""Gradients exchanged as messages: how much room they take, and that they arrive all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard, pairwise
from fsdp2.pairwise import Part
from harness import Ranks, distributed
from models import assert_idle, assert_same_params, by_messages, data_parallel


class Counts:
    """Parts of sums that have room to arrive in."""

    def __init__(self) -> None:
        self.now = 0
        self.most: list[int] = []
        """In each step."""


@contextmanager
def small_pieces() -> Iterator[Counts]:
    """Pieces of 2 KiB, of which four are in flight; and how many parts that makes."""
    counts = Counts()
    post_rest, finish = Part.post_rest, Part.finish
    held = pairwise.PIECE_NBYTES, pairwise.IN_FLIGHT

    def post(part: Part) -> None:
        counts.now += 1
        counts.most[-1] = max(counts.most[-1], counts.now)
        post_rest(part)

    def end(part: Part, scale: float) -> None:
        finish(part, scale)
        counts.now -= 1

    Part.post_rest, Part.finish = post, end  # type: ignore[method-assign]
    pairwise.PIECE_NBYTES, pairwise.IN_FLIGHT = 2048, 4
    try:
        yield counts
    finally:
        Part.post_rest, Part.finish = post_rest, finish  # type: ignore[method-assign]
        pairwise.PIECE_NBYTES, pairwise.IN_FLIGHT = held


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def shard_layers(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """This rank's, of one backward."""
    model.zero_grad()
    loss_of(model, x).backward()
    return [cast(DTensor, param.grad).to_local() for param in model.parameters()]


@distributed(2, 3, 4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_room_for_a_few_pieces(ranks: Ranks, dtype: torch.dtype | None) -> None:
    """However large the gradients are. In the first backward ranks have not compared their
    orders: nobody may wait for room that a peer makes, so everything has some. The numbers are
    those of ranks that read each other's memory, and in float32 of the unsharded model, bit by
    bit."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
    generator = torch.Generator().manual_seed(1)
    steps = [list(torch.randn(ranks.world_size, 4, 256, generator=generator)) for _ in range(3)]
    lent = shard_layers(copy.deepcopy(reference), mesh=ranks.mesh(), mp_policy=policy)
    expected = [gradients_of(lent, inputs[ranks.rank]) for inputs in steps]
    with by_messages(), small_pieces() as counts:
        model = shard_layers(copy.deepcopy(reference), mesh=ranks.mesh(), mp_policy=policy)
        for inputs, gradients in zip(steps, expected):
            counts.most.append(0)
            found = gradients_of(model, inputs[ranks.rank])
            assert all(map(torch.equal, found, gradients))
            if dtype is None:
                data_parallel(reference, inputs, loss_of)
                assert_same_params(model, reference)
            reference.zero_grad()
    few = max(1, 4 // (ranks.world_size - 1))
    assert counts.most[0] > 4 * few, "everything at once"
    assert counts.most[1:] == [2 * few] * 2, "of two groups under way"
    assert counts.now == 0
    assert_idle(model)


class Normed(nn.Module):
    """Under ``norms_in_fp32`` one group whose gradients travel in two dtypes, in several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2048)
        self.up = nn.Linear(2048, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x).to(self.up.weight.dtype))


def norms_in_fp32(name: str, param: nn.Parameter) -> torch.dtype:
    return torch.float32 if name.startswith("norm.") else torch.bfloat16


@distributed(2, 3, 4)
def test_two_dtypes_in_one_reduction(ranks: Ranks) -> None:
    """Sums of what is not cast could be received in place, and those of what is cast could not:
    the pieces of a peer are taken in the order in which it sends them all the same. The numbers
    are those of ranks that read each other's memory, bit by bit."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(norms_in_fp32, torch.float32)
    lent = fully_shard(Normed(), mesh=ranks.mesh(), mp_policy=policy)
    with by_messages(), small_pieces() as counts:
        torch.manual_seed(0)
        sent = fully_shard(Normed(), mesh=ranks.mesh(), mp_policy=policy)
        for step in range(3):
            x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(step + ranks.rank))
            counts.most.append(0)
            assert all(map(torch.equal, gradients_of(sent, x), gradients_of(lent, x)))
    assert_idle(lent)
    assert_idle(sent)
