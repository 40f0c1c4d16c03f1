"""Whatever a caller does with autograd, the shards get what an unsharded model would compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import (
    Block,
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
)

Loss = Callable[[nn.Module, Any], Tensor]


class Stack(nn.Module):
    """Blocks one behind the other, and a projection that belongs to the root."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def activations(world_size: int, steps: int = 3) -> list[list[Tensor]]:
    """For every step one input of shape (3, 8) for each rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(3, 8, generator=generator) for _ in range(world_size)] for _ in range(steps)
    ]


def train_like(
    reference: nn.Module,
    model: nn.Module,
    ranks: Ranks,
    loss_of: Loss,
    batches: Sequence[Sequence[Any]],
    **bound: float,
) -> None:
    """Train both with SGD; losses, gradients and parameters stay equal in every step."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for inputs in batches:
        loss = loss_of(model, inputs[ranks.rank])
        loss.backward()
        losses = data_parallel(reference, inputs, loss_of)
        torch.testing.assert_close(
            loss.detach(), losses[ranks.rank], **(bound or {"rtol": 0, "atol": 0})
        )
        assert_same_params(model, reference, **bound)
        assert_idle(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


# ---- Calls and backwards in any number


class Looped(nn.Module):
    """One block called three times; its own projection twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.out(self.out(x))


@distributed(2, 3)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_module_used_several_times(ranks: Ranks, reshard: bool | None) -> None:
    """A module called several times in one forward gets the sum of its calls' gradients, once."""
    reference = Looped()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    train_like(reference, model, ranks, square, activations(ranks.world_size))
    with fsdp2.trace(model) as events:
        square(model, torch.ones(3, 8)).backward()
    reduced = [event.group for event in events.events if event.name == "reduce"]
    assert sorted(reduced) == ["blocks.0", "root"]
    assert_idle(model)


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(x.flip(0) * 2)
    return (first * second).mean() + first.square().sum()


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_several_forwards_before_one_backward(ranks: Ranks, reshard: bool | None) -> None:
    """Two forwards of the root whose outputs meet in one loss train as if they were not sharded."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    train_like(reference, model, ranks, two_forwards, activations(ranks.world_size))
    assert_idle(model)


@distributed(2)
def test_several_forwards_and_a_backward_for_each(ranks: Ranks) -> None:
    """Two forwards first, then a backward through each: both gradients arrive, in either order."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    for order in (0, 1), (1, 0):
        inputs = activations(ranks.world_size, steps=2)
        losses = [square(model, each[ranks.rank]) for each in inputs]
        for which in order:
            losses[which].backward()
            data_parallel(reference, inputs[which], square)
            assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_several_backwards_on_one_forward(ranks: Ranks, reshard: bool | None) -> None:
    """With ``retain_graph`` each further backward gathers again and adds its mean to ``grad``."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    for inputs in activations(ranks.world_size, steps=2):
        out = model(inputs[ranks.rank])
        total, mean = out.sum(), out.square().mean()
        for loss in (total, mean, total):
            loss.backward(retain_graph=True)
            assert_idle(model)
        for loss_of in (lambda m, x: m(x).sum(), square, lambda m, x: m(x).sum()):
            data_parallel(reference, inputs, loss_of)
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients(
    ranks: Ranks, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    """Evaluating before the first and between training steps changes nothing in training."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    batches = token_batches(ranks.world_size, 3)
    for step, inputs in enumerate(batches):
        tokens = inputs[ranks.rank]
        with mode():
            assert_same(model(tokens), reference(tokens), f"logits before step {step}")
        model.reshard()  # the root, which waits for a backward that does not come
        assert_idle(model)
        train_like(reference, model, ranks, next_token_loss, [inputs])
    assert_idle(model)


@distributed(2)
def test_evaluation_between_forward_and_backward(ranks: Ranks) -> None:
    """A forward without gradients between a forward and its backward disturbs neither."""

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        loss = next_token_loss(model, tokens)
        with torch.no_grad():
            weight = next_token_loss(model, tokens.flip(0))
        return loss * weight

    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    train_like(reference, model, ranks, loss_of, token_batches(ranks.world_size, 3))
    assert_idle(model)


# ---- Inputs


@distributed(2, 3)
def test_inputs_that_need_no_gradient(ranks: Ranks) -> None:
    """Where no input needs a gradient the first block is reduced and freed all the same."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    train_like(reference, model, ranks, square, activations(ranks.world_size))
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("as_keyword", [False, True])
def test_leaf_input_gets_its_gradient(ranks: Ranks, as_keyword: bool) -> None:
    """A leaf given to the root has ``grad`` after backward, added to what was there before."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    ours = torch.randn(3, 8, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    for _ in range(2):
        for m, leaf in ((model, ours), (reference, theirs)):
            (m(x=leaf) if as_keyword else m(leaf)).square().sum().backward()
        assert_same(ours.grad, theirs.grad)
    assert_same_params(model, reference)  # all ranks had the same input
    assert_idle(model)


@distributed(2)
def test_gradient_of_the_input_only(ranks: Ranks) -> None:
    """``torch.autograd.grad`` for an input leaves no gradient on shards, and training goes on."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    for inputs in activations(ranks.world_size):
        x = inputs[ranks.rank].clone().requires_grad_()
        (ours,) = torch.autograd.grad(square(model, x), x)
        (theirs,) = torch.autograd.grad(square(reference, x), x)
        assert_same(ours, theirs)
        assert all(param.grad is None for param in model.parameters())
        assert_idle(model)
        train_like(reference, model, ranks, square, [inputs])
    assert_idle(model)


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.block(x + bias)


class Biased(nn.Module):
    """One learned bias is an input of every block, like a relative position bias."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(blocks))
        self.bias = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x


@distributed(2)
def test_input_shared_by_all_blocks(ranks: Ranks) -> None:
    """A gradient that is complete only at the very end keeps no block's full parameters waiting."""
    reference = Biased(5)
    model = shard_blocks(copy.deepcopy(reference))
    inputs = activations(ranks.world_size, steps=2)
    train_like(reference, model, ranks, square, inputs[:1])
    with fsdp2.trace(model) as events:
        train_like(reference, model, ranks, square, inputs[1:])
    most, live = 0, set()
    for event in events.events:
        if event.name == "gather" and event.group != "root":
            live.add(event.group)
        elif event.name == "free":
            live.discard(event.group)
        most = max(most, len(live))
    assert most == 2, str(events)
    assert_idle(model)


# ---- Parameters that are not used


class Partly(nn.Module):
    """Uses some of its layers, by number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for i in used:
            x = self.layers[i](x)
        return x


class Router(nn.Module):
    """A block of which each rank, in each step, may use other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Partly(), Partly()])

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, used)
        return x


