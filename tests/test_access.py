"""Parameters used where their group is not gathered: what is said, and what works instead."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import (
    MixedPrecisionPolicy,
    NotGatheredError,
    UsageError,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp2.guard import GuardedShard
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, assert_same_params, data_parallel, token_batches

REMEDIES = ["fully_shard([a, b])", "register_fsdp_forward_method", "unshard()", "full_parameters"]


class ReadsHead(Net):
    """Its forward multiplies with the head's weight instead of calling the head."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens) @ self.head.weight.t()


class FusedLoss(ReadsHead):
    """Its forward is the loss: a fused kernel would read hidden states and the head's weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        return fused_loss(self.hidden(tokens), self.head.weight, tokens)


def fused_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    assert hidden.dtype == weight.dtype
    logits = nn.functional.linear(hidden[:, :-1], weight).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def made(cls: type[Net], **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(**options)


def tokens_of(length: int = 4) -> Tensor:
    return torch.ones(2 if length > 1 else 1, length, dtype=torch.long)


def layer(ranks: Ranks) -> Any:
    torch.manual_seed(1)
    return fully_shard(nn.Linear(6, 5), mesh=ranks.mesh())


# ---- What is said


@distributed(2, 3)
def test_weight_of_a_module_in_another_group(ranks: Ranks) -> None:
    """The error names parameter and module in full, the state and three remedies."""
    model = made(ReadsHead)
    fully_shard(model.head, mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh())
    with pytest.raises(NotGatheredError) as caught:
        model(tokens_of())
    text = str(caught.value)
    assert "parameter 'head.weight' of module 'head' is sharded here, not gathered" in text
    assert "got mixed torch.Tensor and DTensor" in text, "what PyTorch's users search for"
    assert [remedy for remedy in REMEDIES if remedy not in text] == []
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, UsageError)
    model.reset_iter_state()
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("length", [1, 4])
def test_method_that_nobody_registered(ranks: Ranks, length: int) -> None:
    """It raises before any collective, also where DTensor lets a single token pass."""
    model = made(ReadsHead)
    fully_shard(model, mesh=ranks.mesh())
    model(tokens_of())  # learns the names
    model.reshard()
    with torch.no_grad(), pytest.raises(NotGatheredError, match="register_fsdp_forward_method"):
        model.hidden(tokens_of(length))
    assert_idle(model)


@distributed(2)
def test_registered_method(ranks: Ranks) -> None:
    """Once registered the same method gives what the unsharded model gives."""
    model, reference = made(ReadsHead), made(ReadsHead)
    for block in model.blocks:
        fully_shard(block, mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh())
    register_fsdp_forward_method(model, "hidden")
    with torch.no_grad():
        assert_same(model.hidden(tokens_of()), reference.hidden(tokens_of()))
    model.reshard()
    assert_idle(model)


MIXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "left": lambda w, x: w @ x.t(),
    "right": lambda w, x: x[:, :5] @ w,
    "linear": lambda w, x: nn.functional.linear(x, w),
    "detached": lambda w, x: x @ w.detach().t(),
    "data": lambda w, x: x @ w.data.t()[:, :3],
    "chunk": lambda w, x: x[:, :5] @ w.chunk(2, 1)[1],
    "cast": lambda w, x: x.bfloat16() @ w.bfloat16().t(),
    "cat": lambda w, x: torch.cat([w, x]),
    "einsum": lambda w, x: torch.einsum("ij,kj->ik", x, w),
    "layer_norm": lambda w, x: nn.functional.layer_norm(x, (6,), w[0]),
    "into another": lambda w, x: x[:1].add_(w[:1]),
}


@distributed(2)
@pytest.mark.parametrize("way", MIXES)
def test_every_way_to_mix(ranks: Ranks, way: str) -> None:
    """Operators, functions, views, pieces and casts of a shard name the parameter."""
    with pytest.raises(NotGatheredError, match="parameter 'weight'"):
        MIXES[way](layer(ranks).weight, torch.ones(4, 6))


@distributed(2)
def test_autocast(ranks: Ranks) -> None:
    """The cast that autocast makes is still known as the parameter."""
    model = layer(ranks)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(NotGatheredError, match="'weight'"),
    ):
        nn.functional.linear(torch.ones(4, 6), model.weight)


@distributed(2)
def test_writing_a_full_tensor(ranks: Ranks) -> None:
    """Writing a plain tensor into a shard names the two ways that work, and one of them does."""
    weight = layer(ranks).weight
    value = torch.arange(30.0).reshape(5, 6)
    with torch.no_grad(), pytest.raises(NotGatheredError, match=r"distribute_tensor\(value"):
        weight.copy_(value)
    with torch.no_grad():
        weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
    assert_same(weight, value)


@distributed(2)
def test_other_errors_pass_through(ranks: Ranks) -> None:
    """An operator that fails for its own reasons says so itself."""
    weight = layer(ranks).weight
    with pytest.raises(Exception, match="size|shape|view") as caught:
        weight.view(7, 7)
    assert not isinstance(caught.value, NotGatheredError)
    assert type(weight) is GuardedShard


# ---- What stays as it is


@distributed(2, 3)
def test_legal_uses(ranks: Ranks) -> None:
    """Reading, DTensor arithmetic, gathering and in-place changes act as on a DTensor."""
    full = nn.Linear(6, 5)
    with torch.no_grad():
        full.weight.copy_(torch.arange(30.0).reshape(5, 6))
    expected = full.weight.detach().clone()
    weight = fully_shard(full, mesh=ranks.mesh()).weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.dtype, weight.device.type) == ((5, 6), torch.float32, "cpu")
    assert weight.is_leaf and weight.requires_grad and weight.placements == (Shard(0),)
    assert_same(weight.full_tensor(), expected)
    assert_same(weight.to_local(), expected.chunk(ranks.world_size)[ranks.rank])
    for result in (weight * 2, weight + weight, weight * torch.tensor(2.0)):
        assert type(result) is DTensor
        assert_same(result, expected * 2)
    version = weight._version
    with torch.no_grad():
        assert weight.mul_(2) is weight
    assert weight._version == version + 1
    assert_same(weight, expected * 2)
    weight.sum().backward()
    assert type(weight.grad) is DTensor
    assert_same(weight.grad, torch.ones(5, 6))
    assert isinstance(nn.Parameter(weight), nn.Parameter)
    assert nn.Parameter(weight.detach()).is_leaf


@distributed(2)
def test_copies_are_plain_dtensors(ranks: Ranks) -> None:
    """State dicts, files, pickles and deep copies hold DTensors that need no fsdp2 to load."""
    model = layer(ranks)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {DTensor}
    assert state["weight"].to_local().data_ptr() == model.weight.to_local().data_ptr()
    assert model.state_dict(keep_vars=True)["weight"] is model.weight
    copied = copy.deepcopy(model.weight)
    assert type(copied) is DTensor
    assert isinstance(copied, nn.Parameter)
    assert_same(copied, model.weight)
    for value in (state["weight"], model.weight):
        file = io.BytesIO()
        torch.save(value, file)
        assert b"fsdp2.guard" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is DTensor
        assert_same(loaded, model.weight)
    assert type(model.weight) is GuardedShard


@distributed(2)
def test_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint written from one model fills another; its shards stay guarded."""
    objects = [str(tmp_path)]
    torch.distributed.broadcast_object_list(objects, src=0)
    model, other = layer(ranks), layer(ranks)
    with torch.no_grad():
        model.weight.mul_(3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=objects[0])
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=objects[0])
    other.load_state_dict(state["model"])
    assert_same(other.weight, model.weight)
    with pytest.raises(NotGatheredError):
        other.weight @ torch.ones(6, 2)


