"""Second-order optimizers written for whole tensors, on the DTensors of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
)


class Shampoo(torch.optim.Optimizer):
    """Gupta, Koren and Singer, 2018, algorithm 1: a matrix is preconditioned from both sides with
    the inverse fourth roots of the sums of ``g @ g.T`` and of ``g.T @ g``. It knows of no DTensor.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "epsilon": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim == 2 and param.grad is not None:
                    update = self._precondition(self.state[param], param.grad, group["epsilon"])
                    param.sub_(update, alpha=group["lr"])

    def _precondition(self, state: dict[str, Tensor], grad: Tensor, epsilon: float) -> Tensor:
        for side, square in (("left", grad @ grad.T), ("right", grad.T @ grad)):
            state[side] = state[side] + square if side in state else square
        left, right = (_inverse_fourth_root(state[side], epsilon) for side in ("left", "right"))
        return left @ grad @ right


def _inverse_fourth_root(square: Tensor, epsilon: float) -> Tensor:
    values, vectors = torch.linalg.eigh(square)
    return vectors * (values.clamp(min=0) + epsilon).pow(-0.25) @ vectors.T


@distributed(2, 3, 4)
def test_steps_of_shampoo(ranks: Ranks) -> None:
    """5 steps are those on the unsharded model, to rounding: products of sharded matrices are
    summed over the ranks in another order. Rows that do not divide, ranks without any."""
    reference = Net().double()
    model = shard_blocks(copy.deepcopy(reference))
    own, expected = Shampoo(model.parameters(), 0.05), Shampoo(reference.parameters(), 0.05)
    before = [param.detach().clone() for param in reference.parameters()]
    for batch in token_batches(ranks.world_size, 5):
        next_token_loss(model, batch[ranks.rank]).backward()
        data_parallel(reference, batch)
        for optimizer in (own, expected):
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs, start in zip(model.parameters(), reference.parameters(), before, strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-9, atol=1e-9)
        assert theirs.ndim != 2 or not torch.equal(theirs, start)
        for side, value in own.state[ours].items():
            torch.testing.assert_close(
                value.full_tensor(), expected.state[theirs][side], rtol=1e-9, atol=1e-9
            )
    assert_idle(model)
