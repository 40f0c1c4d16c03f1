"""Optimizer state that is partial, packed, or on some ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import CheckpointError
from harness import Ranks, distributed, run
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches
from test_checkpoint import adamw, assert_same_state, full_state, train


class Partly(Net):
    """A net with a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 3)


def partly(seed: int) -> Any:
    torch.manual_seed(seed)
    return shard_blocks(Partly())


def assert_continues(model: Any, optimizer: Any, other: Any, other_optimizer: Any) -> None:
    """Both have the same state, and after two further steps still have."""
    assert_same_state(full_state(other, other_optimizer), full_state(model, optimizer))
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(each, its_optimizer, 2)
        assert_idle(each)
    assert_same_state(full_state(other, other_optimizer), full_state(model, optimizer))


@distributed(2, 3)
def test_never_stepped(ranks: Ranks, tmp_path: Path) -> None:
    """Parameters without state are saved without, and start without, also where there was one."""
    model = partly(1)
    optimizer = adamw(model)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    other = partly(2)
    other_optimizer = adamw(other)
    restored = checkpoint.load(tmp_path, other, other_optimizer)
    assert restored.without_state == ("spare.weight", "spare.bias")
    assert other.spare.weight not in other_optimizer.state
    assert_continues(model, optimizer, other, other_optimizer)
    with pytest.raises(CheckpointError, match=r"'spare.weight' has no state.*\(2 in all\)"):
        checkpoint.load(tmp_path, other, other_optimizer, missing_state="error")


