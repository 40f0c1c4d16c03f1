"""What each setter of ``FSDPModule`` does: to the recorded schedule, or to the numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy, ReduceScatter, fully_shard
from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    by_messages,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
    whole,
)

HYBRID = ("replicate", "shard")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def lines(events: fsdp2.Trace) -> list[str]:
    """One string an event, ``gather root (ahead)`` for example."""
    return [" ".join(str(event).split()) for event in events.events]


def traced_step(model: nn.Module, tokens: Tensor) -> tuple[list[str], list[str]]:
    """The events of one forward and those of its backward."""
    with fsdp2.trace(model) as events:
        loss = next_token_loss(model, tokens)
        forward = lines(events)
        events.clear()
        loss.backward()
    return forward, lines(events)


class Plain(nn.Module):
    """A gradient that the test chooses: that of ``weight`` is the input."""

    def __init__(self, rows: int = 5, columns: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def whole_numbers(world_size: int, rows: int = 5, columns: int = 3) -> list[Tensor]:
    """An input per rank, of small integers: sums of them are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(7)
    shape = rows, columns
    return [torch.randint(1, 12, shape, generator=generator).float() for _ in range(world_size)]


# ---- All of them


class SumOverGloo(ReduceScatter):
    """Notes which process group it is given."""

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.groups.append(group)
        pieces = list(input_tensor.chunk(group.size()))
        return dist.reduce_scatter(output_tensor, pieces, op, group, async_op)


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "set_all_reduce_hook": lambda m: m.set_all_reduce_hook(lambda gradients: None),
    "set_allocate_memory_from_process_group_for_comm": lambda m: (
        m.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "set_force_sum_reduction_for_comms": lambda m: m.set_force_sum_reduction_for_comms(True),
    "set_gradient_divide_factor": lambda m: m.set_gradient_divide_factor(2.0),
    "set_is_last_backward": lambda m: m.set_is_last_backward(True),
    "set_modules_to_backward_prefetch": lambda m: m.set_modules_to_backward_prefetch([m.blocks[0]]),
    "set_modules_to_forward_prefetch": lambda m: m.set_modules_to_forward_prefetch([m.blocks[1]]),
    "set_post_optim_event": lambda m: m.set_post_optim_event(torch.Event("cpu")),
    "set_reduce_scatter_divide_factor": lambda m: m.set_reduce_scatter_divide_factor(2.0),
    "set_reduce_scatter_max_input_buffers": lambda m: m.set_reduce_scatter_max_input_buffers(3),
    "set_reduce_scatter_unused_params": lambda m: m.set_reduce_scatter_unused_params(True),
    "set_requires_all_reduce": lambda m: m.set_requires_all_reduce(False),
    "set_requires_gradient_sync": lambda m: m.set_requires_gradient_sync(True),
    "set_reshard_after_backward": lambda m: m.set_reshard_after_backward(False),
    "set_reshard_after_forward": lambda m: m.set_reshard_after_forward(False),
    "set_separate_reduce_scatter_group": lambda m: m.set_separate_reduce_scatter_group(),
    "set_unshard_in_backward": lambda m: m.set_unshard_in_backward(True),
    "_set_unshard_async_op": lambda m: m._set_unshard_async_op(True),
}
"""Values that must not change the numbers of two ranks on a 1-D mesh."""

OTHERS = {"set_custom_all_gather", "set_custom_reduce_scatter", "set_symm_mem_for_comm"}


def test_every_setter_is_tested() -> None:
    """Whoever adds one adds its harmless value here."""
    found = {name for name in dir(FSDPModule) if name.startswith("set_")}
    assert found == {name for name in HARMLESS if name.startswith("set_")} | OTHERS