def routed(model: nn.Module, given: tuple[Tensor, Sequence[int]]) -> Tensor:
    return model(*given).square().mean()


@distributed(2, 3)
def test_unused_parameters(ranks: Ranks) -> None:
    """What no rank used keeps ``grad`` None, the rest of its group trains."""
    reference = Router()
    model = shard_blocks(copy.deepcopy(reference))
    for used in ((0,), (2, 1), (3,)):
        inputs = [[(x, used) for x in xs] for xs in activations(ranks.world_size, steps=1)]
        train_like(reference, model, ranks, routed, inputs)
    routed(model, (torch.ones(3, 8), (0,))).backward()
    grads = {name for name, param in model.named_parameters() if param.grad is not None}
    assert grads == {
        "first.weight",
        "first.bias",
        "blocks.0.layers.0.weight",
        "blocks.0.layers.0.bias",
        "blocks.1.layers.0.weight",
        "blocks.1.layers.0.bias",
    }
    assert_idle(model)


class Skipping(Stack):
    """Calls the blocks that it is told to."""

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:  # type: ignore[override]
        for i in used:
            x = self.blocks[i](x)
        return self.out(x)


@distributed(2)
def test_unused_modules(ranks: Ranks) -> None:
    """Sharded modules that a forward leaves out, some always, get no gradient and stay sharded."""
    reference = Skipping(Block(), Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    batches = [
        [(x, used) for x in xs]
        for xs, used in zip(
            activations(ranks.world_size, 4), ((0, 1), (1,), (), (0, 1)), strict=True
        )
    ]
    train_like(reference, model, ranks, routed, batches)
    assert all(param.grad is None for param in model.blocks[2].parameters())
    assert_idle(model)


@distributed(2, 3)
def test_ranks_that_use_different_parameters(ranks: Ranks) -> None:
    """Rank r uses sub-layer r: gradients are sum / N with zeros, None where no rank has any."""
    reference = Router()
    model = shard_blocks(copy.deepcopy(reference))
    batches = [
        [(x, (rank,)) for rank, x in enumerate(xs)] for xs in activations(ranks.world_size)
    ]
    train_like(reference, model, ranks, routed, batches)
    routed(model, (torch.ones(3, 8), (ranks.rank,))).backward()
    assert all(param.grad is None for param in model.blocks[0].layers[3].parameters())
    assert model.blocks[0].never.grad is None
    assert_idle(model)


class Dropping(Stack):
    """Leaves the block's output out of the result where it is told to."""

    def forward(self, x: Tensor, used: bool) -> Tensor:  # type: ignore[override]
        extra = self.blocks[0](x)
        out = self.out(x)
        return out + extra if used else out


@distributed(2)
def test_output_that_only_one_rank_uses(ranks: Ranks) -> None:
    """A rank whose loss leaves out a kept block's output sends zeros for it."""
    reference = Dropping(Block())
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=False)
    batches = [[(x, rank == 0) for rank, x in enumerate(xs)] for xs in activations(2)]
    train_like(reference, model, ranks, routed, batches)
    assert_idle(model)


