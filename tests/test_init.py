"""Ways to start: reset behind meta or `to_empty`, and all ranks from rank 0's model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, assert_same_params, shard_blocks


def stack() -> nn.Sequential:
    """Two layers of one shape, and buffers that `reset_parameters` computes."""
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7), nn.BatchNorm1d(7))


def reset_all(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def on_meta(build: Callable[[], Any] = stack) -> Any:
    with torch.device("meta"):
        return build()


def shard_layers(model: Any, **options: Any) -> Any:
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def reference(build: Callable[[], Any] = stack) -> Any:
    model = build()
    torch.manual_seed(5)
    reset_all(model)
    return model


def assert_same_state(model: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    for name, value in model.state_dict().items():
        assert_same(value, theirs[name], name)


# ---- reset_parameters


@distributed(1, 2, 3, 4)
def test_materialize_resets(ranks: Ranks) -> None:
    """A model on meta is reset module by module: the unsharded loop's values, for all ranks."""
    expected = reference()
    state = torch.get_rng_state()
    model = shard_layers(on_meta())
    torch.manual_seed(5)
    fsdp2.materialize(model)
    assert_same(torch.get_rng_state(), state)
    assert_same_state(model, expected)
    assert not torch.equal(model[0].weight.full_tensor(), model[2].weight.full_tensor())
    assert_idle(model)
    plain = on_meta()
    torch.manual_seed(5)
    assert_same_state(fsdp2.materialize(plain), expected)


@distributed(4)
def test_materialize_resets_on_two_dimensions(ranks: Ranks) -> None:
    """On a replicate and a shard dimension, and laid out by tensor parallelism."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    model = shard_layers(on_meta(), mesh=mesh)
    torch.manual_seed(5)
    assert_same_state(fsdp2.materialize(model), reference())
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    model = on_meta()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(5)
    assert_same_state(fsdp2.materialize(model), reference())


@distributed(2)
def test_materialize_needs_one_seed(ranks: Ranks) -> None:
    """Ranks that would draw differently are told so before anything is drawn."""
    model = shard_layers(on_meta())
    torch.manual_seed(ranks.rank)
    with pytest.raises(fsdp2.UsageError, match="different states of the default generator"):
        fsdp2.materialize(model)


@distributed(2)
def test_materialize_where(ranks: Ranks) -> None:
    """Shards go where their mesh is."""
    with pytest.raises(fsdp2.UsageError, match="sharded over a mesh on cpu, not on cuda"):
        fsdp2.materialize(shard_layers(on_meta()), device="cuda")


class Table(nn.Module):
    """A parameter with an initialiser, and a table that only the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.angles


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


@distributed(2)
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Table, r"Table.reset_parameters does not fill \['0.angles'\]"),
        (Without, r"\['0.weight'\] are on the meta device, .*no reset_parameters"),
    ],
)
def test_materialize_names_what_nobody_fills(
    ranks: Ranks, build: type[nn.Module], message: str
) -> None:
    """Tables and parameters that no initialiser reaches are not left to chance."""
    model = fully_shard(on_meta(lambda: nn.Sequential(build())))
    with pytest.raises(fsdp2.UsageError, match=message):
        fsdp2.materialize(model)


# ---- to_empty


@distributed(1, 2, 3, 4)
def test_shards_are_drawn_as_the_whole(ranks: Ranks) -> None:
    """`to_empty` and `reset_parameters` on the CPU: the unsharded numbers, for all ranks.

    Rows are not repeated from rank to rank, nor values from layer to layer.
    """
    expected = reference()
    expected[0].weight.data.normal_(generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    model = shard_layers(on_meta()).to_empty(device="cpu")
    torch.manual_seed(5)
    reset_all(model)
    model[0].weight.data.normal_(generator=torch.Generator().manual_seed(1))
    assert_same(torch.get_rng_state(), state)
    assert_same_state(model, expected)


@distributed(4)
def test_shards_are_drawn_as_the_whole_on_two_dimensions(ranks: Ranks) -> None:
    """Also what tensor parallelism has laid out."""
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    model = stack()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    expected = stack()
    for each in (model, expected):
        torch.manual_seed(5)
        nn.init.normal_(each[0].weight)
        nn.init.uniform_(each[1].weight)
    assert_same(model[0].weight, expected[0].weight)
    assert_same(model[1].weight, expected[1].weight)


@distributed(2, 3)
def test_untouched_memory_is_named(ranks: Ranks) -> None:
    """What `to_empty` leaves and nobody fills is named on all ranks, also those without rows."""
    model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(4, 1), Table())))
    model.to_empty(device="cpu")
    model[1].reset_parameters()
    names = r"\['0.weight', '0.bias', '1.angles'\] have memory from to_empty\(\) and no values"
    with pytest.raises(RuntimeError, match=names):
        model(torch.ones(1, 4))


