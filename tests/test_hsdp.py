"""Hybrid sharding: parameters split along one mesh dimension and repeated along another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    next_token_loss,
    shard_blocks,
    token_batches,
    whole,
)

HYBRID = ("replicate", "shard")
STEPS = 4


def replicated_sums(model: nn.Module, inputs: list[Tensor], splits: int) -> None:
    """``.grad`` as hybrid sharding adds it up: inside each replica, then over the replicas."""
    params = list(model.parameters())
    per_rank: list[list[Tensor]] = []
    for each in inputs:
        model.zero_grad()
        next_token_loss(model, each).backward()
        per_rank.append([param.grad for param in params])  # type: ignore[misc]
    for i, param in enumerate(params):
        sums = []
        for first in range(0, len(inputs), splits):
            total = per_rank[first][i]
            for rank in range(first + 1, first + splits):
                total = total + per_rank[rank][i]
            sums.append(total)
        total = sums[0]
        for other in sums[1:]:
            total = total + other
        param.grad = total / len(inputs)


@distributed(4)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_two_by_two_equals_one_process_bit_by_bit(ranks: Ranks, reshard: bool | None) -> None:
    """Sums inside each replica and then over both: with two of each the order is the same."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    model = Net()
    reference = copy.deepcopy(model)
    shard_blocks(model, mesh=mesh, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for batch in token_batches(4, STEPS):
        loss = next_token_loss(model, batch[ranks.rank])
        assert_same(loss, next_token_loss(reference, batch[ranks.rank]))
        loss.backward()
        replicated_sums(reference, batch, 2)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_idle_or_kept(model, reshard)


def assert_idle_or_kept(model: nn.Module, reshard: bool | None) -> None:
    if reshard is not False:
        assert_idle(model)


@distributed(4)
def test_shards_are_dtensors_on_the_two_dimensional_mesh(ranks: Ranks) -> None:
    """Placements are PyTorch's: (Replicate, Shard(0)); 0-dim ones are replicated over both."""
    mesh = ranks.mesh(2, 2, names=HYBRID)

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 6)
            self.scale = nn.Parameter(torch.tensor(2.0))

    model = fully_shard(Scaled(), mesh=mesh)
    assert model.weight.placements == (Replicate(), Shard(0))
    assert model.weight.device_mesh == mesh
    assert model.weight.to_local().shape == (3, 4)
    assert model.scale.placements == (Replicate(), Replicate())


