"""State dicts, checkpoints, meta-device initialisation, and moves between dtypes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
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


def plain_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded_net(seed: int, **options: Any) -> Any:
    return shard_blocks(plain_net(seed), **options)


def train(model: Any, optimizer: Any, batches: list[list[Tensor]], rank: int) -> list[float]:
    """Steps of one rank; returns its losses."""
    losses = []
    for batch in batches:
        loss = next_token_loss(model, batch[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_plain(model: nn.Module, batches: list[list[Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches:
        data_parallel(model, batch)
        optimizer.step()
        optimizer.zero_grad()


def assert_trains_like(model: Any, plain: nn.Module, ranks: Ranks) -> None:
    """Three further steps with AdamW end in the same values, bit by bit."""
    batches = token_batches(ranks.world_size, 3)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05), batches, ranks.rank)
    train_plain(plain, batches)
    assert_same_params(model, plain)


# ---- state_dict and load_state_dict


@distributed(2, 3)
def test_state_dict_holds_the_shards(ranks: Ranks) -> None:
    """The plain model's keys, and under each the rows that `torch.chunk` gives this rank."""
    plain = plain_net(1)
    model = sharded_net(1)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, whole in plain.state_dict().items():
        value = state[name]
        assert isinstance(value, DTensor)
        assert value.placements == (Shard(0),)
        assert value.shape == whole.shape
        assert value.stride() == whole.stride()
        assert value.dtype == whole.dtype
        chunks = whole.chunk(ranks.world_size)
        rows = chunks[ranks.rank] if ranks.rank < len(chunks) else whole[:0]
        assert_same(value.to_local(), rows, name)
        assert_same(value, whole, name)
    assert_idle(model)


@distributed(2)
def test_state_dict_follows_training(ranks: Ranks) -> None:
    """A state dict taken once goes on showing the trained values: it shares their memory."""
    plain = plain_net(1)
    model = sharded_net(1)
    state = model.state_dict()
    assert_trains_like(model, plain, ranks)
    for name, value in plain.state_dict().items():
        assert_same(state[name], value, name)
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("after_a_step", [False, True])
def test_load_own_state_dict(ranks: Ranks, assign: bool, after_a_step: bool) -> None:
    """Values of another model's sharded state dict, copied or assigned, are those that train."""
    plain = plain_net(1)
    model = sharded_net(2)
    if after_a_step:
        next_token_loss(model, token_batches(1, 1)[0][0]).backward()
        model.zero_grad()
    state = {name: value.clone() for name, value in sharded_net(1).state_dict().items()}
    assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert_same_params(model, plain)
    # The reference adds gradients in rank order and so does fsdp2: equal at 3 ranks too.
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_load_reports_keys(ranks: Ranks) -> None:
    """`strict=False` reports what is missing or unknown under the plain model's names."""
    model = sharded_net(1)
    state = dict(model.state_dict())
    state["extra"] = state.pop("head.weight")
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["head.weight"]
    assert result.unexpected_keys == ["extra"]
    with pytest.raises(RuntimeError, match="head.weight"):
        model.load_state_dict(state)
    assert_idle(model)


