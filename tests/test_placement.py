"""``shard_placement_fn``: dimensions other than the first, and meshes of single parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy, ShardPlacementResult, fully_shard
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

BF16, FP32 = torch.bfloat16, torch.float32
HYBRID = ("replicate", "shard")

Fn = Callable[[nn.Parameter], Any]


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(-1)


def largest_dim(param: nn.Parameter) -> Shard | None:
    if param.ndim == 0:
        return None
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def second_of_matrices(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


FUNCTIONS: dict[str, Fn] = {
    "last": last_dim,
    "largest": largest_dim,
    "second": second_of_matrices,
}


# ---- One parameter


class Product(nn.Module):
    """A parameter of any shape, times the input."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape).to(dtype))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square().sum() + self.bias.sum()


SHAPES = [
    ((4, 12), 1),
    ((5, 17), 1),
    ((5, 17), -1),
    ((5, 17), 0),
    ((5, 17), -2),
    ((3, 2), 1),  # fewer columns than some numbers of ranks
    ((6, 1), 1),
    ((2, 3, 5), 1),
    ((2, 3, 5), 2),
    ((2, 3, 4, 5), 3),
    ((2, 3, 4, 5), 2),
    ((2, 3, 4, 5), -1),
    ((2, 3, 4, 5), -4),
    ((5, 0), 1),
    ((0, 5), 1),
    ((60, 1700), 1),  # large enough to travel by itself
    ((3, 20, 1100), 2),
]


@distributed(1, 2, 3, 4)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_any_dimension(ranks: Ranks, shape: tuple[int, ...], dim: int) -> None:
    """Shards are what ``torch.chunk`` cuts along the dimension; full values and gradients equal.

    Both are contiguous.
    """
    reference = Product(shape)
    whole = reference.weight.detach().clone()
    model = fully_shard(
        copy.deepcopy(reference),
        shard_placement_fn=lambda p: Shard(dim) if p.shape == shape else None,
    )
    normal = dim % len(shape)
    weight = model.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(normal),)
    assert weight.shape == shape
    assert weight.stride() == whole.stride()
    chunks = whole.chunk(ranks.world_size, normal)
    empty = whole.narrow(normal, 0, 0)
    expected = chunks[ranks.rank] if ranks.rank < len(chunks) else empty
    assert_same(weight.to_local(), expected)
    assert weight.to_local().is_contiguous()
    assert_same(weight.full_tensor(), whole)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        inputs = list(torch.randn(ranks.world_size, *shape, generator=generator))
        loss = model(inputs[ranks.rank])
        losses = data_parallel(reference, inputs, lambda m, x: m(x))
        assert_same(loss, losses[ranks.rank])
        loss.backward()
        assert weight.grad.placements == (Shard(normal),)
        assert weight.grad.to_local().is_contiguous()
        assert weight.grad.to_local().shape == expected.shape
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_storage_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    """Parameters of other dtypes in the same group move as well."""
    reference = Product((5, 7), dtype)
    model = fully_shard(copy.deepcopy(reference), shard_placement_fn=last_dim)
    inputs = list(torch.randn(ranks.world_size, 5, 7, dtype=dtype))
    dist.broadcast(inputs[0], 0)
    inputs = [inputs[0]] * ranks.world_size
    model(inputs[0]).backward()
    reference(inputs[0]).backward()
    # The mean of equal gradients: three of them round in bf16 when they are added.
    bound = 2e-2 if dtype == BF16 and ranks.world_size == 3 else 1e-6
    assert_same_params(model, reference, rtol=bound, atol=bound)


@distributed(2, 3)
def test_non_contiguous_parameters(ranks: Ranks) -> None:
    """A transposed parameter, split along its second dimension."""
    reference = Product((5, 7))
    reference.weight = nn.Parameter(torch.randn(7, 5).t())
    whole = reference.weight.detach().clone()
    model = fully_shard(copy.deepcopy(reference), shard_placement_fn=second_of_matrices)
    assert_same(model.weight.full_tensor(), whole)
    inputs = list(torch.randn(ranks.world_size, 5, 7, generator=torch.Generator().manual_seed(5)))
    model(inputs[ranks.rank]).backward()
    data_parallel(reference, inputs, lambda m, x: m(x))
    assert_same_params(model, reference)


