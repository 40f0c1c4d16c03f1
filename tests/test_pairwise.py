"""Gradients exchanged as messages: how much room they take, and that they arrive all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

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


@distributed(2, 3, 4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_room_for_a_few_pieces(ranks: Ranks, dtype: torch.dtype | None) -> None:
    """However large the gradients are. In the first backward ranks have not compared their
    orders: nobody may wait for room that a peer makes, so everything has some."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
    generator = torch.Generator().manual_seed(1)
    with by_messages(), small_pieces() as counts:
        model = copy.deepcopy(reference)
        for layer in model:
            fully_shard(layer, mesh=ranks.mesh(), mp_policy=policy)
        fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
        for _ in range(3):
            inputs = list(torch.randn(ranks.world_size, 4, 256, generator=generator))
            counts.most.append(0)
            loss_of(model, inputs[ranks.rank]).backward()
            if dtype is None:
                data_parallel(reference, inputs, loss_of)
                assert_same_params(model, reference)
            else:
                assert all(param.grad is not None for param in model.parameters())
            model.zero_grad()
            reference.zero_grad()
    few = max(1, 4 // (ranks.world_size - 1))
    assert counts.most[0] > 4 * few, "everything at once"
    assert counts.most[1:] == [2 * few] * 2, "of two groups under way"
    assert counts.now == 0
    assert_idle(model)