@distributed(2)
@pytest.mark.parametrize("when", ["before the first step", "between steps"])
@pytest.mark.parametrize("setter", HARMLESS)
def test_harmless_values_change_no_number(ranks: Ranks, setter: str, when: str) -> None:
    """Losses, gradients and parameters stay those of one process, bit by bit."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step, inputs in enumerate(token_batches(2, 3)):
        if step == (when == "between steps"):
            HARMLESS[setter](model)
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        assert_same(loss, data_parallel(reference, inputs)[ranks.rank], "loss")
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize(
    "setter",
    [
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
        "set_reshard_after_backward",
        "set_reduce_scatter_unused_params",
    ],
)
def test_recursion_is_by_keyword(ranks: Ranks, setter: str) -> None:
    """As in PyTorch ``recurse`` cannot be given by position."""
    model = shard_blocks(Net())
    with pytest.raises(TypeError):
        getattr(model, setter)(True, False)
    getattr(model, setter)(True, recurse=False)


# ---- Reductions over replicas


def replicated_sums(model: nn.Module, inputs: list[Tensor], splits: int) -> None:
    """``.grad`` as hybrid sharding adds it up: inside each replica, then over the replicas."""
    params = list(model.parameters())
    before = [param.grad for param in params]
    per_rank: list[list[Any]] = []
    for each in inputs:
        model.zero_grad()
        next_token_loss(model, each).backward()
        per_rank.append([param.grad for param in params])
    for i, param in enumerate(params):
        sums = []
        for first in range(0, len(inputs), splits):
            total = per_rank[first][i]
            for rank in range(first + 1, first + splits):
                total = total + per_rank[rank][i]
            sums.append(total)
        mean = sum(sums[1:], sums[0]) / len(inputs)
        old = before[i]
        param.grad = mean if old is None else old + mean


@distributed(4)
def test_put_off_all_reduces_only_some_groups(ranks: Ranks) -> None:
    """``set_requires_all_reduce(False, recurse=False)`` keeps one group's sums in each replica."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), mesh=ranks.mesh(2, 2, names=HYBRID))
    [batch] = token_batches(4, 1)
    model.blocks[0].set_requires_all_reduce(False, recurse=False)
    next_token_loss(model, batch[ranks.rank]).backward()
    for name, param in model.named_parameters():
        assert (param.grad is None) == name.startswith("blocks.0."), name
    model.blocks[0].set_requires_all_reduce(True, recurse=False)
    next_token_loss(model, batch[ranks.rank]).backward()
    for _ in range(2):
        replicated_sums(reference, batch, 2)
    assert_same_params(model, reference, rtol=1e-6, atol=1e-7)
    assert_idle(model)


@distributed(4)
def test_put_off_sums_travel_once(ranks: Ranks) -> None:
    """Every micro-batch reduces each group once, and so does the last one."""
    model = shard_blocks(Net(), mesh=ranks.mesh(2, 2, names=HYBRID))
    for i, batch in enumerate(token_batches(4, 3)):
        model.set_requires_all_reduce(i == 2)
        _, backward = traced_step(model, batch[ranks.rank])
        reduced = [line for line in backward if line.startswith("reduce ")]
        assert reduced == ["reduce blocks.1", "reduce blocks.0", "reduce root"]


@distributed(4)
@pytest.mark.parametrize("reduced", [None, FP32])
@pytest.mark.parametrize("param_dtype", [None, BF16])
def test_all_three_ways_to_accumulate_together(
    ranks: Ranks, reduced: torch.dtype | None, param_dtype: torch.dtype | None
) -> None:
    """Kept full, summed in a replica, summed over all: nothing is lost or counted twice."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduced)
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID), mp_policy=policy)
    inputs = whole_numbers(4)
    for sync, all_reduce in [(False, True), (True, False), (False, False), (True, False)]:
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(all_reduce)
        model(inputs[ranks.rank]).backward()
        assert model.weight.grad is None
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model(inputs[ranks.rank]).backward()
    dtype = reduced or param_dtype or FP32
    total = 5 * torch.stack(inputs).sum(0)
    assert_same(model.weight.grad, total.to(dtype).div(4).float())
    assert_idle(model)


@distributed(4)
def test_last_micro_batch_that_uses_nothing(ranks: Ranks) -> None:
    """What replicas keep back is handed over although the last backward skips the module."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Plain(), Plain()

        def forward(self, x: Tensor, use_b: bool) -> Tensor:
            y = self.a(x)
            return y + self.b(x) if use_b else y

    model = Two()
    mesh = ranks.mesh(2, 2, names=HYBRID)
    for part in (model.a, model.b, model):
        fully_shard(part, mesh=mesh)
    inputs = whole_numbers(4)
    model.set_requires_all_reduce(False)
    model(inputs[ranks.rank], True).backward()
    model.set_requires_all_reduce(True)
    model(inputs[ranks.rank], False).backward()
    total = torch.stack(inputs).sum(0) / 4
    assert_same(model.a.weight.grad, 2 * total)
    assert_same(model.b.weight.grad, total)
    assert_idle(model)