@distributed(2)
def test_new_optimizer_is_cleared(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint from before the first step takes away the states of a later one."""
    model = partly(1)
    optimizer = adamw(model)
    checkpoint.save(tmp_path, model, optimizer, step=0)
    train(model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    assert not any(optimizer.state.values())
    assert_idle(model)


@distributed(2)
def test_frozen_meanwhile(ranks: Ranks, tmp_path: Path) -> None:
    """Frozen parameters keep their state over a checkpoint, and go on with it when unfrozen."""
    model, other = partly(1), partly(2)
    optimizer, other_optimizer = adamw(model), adamw(other)
    train(model, optimizer)
    for each in (model, other):
        each.blocks[0].requires_grad_(False)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=4)
    checkpoint.load(tmp_path, other, other_optimizer)
    assert other_optimizer.state[other.blocks[0].up.weight]["step"] == 2
    for each in (model, other):
        each.blocks[0].requires_grad_(True)
    assert_continues(model, optimizer, other, other_optimizer)


@distributed(2)
def test_optimizer_of_a_part(ranks: Ranks, tmp_path: Path) -> None:
    """State of parameters that are not stepped now is left out, or refused, and options match."""
    model, other = partly(1), partly(2)
    optimizer = torch.optim.AdamW(
        [
            {"params": list(model.blocks.parameters()), "lr": 0.01},
            {"params": [model.head.weight], "lr": 0.02},
        ]
    )
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    part = torch.optim.AdamW([other.head.weight, *other.spare.parameters()])
    restored = checkpoint.load(tmp_path, other, part)
    assert part.param_groups[0]["lr"] == 0.02
    assert len(restored.unused_state) == 12
    assert set(part.state) == {other.head.weight}
    with pytest.raises(CheckpointError, match="is not stepped by this optimizer"):
        checkpoint.load(
            tmp_path, other, torch.optim.AdamW([other.head.weight]), missing_state="error"
        )
    assert_idle(model)
    assert_idle(other)


class Adapted(Net):
    """A net with an adapter beside its head."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(8, 17)
        nn.init.zeros_(self.adapter.weight)
        nn.init.zeros_(self.adapter.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.adapter(self.embedding(tokens))


@distributed(2)
def test_added_adapter(ranks: Ranks, tmp_path: Path) -> None:
    """A base model's checkpoint loads into one with an adapter, which starts as it was made."""
    torch.manual_seed(1)
    base: Any = shard_blocks(Net())
    base_optimizer = adamw(base)
    train(base, base_optimizer)
    checkpoint.save(tmp_path, base, base_optimizer, step=2)
    torch.manual_seed(2)
    model: Any = shard_blocks(Adapted())
    optimizer = adamw(model)
    restored = checkpoint.load(tmp_path, model, optimizer, strict=False)
    assert restored.missing == restored.without_state == ("adapter.weight", "adapter.bias")
    batch = token_batches(1, 1)[0][0]
    assert next_token_loss(model, batch) == next_token_loss(base, batch)
    train(model, optimizer)
    assert optimizer.state[model.adapter.weight]["step"] == 2
    assert optimizer.state[model.head.weight]["step"] == 4
    assert_idle(model)
    base.reshard()


@distributed(2)
def test_gradients_do_not_matter(ranks: Ranks, tmp_path: Path) -> None:
    """A save with gradients around is whole, and changes neither them nor the optimizer."""
    model = partly(1)
    optimizer = adamw(model)
    train(model, optimizer)
    next_token_loss(model, token_batches(1, 1)[0][0]).backward()
    before = full_state(model, optimizer)
    gradient = model.head.weight.grad.full_tensor()
    checkpoint.save(tmp_path, model, optimizer, step=2)
    assert_same_state(full_state(model, optimizer), before)
    assert torch.equal(model.head.weight.grad.full_tensor(), gradient)
    other = partly(2)
    other_optimizer = adamw(other)
    next_token_loss(other, token_batches(1, 1)[0][0]).backward()
    checkpoint.load(tmp_path, other, other_optimizer)
    assert_same_state(full_state(other, other_optimizer), before)
    model.zero_grad()
    other.zero_grad()
    assert_continues(model, optimizer, other, other_optimizer)


@distributed(4)
def test_more_ranks_than_rows(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks without a row of any parameter save and load."""
    models = [fully_shard(nn.Linear(2, 1)) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    models[0](torch.ones(2)).sum().backward()
    optimizers[0].step()
    checkpoint.save(tmp_path, models[0], optimizers[0], step=1)
    checkpoint.load(tmp_path, models[1], optimizers[1])
    assert_same_state(full_state(models[1], optimizers[1]), full_state(models[0], optimizers[0]))
    assert_idle(models[1])


@distributed(2)
def test_state_on_some_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks whose optimizer has no state at all save beside those that have."""
    models = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    if ranks.rank == 1:  # a rank's own, such as statistics of what it has seen
        optimizers[0].state[models[0].weight]["seen"] = torch.arange(5)
    checkpoint.save(tmp_path, models[0], optimizers[0], step=1)
    checkpoint.load(tmp_path, models[1], optimizers[1])
    found = optimizers[1].state[models[1].weight]
    assert list(found) == (["seen"] if ranks.rank == 1 else [])
    assert not found or torch.equal(found["seen"], torch.arange(5))
    assert_idle(models[0])


class Packed(torch.optim.Optimizer):
    """SGD with a momentum in 8 bits behind a header of 3 bytes, and a scale."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1, "kind": kind})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state, gradient = self.state[param], local(param.grad)
            if not state:
                state["packed"] = torch.zeros(gradient.numel() + 3, dtype=torch.uint8)
                state["scale"] = torch.full((), 0.01)
                if self.param_groups[0]["kind"] == "dtensor":
                    for key, placement in (("packed", Shard(0)), ("scale", Replicate())):
                        state[key] = DTensor.from_local(state[key], param.device_mesh, [placement])
            packed, scale = local(state["packed"]), local(state["scale"])
            old = (packed[3:].float() - 128).view_as(gradient) * scale if packed.any() else 0
            momentum = 0.9 * old + gradient
            packed[3:] = (momentum / scale + 128).clamp(1, 255).to(torch.uint8).flatten()
            packed[:3] = 7
            local(param).sub_(momentum, alpha=0.1)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layer_and_packed(ranks: Ranks, kind: str, seed: int) -> tuple[Any, Packed]:
    """The packed state of "dtensor" needs the same number of rows on each rank."""
    torch.manual_seed(seed)
    model: Any = fully_shard(nn.Linear(6, 13 if kind == "plain" else 12), mesh=ranks.mesh())
    return model, Packed(model.parameters(), kind)


def packed_steps(model: Any, optimizer: Packed) -> None:
    for _ in range(3):
        model(torch.linspace(-1, 1, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def packed_run(ranks: Ranks, folder: str, kind: str) -> None:
    model, optimizer = layer_and_packed(ranks, kind, 1)
    other, other_optimizer = layer_and_packed(ranks, kind, 2)
    packed_steps(model, optimizer)
    checkpoint.save(folder, model, optimizer, step=3)
    checkpoint.load(folder, other, other_optimizer)
    for _ in range(2):
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local(ours), local(theirs))
            for key, value in optimizer.state[ours].items():
                found = other_optimizer.state[theirs][key]
                assert type(found) is type(value)
                assert found.dtype is value.dtype
                assert torch.equal(local(found), local(value))
        packed_steps(model, optimizer)
        packed_steps(other, other_optimizer)
    assert_idle(other)


def packed_elsewhere(ranks: Ranks, folder: str, kind: str) -> None:
    model, optimizer = layer_and_packed(ranks, kind, 3)
    with pytest.raises(CheckpointError, match=r"'packed' of parameter 'weight' .*mesh"):
        checkpoint.load(folder, model, optimizer)
    assert_idle(model)


@pytest.mark.parametrize("kind", ["plain", "dtensor"])
def test_packed_state(kind: str, tmp_path: Path) -> None:
    """States of another shape and dtype come back as they were; on another mesh they are refused.

    The next steps are equal bit by bit.
    """
    run(packed_run, 2, str(tmp_path), kind)
    run(packed_elsewhere, 3, str(tmp_path), kind)


@distributed(2)
def test_packed_state_of_no_shape(ranks: Ranks, tmp_path: Path) -> None:
    """A DTensor state for which ranks have different shapes is refused at save, by name."""
    model, optimizer = layer_and_packed(ranks, "plain", 1)
    packed_steps(model, optimizer)
    pieces = torch.zeros(4 + ranks.rank)
    optimizer.state[model.bias]["packed"] = DTensor.from_local(pieces, ranks.mesh(), [Shard(0)])
    with pytest.raises(CheckpointError, match=r"'packed' of parameter 'bias' is .*\[8\].*\[10\]"):
        checkpoint.save(tmp_path, model, optimizer, step=3)
    assert_idle(model)


class Quantised(Tensor):
    """A tensor subclass, as libraries for 8-bit optimizers have them."""


@distributed(2)
def test_subclass_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A state that files cannot hold is refused at save, by name, on all ranks."""
    model = partly(1)
    optimizer = adamw(model)
    train(model, optimizer)
    if ranks.rank == 0:
        made = torch.zeros(3).as_subclass(Quantised)
        optimizer.state[model.head.weight]["exp_avg"] = made
    with pytest.raises(
        CheckpointError, match="'exp_avg' of parameter 'head.weight' is a Quantised"
    ):
        checkpoint.save(tmp_path, model, optimizer, step=2)
    assert not list(tmp_path.iterdir())
    assert_idle(model)


@distributed(2)
def test_foreign_parameter(ranks: Ranks, tmp_path: Path) -> None:
    """An optimizer of another model is refused, before a folder is made."""
    model = partly(1)
    with pytest.raises(CheckpointError, match=r"AdamW steps a parameter \(17, 8\) in group 0"):
        checkpoint.save(tmp_path, model, adamw(partly(1)), step=2)
    assert_idle(model)


@distributed(2)
def test_saved_without_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """An optimizer is not left as it is in silence where the checkpoint has none."""
    model = partly(1)
    checkpoint.save(tmp_path, model, step=2)
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        checkpoint.load(tmp_path, model, adamw(model))
    assert_idle(model)


@distributed(2)
def test_into_meta(ranks: Ranks, tmp_path: Path) -> None:
    """A model on the meta device and its optimizer are filled, and train on."""
    model = partly(1)
    optimizer = adamw(model)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    with torch.device("meta"):
        other: Any = Partly()
    shard_blocks(other, mesh=ranks.mesh())
    other_optimizer = adamw(other)
    checkpoint.load(tmp_path, other, other_optimizer)
    assert_continues(model, optimizer, other, other_optimizer)


@distributed(2)
def test_two_optimizers(ranks: Ranks, tmp_path: Path) -> None:
    """Several optimizers of one model are saved and loaded together."""
    found = []
    for seed in (1, 2):
        model = partly(seed)
        blocks = torch.optim.SGD(model.blocks.parameters(), lr=0.1 * seed, momentum=0.9)
        head = torch.optim.Adam([model.head.weight], lr=0.01 * seed)
        found.append((model, [blocks, head]))
    (model, optimizers), (other, other_optimizers) = found
    for optimizer in optimizers:
        train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizers, step=2)
    checkpoint.load(tmp_path, other, other_optimizers)
    assert [each.param_groups[0]["lr"] for each in other_optimizers] == [0.1, 0.01]
    for ours, theirs in zip(optimizers, other_optimizers, strict=True):
        assert_same_state(full_state(other, theirs), full_state(model, ours))
    assert_idle(model)
