"""``reshard_after_forward`` as a number: backward gathers over so many neighbours only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from fsdp2.param_group import GroupState
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


def lines(events: fsdp2.Trace) -> list[str]:
    """One string an event, ``keep part root`` for example."""
    return [" ".join(str(event).split()) for event in events.events]


def group_of(module: nn.Module) -> Any:
    return fully_shard.state(module).group  # type: ignore[attr-defined]


def held_nbytes(module: nn.Module) -> int:
    """Memory of the full parameters and of kept parts of one group."""
    total = 0
    for portion in group_of(module).portions:
        if portion._full is not None:
            total += portion._full._storage.nbytes()
        if portion._part is not None:
            total += portion._part.shards._storage.nbytes()
    return total


class Stack(nn.Module):
    """Blocks with rows that divide by no number of ranks, some of them large, and a head."""

    def __init__(self, blocks: int = 2, hidden: int = 13) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 7))
            for _ in range(blocks)
        )
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def batches(steps: int, world_size: int = 4) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [list(torch.randn(world_size, 2, 7, generator=generator)) for _ in range(steps)]


def step(*models: nn.Module) -> None:
    with torch.no_grad():
        for model in models:
            for param in model.parameters():
                param -= 0.1 * param.grad  # type: ignore[operator]
                param.grad = None


# ---- Numbers


@distributed(4)
@pytest.mark.parametrize("hidden", [13, 5000])
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16)],
    ids=["fp32", "bf16 in fp32", "bf16"],
)
def test_numbers_are_those_of_freeing_everything(
    ranks: Ranks, policy: MixedPrecisionPolicy, hidden: int
) -> None:
    """Losses, gradients and parameters, small (packed) or large (direct), bit by bit."""
    plain = Stack(hidden=hidden)
    models = [
        shard_blocks(copy.deepcopy(plain), reshard_after_forward=value, mp_policy=policy)
        for value in (True, 2)
    ]
    for inputs in batches(3):
        losses = [square_loss(model, inputs[ranks.rank]) for model in models]
        assert_same(*losses)
        for loss in losses:
            loss.backward()
        assert_same_params(*models)
        step(*models)
    for model in models:
        assert_idle(model)


@distributed(4)
def test_numbers_are_those_of_one_process(ranks: Ranks) -> None:
    """And so of any number of processes, bit by bit."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for inputs in token_batches(4, 3):
        loss = next_token_loss(model, inputs[ranks.rank])
        assert_same(loss, data_parallel(reference, inputs)[ranks.rank])
        loss.backward()
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("limit", [1, 3])
def test_with_other_limits(ranks: Ranks, limit: int) -> None:
    """Few or many groups in flight change no number."""
    reference = Stack(4)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    fsdp2.set_inflight_limit(model, limit)
    for inputs in batches(3):
        square_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        step(model, reference)
    assert_idle(model)