@distributed(2)
def test_zero_dims_stay_replicated(ranks: Ranks) -> None:
    """For a 0-dim parameter the answer does not matter."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 6)
            self.scale = nn.Parameter(torch.tensor(2.0))

    model = fully_shard(Scaled(), shard_placement_fn=lambda p: Shard(0))
    assert model.scale.placements == (Replicate(),)


# ---- Training


@distributed(2, 3)
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("reshard", [True, False])
def test_training_equals_one_process_bit_by_bit(ranks: Ranks, fn: str, reshard: bool) -> None:
    """Losses, gradients and AdamW's updates, with rows and columns that do not divide."""
    reference = Net()
    model = shard_blocks(
        copy.deepcopy(reference), shard_placement_fn=FUNCTIONS[fn], reshard_after_forward=reshard
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for inputs in token_batches(ranks.world_size, 4):
        loss = next_token_loss(model, inputs[ranks.rank])
        assert_same(loss, data_parallel(reference, inputs)[ranks.rank])
        loss.backward()
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


class Even(nn.Module):
    """Every dimension divides by four: PyTorch shards along any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 12 if i == 0 else 8) for i in range(1))
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@distributed(2)
@pytest.mark.parametrize("fn", ["last", "largest"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
def test_training_equals_pytorchs_bit_by_bit(
    ranks: Ranks, fn: str, policy: MixedPrecisionPolicy
) -> None:
    """Placements, local tensors, gradients and updates."""
    plain = Even()
    pair = [
        shard_blocks(
            copy.deepcopy(plain), shard, shard_placement_fn=FUNCTIONS[fn], mp_policy=policy
        )
        for shard in (fully_shard, torch_fully_shard)
    ]
    for step in range(3):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))[ranks.rank]
        for model in pair:
            square_loss(model, x).backward()
        assert_same_params(*pair)
        for ours, theirs in zip(*(m.parameters() for m in pair)):
            assert ours.placements == theirs.placements
            assert_same(ours.to_local(), theirs.to_local())
            assert_same(ours.grad.to_local(), theirs.grad.to_local())
            with torch.no_grad():
                for param in (ours, theirs):
                    param -= 0.1 * param.grad
                    param.grad = None
    assert_idle(pair[0])


@distributed(2, 3)
@pytest.mark.parametrize("reduced", [FP32, BF16, None])
def test_mixed_precision(ranks: Ranks, reduced: torch.dtype | None) -> None:
    """The dimension changes no number: the same as along the first, bit by bit."""
    plain = Net()
    policy = MixedPrecisionPolicy(BF16, reduced)
    first = shard_blocks(copy.deepcopy(plain), mp_policy=policy)
    other = shard_blocks(plain, mp_policy=policy, shard_placement_fn=last_dim)
    for inputs in token_batches(ranks.world_size, 2):
        losses = [next_token_loss(m, inputs[ranks.rank]) for m in (first, other)]
        assert_same(*losses)
        for loss in losses:
            loss.backward()
        assert_same_params(other, first)
    assert_idle(other)


@distributed(4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_hybrid_meshes(ranks: Ranks, shape: tuple[int, int]) -> None:
    """(Replicate, Shard(dim)), and the numbers of one process to rounding."""
    reference = Net()
    mesh = ranks.mesh(*shape, names=HYBRID)
    model = shard_blocks(copy.deepcopy(reference), mesh=mesh, shard_placement_fn=last_dim)
    assert model.head.weight.placements == (Replicate(), Shard(1))
    for inputs in token_batches(4, 2):
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
def test_a_part_is_kept(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """``reshard_after_forward=2`` keeps columns as well as rows; numbers as with True."""
    plain = Net()
    options = {"shard_placement_fn": last_dim, "mp_policy": policy}
    whole = shard_blocks(copy.deepcopy(plain), reshard_after_forward=True, **options)
    part = shard_blocks(plain, reshard_after_forward=2, **options)
    for inputs in token_batches(4, 3):
        for model in (whole, part):
            next_token_loss(model, inputs[ranks.rank]).backward()
        assert_same_params(part, whole)
        for model in (whole, part):
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
    assert_idle(part)


@distributed(2, 3)
def test_accumulation_without_communication(ranks: Ranks) -> None:
    """Gradients kept back and reduced in the end."""
    plain = Net()
    first = shard_blocks(copy.deepcopy(plain))
    other = shard_blocks(plain, shard_placement_fn=last_dim)
    for i, inputs in enumerate(token_batches(ranks.world_size, 3)):
        for model in (first, other):
            model.set_requires_gradient_sync(i == 2)
            next_token_loss(model, inputs[ranks.rank]).backward()
    assert_same_params(other, first)


@distributed(2, 3)
def test_frozen_and_unused_parameters(ranks: Ranks) -> None:
    """A frozen matrix and one that only rank 0 uses, both split along columns."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(5, 5)
            self.frozen.requires_grad_(False)
            self.left, self.right = nn.Linear(5, 7), nn.Linear(5, 7)

        def forward(self, x: Tensor, left: bool) -> Tensor:
            x = self.frozen(x)
            return (self.left if left else self.right)(x).square().sum()

    reference = Branches()
    model = fully_shard(copy.deepcopy(reference), shard_placement_fn=last_dim)
    x = torch.ones(2, 5)
    model(x, ranks.rank == 0).backward()
    ranks_of = [(x, rank == 0) for rank in range(ranks.world_size)]
    data_parallel(reference, ranks_of, lambda m, args: m(*args))
    assert_same_params(model, reference)
    assert_idle(model)


# ---- State dicts


@distributed(2, 3)
def test_checkpoint_round_trip(ranks: Ranks, tmp_path: Path) -> None:
    """Saved along one dimension and loaded along another, through ``torch.distributed``."""
    model = shard_blocks(Net(), shard_placement_fn=last_dim)
    expected = {n: p.full_tensor() for n, p in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    torch.manual_seed(1)
    for fn in (None, last_dim, largest_dim):
        other = shard_blocks(Net(), shard_placement_fn=fn)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state)
        for name, tensor in expected.items():
            assert_same(other.state_dict()[name].full_tensor(), tensor, name)
        inputs = token_batches(ranks.world_size, 1)[0]
        losses = [next_token_loss(m, inputs[ranks.rank]) for m in (model, other)]
        assert_same(*losses)


# ---- Meshes of single parameters


class Experts(nn.Module):
    """A dense layer, and an expert whose weight this rank's expert group shares."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 6)
        self.expert = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.dense(x)))


def results(model: nn.Module, mesh: Any, dim: int, style: str) -> Fn:
    """Deals the expert over ``mesh`` along ``dim``, everything else as usual."""
    expert = model.expert.weight

    def place(param: nn.Parameter) -> Any:
        if param is not expert:
            return None
        if style == "ours":
            return ShardPlacementResult(Shard(dim), mesh)
        info = torch_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return torch_common.ShardPlacementResult(Shard(dim), info)

    return place


@distributed(4)
@pytest.mark.parametrize("style", ["ours", "torch"])
@pytest.mark.parametrize("dim", [0, 1])
def test_experts_over_another_group(ranks: Ranks, style: str, dim: int) -> None:
    """The dense layer over four ranks, experts over two: two different experts are trained."""
    mesh = ranks.mesh(2, 2, names=("ep", "efsdp"))
    shard, which = mesh["efsdp"], mesh.get_local_rank("ep")
    torch.manual_seed(which)
    expert = torch.randn(5, 6)
    torch.manual_seed(9)
    model = Experts()
    with torch.no_grad():
        model.expert.weight.copy_(expert)
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=ranks.mesh(), shard_placement_fn=results(model, shard, dim, style))
    assert model.expert.weight.device_mesh == shard
    assert model.expert.weight.placements == (Shard(dim),)
    assert model.dense.weight.device_mesh == ranks.mesh()
    assert_same(model.expert.weight.full_tensor(), expert)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        inputs = list(torch.randn(4, 2, 4, generator=generator))
        square_loss(model, inputs[ranks.rank]).backward()
        check_experts(ranks, model, reference, inputs, which)
        model.zero_grad()
    assert_idle(model)


def check_experts(
    ranks: Ranks, model: Any, reference: Any, inputs: list[Tensor], which: int
) -> None:
    """Of the expert the mean over its group, of the rest the mean over all ranks."""
    own = reference.expert.weight.detach().clone()
    everyones = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(everyones, own)
    dense: list[list[Tensor]] = []
    expert: list[Tensor] = []
    for rank in range(4):
        with torch.no_grad():
            reference.expert.weight.copy_(everyones[rank])
        reference.zero_grad()
        square_loss(reference, inputs[rank]).backward()
        dense.append([reference.dense.weight.grad, reference.dense.bias.grad])
        expert.append(reference.expert.weight.grad)
    with torch.no_grad():
        reference.expert.weight.copy_(own)
    for param, grads in zip((model.dense.weight, model.dense.bias), zip(*dense)):
        assert_same(param.grad, (grads[0] + grads[1] + grads[2] + grads[3]) / 4)
    first = 2 * which
    assert_same(model.expert.weight.grad, (expert[first] + expert[first + 1]) / 2)


@distributed(4)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_experts_as_in_pytorch(ranks: Ranks, reshard: bool | int) -> None:
    """Gradients equal PyTorch's with its own result type, to rounding."""
    mesh = ranks.mesh(2, 2, names=("ep", "efsdp"))
    plain = Experts()
    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(3))[ranks.rank]
    found = []
    for shard in (fully_shard, torch_fully_shard):
        model = copy.deepcopy(plain)
        # PyTorch wants even dims other than the first: deal along the first.
        place = results(model, mesh["efsdp"], 0, "torch")
        model.expert.weight.data = plain.expert.weight.data
        shard(model, mesh=ranks.mesh(), shard_placement_fn=place, reshard_after_forward=reshard)
        square_loss(model, x).backward()
        found.append(model)
    assert_same_params(*found, rtol=1e-5, atol=1e-6)