@distributed(1, 2, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("after_a_step", [False, True])
def test_load_full_tensors(ranks: Ranks, assign: bool, after_a_step: bool) -> None:
    """The plain model's state dict loads as it is: each rank takes its own rows."""
    plain = plain_net(1)
    model = sharded_net(2, reshard_after_forward=False)
    if after_a_step:
        with torch.no_grad():
            model(token_batches(1, 1)[0][0])  # leaves full parameters, which are stale then
    state = plain.state_dict()
    assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    for param in model.parameters():
        assert isinstance(param, DTensor)
        local = param.to_local()
        assert local.untyped_storage().data_ptr() not in {
            value.untyped_storage().data_ptr() for value in state.values()
        }
    assert_same_params(model, plain)
    assert_trains_like(model, plain, ranks)
    model.reshard()
    assert_idle(model)


@distributed(2)
def test_assigned_replicas_are_copies(ranks: Ranks) -> None:
    """Also where a rank keeps all of a tensor: training does not write into the state dict."""
    plain = plain_net(1)
    dims = DataParallelMeshDims(replicate="all")
    model = sharded_net(2, mesh=ranks.mesh(2, names=("all",)), dp_mesh_dims=dims)
    state = plain.state_dict()
    model.load_state_dict(state, assign=True)
    assert_same_params(model, plain)
    with torch.no_grad():
        model.head.weight.add_(1)
    assert_same(model.head.weight, state["head.weight"] + 1)
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("assign", [False, True])
def test_load_from_another_mesh(ranks: Ranks, assign: bool) -> None:
    """DTensors over a 2-D mesh, split in both of its dims, load into shards over four ranks."""
    plain = plain_net(1)
    model = sharded_net(2)
    mesh = ranks.mesh(2, 2, names=("rows", "columns"))
    state = {
        name: distribute_tensor(value, mesh, [Shard(0), Shard(value.ndim - 1)])
        for name, value in plain.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)
    assert_same_params(model, plain)
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_load_full_into_meta(ranks: Ranks) -> None:
    """Sharded on meta, and then assigned full tensors."""
    plain = plain_net(1)
    model = on_meta()
    model.load_state_dict(plain.state_dict(), assign=True)
    assert_same_params(model, plain)
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_load_full_names_what_does_not_fit(ranks: Ranks) -> None:
    """A full tensor of another shape, and a missing or unknown key, are named as PyTorch does."""
    model = sharded_net(1)
    state = plain_net(1).state_dict()
    state["head.weight"] = torch.zeros(3, 8)
    state["blocks.0.up.wieght"] = state.pop("blocks.0.up.weight")
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
        model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r'Missing key.*"blocks.0.up.weight"') as caught:
        model.load_state_dict(state)
    assert 'Unexpected key(s) in state_dict: "blocks.0.up.wieght"' in str(caught.value)
    assert_idle(model)


@distributed(3)
def test_load_from_a_mesh_without_this_rank(ranks: Ranks) -> None:
    """A DTensor that this rank has no part of is refused by name."""
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    model = sharded_net(1)
    state = model.state_dict()
    state["head.weight"] = distribute_tensor(torch.zeros(17, 8), mesh, [Shard(0)])
    if ranks.rank == 2:
        with pytest.raises(RuntimeError, match=r'"head.weight".*not in its mesh'):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)
    assert_idle(model)


# ---- torch.distributed.checkpoint


@distributed(2)
@pytest.mark.parametrize("reduce_in_fp32", [False, True])
def test_checkpoint_round_trip(ranks: Ranks, tmp_path: Path, reduce_in_fp32: bool) -> None:
    """A new model and optimizer continue from a checkpoint exactly as the old ones do."""
    options: dict[str, Any] = {}
    if reduce_in_fp32:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    batches = token_batches(2, 5)
    model = sharded_net(1, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, batches[:2], ranks.rank)

    other = sharded_net(2, **options)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    [path] = _shared([str(tmp_path)])  # every rank's fixture is the same folder; be sure of it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's checkpoints warn of their own deprecations
        saved = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(saved, checkpoint_id=path)
        loaded = {
            "model": get_model_state_dict(other),
            "optimizer": get_optimizer_state_dict(other, other_optimizer),
        }
        dcp.load(loaded, checkpoint_id=path)
        set_model_state_dict(other, loaded["model"])
        set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"])

    assert list(saved["model"]) == [name for name, _ in plain_net(1).named_parameters()]
    assert_same_params(other, model)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert_same(other_optimizer.state[ours][key], value, key)
    continued = train(model, optimizer, batches[2:], ranks.rank)
    resumed = train(other, other_optimizer, batches[2:], ranks.rank)
    assert resumed == continued
    assert_same_params(other, model)
    assert_idle(model)
    assert_idle(other)


def _shared(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values, src=0)
    return values