@distributed(2)
def test_guard_survives_a_move(ranks: Ranks) -> None:
    """After ``to(dtype)`` swapped the parameters, the next forward guards them again."""
    model = layer(ranks)
    model.to(torch.float64)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    model.reshard()
    with pytest.raises(NotGatheredError, match="'weight'"):
        model.weight @ torch.ones(6, 2, dtype=torch.float64)


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
]


@distributed(2)
@pytest.mark.parametrize("kind", range(len(OPTIMIZERS)))
def test_optimizers(ranks: Ranks, kind: int) -> None:
    """Steps with clipping equal those of the unsharded model, and the guard is back behind them.

    Clipping adds squares shard by shard, so the last bits may differ.
    """
    model, reference = made(Net), made(Net)
    fully_shard(model, mesh=ranks.mesh())
    ours, theirs = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](reference.parameters())
    seen: list[type] = []
    ours.register_step_pre_hook(lambda o, *_: seen.append(type(o.param_groups[0]["params"][0])))
    for batch in token_batches(ranks.world_size, 3):
        sums = lambda m, t: m(t).square().sum()  # noqa: E731
        data_parallel(reference, batch, sums)
        sums(model, batch[ranks.rank]).backward()
        for each, optimizer in ((reference, theirs), (model, ours)):
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, reference, rtol=1e-4, atol=1e-5)
    assert seen == [DTensor] * 3, "optimizers step on plain DTensors, at no extra cost"
    assert {type(param) for param in model.parameters()} == {GuardedShard}