@distributed(4)
def test_reset_drops_what_replicas_kept_back(ranks: Ranks) -> None:
    """``reset_iter_state`` with partial sums: only what follows counts."""
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID))
    inputs = whole_numbers(4)
    model.set_requires_all_reduce(False)
    model(inputs[ranks.rank]).backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, torch.stack(inputs).sum(0) / 4)
    assert_idle(model)


@distributed(4)
def test_reset_drops_what_was_kept_full(ranks: Ranks) -> None:
    """The same for gradients that were kept without any communication."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID), mp_policy=policy)
    inputs = whole_numbers(4)
    model.set_requires_gradient_sync(False)
    model(inputs[ranks.rank]).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, torch.stack(inputs).sum(0) / 4)
    assert_idle(model)


@distributed(2)
def test_all_reduces_mean_nothing_without_replicas(ranks: Ranks) -> None:
    """On a 1-D mesh ``set_requires_all_reduce(False)`` keeps nothing back."""
    model = fully_shard(Plain())
    model.set_requires_all_reduce(False)
    inputs = whole_numbers(2)
    model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, torch.stack(inputs).sum(0) / 2)


# ---- The hook on reduced gradients


@distributed(4)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_a_hook_makes_hybrid_sharding(ranks: Ranks, reshard: bool | int) -> None:
    """On a 1-D mesh, a hook that averages over replicas gives the gradients of a 2-D mesh."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    replicas = mesh.get_group("replicate")
    model = Net()
    reference = copy.deepcopy(model)
    native = shard_blocks(copy.deepcopy(model), mesh=mesh)
    shard_blocks(model, mesh=mesh["shard"], reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(
                lambda gradients: dist.all_reduce(gradients, dist.ReduceOp.AVG, replicas)
            )
    for batch in token_batches(4, 2):
        for each in (model, native):
            next_token_loss(each, batch[ranks.rank]).backward()
        replicated_sums(reference, batch, 2)
        assert_same_params(model, reference)
        assert_same_params(native, reference)
        for each in (model, native, reference):
            each.zero_grad()


@distributed(2, 3)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
def test_what_a_hook_is_given(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Once per group and backward: a flat tensor, divided, in the reduce dtype, this rank's."""
    model = shard_blocks(Net(), mp_policy=policy)
    calls: list[Tensor] = []
    model.blocks[0].set_all_reduce_hook(lambda gradients: calls.append(gradients.clone()))
    for batch in token_batches(ranks.world_size, 2):
        calls.clear()
        model.zero_grad()
        next_token_loss(model, batch[ranks.rank]).backward()
        [gradients] = calls
        assert gradients.dtype == FP32
        assert gradients.ndim == 1
        own = [p.grad.to_local() for p in model.blocks[0].parameters()]
        torch.testing.assert_close(
            gradients.square().sum(), sum(g.square().sum() for g in own), rtol=1e-5, atol=0
        )


@distributed(2, 3, 4)
@pytest.mark.parametrize("columns", [3, 30_000])
def test_padding_in_a_hook_is_zero(ranks: Ranks, columns: int) -> None:
    """Where rows do not divide, a hook sees zeros behind them: norms and sums are right.

    Fresh memory is filled with NaN in this test. Small gradients travel packed, large ones
    do not: both are looked at.
    """
    torch.use_deterministic_algorithms(True)
    try:
        model = fully_shard(Plain(5, columns))
        seen: list[Tensor] = []
        model.set_all_reduce_hook(lambda gradients: seen.append(gradients.clone()))
        model(torch.full((5, columns), 2.0)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    [gradients] = seen
    local = model.weight.grad.to_local()
    assert_same(local, torch.full_like(local, 2.0))
    assert gradients.sum().item() == local.sum().item()


@distributed(4)
def test_a_hook_runs_behind_the_native_all_reduce(ranks: Ranks) -> None:
    """On a 2-D mesh it sees the mean over all ranks, and what it writes is the gradient."""
    model = fully_shard(Plain(4, 3), mesh=ranks.mesh(2, 2, names=HYBRID))
    inputs = whole_numbers(4, 4)
    mean = torch.stack(inputs).sum(0) / 4
    seen: list[Tensor] = []

    def double(gradients: Tensor) -> None:
        seen.append(gradients.clone())
        gradients.mul_(2)

    model.set_all_reduce_hook(double)
    model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, 2 * mean)
    assert_same(seen[0], mean.chunk(2)[ranks.rank % 2].flatten())


@distributed(4)
def test_a_hook_waits_for_the_last_micro_batch(ranks: Ranks) -> None:
    """While sums are put off there is nothing for the hook to see yet."""
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID))
    calls: list[Tensor] = []
    model.set_all_reduce_hook(calls.append)
    for is_last in (False, True):
        model.set_requires_all_reduce(is_last)
        model(whole_numbers(4)[ranks.rank]).backward()
        assert len(calls) == is_last, (is_last, calls)