@distributed(2)
def test_backward_that_only_one_rank_enters(ranks: Ranks) -> None:
    """Where the block must be gathered again, the difference is named on both ranks."""
    model = shard_blocks(Dropping(Block()), reshard_after_forward=True)
    x = activations(2)[0][ranks.rank]
    with pytest.raises(RuntimeError, match="different orders.*the end of backward"):
        routed(model, (x, ranks.rank == 0)).backward()
    model.reset_iter_state()
    assert_idle(model)


# ---- Outputs


class Pair(NamedTuple):
    main: Tensor
    note: str


@dataclass
class Record:
    main: Tensor
    steps: int = 0


@dataclass(frozen=True)
class Frozen:
    inner: Record


class Keeper(dict[str, Any]):
    """Stands for the output classes of model libraries."""


def as_tuple(x: Tensor) -> Any:
    return (x, 3, None)


def as_list(x: Tensor) -> Any:
    return [[x], "text"]


def as_dict(x: Tensor) -> Any:
    return {"main": x, "n": 1}


def as_dict_subclass(x: Tensor) -> Any:
    return Keeper(main=(x,))


def as_named_tuple(x: Tensor) -> Any:
    return Pair(x, "note")


def as_dataclass(x: Tensor) -> Any:
    return Record(x, 2)


def as_frozen_dataclass(x: Tensor) -> Any:
    return Frozen(Record(x))


def as_deep(x: Tensor) -> Any:
    return {"a": [Pair(x, "")], "b": (Record(x * 2), [{"c": x + 1}])}


WRAPPERS = (
    as_tuple,
    as_list,
    as_dict,
    as_dict_subclass,
    as_named_tuple,
    as_dataclass,
    as_frozen_dataclass,
    as_deep,
)


def tensors_of(value: Any) -> list[Tensor]:
    """What the wrappers above put in, found without the code under test."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, (Record, Frozen)):
        value = list(vars(value).values())
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def types_of(value: Any) -> Any:
    """The types of a nested value, in its shape."""
    if isinstance(value, dict):
        return type(value), {key: types_of(item) for key, item in value.items()}
    if isinstance(value, (Record, Frozen)):
        return type(value), {key: types_of(item) for key, item in vars(value).items()}
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


class Wrapping(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.wrap = wrap
        self.made: Any = None

    def forward(self, x: Tensor) -> Any:
        self.made = self.wrap(self.block(x))
        return self.made


class Unwrapping(nn.Module):
    """Nested outputs inside, and at the root as well."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wrapping(wrap), Wrapping(wrap)])
        self.out = nn.Linear(8, 8)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.stack(tensors_of(block(x))).mean(0)
        return self.wrap(self.out(x))


def mean_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([t.square().mean() for t in tensors_of(model(x))]).mean()


@distributed(2)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_nested_outputs(ranks: Ranks, wrap: Callable[[Tensor], Any]) -> None:
    """Outputs in any nesting keep their types and values, and bring backward to the module."""
    reference = Unwrapping(wrap)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=True)
    train_like(reference, model, ranks, mean_of_squares, activations(ranks.world_size))
    x = torch.ones(3, 8)
    assert types_of(model(x)) == types_of(reference(x))
    assert model.blocks[0](x) is model.blocks[0].made, "nothing had to change inside"
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_nested_outputs_are_cast(ranks: Ranks, wrap: Callable[[Tensor], Any]) -> None:
    """With an ``output_dtype`` nested outputs are cast, in containers of their own types."""
    model = Unwrapping(wrap)
    fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(output_dtype=torch.float64))
    plain = wrap(torch.ones(3, 8))
    out = model(torch.ones(3, 8))
    assert types_of(out) == types_of(plain)
    assert [t.dtype for t in tensors_of(out)] == [torch.float64] * len(tensors_of(plain))
    tensors_of(out)[0].sum().backward()
    assert model.out.weight.grad is not None
    assert_idle(model)


