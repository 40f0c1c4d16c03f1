"""Which tensor a name stands for: shards for optimizers and checkpoints, full ones in forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm

from fsdp2 import MixedPrecisionPolicy, fully_shard
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


def train(model: Any, plain: nn.Module, optimizer: Any, steps: int, rank: int) -> None:
    """Both models take the same steps; the sharded one has this optimizer already."""
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for batch in token_batches(2, steps):
        data_parallel(plain, batch)
        next_token_loss(model, batch[rank]).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()


# ---- Outside forward and backward


def assert_shards(model: nn.Module, plain: nn.Module) -> None:
    """Every listing gives the same registered shards, under the names of the plain model."""
    expected = {name: param.shape for name, param in plain.named_parameters()}
    found = dict(model.named_parameters())
    assert {name: param.shape for name, param in found.items()} == expected
    assert all(a is b for a, b in zip(model.parameters(), found.values(), strict=True))
    for param in found.values():
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, DTensor)
        assert param.is_leaf
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.to_local().data_ptr() == found[name].to_local().data_ptr(), name


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_listings_always_give_the_shards(ranks: Ranks, reshard: bool | None) -> None:
    """After construction, forward, backward, the optimizer's step and an eval forward."""
    model, plain = pair(reshard_after_forward=reshard)
    at_first = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_shards(model, plain)
    for batch in token_batches(2, 2):
        loss = next_token_loss(model, batch[ranks.rank])
        assert_shards(model, plain)
        loss.backward()
        assert_shards(model, plain)
        optimizer.step()
        with torch.no_grad():
            model(batch[0])
        assert_shards(model, plain)
    assert all(a is b for a, b in zip(model.parameters(), at_first, strict=True))
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert_idle(model)


@distributed(2)
def test_attributes_are_full_while_kept(ranks: Ranks) -> None:
    """Between forward and backward a kept group's attributes are full, a freed one's shards."""

    def kept(shard: Callable[..., Any]) -> dict[str, list[bool]]:
        model = shard_blocks(Net(), shard=shard)
        [batch] = token_batches(2, 1)
        found: dict[str, list[bool]] = {}

        def look(moment: str) -> None:
            tensors = (model.head.weight, model.norm.bias, model.blocks[0].up.weight)
            found[moment] = [isinstance(tensor, DTensor) for tensor in tensors]

        look("before")
        loss = next_token_loss(model, batch[ranks.rank])
        look("between")
        loss.backward()
        look("after")
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*view", category=UserWarning)
        expected = kept(theirs.fully_shard)
    assert kept(fully_shard) == expected
    assert expected["between"] == [False, False, True]

    model, plain = pair()
    [batch] = token_batches(2, 1)
    loss = next_token_loss(model, batch[ranks.rank])
    assert_same(model.head.weight, plain.head.weight)
    loss.backward()
    assert_idle(model)


@distributed(2)
def test_optimizer_built_between_forward_and_backward(ranks: Ranks) -> None:
    """It gets the shards although the root is full at that moment, and trains them."""
    model, plain = pair()
    [batch] = token_batches(2, 1)
    loss = next_token_loss(model, batch[ranks.rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss.backward()
    optimizer.zero_grad()
    train(model, plain, optimizer, 3, ranks.rank)
    plain.zero_grad()
    assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
def test_optimizer_built_after_an_eval_forward(ranks: Ranks) -> None:
    """An evaluation leaves the root full; the optimizer that follows trains the shards."""
    model, plain = pair()
    with torch.no_grad():
        model(token_batches(2, 1)[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, plain, optimizer, 3, ranks.rank)
    assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_eval_forward_then_step_uses_the_new_weights(ranks: Ranks, mode: Callable[[], Any]) -> None:
    """What evaluation left gathered is stale after the optimizer's step, and gathered again."""
    model, plain = pair(reshard_after_forward=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, plain)]
    first, second = token_batches(2, 2)
    data_parallel(plain, first)
    next_token_loss(model, first[ranks.rank]).backward()
    with mode():
        model(second[0])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with mode():
        assert_same(model(second[0]), plain(second[0]))
    for optimizer in optimizers:
        optimizer.step()  # without gradients: nothing changes
    data_parallel(plain, second)
    next_token_loss(model, second[ranks.rank]).backward()
    assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
def test_load_after_an_eval_forward_is_seen(ranks: Ranks) -> None:
    """Loading values into the shards while full parameters are kept: the next forward sees them."""
    model, plain = pair(reshard_after_forward=False)
    tokens = token_batches(2, 1)[0][0]
    with torch.no_grad():
        model(tokens)
        for net in (model, plain):
            for param in net.parameters():
                param.mul_(0.5)
        assert_same(model(tokens), plain(tokens))
    for module in (model, *model.blocks):
        module.reshard()
    assert_idle(model)


# ---- Inside forward


class Looking(nn.Module):
    """Notes what `self.parameters()` is while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen: list[tuple[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = list(self.named_parameters())
        return self.linear(x)


@distributed(2)
def test_inside_forward_parameters_are_full(ranks: Ranks) -> None:
    """A gathered module's `parameters()` are plain, full, in the compute dtype, and its own."""
    torch.manual_seed(2)
    model = nn.Sequential(Looking(), nn.Linear(3, 2))
    expected = {n: p.detach().bfloat16() for n, p in model[0].named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    output = model(torch.randn(4, 4))
    seen = model[0].seen
    assert [name for name, _ in seen] == list(expected)
    for _, param in seen:
        assert isinstance(param, nn.Parameter)
        assert not isinstance(param, DTensor)
        assert param.requires_grad
    output.sum().backward()
    handle = model[0].unshard()
    assert handle is None
    for name, param in seen:  # the same tensors come back with every gather
        assert_same(param.detach(), expected[name], name)
    model[0].reshard()
    assert_idle(model)


# ---- Modules that have ways of their own with parameters


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.scales = nn.ParameterDict({"in": torch.randn(4), "out": torch.randn(4)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales["in"]
        for matrix in self.matrices:
            x = (x @ matrix).tanh()
        return x * self.scales["out"]


def normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), weight_norm(nn.Linear(6, 3)))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized() -> nn.Module:
    """A parametrization of its own, and FSDP applied to the parametrized module itself."""
    layer = nn.Linear(4, 3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Recurrent,
    "MultiheadAttention": Attention,
    "ParameterList": Listed,
    "weight_norm": normed,
    "parametrize": parametrized,
}


@distributed(2)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reshard", [True, False])
def test_special_modules_train_like_the_plain_ones(ranks: Ranks, kind: str, reshard: bool) -> None:
    """Values and gradients are equal to the plain module's bit by bit over three steps."""
    torch.manual_seed(4)
    plain = SPECIAL[kind]()
    model = copy.deepcopy(plain)
    for child in model.children():
        if child.__class__.forward is not nn.Module.forward and list(child.parameters()):
            fully_shard(child, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (model, plain)]
    for _ in range(3):
        inputs = [torch.randn(2, 3, 4) for _ in range(2)]
        data_parallel(plain, inputs, lambda net, x: net(x).square().sum())
        model(inputs[ranks.rank]).square().sum().backward()
        assert_same_params(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, plain)
    model.eval()
    plain.eval()
    with torch.no_grad():
        x = torch.randn(2, 3, 4)
        assert_same(model(x), plain(x))
    for module in model.modules():
        if fully_shard.state(module) is not None:
            module.reshard()
    assert_idle(model)