@distributed(1)
def test_a_hook_of_one_rank(ranks: Ranks) -> None:
    """Where nothing is communicated the hook still has its say."""
    model = fully_shard(Plain())
    [x] = whole_numbers(1)
    model.set_all_reduce_hook(lambda gradients: gradients.mul_(3))
    model(x).backward()
    assert_same(model.weight.grad, 3 * x)


@distributed(4)
def test_no_stream_where_sums_over_replicas_have_one(ranks: Ranks) -> None:
    """PyTorch's words, and only on a mesh with replicas."""
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID))
    stream: Any = object()
    with pytest.raises(ValueError, match="^stream cannot be set when using native HSDP$"):
        model.set_all_reduce_hook(print, stream=stream)
    with pytest.raises(TypeError, match="callable"):
        model.set_all_reduce_hook(None)  # type: ignore[arg-type]


@distributed(2)
def test_a_parameter_that_nobody_used_under_a_hook(ranks: Ranks) -> None:
    """The hook may bring gradients from elsewhere, so that zeros are what it gets."""
    model = fully_shard(Branches())
    model.set_all_reduce_hook(lambda gradients: gradients.add_(1))
    model(torch.ones(2, 3), "left").backward()
    assert_same(model.right.weight.grad, torch.ones(5, 3))


# ---- Divide factors


POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16 in fp32": MixedPrecisionPolicy(BF16, FP32),
    "bf16": MixedPrecisionPolicy(BF16),
    "fp32 in bf16": MixedPrecisionPolicy(None, BF16),
}


@distributed(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 10.0])
def test_divide_factor_of_any_mesh(
    ranks: Ranks, shape: tuple[int, ...], policy: str, factor: float | None
) -> None:
    """The sum over all ranks, divided once by the factor: 1.0 is the sum, None the mean."""
    names = HYBRID if len(shape) == 2 else None
    mesh = ranks.mesh(*shape, names=names)
    check_factor(ranks, fully_shard(Plain(), mesh=mesh, mp_policy=POLICIES[policy]), policy, factor)


@distributed(1, 2, 3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 10.0])
def test_divide_factor_of_any_number_of_ranks(
    ranks: Ranks, policy: str, factor: float | None
) -> None:
    """One rank divides too."""
    check_factor(ranks, fully_shard(Plain(), mp_policy=POLICIES[policy]), policy, factor)


def check_factor(ranks: Ranks, model: Any, policy: str, factor: float | None) -> None:
    inputs = whole_numbers(ranks.world_size)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(inputs[ranks.rank]).backward()
    chosen = POLICIES[policy]
    dtype = chosen.reduce_dtype or chosen.param_dtype or FP32
    total = torch.stack(inputs).sum(0).to(dtype)
    assert_same(model.weight.grad, total.div(factor or ranks.world_size).float())
    assert_idle(model)


@distributed(1, 2, 4)
def test_divide_factor_of_float16(ranks: Ranks) -> None:
    """fp16 sums are divided before they are added; powers of two stay exact."""
    policy = MixedPrecisionPolicy(FP16)
    model = fully_shard(Plain(), mp_policy=policy)
    model.set_reduce_scatter_divide_factor(8.0)
    inputs = whole_numbers(ranks.world_size)
    model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, torch.stack(inputs).sum(0) / 8)


@distributed(4)
def test_divide_factor_after_put_off_sums(ranks: Ranks) -> None:
    """Micro-batches that were put off are divided by the factor as well, once."""
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID))
    model.set_gradient_divide_factor(2.0)
    inputs = whole_numbers(4)
    for is_last in (False, True):
        model.set_requires_all_reduce(is_last)
        model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, torch.stack(inputs).sum(0))


