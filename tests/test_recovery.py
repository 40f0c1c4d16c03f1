"""After an exception in forward or backward ``reset_iter_state`` makes the model usable again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from harness import Ranks, distributed
from models import Block, assert_idle, assert_same, assert_same_params, data_parallel, shard_blocks


class Fault(torch.autograd.Function):
    """Passes on; raises in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ValueError("fault in backward")


class Fragile(nn.Module):
    """A block that raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "before":
            raise ValueError("fault in forward")
        x = self.block(x)
        if self.fails == "after":
            raise ValueError("fault in forward")
        return Fault.apply(x) if self.fails == "backward" else x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fragile() for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        if self.fails == "after":
            raise ValueError("fault in forward")
        return Fault.apply(x) if self.fails == "backward" else x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(world_size: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(3, 8, generator=generator) for _ in range(world_size)] for _ in range(3)]


def failing(model: Chain, at: tuple[str, int]) -> nn.Module:
    """The module that raises: a block, or the root for -1."""
    return model if at[1] == -1 else model.blocks[at[1]]


def fail(model: Chain, at: tuple[str, int], x: Tensor) -> None:
    module = failing(model, at)
    module.fails = at[0]
    with pytest.raises(ValueError, match="fault in"):
        loss_of(model, x).backward()
    module.fails = None


FAULTS = pytest.mark.parametrize(
    "at",
    [
        ("before", 0),
        ("after", 1),
        ("before", 2),
        ("after", -1),
        ("backward", 0),
        ("backward", 1),
        ("backward", 2),
        ("backward", -1),
    ],
    ids=lambda at: f"{at[0]}-{'root' if at[1] == -1 else at[1]}",
)


@distributed(2, 3)
@FAULTS
@pytest.mark.parametrize("step", [0, 2])
def test_training_goes_on(ranks: Ranks, at: tuple[str, int], step: int) -> None:
    """After a fault in the first or a later step, and a reset, training equals a fresh run's."""
    reference = Chain()
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for i, inputs in enumerate(batches(ranks.world_size)):
        if i == step:
            fail(model, at, inputs[ranks.rank] * 3)
            model.reset_iter_state()
            model.zero_grad()  # some groups had been reduced before the fault
            assert_idle(model)
        loss = loss_of(model, inputs[ranks.rank])
        loss.backward()
        losses = data_parallel(reference, inputs, loss_of)
        assert_same(loss, losses[ranks.rank])
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


@distributed(2)
@FAULTS
def test_forgotten_reset_is_named(ranks: Ranks, at: tuple[str, int]) -> None:
    """Without a reset the next forward of the root raises, and says what to call."""
    model = shard_blocks(Chain())
    x = batches(ranks.world_size)[0][ranks.rank]
    loss_of(model, x).backward()
    fail(model, at, x)
    what = "backward" if at[0] == "backward" else "forward"
    for _ in range(2):  # raising does not make it usable
        with pytest.raises(RuntimeError, match=rf"previous {what}.*reset_iter_state\(\)"):
            model(x)
    model.reset_iter_state()
    loss_of(model, x).backward()
    assert_idle(model)


@distributed(2)
@FAULTS
def test_names_are_shards_right_after_a_fault(ranks: Ranks, at: tuple[str, int]) -> None:
    """``parameters`` and ``state_dict`` give the sharded values before any reset."""
    model = shard_blocks(Chain())
    x = batches(ranks.world_size)[0][ranks.rank]
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    fail(model, at, x)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in after.items():
        assert isinstance(value, DTensor), name
        assert_same(value, before[name], name)
    model.reset_iter_state()
    assert_idle(model)


@distributed(2)
def test_memory_is_freed_by_a_fault_in_forward(ranks: Ranks) -> None:
    """A forward that raises frees what it had gathered, ahead or not, without a reset."""
    model = shard_blocks(Chain())
    x = batches(ranks.world_size)[0][ranks.rank]
    loss_of(model, x).backward()
    fail(model, ("after", 1), x)
    for block in model.blocks:
        full = fsdp2.fully_shard.state(block).group.params[0].full
        assert full.untyped_storage().nbytes() == 0
    model.reset_iter_state()
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_kept_back_gradients_are_dropped(ranks: Ranks, param_dtype: torch.dtype | None) -> None:
    """A reset forgets gradients that wait for a later reduction, and keeps those on the shards."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype, torch.float32)
    first, second, third = (inputs[ranks.rank] for inputs in batches(ranks.world_size))
    reference = Chain()
    model = shard_blocks(copy.deepcopy(reference), mp_policy=policy)
    shard_blocks(reference, mp_policy=policy)  # it never sees the second batch
    for m in (model, reference):
        loss_of(m, first).backward()
    model.set_requires_gradient_sync(False)
    loss_of(model, second).backward()
    fail(model, ("before", 1), second)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    assert_same_params(model, reference)
    for m in (model, reference):
        loss_of(m, third).backward()
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_fault_that_the_caller_handles_inside(ranks: Ranks) -> None:
    """A block's exception that the root's own forward catches needs no reset."""

    class Tolerant(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    x = x * 2
            return self.head(x)

    reference = Tolerant()
    model = shard_blocks(copy.deepcopy(reference))
    for inputs in batches(ranks.world_size):
        for m in (model, reference):
            m.blocks[1].fails = "after"
        loss = loss_of(model, inputs[ranks.rank])
        loss.backward()
        losses = data_parallel(reference, inputs, loss_of)
        assert_same(loss, losses[ranks.rank])
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(2)
def test_training_inside_an_exception_handler(ranks: Ranks) -> None:
    """A step that runs while another exception is being handled is not taken for a failed one."""
    reference = Chain()
    model = shard_blocks(copy.deepcopy(reference))
    for inputs in batches(ranks.world_size):
        try:
            raise KeyError("something else")
        except KeyError:
            loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_forward_that_returns_nothing(ranks: Ranks) -> None:
    """A root that returns None did not fail, also while another exception is being handled."""

    class Silent(Chain):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            self.result = super().forward(x)

    model = shard_blocks(Silent())
    x = batches(ranks.world_size)[0][ranks.rank]
    with torch.no_grad():
        try:
            raise KeyError("something else")
        except KeyError:
            model(x)
        expected = model.result
        model(x)
    assert_same(model.result, expected)
    model.reshard()
    assert_idle(model)


@distributed(2)
def test_reset_when_nothing_happened(ranks: Ranks) -> None:
    """A reset before the first forward, and between steps, changes nothing."""
    reference = Chain()
    model = shard_blocks(copy.deepcopy(reference))
    for inputs in batches(ranks.world_size):
        model.reset_iter_state()
        loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
        model.reset_iter_state()
        assert_same_params(model, reference)
    assert_idle(model)