@distributed(4)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
def test_any_shape_of_mesh_equals_pytorchs(ranks: Ranks, shape: tuple[int, int]) -> None:
    """Against PyTorch's HSDP, to rounding: gloo sums four replicas in an order of its own."""
    mesh = ranks.mesh(*shape, names=HYBRID)
    model = Net()
    theirs = copy.deepcopy(model)
    shard_blocks(model, mesh=mesh)
    shard_blocks(theirs, torch_fully_shard, mesh=mesh)
    for batch in token_batches(4, 2):
        losses = [next_token_loss(m, batch[ranks.rank]) for m in (model, theirs)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
        for loss in losses:
            loss.backward()
        assert_same_params(model, theirs, rtol=1e-5, atol=1e-6)
        for m in (model, theirs):
            with torch.no_grad():
                for param in m.parameters():
                    param -= 0.1 * param.grad  # type: ignore[operator]
                    param.grad = None


@distributed(4)
def test_mixed_precision_equals_pytorchs(ranks: Ranks) -> None:
    """bf16 parameters, fp32 reduction over both dimensions."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    model = Net()
    theirs = copy.deepcopy(model)
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    shard_blocks(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    shard_blocks(theirs, torch_fully_shard, mesh=mesh, mp_policy=TorchPolicy(**dtypes))
    [batch] = token_batches(4, 1)
    for m in (model, theirs):
        next_token_loss(m, batch[ranks.rank]).backward()
    assert_same_params(model, theirs, rtol=1e-6, atol=1e-7)


@distributed(4)
@pytest.mark.parametrize("dims", ["replicate", "(4, 1)"])
def test_replicate_only_keeps_and_moves_nothing(ranks: Ranks, dims: str) -> None:
    """DDP on the same engine: full parameters are the shards, and one all-reduce per group."""
    if dims == "replicate":
        options: dict[str, Any] = {
            "mesh": ranks.mesh(4, names=("dp",)),
            "dp_mesh_dims": DataParallelMeshDims(replicate="dp"),
        }
    else:
        options = {"mesh": ranks.mesh(4, 1, names=HYBRID)}
    model = Net()
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    shard_blocks(model, **options)
    groups = [fully_shard.state(m).group for m in model.modules() if fully_shard.state(m)]
    assert all(group.aliases_shards and group.full_nbytes == 0 for group in groups)
    for batch in token_batches(4, 2):
        with fsdp2.trace(model) as events:
            next_token_loss(model, batch[ranks.rank]).backward()
        next_token_loss(ddp, batch[ranks.rank]).backward()
        assert_same_params(model, ddp.module, rtol=1e-5, atol=1e-6)
        assert sum(event.name == "reduce" for event in events.events) == len(groups)
        for m in (model, ddp):
            m.zero_grad()
    local = model.head.weight.to_local()
    assert local.shape == (17, 8)
    assert_idle(model)


@distributed(4)
def test_two_processes_of_replicas_equal_one_process_bit_by_bit(ranks: Ranks) -> None:
    """Two replicas and nothing split, on one half of the ranks: a sum of two has no order."""
    mesh = ranks.mesh(2, 2, names=("other", "dp"))["dp"]
    model = Net()
    reference = copy.deepcopy(model)
    shard_blocks(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))
    batch = token_batches(2, 1)[0]
    next_token_loss(model, batch[mesh.get_local_rank()]).backward()
    replicated_sums(reference, batch, 1)
    assert_same_params(model, reference)


@distributed(4)
def test_several_dimensions_are_flattened(ranks: Ranks) -> None:
    """shard=(a, b) splits over four ranks as one dimension would, for DTensors and others."""
    mesh = ranks.mesh(2, 2, names=("a", "b"))
    dims = DataParallelMeshDims(shard=("a", "b"))
    plain, laid_out = nn.Linear(3, 6), nn.Linear(3, 6)
    expected = plain.weight.detach().clone()
    for name, param in plain.named_parameters():
        tensor = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
        setattr(laid_out, name, nn.Parameter(tensor))
    for model in (plain, laid_out):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        assert model.weight.placements == (Shard(0),)
        assert model.weight.device_mesh.size() == 4
        assert_same(model.weight.full_tensor(), expected)
    replicated = [Replicate(), Replicate()]
    x = distribute_tensor(torch.ones(2, 3), mesh, replicated)
    laid_out(x).sum().backward()
    plain(torch.ones(2, 3)).sum().backward()
    assert_same(whole(laid_out.weight.grad), whole(plain.weight.grad))


@distributed(4)
def test_dims_of_a_larger_mesh(ranks: Ranks) -> None:
    """Shard over one dimension of a mesh; the parameters are split by others along the other."""
    mesh = ranks.mesh(2, 2, names=("tp", "dp"))
    model = nn.Linear(4, 8, bias=False)
    expected = model.weight.detach().clone()
    weight = distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()])
    model.weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert model.weight.to_local().shape == (2, 4)
    assert_same(model.weight.full_tensor(), expected)
    x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate(), Replicate()])
    output = model(x)
    assert isinstance(output, DTensor)
    assert_same(output.full_tensor(), torch.ones(2, 4) @ expected.T)


@distributed(4)
@pytest.mark.parametrize("micro_batches", [3])
def test_put_off_all_reduces_equal_one_large_batch(ranks: Ranks, micro_batches: int) -> None:
    """set_requires_all_reduce(False): this replica's sums are kept, and added to the last ones."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    model = Net()
    reference = copy.deepcopy(model)
    shard_blocks(model, mesh=mesh)
    batches = token_batches(4, micro_batches)
    for i, batch in enumerate(batches):
        is_last = i == micro_batches - 1
        model.set_requires_all_reduce(is_last)
        next_token_loss(model, batch[ranks.rank]).backward()
        if not is_last:
            assert all(param.grad is None for param in model.parameters())
    shard_blocks(reference, torch_fully_shard, mesh=mesh)
    for batch in batches:
        next_token_loss(reference, batch[ranks.rank]).backward()
    assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("put_off", ["all-reduce", "reduction"])
def test_three_hundred_ones_make_three_hundred(ranks: Ranks, put_off: str) -> None:
    """Partial sums of a bf16 reduction are kept in fp32, where 256 + 1 is 257."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    model = nn.Linear(1, 4, bias=False)
    reduce = torch.bfloat16 if put_off == "all-reduce" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for step in range(300):
        if put_off == "all-reduce":
            model.set_requires_all_reduce(step == 299)
        else:
            model.set_requires_gradient_sync(step == 299)
        model(torch.ones(1, 1)).sum().backward()
    assert_same(model.weight.grad.full_tensor(), torch.full((4, 1), 300.0))


@distributed(4)
def test_a_parameter_that_one_replica_used(ranks: Ranks) -> None:
    """Where only one rank of one replica used a module, all ranks get its gradient."""
    mesh = ranks.mesh(2, 2, names=HYBRID)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) if dist.get_rank() == 3 else self.right(x)

    model = fully_shard(Branches(), mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    assert_same(model.left.bias.grad.full_tensor(), torch.full((4,), 0.25))
    assert_same(model.right.bias.grad.full_tensor(), torch.full((4,), 0.75))


@distributed(4)
def test_unequal_replicas_are_named(ranks: Ranks) -> None:
    """The first forward compares; sync_replicas makes them equal."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    model = Net()
    if ranks.rank == 3:
        with torch.no_grad():
            model.blocks[1].down.weight[-1] += 1e-3
    shard_blocks(model, mesh=mesh)
    [batch] = token_batches(4, 1)
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.down\.weight'.*sync_replicas"):
        model(batch[0])
    fsdp2.sync_replicas(model)
    model(batch[0])


@distributed(4)
@pytest.mark.parametrize("size", [2])
def test_a_smaller_group_in_backward_composes(ranks: Ranks, size: int) -> None:
    """reshard_after_forward as an int on a 2-D mesh whose shard dimension has four ranks."""
    mesh = ranks.mesh(1, 4, names=HYBRID)
    model = Net()
    reference = copy.deepcopy(model)
    shard_blocks(model, mesh=mesh, reshard_after_forward=size)
    for batch in token_batches(4, 2):
        next_token_loss(model, batch[ranks.rank]).backward()
        replicated_sums(reference, batch, 4)
        assert_same_params(model, reference)
        model.zero_grad()
        assert_idle(model)


@distributed(4)
@pytest.mark.parametrize(
    "names",
    [("dp_shard", "cp"), ("shard", "replicate"), ("dp", "tp"), ("fsdp", "ddp"), ("pp", "shard")],
)
def test_names_that_deny_their_use_are_questioned(ranks: Ranks, names: tuple[str, str]) -> None:
    """A (dp_shard, cp) mesh is not read as (replicate, shard)."""
    with pytest.raises(ValueError, match=f"'{names[0]}'|'{names[1]}'"):
        fully_shard(nn.Linear(4, 4), mesh=ranks.mesh(2, 2, names=names))


@distributed(4)
@pytest.mark.parametrize(
    "names", [HYBRID, ("dp_replicate", "dp_shard"), ("ddp", "fsdp"), ("outer", "inner")]
)
def test_other_names_are_taken_as_pytorch_does(ranks: Ranks, names: tuple[str, str]) -> None:
    """The first dimension repeats, the second splits."""
    model = fully_shard(nn.Linear(4, 4), mesh=ranks.mesh(2, 2, names=names))
    assert model.weight.placements == (Replicate(), Shard(0))