@distributed(2)
def test_divide_factor_is_one_groups_own(ranks: Ranks) -> None:
    """As in PyTorch it does not reach modules below."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    theirs = copy.deepcopy(model)
    pair = [(model, fully_shard), (theirs, torch_fully_shard)]
    for each, shard in pair:
        shard(each[0])
        shard(each)
    model.set_gradient_divide_factor(1.0)
    for each in (model, theirs):
        each(torch.ones(2, 3)).sum().backward()
    assert_same(model[0].weight.grad, theirs[0].weight.grad)
    assert_same(model[1].weight.grad, 2 * whole(theirs[1].weight.grad))


@distributed(2)
@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_divide_factor_must_be_positive(ranks: Ranks, factor: float) -> None:
    """Also not-a-number is refused."""
    with pytest.raises(ValueError, match="positive"):
        fully_shard(Plain()).set_gradient_divide_factor(factor)


@distributed(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_forced_sums_change_nothing(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Gradients are summed by communication in any case."""
    mesh = ranks.mesh(*shape, names=HYBRID if len(shape) == 2 else None)
    model = fully_shard(Plain(), mesh=mesh)
    inputs = whole_numbers(4)
    for enable in (True, False):
        model.set_force_sum_reduction_for_comms(enable)
        model(inputs[ranks.rank]).backward()
        assert_same(model.weight.grad, torch.stack(inputs).sum(0) / 4)
        model.zero_grad()


# ---- How many reductions are under way


class Chain(nn.Module):
    """Equal blocks, which share staging memory, and a head."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(blocks))
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def most_under_way(events: fsdp2.Trace, end: str) -> int:
    """How many reductions had begun and not come to ``end``, at most."""
    most = now = 0
    for event in events.events:
        now += (event.name == "reduce") - (event.name == end)
        most = max(most, now)
    return most


@distributed(2, 3)
@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("when", ["before", "after"])
def test_more_reductions_at_once(ranks: Ranks, count: int, when: str) -> None:
    """Whatever the number of buffers, gradients are those of one process, bit by bit."""
    reference = Chain()
    with by_messages():
        model = shard_blocks(copy.deepcopy(reference))
    if when == "before":
        model.set_reduce_scatter_max_input_buffers(count)
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        inputs = list(torch.randn(ranks.world_size, 2, 5, generator=generator))
        with fsdp2.trace(model) as events:
            square_loss(model, inputs[ranks.rank]).backward()
        if step or when == "before":
            # The next one begins before the oldest is waited for.
            assert most_under_way(events, "reduced") == min(count + 1, 6), str(events)
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        model.set_reduce_scatter_max_input_buffers(count)
        for each in (model, reference):
            each.zero_grad()
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("count", [1, 3])
def test_more_reductions_at_once_with_replicas(ranks: Ranks, count: int) -> None:
    """Sums of one group wait for replicas while those of the next are exchanged."""
    model = Chain()
    reference = copy.deepcopy(model)
    mesh = ranks.mesh(2, 2, names=HYBRID)
    with by_messages():
        shard_blocks(model, mesh=mesh)
    model.set_reduce_scatter_max_input_buffers(count)
    inputs = list(torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(3)))
    for _ in range(2):
        model.zero_grad()
        with fsdp2.trace(model) as events:
            square_loss(model, inputs[ranks.rank]).backward()
    assert most_under_way(events, "summed") == count + 1, str(events)
    data_parallel(reference, inputs, square_loss)
    assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_lent_gradients_are_those_of_so_many_groups(ranks: Ranks, count: int) -> None:
    """Ranks of one host read them in place: what is under way ends before the next begins."""
    reference = Chain()
    model = shard_blocks(copy.deepcopy(reference))
    model.set_reduce_scatter_max_input_buffers(count)
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        inputs = list(torch.randn(2, 2, 5, generator=generator))
        with fsdp2.trace(model) as events:
            square_loss(model, inputs[ranks.rank]).backward()
        if step:
            assert most_under_way(events, "reduced") == min(count, 6), str(events)
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        for each in (model, reference):
            each.zero_grad()
    assert_idle(model)


@distributed(2)
def test_the_largest_number_below_a_root_holds(ranks: Ranks) -> None:
    """A block that asks for fewer does not take them away from the root, at any time."""
    with by_messages():
        model = shard_blocks(Chain())
    x = torch.ones(2, 5)
    model.set_reduce_scatter_max_input_buffers(3)
    for _ in range(3):
        with fsdp2.trace(model) as events:
            square_loss(model, x).backward()
        assert most_under_way(events, "reduced") == 4, str(events)
        model.blocks[0].set_reduce_scatter_max_input_buffers(1)


@distributed(2)
@pytest.mark.parametrize(
    ("count", "error"),
    [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_number_of_buffers_is_checked(ranks: Ranks, count: Any, error: type) -> None:
    """PyTorch's types of exception."""
    with pytest.raises(error):
        fully_shard(Plain()).set_reduce_scatter_max_input_buffers(count)


