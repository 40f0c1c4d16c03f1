"""While a pass lasts ranks of one host read each other's shards without asking each time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import MixedPrecisionPolicy, fully_shard, segments
from fsdp2.loans import Loan
from fsdp2.segments import Segments
from fsdp2.truce import Truce
from harness import Ranks, distributed
from models import assert_idle, assert_same, assert_same_params, data_parallel, shard_blocks


class Wide(nn.Module):
    """Weights that travel by themselves, and biases that travel packed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def batches(ranks: Ranks, steps: int) -> list[list[Tensor]]:
    """Per step an input for each rank, alike on all of them."""
    generator = torch.Generator().manual_seed(1)
    shape = ranks.world_size, 4, 256
    return [list(torch.randn(shape, generator=generator)) for _ in range(steps)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def met_by(model: nn.Module) -> Segments:
    met = segments.known(fully_shard.state(model).group.mesh.shard.group)
    assert met is not None and met.reads_peers
    return met


@contextmanager
def counted(cls: type, name: str) -> Iterator[list[Any]]:
    """The objects whose method is called meanwhile."""
    found: list[Any] = []
    original: Callable[..., Any] = getattr(cls, name)

    def count(self: Any, *args: Any) -> Any:
        found.append(self)
        return original(self, *args)

    setattr(cls, name, count)
    try:
        yield found
    finally:
        setattr(cls, name, original)


@distributed(2, 3)
def test_gathers_ask_once_a_pass(ranks: Ranks) -> None:
    """From the second pass on a gather sends no message; reductions still do, one each."""
    model = shard_blocks(Wide(), mesh=ranks.mesh())
    x = batches(ranks, 1)[0][ranks.rank]
    loss_of(model, x).backward()
    with counted(Loan, "__init__") as loans, counted(Truce, "take_back") as truces:
        for _ in range(2):
            loss_of(model, x).backward()
    assert len(loans) == 2 * 4, "one reduction a group and step"
    assert len(truces) == 2 * 2, "forward and backward of each step"
    assert not met_by(model).notes._unread
    assert_idle(model)


@distributed(2)
def test_a_pass_without_gathers_asks_nobody(ranks: Ranks) -> None:
    model = shard_blocks(Wide(), mesh=ranks.mesh(), reshard_after_forward=False)
    x = batches(ranks, 1)[0][ranks.rank]
    with torch.no_grad():
        expected = model(x)
        with counted(Segments, "number") as numbers:
            assert torch.equal(model(x), expected)
    assert not numbers


@distributed(2, 3)
@pytest.mark.parametrize("slow", ["forward", "backward"])
def test_nobody_writes_before_a_slow_rank_has_read(ranks: Ranks, slow: str) -> None:
    """The last rank sleeps in front of its gathers; the others reach the optimizer long before."""
    reference = Wide()
    model = shard_blocks(copy.deepcopy(reference), mesh=ranks.mesh())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]

    def sleep(*_: Any) -> None:
        if ranks.rank == ranks.world_size - 1:
            time.sleep(0.02)

    def sleep_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(sleep)

    for block in model.blocks:
        if slow == "forward":
            block.register_forward_pre_hook(sleep, prepend=True)
        else:
            block.register_forward_hook(sleep_in_backward)
    for inputs in batches(ranks, 4):
        with torch.no_grad():
            assert_same(model(inputs[ranks.rank]), reference(inputs[ranks.rank]))
            for each in (model, reference):
                for param in each.parameters():
                    param.mul_(1.25)
        loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@distributed(2, 3)
def test_an_optimizer_in_backward(ranks: Ranks) -> None:
    """A group's shards may be written to once its gradients are there, while others are read.

    A block that is used twice, once before and once behind another, is gathered again later.
    """

    class Twice(Wide):
        def forward(self, x: Tensor) -> Tensor:
            for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
                x = torch.relu(block(x))
            return self.head(x)

    reference = Twice()
    model = shard_blocks(copy.deepcopy(reference), mesh=ranks.mesh())

    def step(param: Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for inputs in batches(ranks, 4):
        loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
        for param in reference.parameters():
            step(param)
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2, 3)
def test_gathers_by_hand_inside_forward(ranks: Ranks) -> None:
    """They ask for themselves, and their shards may be written to behind them."""
    reference = Wide()
    model = shard_blocks(copy.deepcopy(reference), mesh=ranks.mesh())
    block, plain = model.blocks[1], reference.blocks[1]

    def change(module: nn.Module, *_: Any) -> None:
        if isinstance(module, type(block)):
            module.unshard()
            module.reshard()
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.9)

    for inputs in batches(ranks, 3):
        handles = [model.blocks[0].register_forward_hook(lambda *_: change(block))]
        handles.append(reference.blocks[0].register_forward_hook(lambda *_: change(plain)))
        with torch.no_grad():
            found, expected = model(inputs[ranks.rank]), reference(inputs[ranks.rank])
        for handle in handles:
            handle.remove()
        assert_same(found, expected)
        assert_same_params(model, reference)


@distributed(2, 3)
def test_rows_that_are_cast(ranks: Ranks) -> None:
    """Peers read float32 and cast it themselves: no copy is lent, and none is held."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    module = nn.Linear(1024, 700)  # more than one piece
    expected = {name: param.bfloat16() for name, param in module.named_parameters()}
    model = fully_shard(module, mesh=ranks.mesh(), mp_policy=policy)
    for _ in range(2):
        model.unshard()
        found = {name: getattr(model, name).detach().clone() for name in expected}
        model.reshard()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        with torch.no_grad():
            model(torch.randn(2, 1024))
    [portion] = fully_shard.state(model).group.portions
    assert portion.gather_plan is not None and portion.gather_plan.staging_nbytes == 0


def mesh_apart(ranks: Ranks) -> DeviceMesh:
    """Over a process group that no other test uses: messages are left behind in it."""
    group = dist.new_group(list(range(ranks.world_size)))
    kept.append(group)
    return DeviceMesh.from_group(group, "cpu")


kept: list[Any] = []
"""Messages may still arrive."""


@distributed(2, timeout=20)
def test_ranks_in_different_passes(ranks: Ranks) -> None:
    """A rank whose forward raised goes on alone: both say so, instead of taking what is not
    meant for them."""
    model = shard_blocks(Wide(), mesh=mesh_apart(ranks))
    x = batches(ranks, 1)[0][ranks.rank]
    loss_of(model, x).backward()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    if ranks.rank == 0:
        handle = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match="begins a forward where rank 1 begins a backward"):
            model(x)
    else:
        loss = loss_of(model, x)
        with pytest.raises(RuntimeError, match="begins a backward where rank 0 begins a forward"):
            loss.backward()


@distributed(2, 3, timeout=10)
def test_shards_that_move_on_one_rank(ranks: Ranks) -> None:
    """Its peers would read memory that it has given back: they ask again, once."""
    reference = Wide()
    model = shard_blocks(copy.deepcopy(reference), mesh=ranks.mesh())
    for step, inputs in enumerate(batches(ranks, 5)):
        if step == 2 and ranks.rank == 1:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        with counted(Loan, "__init__") as loans:
            loss_of(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, loss_of)
        assert_same_params(model, reference)
        if step:
            assert (len(loans) > 4) == (step == 2), "gathers ask when shards have moved"
        with torch.no_grad():
            for each in (model, reference):
                for param in each.parameters():
                    param.sub_(param.grad, alpha=0.1)
                    param.grad = None
    assert_idle(model)
