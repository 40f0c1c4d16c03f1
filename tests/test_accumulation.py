"""Several backwards before one optimizer step, with and without communication in between."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2 import fully_shard
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
    whole,
)

MICRO_BATCHES = 3


def counts(events: fsdp2.Trace, name: str) -> dict[str, int]:
    return dict(Counter(event.group for event in events.events if event.name == name))


def each_group(times: int) -> dict[str, int]:
    return {"root": times, "blocks.0": times, "blocks.1": times} if times else {}


def accumulate_then_mean(
    reference: nn.Module, micro_batches: Sequence[Sequence[Tensor]], divisor: float | None = None
) -> None:
    """Each rank sums its own micro-batches first; the sums are added in rank order, and divided."""
    params = list(reference.parameters())
    totals: list[Tensor | None] = [None] * len(params)
    world_size = len(micro_batches[0])
    for rank in range(world_size):
        for param in params:
            param.grad = None
        for inputs in micro_batches:
            next_token_loss(reference, inputs[rank]).backward()
        totals = [
            p.grad if t is None else t + p.grad for p, t in zip(params, totals, strict=True)
        ]
    for param, total in zip(params, totals, strict=True):
        param.grad = total / (divisor or world_size)


@distributed(2, 3)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_without_communication(ranks: Ranks, reshard: bool | None) -> None:
    """``set_requires_gradient_sync``: only the last micro-batch reduces, each group once."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        micro_batches = token_batches(ranks.world_size, MICRO_BATCHES)[step:]
        with fsdp2.trace(model) as events:
            for i, inputs in enumerate(micro_batches):
                is_last = i == len(micro_batches) - 1
                model.set_requires_gradient_sync(is_last)
                next_token_loss(model, inputs[ranks.rank]).backward()
                assert all((p.grad is not None) == is_last for p in model.parameters())
        assert counts(events, "reduce") == each_group(1), str(events)
        accumulate_then_mean(reference, micro_batches)
        assert_same_params(model, reference)
        assert_idle(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


@distributed(2, 3)
def test_with_communication(ranks: Ranks) -> None:
    """Without a switch every micro-batch reduces, and the means add up in ``grad``."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    with fsdp2.trace(model) as events:
        for inputs in token_batches(ranks.world_size, MICRO_BATCHES):
            next_token_loss(model, inputs[ranks.rank]).backward()
            data_parallel(reference, inputs)
            assert_same_params(model, reference)
    assert counts(events, "reduce") == each_group(MICRO_BATCHES), str(events)
    assert_idle(model)


@distributed(2)
def test_without_communication_in_some_groups(ranks: Ranks) -> None:
    """With ``recurse=False`` one group keeps its gradients back and the others reduce."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    micro_batches = token_batches(ranks.world_size, 2)
    with fsdp2.trace(model) as events:
        for i, inputs in enumerate(micro_batches):
            model.blocks[0].set_requires_gradient_sync(i == 1, recurse=False)
            next_token_loss(model, inputs[ranks.rank]).backward()
            data_parallel(reference, inputs)
    assert counts(events, "reduce") == {"root": 2, "blocks.1": 2, "blocks.0": 1}
    for name, param in model.named_parameters():
        if not name.startswith("blocks.0"):
            assert_same(param.grad, reference.get_parameter(name).grad, name)
    accumulate_then_mean(reference, micro_batches)
    for name, param in model.blocks[0].named_parameters():
        assert_same(param.grad, reference.blocks[0].get_parameter(name).grad, name)
    assert_idle(model)


@distributed(2)
def test_kept_gradients_are_added_to_reduced_ones(ranks: Ranks) -> None:
    """Reduced, kept back, kept back, reduced: ``grad`` is the sum of two reductions."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    first, *others = token_batches(ranks.world_size, 4)
    for sync, inputs in zip((True, False, False, True), (first, *others), strict=True):
        model.set_requires_gradient_sync(sync)
        next_token_loss(model, inputs[ranks.rank]).backward()
    data_parallel(reference, first)
    reduced = [param.grad for param in reference.parameters()]
    accumulate_then_mean(reference, others)
    for param, before in zip(reference.parameters(), reduced, strict=True):
        param.grad = before + param.grad
    assert_same_params(model, reference)
    assert_idle(model)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        x = self.a(x)
        return self.b(x) if use_b else x


@distributed(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_only_early_micro_batches_use(ranks: Ranks, dtype: torch.dtype) -> None:
    """What was kept back is reduced in the last micro-batch, though that one does not use it."""
    reference = Two().to(dtype)
    model = copy.deepcopy(reference)
    fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32))
    x = torch.ones(2, 6, dtype=dtype)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(x, not is_last).sum().backward()
        reference(x, not is_last).sum().backward()
    # Equal inputs on both ranks: the mean is the gradient. Parameter `a` sums two terms in
    # float32 here and in its own dtype there.
    for name, param in model.b.named_parameters():
        assert_same(param.grad, reference.b.get_parameter(name).grad, name)
    rtol = 1e-6 if dtype is torch.float32 else 2**-7
    for name, param in model.a.named_parameters():
        expected = reference.a.get_parameter(name).grad
        torch.testing.assert_close(whole(param.grad), expected, rtol=rtol, atol=rtol)
    assert_idle(model)


class Count(nn.Module):
    """Its weight's gradient is one in every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self) -> Tensor:
        return self.weight.sum()


@distributed(2)
def test_kept_gradients_are_summed_in_the_reduce_dtype(ranks: Ranks) -> None:
    """300 gradients of one are 300, which a sum in bfloat16 cannot reach: it stays at 256."""
    model = fully_shard(
        Count(), mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    for i in range(300):
        model.set_requires_gradient_sync(i == 299)
        model().backward()
    assert_same(model.weight.grad, torch.full((4,), 300.0))
    assert_idle(model)


@distributed(2, 3)
def test_kept_after_backward(ranks: Ranks) -> None:
    """``set_reshard_after_backward(False)``: further micro-batches gather nothing."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        micro_batches = token_batches(ranks.world_size, MICRO_BATCHES)[step:]
        with fsdp2.trace(model) as events:
            for i, inputs in enumerate(micro_batches):
                is_last = i == len(micro_batches) - 1
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
                next_token_loss(model, inputs[ranks.rank]).backward()
        assert counts(events, "gather") == each_group(1), str(events)
        assert counts(events, "free") == each_group(1), str(events)
        accumulate_then_mean(reference, micro_batches)
        assert_same_params(model, reference)
        assert_idle(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


@distributed(2)
def test_optimizer_step_while_kept(ranks: Ranks) -> None:
    """Full parameters that were kept over an optimizer step are gathered anew, not used stale."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for inputs in token_batches(ranks.world_size, 3):
        with fsdp2.trace(model) as events:
            next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert counts(events, "gather") == each_group(1), str(events)
    for module in (model, *model.blocks):
        module.reshard()
    assert_idle(model)


@distributed(2, 3)
def test_last_backward_of_a_pipeline(ranks: Ranks) -> None:
    """``set_is_last_backward(False)``: several forwards, then their backwards, reduced in each."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    for _ in range(2):
        micro_batches = token_batches(ranks.world_size, MICRO_BATCHES)
        losses = [next_token_loss(model, inputs[ranks.rank]) for inputs in micro_batches]
        for i, (loss, inputs) in enumerate(zip(losses, micro_batches, strict=True)):
            model.set_is_last_backward(i == MICRO_BATCHES - 1)
            loss.backward()
            data_parallel(reference, inputs)
        assert_same_params(model, reference)
        assert_idle(model)


@distributed(2)
def test_pipeline_that_reduces_in_the_end(ranks: Ranks) -> None:
    """One forward, one backward in turn, kept in memory and not reduced until the last."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=False)
    micro_batches = token_batches(ranks.world_size, MICRO_BATCHES)
    with fsdp2.trace(model) as events:
        for i, inputs in enumerate(micro_batches):
            is_last = i == MICRO_BATCHES - 1
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            next_token_loss(model, inputs[ranks.rank]).backward()
    assert counts(events, "gather") == counts(events, "reduce") == each_group(1), str(events)
    accumulate_then_mean(reference, micro_batches)
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_backward_that_is_not_the_last_may_leave_a_group_out(ranks: Ranks) -> None:
    """A group whose only use was in an early micro-batch has its gradient after the last one."""
    reference = Two()
    model = copy.deepcopy(reference)
    fully_shard(model.a)
    fully_shard(model.b)
    fully_shard(model)
    x = torch.ones(2, 6) * (ranks.rank + 1)
    for is_last in (False, True):
        model.set_is_last_backward(is_last)
        model(x, not is_last).sum().backward()
        inputs = [torch.ones(2, 6), torch.full((2, 6), 2.0)]
        data_parallel(reference, inputs, lambda m, x, used=not is_last: m(x, used).sum())
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("factor", [1.0, 8.0, 0.5])
def test_gradient_divide_factor(ranks: Ranks, factor: float) -> None:
    """``set_gradient_divide_factor``: the sum over ranks is divided by it, in that group only."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    model.blocks[0].set_gradient_divide_factor(factor)
    [inputs] = token_batches(ranks.world_size, 1)
    next_token_loss(model, inputs[ranks.rank]).backward()
    accumulate_then_mean(reference, [inputs], factor)
    for name, param in model.blocks[0].named_parameters():
        assert_same(param.grad, reference.blocks[0].get_parameter(name).grad, name)
    accumulate_then_mean(reference, [inputs])
    for name, param in model.named_parameters():
        if not name.startswith("blocks.0."):
            assert_same(param.grad, reference.get_parameter(name).grad, name)
    assert_idle(model)


@distributed(1)
def test_gradient_divide_factor_of_one_rank(ranks: Ranks) -> None:
    """The factor also holds where there is nobody to reduce with."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(4.0)
    [inputs] = token_batches(1, 1)
    next_token_loss(model, inputs[0]).backward()
    accumulate_then_mean(reference, [inputs], 4.0)
    assert_same_params(model, reference)
    assert_idle(model)


def sync_in_the_end(model: nn.Module, i: int) -> None:
    model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)


def sync_always(model: nn.Module, i: int) -> None:
    pass


def keep_until_the_end(model: nn.Module, i: int) -> None:
    sync_in_the_end(model, i)
    model.set_is_last_backward(i == MICRO_BATCHES - 1)
    model.set_reshard_after_backward(i == MICRO_BATCHES - 1)


@distributed(2)
@pytest.mark.parametrize("before", [sync_in_the_end, sync_always, keep_until_the_end])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_as_in_pytorch(
    ranks: Ranks, before: Callable[[nn.Module, int], None], param_dtype: torch.dtype | None
) -> None:
    """Losses and gradients are those of PyTorch's FSDP2, bit by bit, over two steps."""
    theirs = Net()
    model = copy.deepcopy(theirs)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype, torch.float32)
    shard_blocks(model, mp_policy=policy)
    shard_blocks(theirs, torch_fully_shard, mp_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    for _ in range(2):
        for i, inputs in enumerate(token_batches(ranks.world_size, MICRO_BATCHES)):
            losses = []
            for m in (model, theirs):
                before(m, i)
                losses.append(next_token_loss(m, inputs[ranks.rank]))
                losses[-1].backward()
            assert_same(*losses)
        assert_same_params(model, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


@distributed(2)
def test_replacing_shards_does_not_lose_kept_gradients(ranks: Ranks) -> None:
    """Moving the model while gradients are kept back raises; after a reset it trains on."""
    model = fully_shard(nn.Linear(4, 4))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    model.to(torch.float64)
    with pytest.raises(RuntimeError, match="kept back"):
        model(torch.ones(2, 4, dtype=torch.float64))
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert_same(whole(model.bias.grad), torch.full((4,), 2.0, dtype=torch.float64))
    assert_idle(model)