@distributed(2, 3)
def test_a_fault_with_several_reductions_under_way(ranks: Ranks) -> None:
    """After ``reset_iter_state`` no message of the interrupted backward is left behind."""
    reference = Chain()
    model = shard_blocks(copy.deepcopy(reference))
    model.set_reduce_scatter_max_input_buffers(3)
    inputs = list(torch.randn(ranks.world_size, 2, 5, generator=torch.Generator().manual_seed(3)))
    square_loss(model, inputs[ranks.rank]).backward()
    model.zero_grad()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    def let_backward_fail(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.blocks[1].register_forward_hook(let_backward_fail)
    loss = square_loss(model, inputs[ranks.rank])
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    del loss
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    square_loss(model, inputs[ranks.rank]).backward()
    data_parallel(reference, inputs, square_loss)
    assert_same_params(model, reference)
    assert_idle(model)


# ---- Unused parameters


class Branches(nn.Module):
    """Two layers in one group, of which forward uses those that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Plain(), Plain()

    def forward(self, x: Tensor, which: str) -> Tensor:
        total = torch.zeros((), requires_grad=True) * 1
        if "left" in which:
            total = total + (self.left.weight[0] * x).sum()
        if "right" in which:
            total = total + (self.right.weight[0] * x).sum()
        return total


@distributed(1, 2, 4)
@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "bf16 in fp32"])
def test_unused_parameters(ranks: Ranks, fills: bool, policy: str) -> None:
    """Zeros in the storage dtype if asked for, else nothing."""
    check_unused(fully_shard(Branches(), mp_policy=POLICIES[policy]), fills)


@distributed(4)
@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_unused_parameters_with_replicas(ranks: Ranks, fills: bool, shape: tuple[int, int]) -> None:
    """The same on any mesh."""
    check_unused(fully_shard(Branches(), mesh=ranks.mesh(*shape, names=HYBRID)), fills)


def check_unused(model: Any, fills: bool) -> None:
    model.set_reduce_scatter_unused_params(fills)
    model(torch.ones(2, 3), "left").backward()
    assert model.left.weight.grad is not None
    found = whole(model.right.weight.grad)
    if fills:
        assert_same(found, torch.zeros(5, 3))
    else:
        assert found is None
    assert_idle(model)


@distributed(2)
def test_unused_parameters_as_in_pytorch(ranks: Ranks) -> None:
    """With the switch on, ranks that use different parameters get PyTorch's gradients."""
    pair = []
    for shard in (fully_shard, torch_fully_shard):
        model = shard(Branches())
        model.set_reduce_scatter_unused_params(True)
        model(torch.ones(2, 3), ["left", "right"][ranks.rank]).backward()
        pair.append(model)
    assert_same_params(*pair)
    assert_same(pair[0].left.weight.grad[0], torch.ones(3))


@distributed(2)
def test_unused_parameters_keep_an_older_gradient(ranks: Ranks) -> None:
    """Zeros are added to what is there, not put in its place."""
    model = fully_shard(Branches())
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(2, 3), "left right").backward()
    before = whole(model.right.weight.grad)
    model(torch.ones(2, 3), "left").backward()
    assert_same(model.right.weight.grad, before)


# ---- Process groups


