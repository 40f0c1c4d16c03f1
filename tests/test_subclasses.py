"""Tensor subclasses that say themselves what travels, and parameters of classes of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed
from models import (
    Block,
    Net,
    assert_idle,
    assert_same,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
)

BF16 = torch.bfloat16
KEPT = {  # operators whose result is of the subclass again, as PyTorch's engine needs them
    torch.ops.aten.detach.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.empty_like.default,
}


class Narrow(torch.Tensor):
    """Kept in float32; travels in bfloat16, and computes in what bfloat16 left of it."""

    asked: list[Any] = []

    @staticmethod
    def __new__(cls, data: Tensor) -> Narrow:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data_})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = [type(a) for a in args if isinstance(a, Narrow)]
        unwrap = lambda t: t.data_ if isinstance(t, Narrow) else t  # noqa: E731
        args, kwargs = _pytree.tree_map(unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func not in KEPT or not kinds:
            return result
        return _pytree.tree_map_only(torch.Tensor, kinds[0], result)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        self.asked.append(mesh)
        return (self.data_.to(BF16),), self.data_.dtype

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        [wire] = gathered
        assert metadata is torch.float32, "metadata comes back"
        if out is None:
            full = wire.to(param_dtype)
            return full, (full,)
        target = out._local_tensor if isinstance(out, DTensor) else out
        # PyTorch's engine calls it with gradients on.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
            target.copy_(wire)
        return None


class NarrowKnowing(Narrow):
    """The same with the longer signature, which says what the whole parameter is."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        self.asked.append((mesh, outer_size, outer_stride, module, mp_policy))
        rows = -(-outer_size[0] // mesh.size())
        wire = self.data_.to(BF16)
        padding = wire.new_zeros(rows - wire.shape[0], *wire.shape[1:])
        return (torch.cat([wire, padding]),), self.data_.dtype


def with_narrow_weights(model: nn.Module, kind: type[Narrow] = Narrow) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach().clone()))
    return model


class Rounded(nn.Module):
    """What ``Narrow`` means: weights rounded to bfloat16, gradients as if they had not been."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (weight.to(BF16).to(weight.dtype) - weight).detach()


def reference(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            nn.utils.parametrize.register_parametrization(module, "weight", Rounded(), unsafe=True)
    return model


def plain_named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name.replace("parametrizations.", "").replace(".original", ""): param
        for name, param in model.named_parameters()
    }


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's rows of all ranks, whatever its local tensor is."""
    assert isinstance(tensor, DTensor)
    local = tensor._local_tensor
    local = local.data_ if isinstance(local, Narrow) else local
    return DTensor.from_local(
        local.clone(), tensor.device_mesh, tensor.placements, shape=tensor.shape,
        stride=tensor.stride(), run_check=False,
    ).full_tensor()  # fmt: skip


def start(kind: type[Narrow]) -> tuple[nn.Module, nn.Module]:
    """A model with narrow weights, and the plain model that it should equal."""
    torch.manual_seed(0)
    model = Net(dim=12)
    expected = reference(copy.deepcopy(model))
    return with_narrow_weights(model, kind), expected


