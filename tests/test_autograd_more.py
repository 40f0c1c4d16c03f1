"""Derivatives of derivatives, forward-mode derivatives, and several models in one loss."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from fsdp2.hooks import states_below
from harness import Ranks, distributed
from models import (
    Block,
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    data_parallel,
    shard_blocks,
    token_batches,
)
from test_autograd import Stack, activations, train_like

RESHARD = pytest.mark.parametrize("reshard", [True, False, None])

# ---- Second order


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The size of the gradient for the input, and nothing else."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().mean()


def loss_and_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """One forward serves both."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().mean()


def score_matching(model: nn.Module, x: Tensor) -> Tensor:
    """A second derivative inside the loss: third order in all."""
    x = x.clone().requires_grad_()
    (score,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(score.square().sum(), x, create_graph=True)
    return score.square().mean() + curvature.mean()


def interior_only(model: nn.Module, x: Tensor) -> Tensor:
    """No gradient of the last block's output: the second walk enters it from the inside."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().mean()


@distributed(2, 3)
@RESHARD
@pytest.mark.parametrize("loss", [penalty, interior_only, loss_and_penalty, score_matching])
def test_second_order(
    ranks: Ranks, loss: Callable[[nn.Module, Tensor], Tensor], reshard: bool | None
) -> None:
    """Losses made of input gradients train as they do unsharded, resharding or not."""
    reference = Stack(Block(), Block(), Block())
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    train_like(reference, model, ranks, loss, activations(ranks.world_size))
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("loss", [penalty, loss_and_penalty])
def test_second_order_without_resharding_after_backward(
    ranks: Ranks, loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """With `set_reshard_after_backward(False)` too the parameters have their gradients."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    model.set_reshard_after_backward(False)
    inputs = activations(ranks.world_size)[0]
    loss(model, inputs[ranks.rank]).backward()
    data_parallel(reference, inputs, loss)
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert_same_params(model, reference)
    assert_idle(model)


# ---- Forward mode


@distributed(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@RESHARD
def test_jvp(ranks: Ranks, reshard: bool | None, dtype: torch.dtype) -> None:
    """`torch.func.jvp` through a sharded model, before and after it has trained."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # PyTorch's own, on first use
    reference = Stack(Block(), Block())
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype)
    model = copy.deepcopy(reference)
    shard_blocks(model, reshard_after_forward=reshard, mp_policy=policy)
    reference.to(dtype)
    x, tangent = (each[0].to(dtype) for each in activations(ranks.world_size, steps=2))
    for _ in range(2):
        found = torch.func.jvp(model, (x,), (tangent,))
        expected = torch.func.jvp(reference, (x,), (tangent,))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            assert_same(ours, theirs)
        model(x).sum().backward()
    assert_idle(model)


# ---- Several models, nested results


@distributed(2)
@pytest.mark.parametrize("checkpointed", [True, False])
@RESHARD
def test_preferences(ranks: Ranks, reshard: bool | None, checkpointed: bool) -> None:
    """A policy is trained against a frozen sharded copy of itself, on two answers a step."""
    plain, frozen = Net(), Net().requires_grad_(False)
    frozen.load_state_dict(plain.state_dict())
    model, guide = (
        shard_blocks(copy.deepcopy(m), reshard_after_forward=reshard) for m in (plain, frozen)
    )

    def score(net: nn.Module, tokens: Tensor) -> Tensor:
        call = checkpoint if checkpointed else lambda f, x, use_reentrant: f(x)
        logits = call(net, tokens, use_reentrant=False)
        return -nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
        chosen, rejected = tokens, tokens.flip(1)
        gain = score(net, chosen) - score(net, rejected)
        reference = guide if net is model else frozen
        with torch.no_grad():
            base = score(reference, chosen) - score(reference, rejected)
        return -nn.functional.logsigmoid(gain - base)

    train_like(plain, model, ranks, loss_of, token_batches(ranks.world_size, 3))
    for state in states_below(guide):
        state.reshard()  # no backward frees what a forward kept
    assert_idle(guide)
    assert all(param.grad is None for param in guide.parameters())


class Heads(nn.Module):
    """An embedding and blocks, with results nested four deep."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embedding(tokens)
        inner = self.blocks[0](hidden)
        outer = self.blocks[1](inner)
        return ((hidden, {"layers": [(inner, outer)]}), [[outer * 2]])


@distributed(2)
@RESHARD
def test_loss_on_an_inner_result(ranks: Ranks, reshard: bool | None) -> None:
    """A loss on one tensor deep inside trains what leads to it, and nothing waits for the rest."""
    reference = Heads()
    model = copy.deepcopy(reference)
    fully_shard(model.embedding)
    shard_blocks(model, reshard_after_forward=reshard)

    def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
        return net(tokens)[0][1]["layers"][0][0].square().mean()

    train_like(reference, model, ranks, loss_of, token_batches(ranks.world_size, 3))
    assert model.blocks[1].up.weight.grad is None
    assert_idle(model)


# ---- Users' hooks


class Hooked(Block):
    """Looks at gradients of what goes in and comes out, and changes them."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)
        out: Tensor = super().forward(x)
        out.register_hook(lambda gradient: gradient * 4)
        return out


def hooked_square(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x.requires_grad_())
    out.register_hook(lambda gradient: gradient * 8)
    gone = out.register_hook(lambda gradient: gradient * 0)
    gone.remove()
    return out.square().mean()


@distributed(2)
def test_users_hooks_on_what_goes_in_and_comes_out(ranks: Ranks) -> None:
    """Before and behind ours on the same tensor they run in their order, and can be removed."""
    reference = Stack(Hooked(), Hooked())
    model = shard_blocks(copy.deepcopy(reference))
    train_like(reference, model, ranks, hooked_square, activations(ranks.world_size))
