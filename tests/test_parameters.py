"""Any parameter can be sharded: uneven, empty, of any rank, layout and dtype, shared or ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import fully_shard
from fsdp2.layout import Rows
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


class Weighted(nn.Module):
    """Every parameter takes part in the output, whatever its shape."""

    def __init__(self, **params: nn.Parameter) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for param in self.parameters():
            weights = torch.arange(1, param.numel() + 1, dtype=param.dtype).view(param.shape)
            total = total + (param * param * weights * x.mean()).sum()
        return total


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def assert_trains_as_reference(
    ranks: Ranks, model: Any, reference: nn.Module, steps: int = 3, lr: float = 0.01
) -> None:
    """SGD with momentum on both, bit by bit. Inputs require gradients, so that backward frees."""
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        for m in (model, reference)
    ]
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        inputs = [
            torch.rand(4, generator=generator).requires_grad_() for _ in range(ranks.world_size)
        ]
        loss = model(inputs[ranks.rank])
        loss.backward()
        losses = data_parallel(reference, inputs, loss_of)
        assert_same(loss, losses[ranks.rank], "loss")
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, reference)


SHAPES: dict[str, tuple[int, ...]] = {
    "divides": (12, 3),
    "uneven": (5, 3),
    "one_row": (1, 6),
    "few_rows": (2, 2, 2),
    "one_dim": (7,),
    "single": (1,),
    "conv": (5, 2, 3, 3),
    "five_dims": (3, 1, 2, 1, 2),
    "no_rows": (0, 4),
    "no_columns": (4, 0),
    "large": (131, 257),  # its shard is beyond 64 KiB on 2 ranks
}


def make_param(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@distributed(1, 2, 3, 4)
def test_any_shape_trains(ranks: Ranks) -> None:
    """Uneven rows, fewer rows than ranks, none at all, any number of dims: as unsharded."""
    reference = Weighted(**{name: make_param(shape) for name, shape in SHAPES.items()})
    model = fully_shard(copy.deepcopy(reference))
    # Gradients of the large parameter reach 1e4: a small step keeps the numbers finite.
    assert_trains_as_reference(ranks, model, reference, lr=1e-7)
    assert_idle(model)


@distributed(1, 2, 3, 4)
def test_a_shard_is_what_chunk_gives(ranks: Ranks) -> None:
    """The shard is `torch.chunk`'s piece; its DTensor tells mesh, placement, shape and stride."""
    for shape in SHAPES.values():
        assert_sharded_as_chunk(ranks, shape)


def assert_sharded_as_chunk(ranks: Ranks, shape: tuple[int, ...]) -> None:
    original = make_param(shape)
    plain = original.detach().clone()
    model = fully_shard(Weighted(weight=original), mesh=ranks.mesh())
    weight = model.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, DTensor)
    assert weight.requires_grad and weight.is_leaf
    assert weight.device_mesh == ranks.mesh()
    assert weight.placements == (Shard(0),)
    assert (weight.shape, weight.stride(), weight.dtype) == (
        plain.shape,
        plain.stride(),
        plain.dtype,
    )
    chunks = plain.chunk(ranks.world_size) if shape[0] else (plain,)
    expected = chunks[ranks.rank] if ranks.rank < len(chunks) else plain[:0]
    local = weight.to_local()
    assert local.is_contiguous()
    assert_same(local, expected)
    assert_same(weight, plain)
    assert_idle(model)


@distributed(2, 3)
def test_shards_equal_pytorchs(ranks: Ranks) -> None:
    """Local shards, placements and strides are those of PyTorch's FSDP2."""
    plain = Net(dim=5, tied=True)
    ours = shard_blocks(copy.deepcopy(plain))
    theirs = shard_blocks(plain, torch_fully_shard)
    expected = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(expected)
    for name, param in ours.named_parameters():
        assert (param.placements, param.shape, param.stride()) == (
            expected[name].placements,
            expected[name].shape,
            expected[name].stride(),
        )
        assert_same(param.to_local(), expected[name].to_local(), name)
    assert_idle(ours)


def transposed() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 7).t())


def channels_last() -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last))


def strided() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 8)[::2, 1::3])


def expanded() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 1).expand(3, 4))


@distributed(1, 2, 3)
@pytest.mark.parametrize("make", [transposed, channels_last, strided, expanded])
def test_non_contiguous_parameters_train(ranks: Ranks, make: Callable[[], nn.Parameter]) -> None:
    """PyTorch refuses them; here the shard is contiguous and the values and gradients are equal."""
    original = make()
    assert not original.is_contiguous()
    reference = Weighted(weight=nn.Parameter(original.detach().contiguous().clone()))
    model = fully_shard(Weighted(weight=original))
    assert model.weight.to_local().is_contiguous()
    assert_trains_as_reference(ranks, model, reference)
    assert_idle(model)