@distributed(2)
def test_step_that_raises(ranks: Ranks) -> None:
    """A step that raised leaves plain DTensors; the next one brings the guard back."""
    model = layer(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = model.weight.detach().clone()

    def fail() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(fail)
    optimizer.step()
    assert type(model.weight) is GuardedShard


@distributed(2)
def test_grad_scaler(ranks: Ranks) -> None:
    """Loss scaling unscales and steps as without a guard."""
    model = layer(ranks)
    before = model.weight.full_tensor().detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(model.weight, before - 0.5 * 2)


@distributed(2)
def test_parameters_after_forward(ranks: Ranks) -> None:
    """After forward ``parameters()`` are shards, also where the root stays gathered."""
    model = made(Net)
    fully_shard(model, mesh=ranks.mesh())
    model(tokens_of())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert not isinstance(model.head.weight, DTensor), "the attribute is full while it is kept"
    model.reshard()
    assert_idle(model)


# ---- A head that the loss reads


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class RoundsWeights(nn.Module):
    """What mixed precision computes, unsharded: the model on parameters rounded to bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        rounded = {name: p.to(torch.bfloat16) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, rounded, tokens)


def shard_with_head(model: Any, pattern: str, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    if pattern == "one group":
        fully_shard([model.norm, model.head], **options)
    elif pattern == "unshard":
        fully_shard(model.head, **options)
    fully_shard(model, **options)


@distributed(2, 3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pattern", ["root", "one group", "unshard"])
def test_fused_linear_cross_entropy(ranks: Ranks, pattern: str, precision: str) -> None:
    """A loss that reads the head's weight trains like the unsharded model.

    The head belongs to the root, or to one group with the norm before it, or is gathered by hand
    before each forward. The weight that the loss sees has the compute dtype, and its gradient is
    reduced. In bf16 the gradients are summed in fp32 by both.
    """
    policy = BF16 if precision == "bf16" else MixedPrecisionPolicy()
    model, reference = made(FusedLoss), made(FusedLoss)
    shard_with_head(model, pattern, mesh=ranks.mesh(), mp_policy=policy)
    expected = RoundsWeights(reference) if precision == "bf16" else reference
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in token_batches(ranks.world_size, 3):
        losses = data_parallel(expected, batch, loss_of)
        if pattern == "unshard":
            model.head.unshard()
        loss = model(batch[ranks.rank])
        loss.backward()
        assert_same(loss, losses[ranks.rank])
        assert_same_params(model, reference)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        assert_idle(model)