@distributed(4)
def test_a_mesh_of_one_rank_and_one_with_replicas(ranks: Ranks) -> None:
    """Three meshes in one call: all ranks, pairs that are repeated, and nobody else."""
    pairs = ranks.mesh(2, 2, names=HYBRID)
    alone = ranks.mesh(4, 1, names=("each", "alone"))["alone"]

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(5, 3)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.a + self.b + self.c) * x).sum()

    model = Three()
    of = {
        model.a: None,
        model.b: ShardPlacementResult(Shard(1), pairs),
        model.c: ShardPlacementResult(None, alone),
    }
    fully_shard(model, mesh=ranks.mesh(), shard_placement_fn=of.__getitem__)
    assert model.a.to_local().shape[1] == 3
    assert model.b.placements == (Replicate(), Shard(1))
    assert model.c.to_local().shape == (5, 3)
    for times in (1, 2):
        model(torch.full((5, 3), float(ranks.rank))).backward()
        assert_same(model.a.grad, torch.full((5, 3), 1.5 * times))
        assert_same(model.b.grad, torch.full((5, 3), 1.5 * times))
        assert_same(model.c.grad, torch.full((5, 3), float(ranks.rank) * times))
    assert len(fsdp2.explain(model).groups[0].params) == 3


@distributed(4)
def test_switches_reach_all_meshes(ranks: Ranks) -> None:
    """Kept back, put off and divided alike on each mesh of the call."""
    pairs = ranks.mesh(2, 2, names=HYBRID)
    model = Experts()
    x = torch.ones(2, 4)
    reference = copy.deepcopy(model)
    expert = model.expert.weight

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), pairs) if param is expert else None

    fully_shard(model, mesh=ranks.mesh(), shard_placement_fn=place)
    model.set_gradient_divide_factor(4.0)
    model.set_requires_gradient_sync(False)
    square_loss(model, x).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    square_loss(model, x).backward()
    assert model.expert.weight.grad is None
    assert model.dense.weight.grad is not None
    model.set_requires_all_reduce(True)
    square_loss(model, x).backward()
    for _ in range(3):
        square_loss(reference, x).backward()
    assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
    assert_idle(model)