@distributed(1, 2, 3)
def test_a_channels_last_convolution_trains(ranks: Ranks) -> None:
    """A convolution whose gradient arrives in channels_last gets it in the right places.

    The layout chooses other kernels, so numbers agree to fp32 roundings: 1e-5.
    """
    reference = nn.Conv2d(3, 5, 3)
    model = fully_shard(copy.deepcopy(reference).to(memory_format=torch.channels_last))
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        shape = (ranks.world_size, 2, 3, 6, 6)
        inputs = list(torch.randn(shape, generator=generator))
        own = inputs[ranks.rank].contiguous(memory_format=torch.channels_last)
        model(own).square().sum().backward()
        data_parallel(reference, inputs, lambda m, x: m(x).square().sum())
        assert_same_params(model, reference, rtol=1e-5, atol=1e-4)
        model.zero_grad()
        reference.zero_grad()
    assert_idle(model)


@distributed(1, 2, 3)
def test_parameters_without_dims_are_replicated(ranks: Ranks) -> None:
    """PyTorch refuses them; here every rank has the value, and the mean of the gradients."""
    reference = Weighted(scale=nn.Parameter(torch.tensor(1.5)), weight=make_param((5, 3)))
    model = fully_shard(copy.deepcopy(reference))
    scale = model.scale
    assert isinstance(scale, DTensor)
    assert scale.placements == (Replicate(),)
    assert (scale.shape, scale.to_local().shape) == ((), ())
    assert_trains_as_reference(ranks, model, reference)
    values = torch.zeros(ranks.world_size)
    values[ranks.rank] = model.scale.to_local().item()
    dist.all_reduce(values)
    assert bool((values == values[0]).all())
    assert values[0] != 1.5
    assert_idle(model)


@distributed(2, 3)
def test_a_group_of_nothing_but_scalars_trains(ranks: Ranks) -> None:
    """Where there is nothing to gather the gradients are summed all the same."""
    reference = Weighted(a=nn.Parameter(torch.tensor(1.5)), b=nn.Parameter(torch.tensor(-2.0)))
    model = fully_shard(copy.deepcopy(reference))
    assert_trains_as_reference(ranks, model, reference)
    assert_idle(model)


class Mixed(nn.Module):
    """A bf16 weight, an fp32 bias, an integer table and an fp64 scale, in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4).bfloat16())
        self.bias = nn.Parameter(torch.randn(7))
        self.table = nn.Parameter(torch.arange(-3, 4), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(7) % 2 == 0, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x.bfloat16(), self.weight).float() + self.bias
        return ((y * self.table)[:, self.mask].double() * self.scale).square().mean()


@distributed(1, 2, 3)
def test_several_dtypes_in_one_group(ranks: Ranks) -> None:
    """PyTorch refuses them; here each parameter trains in its own dtype, bit by bit."""
    reference = Mixed()
    dtypes = {name: param.dtype for name, param in reference.named_parameters()}
    table, mask = reference.table.detach().clone(), reference.mask.detach().clone()
    model = fully_shard(copy.deepcopy(reference))
    assert len(set(dtypes.values())) == 5
    generator = torch.Generator().manual_seed(9)
    for _ in range(3):
        inputs = list(torch.randn(ranks.world_size, 3, 4, generator=generator))
        loss = model(inputs[ranks.rank])
        loss.backward()
        assert_same(loss, data_parallel(reference, inputs, loss_of)[ranks.rank], "loss")
        assert_same_params(model, reference)
        for each in (model, reference):
            for param in each.parameters():
                if param.grad is not None:
                    assert param.grad.dtype == param.dtype
                    param.data.sub_(param.grad, alpha=0.01)
                    param.grad = None
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    assert_same(model.table, table)
    assert_same(model.mask, mask)
    assert model.table.grad is None
    assert_idle(model)


class Shared(nn.Module):
    """One weight under two names of two modules, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.c = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@distributed(1, 2, 3)
def test_parameters_shared_inside_a_group(ranks: Ranks) -> None:
    """They stay one parameter under all names, with one gradient: the sum of all uses."""
    reference = Shared()
    model = fully_shard(copy.deepcopy(reference))
    assert model.a.weight is model.b.weight is model.c.weight
    names = [name for name, _ in model.named_parameters()]
    assert names == ["a.weight", "a.bias", "b.bias"]
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        inputs = list(torch.randn(ranks.world_size, 2, 5, generator=generator))
        model(inputs[ranks.rank]).square().sum().backward()
        data_parallel(reference, inputs, lambda m, x: m(x).square().sum())
        assert_same_params(model, reference)
        for each in (model, reference):
            for param in each.parameters():
                param.data.sub_(param.grad, alpha=0.01)
                param.grad = None
    assert_same_params(model, reference)
    assert model.a.weight is model.b.weight
    assert_idle(model)


@distributed(1, 2, 3, 4)
def test_embedding_and_head_tied_under_one_call(ranks: Ranks) -> None:
    """The root owns both names of a tied weight: it trains as one, and stays tied."""
    reference = Net(tied=True)
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for inputs in token_batches(ranks.world_size, 3):
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        assert_same(loss, data_parallel(reference, inputs)[ranks.rank], "loss")
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, reference)
    assert model.head.weight is model.embedding.weight
    assert set(model.state_dict()) == set(reference.state_dict())
    assert_idle(model)