@distributed(2, 3, 4)
@pytest.mark.parametrize("kind", [Narrow, NarrowKnowing])
@pytest.mark.parametrize("reshard", [True, False])
def test_trains_as_the_unsharded_model(ranks: Ranks, kind: type[Narrow], reshard: bool) -> None:
    """Rows that do not divide included; the shards stay in float32 and of their class."""
    model, expected = start(kind)
    shard_blocks(model, mesh=ranks.mesh(), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    their_optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in token_batches(ranks.world_size, steps=3):
        losses = data_parallel(expected, batch)
        loss = next_token_loss(model, batch[ranks.rank])
        loss.backward()
        assert_same(loss.detach(), losses[ranks.rank].detach())
        grads = plain_named(expected)
        for name, param in model.named_parameters():
            assert param.grad is not None
            assert_same(param.grad.full_tensor(), grads[name].grad)
        for each in (optimizer, their_optimizer):
            each.step()
            each.zero_grad()
    for name, param in model.named_parameters():
        assert_same(whole(param), plain_named(expected)[name].detach())
    assert type(model.head.weight._local_tensor) is kind
    if reshard:
        assert_idle(model)


@distributed(2, 4)
@pytest.mark.parametrize("kind", [Narrow, NarrowKnowing])
@pytest.mark.parametrize("param_dtype", [None, BF16])
def test_equals_pytorch(ranks: Ranks, kind: type[Narrow], param_dtype: torch.dtype | None) -> None:
    """Losses and shards after three steps, where rows divide."""
    results = []
    for shard in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = with_narrow_weights(nn.Sequential(Block(8, 16), Block(8, 16)), kind)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype)
        for block in model:
            shard(block, mesh=ranks.mesh(), mp_policy=policy)
        shard(model, mesh=ranks.mesh(), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        torch.manual_seed(ranks.rank)
        for _ in range(3):
            loss = model(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append([*losses, *(whole(p).detach() for p in model.parameters())])
    if ranks.world_size == 2:
        for ours, theirs in zip(*results):
            assert_same(ours, theirs)
    else:  # gloo adds the gradients of four ranks in another order, here in bfloat16
        bound = 1e-6 if param_dtype is None else 4e-3
        torch.testing.assert_close(results[0], results[1], rtol=bound, atol=bound)


@distributed(4)
def test_asks_with_the_shard_mesh(ranks: Ranks) -> None:
    """One-dimensional also where the model is replicated; with size, stride, module, policy."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    model = with_narrow_weights(nn.Sequential(nn.Linear(6, 4)), NarrowKnowing)
    policy = MixedPrecisionPolicy()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    NarrowKnowing.asked.clear()
    model(torch.ones(2, 6)).sum().backward()
    first = NarrowKnowing.asked[0]
    assert first[0] == mesh["shard"] and first[0].ndim == 1
    assert first[1:] == (torch.Size([4, 6]), (6, 1), model[0], policy)
    assert_idle(model)


@distributed(2)
def test_the_first_gather_is_not_repeated(ranks: Ranks) -> None:
    """The gather that shows what the full tensor is serves the first forward; then ``out``."""
    model = with_narrow_weights(nn.Sequential(nn.Linear(6, 4)))
    fully_shard(model, mesh=ranks.mesh())
    Narrow.asked.clear()
    model(torch.ones(2, 6)).sum().backward()
    assert len(Narrow.asked) == 1, "the root is kept until backward"
    model(torch.ones(2, 6)).sum().backward()
    assert len(Narrow.asked) == 2
    assert_idle(model)


@distributed(2)
def test_methods_given_to_a_shard_by_hand(ranks: Ranks) -> None:
    """Put on the local tensor after ``fully_shard``, as libraries patch plain weights."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    expected = model.weight.detach().to(BF16).float()
    fully_shard(model, mesh=ranks.mesh())
    local = model.weight._local_tensor

    def post(gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            out.data.copy_(gathered[0])
            return None
        full = gathered[0].to(dtype)
        return full, (full,)

    local.fsdp_pre_all_gather = lambda mesh: ((local.to(BF16),), None)
    local.fsdp_post_all_gather = post
    for _ in range(2):
        out = model(torch.eye(6))
        assert_same(out.detach(), expected.t())
        out.sum().backward()
    assert model.weight.grad.full_tensor().eq(2).all()
    assert_idle(model)


@distributed(2)
def test_a_deep_copy_has_rows_of_its_own(ranks: Ranks) -> None:
    """Of the same class, and independent."""
    model = with_narrow_weights(nn.Sequential(nn.Linear(6, 4)))
    fully_shard(model, mesh=ranks.mesh())
    before = whole(model[0].weight).clone()
    made = copy.deepcopy(model)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert type(made[0].weight._local_tensor) is Narrow
    assert_same(whole(model[0].weight), before)
    assert_same(whole(made[0].weight), before - 2)
    assert_idle(made)


class Half(Narrow):
    fsdp_post_all_gather = property()  # type: ignore[assignment]


@distributed(2)
def test_half_a_protocol_is_refused(ranks: Ranks) -> None:
    """With the parameter's name, and before the model is changed."""
    model = with_narrow_weights(nn.Sequential(nn.Linear(6, 4)), Half)
    with pytest.raises(fsdp2.UsageError, match=r"'0\.weight' of type Half has fsdp_pre_all_gather"):
        fully_shard(model, mesh=ranks.mesh())
    assert not isinstance(model[0].weight, DTensor)


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


@distributed(4)
@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": 2}, {"shard_placement_fn": last_dim}]
)
def test_what_it_does_not_go_with(ranks: Ranks, options: dict[str, Any]) -> None:
    """Parts, and other dimensions than the first."""
    model = with_narrow_weights(nn.Sequential(nn.Linear(6, 4)))
    with pytest.raises(NotImplementedError, match=r"'0\.weight' of type Narrow"):
        fully_shard(model, mesh=ranks.mesh(), **options)


class Unknown(Narrow):
    """Overrides operators and does not say how it is gathered."""

    fsdp_pre_all_gather = property()  # type: ignore[assignment]
    fsdp_post_all_gather = property()  # type: ignore[assignment]


@distributed(2)
def test_a_subclass_without_the_protocol_is_refused(ranks: Ranks) -> None:
    """Its rows would silently become plain numbers."""
    model = with_narrow_weights(nn.Sequential(nn.Linear(6, 4)), Unknown)
    with pytest.raises(NotImplementedError, match=r"'0\.weight' is a Unknown"):
        fully_shard(model, mesh=ranks.mesh())


class Scaled(nn.Parameter):
    """A parameter class with a constructor and a method of its own."""

    def __new__(cls, data: Tensor, factor: float) -> Scaled:
        made = super().__new__(cls, data)
        made.factor = factor
        return made

    def scaled(self) -> Tensor:
        return torch.Tensor.mul(self, self.factor)


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(torch.randn(5, 6), factor=3.0)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Scaled
        return x @ self.weight.scaled().t()


@distributed(2, 3)
def test_parameter_classes_survive(ranks: Ranks) -> None:
    """Forward sees the class and the attributes; the shard has the attributes."""
    torch.manual_seed(0)
    model, x = ScaledLinear(), torch.randn(4, 6)
    expected = copy.deepcopy(model.weight.data)
    fully_shard(model, mesh=ranks.mesh())
    for step in range(2):
        out = model(x)
        out.sum().backward()
        assert_same(out.detach(), x @ (3 * expected).t())
        grad = (x.sum(0) * 3 * (step + 1)).expand(5, 6)
        torch.testing.assert_close(model.weight.grad.full_tensor(), grad)
    assert model.weight.factor == 3.0
    assert_idle(model)