class Mixed(nn.Module):
    """Few rows, none, no dims, integers, frozen, two storage dtypes: one group."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.randn(1, 3))
        self.three = nn.Parameter(torch.randn(3, 3))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.small = nn.Parameter(torch.randn(5).to(BF16))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.frozen)[:, self.index] @ self.three * self.scale + self.few
        return x.square().mean() + self.small.float().square().sum() + self.none.sum()


@distributed(4)
def test_parameters_of_all_kinds(ranks: Ranks) -> None:
    """Whatever their shape, dtype and place, two ranks give them back to backward as they were."""
    plain = Mixed()
    models = []
    for value in (True, 2):
        model = nn.Sequential(copy.deepcopy(plain))
        fully_shard(model[0], reshard_after_forward=value)
        models.append(fully_shard(model, reshard_after_forward=value))
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        x = torch.randn(4, 2, 3, generator=generator)[ranks.rank]
        losses = [model(x) for model in models]
        assert_same(*losses)
        for loss in losses:
            loss.backward()
        assert_same_params(*models)
    for model in models:
        assert_idle(model)


# ---- Memory and bytes


@distributed(4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
def test_only_a_part_is_held_between(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """After forward a group holds half of its full parameters, in the compute dtype."""
    model = shard_blocks(Stack(hidden=1024), reshard_after_forward=2, mp_policy=policy)
    loss = square_loss(model, batches(1)[0][ranks.rank])
    itemsize = 2 if policy.param_dtype else 4
    numel = 7 * 1024 * 2 + 1024 + 7
    for block in model.blocks:
        group = group_of(block)
        assert group.state is GroupState.PART
        assert held_nbytes(block) == sum(portion.part_nbytes for portion in group.portions)
        # Half, and up to one padded row and an alignment per parameter.
        assert numel * itemsize // 2 <= held_nbytes(block) <= numel * itemsize // 2 + 4 * 1024
    reports = {report.name: report for report in fsdp2.explain(model).groups}
    assert reports["blocks.0"].part_nbytes == held_nbytes(model.blocks[0])
    assert f"{held_nbytes(model.blocks[0]):,} B kept after forward" in str(reports["blocks.0"])
    loss.backward()
    assert all(held_nbytes(block) == 0 for block in (model, *model.blocks))
    assert_idle(model)


@distributed(4)
def test_backward_asks_only_its_neighbours(ranks: Ranks) -> None:
    """Every gather in backward sends half of what one in forward sends, to one rank of two."""
    model = shard_blocks(Stack(), reshard_after_forward=2)
    calls: list[int] = []
    for portion in [p for m in (model, *model.blocks) for p in group_of(m).portions]:
        inner = portion.transport.plan_gather
        portion.transport.plan_gather = counted(inner, calls, "all")
    inputs = batches(2)
    square_loss(model, inputs[0][ranks.rank]).backward()
    calls.clear()
    with fsdp2.trace(model) as events:
        loss = square_loss(model, inputs[1][ranks.rank])
        forward = len(calls)
        loss.backward()
    assert forward == 3
    assert len(calls) == forward, "a gather in backward went over all ranks"
    found = lines(events)
    assert sum(line.startswith("keep part") for line in found) == 3
    assert sum(line.startswith("gather") for line in found) == 6
    for module in (model, *model.blocks):
        for portion in group_of(module).portions:
            assert portion.part_axis.size == 2
            ranks_of = torch.distributed.get_process_group_ranks(portion.part_axis.group)
            assert ranks_of == ([0, 1] if ranks.rank < 2 else [2, 3])


def counted(plan_gather: Callable[..., Any], calls: list[Any], mark: object) -> Callable[..., Any]:
    def counting(start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = start(*args)
            if started is not None:
                calls.append(mark)
            return started

        return call

    def plan(*args: Any) -> Any:
        made = plan_gather(*args)
        made.start = counting(made.start)
        made.read_during = counting(made.read_during)  # of ranks that share a host
        return made

    return plan


@distributed(4)
def test_without_gradients_nothing_is_kept(ranks: Ranks) -> None:
    """A forward that no backward follows frees all, whether others did before or not."""
    model = shard_blocks(Stack(), reshard_after_forward=2)
    x = batches(1)[0][ranks.rank]
    for _ in range(2):
        with fsdp2.trace(model) as events, torch.no_grad():
            model(x)
        assert not any(line.startswith("keep part") for line in lines(events))
        assert_idle(model)
        square_loss(model, x).backward()
    with torch.inference_mode():
        model(x)
    assert_idle(model)


@distributed(4)
def test_the_schedule(ranks: Ranks) -> None:
    """Where True frees, a number keeps a part; backward gathers the same groups as with True."""
    traces = []
    for value in (True, 2):
        model = shard_blocks(Stack(), reshard_after_forward=value)
        for inputs in batches(2):
            with fsdp2.trace(model) as events:
                square_loss(model, inputs[ranks.rank]).backward()
        found = lines(events)
        half = found.index("backward root")
        traces.append([line.replace("keep part", "free") for line in found[:half]] + found[half:])
    assert traces[0] == traces[1]


# ---- Changes between


@distributed(4)
@pytest.mark.parametrize("how", ["in place", "data", "state dict"])
def test_changes_between_two_forwards_are_seen(ranks: Ranks, how: str) -> None:
    """A part that was kept for a backward which never came is not used for the next forward."""
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    x = batches(1)[0][ranks.rank]
    square_loss(model, x)  # forward only
    for each in (model, reference):
        change(each, how)
    assert_same(square_loss(model, x), square_loss(reference, x))
    model.reset_iter_state()
    assert_idle(model)


def change(model: nn.Module, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            for param in model.parameters():
                param.mul_(1.5)
        elif how == "data":
            for param in model.parameters():
                local = param.to_local() if hasattr(param, "to_local") else param
                local.mul_(1.5)
                param.add_(0)
        else:
            model.load_state_dict({name: p * 1.5 for name, p in model.state_dict().items()})


@distributed(4)
def test_two_forwards_before_backward(ranks: Ranks) -> None:
    """Both backward through the same part; the numbers are those of one process."""
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)

    def twice(m: nn.Module, x: Tensor) -> Tensor:
        return square_loss(m, x) + square_loss(m, 2 * x)

    for inputs in batches(2):
        twice(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, twice)
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(4)
def test_an_evaluation_between_forward_and_backward(ranks: Ranks) -> None:
    """It gathers from the part, and leaves backward what it needs."""
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    for inputs in batches(2):
        loss = square_loss(model, inputs[ranks.rank])
        with torch.no_grad():
            assert_same(model(inputs[0]), reference(inputs[0]))
        loss.backward()
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(4)
def test_by_hand_between_forward_and_backward(ranks: Ranks) -> None:
    """``unshard`` gathers from the part; ``reshard`` drops the part, and backward does without."""
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    for inputs in batches(2):
        loss = square_loss(model, inputs[ranks.rank])
        model.blocks[0].unshard()
        assert_same(model.blocks[0][0].weight, reference.blocks[0][0].weight)
        model.blocks[1].reshard()
        assert held_nbytes(model.blocks[1]) == 0
        loss.backward()
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(4)
def test_moving_the_model_drops_parts(ranks: Ranks) -> None:
    """``to(float64)`` after a forward: the next step is in float64 throughout."""
    model = shard_blocks(Stack(), reshard_after_forward=2)
    x = batches(1)[0][ranks.rank]
    square_loss(model, x)
    model.to(torch.float64)
    model.reset_iter_state()
    square_loss(model, x.double()).backward()
    assert model.head.weight.grad.dtype == torch.float64
    assert_idle(model)


@distributed(4)
def test_a_fault_in_between(ranks: Ranks) -> None:
    """After ``reset_iter_state`` no part is held and training goes on."""
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    inputs = batches(1)[0]

    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError("on purpose")

    handle = model.head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(inputs[0])
    handle.remove()
    model.reset_iter_state()
    assert all(held_nbytes(module) == 0 for module in (model, *model.blocks))
    square_loss(model, inputs[ranks.rank]).backward()
    data_parallel(reference, inputs, square_loss)
    assert_same_params(model, reference)
    assert_idle(model)


# ---- Together with other features


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@distributed(4)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(ranks: Ranks, reentrant: bool) -> None:
    """The recomputed forward and its backward share one gather; numbers as without."""
    reference = Checkpointed()
    reference.reentrant = reentrant
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    for inputs in batches(3):
        square_loss(model, inputs[ranks.rank].clone()).backward()
        data_parallel(reference, [x.clone() for x in inputs], square_loss)
        assert_same_params(model, reference)
        step(model, reference)
        assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("all_or", ["sync", "nothing"])
def test_accumulation(ranks: Ranks, all_or: str) -> None:
    """With and without communication in between."""
    plain = Stack()
    models = [
        shard_blocks(copy.deepcopy(plain), reshard_after_forward=value) for value in (True, 2)
    ]
    for i, inputs in enumerate(batches(3)):
        for model in models:
            model.set_requires_gradient_sync(all_or == "sync" or i == 2)
            square_loss(model, inputs[ranks.rank]).backward()
    assert_same_params(*models)
    for model in models:
        assert_idle(model)


@distributed(4)
def test_frozen_parameters(ranks: Ranks) -> None:
    """Frozen weights are needed by backward and kept in part like others."""
    reference = Stack()
    reference.blocks[1].requires_grad_(False)
    reference.blocks[0][0].weight.requires_grad_(False)
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    for inputs in batches(2):
        square_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(4)
def test_kept_after_backward(ranks: Ranks) -> None:
    """With ``set_reshard_after_backward(False)`` full parameters stay, and are seen to be stale."""
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=2)
    model.set_reshard_after_backward(False)
    for inputs in batches(3):
        square_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        step(model, reference)
    for module in (model, *model.blocks):
        module.reshard()
    assert_idle(model)


@distributed(4)
def test_a_mesh_that_the_number_does_not_fit(ranks: Ranks) -> None:
    """Beside four ranks, a parameter that only two share: nothing of it is kept, all is right."""
    pairs = ranks.mesh(2, 2, names=("replicate", "shard"))
    reference = nn.Linear(5, 7)
    model = copy.deepcopy(reference)
    bias = model.bias
    fully_shard(
        model,
        mesh=ranks.mesh(),
        reshard_after_forward=2,
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), pairs) if p is bias else None,
    )
    x = torch.ones(2, 5)
    square_loss(model, x).backward()
    square_loss(reference, x).backward()
    assert_same_params(model, reference)
    assert_idle(model)


# ---- Numbers with another meaning


@distributed(4)
@pytest.mark.parametrize(("value", "same_as"), [(1, False), (4, True)])
def test_one_keeps_all_and_all_keeps_none(ranks: Ranks, value: int, same_as: bool) -> None:
    """1 is False and the number of ranks is True, in numbers and in the schedule."""
    traces = []
    plain = Stack()
    models = []
    for each in (value, same_as):
        model = shard_blocks(copy.deepcopy(plain), reshard_after_forward=each)
        for inputs in batches(2):
            model.zero_grad()
            with fsdp2.trace(model) as events:
                square_loss(model, inputs[ranks.rank]).backward()
        traces.append(lines(events))
        models.append(model)
    assert traces[0] == traces[1]
    assert_same_params(*models)


@distributed(4)
@pytest.mark.parametrize("value", [3, 8, 0, -2, 5])
def test_numbers_that_do_not_divide(ranks: Ranks, value: int) -> None:
    """They are named together with the number of ranks."""
    with pytest.raises(ValueError, match=rf"reshard_after_forward={value}.*factor of 4"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=value)


@distributed(2)
@pytest.mark.parametrize("value", [1.5, "2"])
def test_what_is_no_number(ranks: Ranks, value: Any) -> None:
    """Neither a bool nor an int."""
    with pytest.raises((TypeError, ValueError), match="reshard_after_forward is a bool"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=value)


@distributed(4)
def test_as_in_pytorch(ranks: Ranks) -> None:
    """PyTorch's gradients with the same number, to rounding of its sums."""
    plain = Stack()
    models = [
        shard_blocks(copy.deepcopy(plain), shard, reshard_after_forward=2)
        for shard in (fully_shard, torch_fully_shard)
    ]
    for inputs in batches(2):
        for model in models:
            square_loss(model, inputs[ranks.rank]).backward()
        assert_same_params(*models, rtol=1e-5, atol=1e-6)
        step(*models)


@distributed(4)
def test_parameters_are_shards_in_between(ranks: Ranks) -> None:
    """Between forward and backward listings give the shards over all four ranks, unlike PyTorch."""
    model = shard_blocks(Stack(), reshard_after_forward=2)
    loss = square_loss(model, batches(1)[0][ranks.rank])
    for param in model.parameters():
        assert param.device_mesh == ranks.mesh()
    assert model.blocks[0][0].weight.to_local().shape == ([4, 4, 4, 1][ranks.rank], 7)
    loss.backward()