@distributed(2)
def test_full_state_dict_from_rank_0(ranks: Ranks) -> None:
    """Rank 0 reads an unsharded state dict; all ranks end with its values."""
    plain = plain_net(1)
    model = sharded_net(2)
    full = plain.state_dict() if ranks.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    assert_same_params(model, plain)
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_full_state_dict_on_rank_0(ranks: Ranks) -> None:
    """The unsharded values are gathered onto rank 0 and load into the plain model."""
    model = sharded_net(1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if ranks.rank:
        assert full == {}
    else:
        plain = plain_net(2)
        plain.load_state_dict(full)
        for name, param in plain_net(1).named_parameters():
            assert_same(plain.get_parameter(name), param, name)
    assert_idle(model)


@distributed(2)
def test_full_optimizer_state(ranks: Ranks) -> None:
    """The optimizer's states are gathered onto rank 0, and dealt out again from there."""
    model, other = sharded_net(1), sharded_net(2)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (model, other)]
    train(model, optimizers[0], token_batches(2, 2), ranks.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of what its own functions call
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_optimizer_state_dict(model, optimizers[0], options=options)
        assert bool(full) == (ranks.rank == 0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(other, optimizers[1], full, options=options)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizers[0].state[theirs].items():
            assert_same(optimizers[1].state[ours][key], value, key)
    assert_idle(model)


@distributed(4)
def test_checkpoint_of_empty_shards(ranks: Ranks, tmp_path: Path) -> None:
    """More ranks than rows: those without a row save and load, optimizer included."""
    [path] = _shared([str(tmp_path)])
    models = [fully_shard(nn.Linear(2, 1), mesh=ranks.mesh()) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's checkpoints warn of their own deprecations
        states = [
            {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        dcp.save(states[0], checkpoint_id=path)
        dcp.load(states[1], checkpoint_id=path)
        set_optimizer_state_dict(models[1], optimizers[1], states[1]["optimizer"])
    assert_same_params(models[1], models[0])
    state = optimizers[1].state[models[1].weight]["exp_avg"]
    assert_same(state, optimizers[0].state[models[0].weight]["exp_avg"])
    assert_idle(models[1])


@distributed(2)
def test_async_save(ranks: Ranks, tmp_path: Path) -> None:
    """`dcp.async_save` writes what the model held when it was called."""
    [path] = _shared([str(tmp_path)])
    model = sharded_net(1)
    state = model.state_dict()
    dcp.async_save(state, checkpoint_id=path).result()
    other = sharded_net(2)
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded)
    assert_same_params(other, plain_net(1))
    assert_idle(other)


# ---- The meta device


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        model = Net()
    model = shard_blocks(model, **options)
    assert all(param.device.type == "meta" for param in model.parameters())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return model


@distributed(2, 3)
def test_materialize_and_reset(ranks: Ranks) -> None:
    """Sharded on meta, then `to_empty` and `reset_parameters`: what was drawn is what trains."""
    model = on_meta(mesh=ranks.mesh())
    model.to_empty(device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    plain = plain_net(9)
    for name, param in model.named_parameters():
        assert param.device.type == "cpu"
        value = param.full_tensor().detach()
        assert value.isfinite().all()
        with torch.no_grad():
            plain.get_parameter(name).copy_(value)
    assert_same(model.norm.weight, torch.ones(8))
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2, 3)
def test_assign_to_meta(ranks: Ranks) -> None:
    """Sharded on meta, then filled by `load_state_dict(assign=True)`, without `to_empty`."""
    plain = plain_net(1)
    model = on_meta(mesh=ranks.mesh())
    state = {
        name: distribute_tensor(value, ranks.mesh(), [Shard(0)])
        for name, value in plain.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert_same_params(model, plain)
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_broadcast_to_meta(ranks: Ranks) -> None:
    """Sharded on meta, then filled from rank 0's full state dict."""
    plain = plain_net(1)
    model = on_meta()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of what its own function calls
        set_model_state_dict(model, plain.state_dict() if ranks.rank == 0 else {}, options=options)
    assert_same_params(model, plain)
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_shard_inside_a_meta_context(ranks: Ranks) -> None:
    """Model and `fully_shard` under `torch.device("meta")`: our buffers are real where needed."""
    mesh = ranks.mesh()
    with torch.device("meta"):
        model = shard_blocks(Net(), mesh=mesh)
    plain = plain_net(1)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            param.copy_(distribute_tensor(value.detach(), mesh, [Shard(0)]))
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


# ---- Other dtypes


@distributed(2)
@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_to_float64(ranks: Ranks, after_a_step: bool, reshard: bool) -> None:
    """`model.to(float64)` at any time: shards, gradients and arithmetic are float64."""
    plain = plain_net(1)
    model = sharded_net(1, reshard_after_forward=reshard)
    if after_a_step:
        [batch] = token_batches(2, 1)
        next_token_loss(model, batch[ranks.rank]).backward()
        with torch.no_grad():
            model(batch[0])  # leaves groups full when they are kept
        model.zero_grad()
    model.to(torch.float64)
    plain.to(torch.float64)
    assert_idle(model)  # a full parameter that was kept would be of the old dtype
    assert_same_params(model, plain)
    batches = token_batches(2, 2)
    for batch in batches:
        data_parallel(plain, batch)
        next_token_loss(model, batch[ranks.rank]).backward()
    for param in model.parameters():
        assert param.dtype is param.to_local().dtype is torch.float64
        assert param.grad.dtype is param.grad.to_local().dtype is torch.float64
    assert_same_params(model, plain)
    model.zero_grad()
    plain.zero_grad()
    assert_trains_like(model, plain, ranks)
    assert_idle(model)


@distributed(2)
def test_to_keeps_what_it_does_not_change(ranks: Ranks) -> None:
    """`model.to("cpu")` on a trained CPU model changes nothing, optimizers included."""
    model = sharded_net(1)
    twin = copy.deepcopy(plain_net(1))
    shard_blocks(twin)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (model, twin)]
    batches = token_batches(2, 4)
    for net, optimizer in zip((model, twin), optimizers, strict=True):
        train(net, optimizer, batches[:2], ranks.rank)
    before = list(model.parameters())
    model.to("cpu")
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    losses = [
        train(net, optimizer, batches[2:], ranks.rank)
        for net, optimizer in zip((model, twin), optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert_same_params(model, twin)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("keep", [False, True])
def test_parameters_replaced_before_backward(ranks: Ranks, keep: bool) -> None:
    """Backward reads what forward read, and those get the gradients; the next forward adopts."""
    plain = plain_net(1)
    model = shard_blocks(plain_net(1), reshard_after_forward=not keep)
    for batch in token_batches(2, 2):
        before = list(model.parameters())
        data_parallel(plain, batch)
        loss = next_token_loss(model, batch[ranks.rank])
        with torch.no_grad():
            doubled = {name: value * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(doubled, assign=True)
        loss.backward()
        after = list(model.parameters())
        assert not any(new is old or new.grad is not None for new, old in zip(after, before))
        for old, expected in zip(before, plain.parameters(), strict=True):
            assert_same(old.grad.full_tensor(), expected.grad)
        plain.zero_grad()
        with torch.no_grad():
            for expected in plain.parameters():
                expected.mul_(2)
    assert_idle(model)


@distributed(2)
def test_replaced_parameter_is_picked_up(ranks: Ranks) -> None:
    """A sharded parameter that the user registers between two steps is the one that trains."""
    plain = plain_net(1)
    model = fully_shard(plain_net(1), mesh=ranks.mesh())
    for step in range(2):
        value = torch.full((17, 8), 0.1 * (step + 1))
        plain.head.weight = nn.Parameter(value.clone())
        sharded = nn.Parameter(distribute_tensor(value, ranks.mesh(), [Shard(0)]))
        model.head.weight = sharded
        [batch] = token_batches(2, 1)
        data_parallel(plain, batch)
        next_token_loss(model, batch[ranks.rank]).backward()
        assert model.head.weight is sharded
        assert_same_params(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert_idle(model)