class Viewing(nn.Module):
    """Returns a view, of its own result or of what it was given."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.block = Block()
        self.of_input = of_input

    def forward(self, x: Tensor) -> Tensor:
        if self.of_input:
            x.add_(self.block(x.clone()))
            return x.view(8, 3)
        return self.block(x).view(8, 3)


class InPlace(nn.Module):
    """Changes what the blocks return in place."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing(of_input) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(x)
        for block in self.blocks:
            x = block(x)
            x.add_(1.0)
            x.mul_(0.5)
            x = x.view(3, 8)
        return x.square()


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_views_changed_in_place(ranks: Ranks, reshard: bool) -> None:
    """A caller may change a returned view in place: backward still reaches the module in time."""
    reference = InPlace(of_input=False)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    train_like(reference, model, ranks, square, activations(ranks.world_size))
    assert_idle(model)


# ---- Hooks and versions


@distributed(2)
def test_post_accumulate_hooks_run_once(ranks: Ranks) -> None:
    """A user's post-accumulate hook on a shard runs once a backward, with the reduced gradient."""
    reference = Looped()
    model = shard_blocks(copy.deepcopy(reference))
    calls: list[str] = []
    seen: dict[str, Tensor] = {}
    for name, param in model.named_parameters():

        def hook(shard: Tensor, name: str = name) -> None:
            calls.append(name)
            seen[name] = shard.grad.full_tensor()

        param.register_post_accumulate_grad_hook(hook)
    for inputs in activations(ranks.world_size, steps=2):
        calls.clear()
        reference.zero_grad()
        model.zero_grad()
        square(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, square)
        assert sorted(calls) == sorted(name for name, _ in reference.named_parameters())
        for name, param in reference.named_parameters():
            assert_same(seen[name], param.grad, name)
    assert_idle(model)


@distributed(2)
def test_optimizer_in_hooks(ranks: Ranks) -> None:
    """Optimizers that step and drop the gradient inside the hooks train like one at the end."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def hook(shard: Tensor) -> None:
        optimizers[shard].step()
        optimizers[shard].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for inputs in activations(ranks.world_size):
        square(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, square)
        theirs.step()
        theirs.zero_grad()
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_shard_changed_between_forward_and_backward(ranks: Ranks) -> None:
    """Changing a weight that backward needs makes backward raise, as it does unsharded."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=True)
    inputs = activations(ranks.world_size, steps=1)[0]
    train_like(reference, model, ranks, square, [inputs])
    for m in (reference, model):
        loss = square(m, inputs[ranks.rank])
        with torch.no_grad():
            m.blocks[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    model.reset_iter_state()
    reference.zero_grad()
    model.zero_grad()
    train_like(reference, model, ranks, square, [inputs])
    assert_idle(model)


@distributed(2)
def test_shard_of_a_kept_group_changed(ranks: Ranks) -> None:
    """A kept group's backward uses what its forward used; the next forward sees the change."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=False)
    first, second = activations(ranks.world_size, steps=2)
    loss = square(model, first[ranks.rank])
    with torch.no_grad():
        dict(model.named_parameters())["blocks.1.up.weight"].mul_(2)  # the attribute is full
    loss.backward()
    data_parallel(reference, first, square)
    with torch.no_grad():
        reference.blocks[1].up.weight.mul_(2)
    assert_same_params(model, reference)
    train_like(reference, model, ranks, square, [second])
    assert_idle(model)


@distributed(2)
def test_shard_changed_where_backward_does_not_need_it(ranks: Ranks) -> None:
    """Changing a bias, which backward does not read, between forward and backward is allowed."""
    reference = Stack(Block(), Block())
    model = shard_blocks(copy.deepcopy(reference))
    x = torch.ones(3, 8)
    for m in (reference, model):
        loss = square(m, x)
        with torch.no_grad():
            m.blocks[1].up.bias.add_(1)
        loss.backward()
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_views_of_inputs_changed_in_place(ranks: Ranks) -> None:
    """The same where the view is one of an input that the module itself changed in place."""
    reference = InPlace(of_input=True)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=True)
    train_like(reference, model, ranks, square, activations(ranks.world_size))
    assert_idle(model)