@distributed(2, 3)
def test_separate_group_for_reductions(ranks: Ranks) -> None:
    """On, on again, off, off again: the same numbers as one process, bit by bit."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    enables = [True, True, False, False, True]
    for enable, inputs in zip(enables, token_batches(ranks.world_size, len(enables))):
        model.set_separate_reduce_scatter_group(enable)
        model.zero_grad()
        reference.zero_grad()
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("first", ["custom", "separate"])
def test_reductions_really_use_the_separate_group(ranks: Ranks, first: str) -> None:
    """Seen from a custom reduce-scatter, in whatever order the two are set."""
    mesh = ranks.mesh()
    model = fully_shard(Plain(), mesh=mesh)
    comm = SumOverGloo()
    if first == "separate":
        model.set_separate_reduce_scatter_group()
    model.set_custom_reduce_scatter(comm)
    if first == "custom":
        model.set_separate_reduce_scatter_group()
    model(torch.ones(5, 3)).backward()
    model.set_separate_reduce_scatter_group(False)
    model(torch.ones(5, 3)).backward()
    separate, usual = comm.groups
    assert usual is mesh.get_group()
    assert separate is not mesh.get_group()
    assert dist.get_process_group_ranks(separate) == [0, 1]


@distributed(4)
def test_separate_group_with_replicas(ranks: Ranks) -> None:
    """Each half of the ranks makes a group of its own."""
    model = fully_shard(Plain(), mesh=ranks.mesh(2, 2, names=HYBRID))
    model.set_separate_reduce_scatter_group()
    inputs = whole_numbers(4)
    model(inputs[ranks.rank]).backward()
    assert_same(model.weight.grad, torch.stack(inputs).sum(0) / 4)


@distributed(1, 2)
def test_symmetric_memory_is_refused(ranks: Ranks) -> None:
    """With the reason, and what to do instead."""
    with pytest.raises(NotImplementedError, match="no staging buffer.*set_custom_all_gather"):
        fully_shard(Plain()).set_symm_mem_for_comm()


@distributed(2)
@pytest.mark.parametrize("setter", ["set_custom_all_gather", "set_custom_reduce_scatter"])
def test_memory_of_the_group_and_custom_collectives_exclude_each_other(
    ranks: Ranks, setter: str
) -> None:
    """Both would allocate. A custom collective replaces the group's memory, not the reverse."""
    model = fully_shard(Plain())
    model.set_allocate_memory_from_process_group_for_comm(True)
    getattr(model, setter)(SumOverGloo())
    with pytest.raises(AssertionError, match="cannot be used together"):
        model.set_allocate_memory_from_process_group_for_comm(True)


# ---- The schedule


def gathers(events: list[str]) -> list[str]:
    return sorted(line.split()[1] for line in events if line.startswith("gather"))


def freed(events: list[str]) -> list[str]:
    return sorted(line.split()[1] for line in events if line.startswith("free"))


ALL = ["blocks.0", "blocks.1", "root"]


@distributed(2)
@pytest.mark.parametrize("made_with", [True, False, None])
@pytest.mark.parametrize("recurse", [True, False])
def test_reshard_after_forward(ranks: Ranks, made_with: bool | None, recurse: bool) -> None:
    """It overrides what ``fully_shard`` was told, before the first step and later."""
    model = shard_blocks(Net(), reshard_after_forward=made_with)
    [inputs] = token_batches(2, 1)
    for value in (False, True, False, True):
        model.set_reshard_after_forward(value, recurse)
        forward, backward = traced_step(model, inputs[ranks.rank])
        blocks_free = value if recurse else made_with is not False
        expected = [n for n in ALL if (value if n == "root" else blocks_free)]
        assert freed(forward) == expected, (value, freed(forward))
        assert gathers(backward) == expected
        assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("value", [True, False])
def test_reshard_after_forward_overrides_a_number(ranks: Ranks, value: bool) -> None:
    """After ``reshard_after_forward=2``, True frees all and False keeps all; no part is kept."""
    model = shard_blocks(Net(), reshard_after_forward=2)
    [inputs] = token_batches(4, 1)
    forward, _ = traced_step(model, inputs[ranks.rank])
    assert sum(line.startswith("keep part") for line in forward) == 3
    model.set_reshard_after_forward(value)
    forward, backward = traced_step(model, inputs[ranks.rank])
    assert not any(line.startswith("keep part") for line in forward)
    assert freed(forward) == gathers(backward) == (ALL if value else [])
    assert_idle(model)


@distributed(2)
def test_reshard_after_forward_is_a_bool(ranks: Ranks) -> None:
    """A number there would be read as True."""
    with pytest.raises(ValueError, match="bool"):
        fully_shard(Plain()).set_reshard_after_forward(2)  # type: ignore[arg-type]