@distributed(4)
def test_a_mesh_that_is_the_calls_own(ranks: Ranks) -> None:
    """A result without a mesh, or with the call's, makes no second portion."""
    meshes = (None, ranks.mesh())
    for mesh in meshes:
        model = nn.Linear(6, 5)
        fully_shard(
            model,
            mesh=ranks.mesh(),
            shard_placement_fn=lambda p, mesh=mesh: ShardPlacementResult(Shard(0), mesh),
        )
        assert len(fully_shard.state(model).group.portions) == 1
        model(torch.ones(2, 6)).sum().backward()
        assert_same(model.bias.grad, torch.full((5,), 2.0))


# ---- Errors


@distributed(2)
@pytest.mark.parametrize("dim", [2, 3, -3])
def test_a_dimension_that_is_not_there(ranks: Ranks, dim: int) -> None:
    """PyTorch's words, and the parameter's name and shape."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        AssertionError, match=rf"'0\.weight': Shard dim {dim} is invalid for 2D tensor.*\(4, 4\)"
    ):
        fully_shard(model, shard_placement_fn=lambda p: Shard(dim) if p.ndim > 1 else None)
    assert not isinstance(model, fsdp2.FSDPModule)
    assert not isinstance(model[0].weight, DTensor)


@distributed(2)
@pytest.mark.parametrize("answer", [1, "Shard(0)", Replicate(), (Shard(0), None)])
def test_an_answer_of_another_type(ranks: Ranks, answer: Any) -> None:
    """It names the parameter, what came back and what may."""
    with pytest.raises(ValueError, match=r"for parameter '(weight|bias)'; it returns None"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: answer)


@distributed(4)
def test_a_mesh_of_three_dimensions(ranks: Ranks) -> None:
    """Meshes of single parameters are checked like the call's."""
    mesh = ranks.mesh(1, 2, 2, names=("a", "b", "c"))
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
        fully_shard(
            nn.Linear(4, 4), shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), mesh)
        )


@distributed(2)
def test_explain_names_the_dimension(ranks: Ranks) -> None:
    """Rows per rank are counted along the dimension that is split."""
    model = fully_shard(nn.Linear(17, 4), shard_placement_fn=last_dim)
    [group] = fsdp2.explain(model).groups
    [weight] = [p for p in group.params if p.name == "weight"]
    assert (weight.dim, weight.rows_per_rank) == (1, (9, 8))
    assert "along dim 1" in str(group)