@distributed(2)
def test_filled_memory_is_accepted(ranks: Ranks) -> None:
    """By hand, through `.data`, by loading: the first forward runs."""
    model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Table())))
    model.to_empty(device="cpu")
    nn.init.zeros_(model[0].weight)
    model[0].bias.data.fill_(1)
    model[1].reset_parameters()
    model[1].angles.copy_(torch.arange(4.0))
    assert_same(model(torch.ones(1, 4)), torch.tensor([[1.0, 2, 3, 4]]))
    model.reshard()
    assert_idle(model)


# ---- Rank 0's model


def own_model(ranks: Ranks) -> Net:
    torch.manual_seed(ranks.rank)
    model = Net()
    model.register_buffer("table", torch.randn(3))
    return model


def rank0_model() -> Net:
    return own_model(Ranks(0, 1))


@distributed(2, 3)
def test_sync_before_sharding(ranks: Ranks) -> None:
    """Ranks that drew under seeds of their own go on with rank 0's parameters and buffers."""
    model = own_model(ranks)
    with pytest.raises(RuntimeError, match=r"'embedding.weight' \(17, 8\) has other values on"):
        fsdp2.sync_from_rank0(model, check=True)
    fsdp2.sync_from_rank0(model)
    fsdp2.sync_from_rank0(model, check=True)
    shard_blocks(model)
    assert_same_params(model, rank0_model())
    assert_same(model.table, rank0_model().table)


@distributed(4)
def test_sync_behind_sharding(ranks: Ranks) -> None:
    """Replicas get the first replica's shards, all ranks the first rank's buffers."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    replica = ranks.rank // 2
    torch.manual_seed(replica)
    model = Net()
    model.register_buffer("table", torch.full((3,), float(ranks.rank)))
    shard_blocks(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="has different values on different replicas"):
        fsdp2.sync_from_rank0(model, check=True)
    fsdp2.sync_replicas(model)
    with pytest.raises(RuntimeError, match=r"'table' \(3,\) has other values on ranks \[1, 2, 3\]"):
        fsdp2.sync_from_rank0(model, check=True)
    fsdp2.sync_from_rank0(model)
    fsdp2.sync_from_rank0(model, check=True)
    torch.manual_seed(0)
    assert_same_params(model, Net())
    assert_same(model.table, torch.zeros(3))


@distributed(2)
def test_sync_refuses(ranks: Ranks) -> None:
    """What has no values yet, and what others have laid out."""
    with pytest.raises(fsdp2.UsageError, match=r"'0.weight' \(7, 5\) is on the meta device"):
        fsdp2.sync_from_rank0(on_meta())
    model = stack()
    parallelize_module(model, ranks.mesh(), {"0": ColwiseParallel()})
    assert isinstance(model[0].weight, DTensor)
    with pytest.raises(fsdp2.UsageError, match="'0.weight' is a DTensor"):
        fsdp2.sync_from_rank0(model)


@distributed(2)
def test_full_model_moves_group_by_group(ranks: Ranks) -> None:
    """A full model on the CPU: each call keeps its rows and lets go of the rest."""
    plain = stack()
    model = copy.deepcopy(plain)
    storage = model[0].weight.untyped_storage()
    fully_shard(model[0])
    assert model[0].weight.to_local().untyped_storage().nbytes() < storage.nbytes()
    assert isinstance(model[0].weight, DTensor) and not isinstance(model[1].weight, DTensor)
    fully_shard(model)
    assert_same_state(model, plain)