@distributed(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_reshard_after_backward(ranks: Ranks, recurse: bool) -> None:
    """What is kept after backward is not gathered in the next forward."""
    model = shard_blocks(Net())
    [inputs] = token_batches(2, 1)
    traced_step(model, inputs[ranks.rank])
    kept = ALL if recurse else ["root"]
    model.set_reshard_after_backward(False, recurse=recurse)
    _, backward = traced_step(model, inputs[ranks.rank])
    assert freed(backward) == [n for n in ALL if n not in kept]
    forward, _ = traced_step(model, inputs[ranks.rank])
    assert gathers(forward) == [n for n in ALL if n not in kept]
    model.set_reshard_after_backward(True, recurse=recurse)
    traced_step(model, inputs[ranks.rank])
    assert_idle(model)


class Looked(nn.Module):
    """An embedding in a group of its own, whose backward does not read its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@distributed(2)
def test_unshard_in_backward(ranks: Ranks) -> None:
    """Off, the group is not gathered in backward; gradients are the same."""
    reference = Looked()
    model = copy.deepcopy(reference)
    fully_shard(model.embedding)
    fully_shard(model)
    for inputs, value in zip(token_batches(2, 4), (True, False, False, True)):
        model.embedding.set_unshard_in_backward(value)
        _, backward = traced_step(model, inputs[ranks.rank])
        assert gathers(backward) == (["embedding"] if value else [])
        data_parallel(reference, inputs)
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(2)
def test_last_backward(ranks: Ranks) -> None:
    """Before the last one, the newest reduction is not waited for: that of the embedding."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    [inputs] = token_batches(2, 1)
    model.set_is_last_backward(False)
    _, backward = traced_step(model, inputs[ranks.rank])
    assert "reduced root" not in backward
    model.set_is_last_backward(True)
    _, backward = traced_step(model, inputs[ranks.rank])
    assert backward.count("reduced root") == 2
    for _ in range(2):
        data_parallel(reference, inputs)
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_prefetch_lists(ranks: Ranks) -> None:
    """What is listed is gathered before the module computes, whatever the limit says."""
    reference = Net(blocks=3)
    model = shard_blocks(copy.deepcopy(reference))
    fsdp2.set_inflight_limit(model, 1)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.set_modules_to_backward_prefetch(list(model.blocks))
    for inputs in token_batches(2, 2):
        forward, backward = traced_step(model, inputs[ranks.rank])
        for events in (forward, backward):
            listed = [line for line in events if line.endswith("(as listed)")]
            assert listed == [f"gather blocks.{i} (as listed)" for i in range(3)]
            assert not [line for line in events if line.endswith("(ahead)")]
        data_parallel(reference, inputs)
        assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize(
    "setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"]
)
def test_prefetch_lists_hold_sharded_modules(ranks: Ranks, setter: str) -> None:
    """A module without ``fully_shard`` is an error of the call."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="Linear"):
        getattr(model, setter)([model[0]])


@distributed(2)
def test_unshards_are_asynchronous_already(ranks: Ranks) -> None:
    """``_set_unshard_async_op`` leaves the schedule alone."""
    model = shard_blocks(Net())
    [inputs] = token_batches(2, 1)
    traced_step(model, inputs[ranks.rank])
    before = traced_step(model, inputs[ranks.rank])
    model._set_unshard_async_op(True)
    assert traced_step(model, inputs[ranks.rank]) == before


@distributed(1, 2)
def test_event_behind_the_optimizer(ranks: Ranks) -> None:
    """On CPU the event is taken and not waited for."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for inputs in token_batches(ranks.world_size, 2):
        model.set_post_optim_event(torch.Event("cpu"))
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# ---- Several roots


@distributed(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_roots_share_their_streams(ranks: Ranks, when: str) -> None:
    """Two stages of one pipeline: the numbers are those of two roots by themselves."""
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    reference = copy.deepcopy(plain)
    stages = [fully_shard(stage) for stage in plain]
    if when == "before":
        fsdp2.share_comm_ctx(stages)
    for step in range(3):
        inputs = list(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(step)))
        stages[1](torch.tanh(stages[0](inputs[ranks.rank]))).square().sum().backward()
        data_parallel(
            reference,
            inputs,
            lambda m, x: m[1](torch.tanh(m[0](x))).square().sum(),  # type: ignore[index]
        )
        assert_same_params(plain, reference)
        fsdp2.share_comm_ctx(stages)
    first, second = (fully_shard.state(stage).schedule for stage in stages)
    assert first is not second
    assert first.streams is second.streams


@distributed(2)
def test_only_sharded_modules_share(ranks: Ranks) -> None:
    """PyTorch's exception for a plain module."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="FSDPModules but got Linear"):
        fsdp2.share_comm_ctx([model, model[0]])