@distributed(2)
def test_attributes_of_a_parameter_survive(ranks: Ranks) -> None:
    """What users hang on a parameter is on its shard, and on the full one inside forward."""

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.lr_scale == 0.5
            assert not isinstance(self.weight, DTensor)
            return super().forward(x)

    model = Reads(3, 3)
    model.weight.lr_scale = 0.5
    fully_shard(model)
    assert model.weight.lr_scale == 0.5
    model(torch.ones(2, 3)).sum().backward()
    assert model.weight.lr_scale == 0.5
    assert_idle(model)


@distributed(2, 3)
def test_ignored_parameters_are_left_alone(ranks: Ranks) -> None:
    """They stay the same plain objects; their gradients are this rank's own; the rest trains."""
    reference = Net()
    model = copy.deepcopy(reference)
    ignored = {model.blocks[0].up.weight, model.head.weight}
    shard_blocks(model, ignored_params=ignored)
    assert {model.blocks[0].up.weight, model.head.weight} == ignored
    assert all(type(param) is nn.Parameter for param in ignored)
    assert all(param.device == torch.device("cpu") for param in ignored)
    names = ("blocks.0.up.weight", "head.weight")
    for inputs in token_batches(ranks.world_size, 3):
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        alone = copy.deepcopy(reference)
        next_token_loss(alone, inputs[ranks.rank]).backward()
        assert_same(loss, data_parallel(reference, inputs)[ranks.rank], "loss")
        for name in names:
            found = model.get_parameter(name)
            assert type(found) is nn.Parameter
            assert_same(found.grad, alone.get_parameter(name).grad, name)
            assert not torch.equal(found.grad, reference.get_parameter(name).grad)
            found.grad = reference.get_parameter(name).grad.clone()
        assert_same_params(model, reference)
        for each in (model, reference):
            for param in each.parameters():
                param.data.sub_(param.grad, alpha=0.1)
                param.grad = None
    reported = {param.name for group in fsdp2.explain(model).groups for param in group.params}
    assert not reported & set(names)
    assert_idle(model)


@distributed(2)
def test_ignored_parameters_stay_where_they_are(ranks: Ranks) -> None:
    """`fully_shard` moves a model to the mesh's device, and an ignored parameter nowhere."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, device="meta")})
    root = nn.Sequential(model["a"], model["b"])
    fully_shard(root, ignored_params=set(model["b"].parameters()))
    assert model["b"].weight.device.type == "meta"
    assert not isinstance(model["b"].weight, DTensor)
    assert isinstance(model["a"].weight, DTensor)
    assert [p.device.type for p in root.parameters()] == ["cpu", "cpu", "meta", "meta"]
    assert_idle(root)


class Buffered(nn.Module):
    """A parameter beside buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum()


@distributed(2)
def test_buffers_are_neither_sharded_nor_synchronised(ranks: Ranks) -> None:
    """Buffers stay plain and per rank, integer ones too."""
    reference = Buffered()
    model = fully_shard(copy.deepcopy(reference))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(ranks.rank))
    model(x).backward()
    reference(x).backward()
    for name, buffer in model.named_buffers():
        assert not isinstance(buffer, DTensor)
        assert_same(buffer, reference.get_buffer(name), name)
    assert_idle(model)


class Total(nn.Module):
    """The sum of its parts' outputs."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum()


def assert_groups_train(ranks: Ranks, names: list[str]) -> None:
    """One group for each of these shapes."""
    reference = Total(nn.ModuleList(Weighted(weight=make_param(SHAPES[name])) for name in names))
    model = copy.deepcopy(reference)
    for part in model.parts:
        fully_shard(part)
    fully_shard(model)
    assert_trains_as_reference(ranks, model, reference)
    assert_idle(model)


@distributed(3, 4)
def test_groups_that_are_empty_on_some_ranks(ranks: Ranks) -> None:
    """A group of which some ranks have no rows gathers and reduces like any other."""
    assert Rows((2, 2, 2), ranks.world_size).local_numel(ranks.world_size - 1) == 0
    assert_groups_train(ranks, ["one_row", "single", "few_rows"])


@distributed(1, 2)
def test_changes_of_the_shards_are_seen_by_forward(ranks: Ranks) -> None:
    """What is written to `parameters()` between steps, forward computes with."""
    reference = Weighted(weight=make_param((5, 3)), scale=nn.Parameter(torch.tensor(1.5)))
    model = fully_shard(copy.deepcopy(reference))
    x = torch.ones(4)
    with torch.no_grad():
        assert_same(model(x), reference(x))
        model.reshard()
        for each in (model, reference):
            for param in each.parameters():
                param.mul_(2)
        assert_same(model(x), reference(x))
        model.reshard()
    assert_idle(model)


@distributed(1, 2)
def test_a_group_without_any_elements(ranks: Ranks) -> None:
    """A group all of whose parameters have no elements runs, and its gradients are empty too."""
    assert_groups_train(ranks, ["no_rows", "one_row", "no_columns"])
