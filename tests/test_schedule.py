"""What is gathered, freed and reduced when: the golden traces of whole steps.

A trace is written like a program: ``gather`` issues communication and ``wait`` blocks for it,
``reduce`` and ``reduced`` likewise; ``free`` gives the full parameters' memory back. Accept a
changed schedule with ``EXPECTTEST_ACCEPT=1 pytest tests/test_schedule.py``, and read the diff.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed, run
from models import assert_idle, shard_blocks


class Chain(nn.Module):
    """Three blocks called in the given order, then a projection that is the root's own."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
        for i in range(len(self.blocks)) if order is None else order:
            x = self.blocks[i](x)
        return self.head(x)


def one_step(model: nn.Module, *args: object) -> str:
    """The trace of one forward and backward."""
    with fsdp2.trace(model) as events:
        out = model(torch.ones(2, 4), *args)
        events.add("----", "backward")
        out.sum().backward()
    return str(events) + "\n"


# ---- Bodies


def first_step(ranks: Ranks) -> str:
    model = shard_blocks(Chain())
    trace = one_step(model)
    assert_idle(model)
    return trace


def steady_step(ranks: Ranks, reshard: bool | None = None, limit: int = 2) -> str:
    model = shard_blocks(Chain(), reshard_after_forward=reshard)
    fsdp2.set_inflight_limit(model, limit)
    second, third = [one_step(model) for _ in range(3)][1:]
    assert second == third, "the schedule has not settled after one step"
    assert_idle(model)
    return third


def listed_step(ranks: Ranks) -> str:
    model = shard_blocks(Chain(4), reshard_after_forward=True)
    fsdp2.set_inflight_limit(model, 1)
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
    one_step(model)
    trace = one_step(model)
    assert_idle(model)
    return trace


def changed_order(ranks: Ranks) -> list[str]:
    model = shard_blocks(Chain())
    traces = [one_step(model, order) for order in ([0, 1, 2], [0, 2, 1], [0, 2, 1])]
    assert_idle(model)
    return traces[1:]


def nested_step(ranks: Ranks) -> str:
    """Groups inside groups: a block's own group is the linear layer beside its inner one."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.own = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.inner(x))

    model = nn.Sequential(Outer(), Outer())
    for outer in model:
        fully_shard(outer.inner)
        fully_shard(outer)
    fully_shard(model)
    one_step(model)
    trace = one_step(model)
    assert_idle(model)
    return trace


def step_by_hand(ranks: Ranks) -> str:
    """Gathers before forward, and a group that is kept in memory and then freed by hand."""
    model = shard_blocks(Chain(2), reshard_after_forward=False)
    with fsdp2.trace(model) as events:
        model(torch.ones(2, 4)).sum().backward()
        events.clear()
        handle = model.blocks[1].unshard(async_op=True)
        model.blocks[0].unshard()
        handle.wait()
        events.add("----", "forward")
        loss = model(torch.ones(2, 4)).sum()
        events.add("----", "by hand")
        model.blocks[1].reshard()
        events.add("----", "backward")
        loss.backward()
    assert_idle(model)
    return str(events) + "\n"


def accumulating_steps(ranks: Ranks) -> str:
    model = shard_blocks(Chain(2))
    one_step(model)
    traces = []
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        traces.append(one_step(model))
    assert_idle(model)
    return "".join(traces)


def frozen_step(ranks: Ranks) -> str:
    model = Chain()
    model.blocks[1].requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    shard_blocks(model)
    one_step(model)
    trace = one_step(model)
    assert_idle(model)
    return trace


def evaluation(ranks: Ranks) -> str:
    model = shard_blocks(Chain())
    one_step(model)
    with fsdp2.trace(model) as events, torch.no_grad():
        model(torch.ones(2, 4))
    model.reshard()
    assert_idle(model)
    return str(events) + "\n"


class TestSchedule(TestCase):
    """Two ranks, whose traces are alike."""

    maxDiff = None

    def trace_of(self, body: object, *args: object) -> str:
        first, second = run(body, 2, *args)  # type: ignore[arg-type]
        self.assertEqual(first, second, "the ranks differ")
        return first  # type: ignore[no-any-return]

    def test_first_step(self) -> None:
        """Nothing is known in the first forward; its reverse predicts the first backward."""
        self.assertExpectedInline(self.trace_of(first_step), """\
gather   root (on demand)
wait     root
forward  root
gather   blocks.0 (on demand)
wait     blocks.0
forward  blocks.0
free     blocks.0
gather   blocks.1 (on demand)
wait     blocks.1
forward  blocks.1
free     blocks.1
gather   blocks.2 (on demand)
wait     blocks.2
forward  blocks.2
free     blocks.2
----     backward
backward root
gather   blocks.2 (ahead)
gather   blocks.1 (ahead)
reduce   root
wait     blocks.2
backward blocks.2
reduce   blocks.2
reduced  root
free     blocks.2
gather   blocks.0 (ahead)
wait     blocks.1
backward blocks.1
reduce   blocks.1
reduced  blocks.2
free     blocks.1
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.1
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_steady_step(self) -> None:
        """Each gather is issued before the compute that hides it; the root is kept."""
        self.assertExpectedInline(self.trace_of(steady_step), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.1
gather   blocks.2 (ahead)
forward  blocks.1
free     blocks.1
wait     blocks.2
forward  blocks.2
free     blocks.2
----     backward
backward root
gather   blocks.2 (ahead)
gather   blocks.1 (ahead)
reduce   root
wait     blocks.2
backward blocks.2
reduced  root
reduce   blocks.2
free     blocks.2
reduced  blocks.2
gather   blocks.0 (ahead)
wait     blocks.1
backward blocks.1
reduce   blocks.1
free     blocks.1
reduced  blocks.1
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_all_freed(self) -> None:
        """With ``reshard_after_forward=True`` the root is freed and gathered again as well."""
        self.assertExpectedInline(self.trace_of(steady_step, True), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
forward  root
wait     blocks.0
gather   blocks.1 (ahead)
forward  blocks.0
free     blocks.0
wait     blocks.1
gather   blocks.2 (ahead)
forward  blocks.1
free     blocks.1
wait     blocks.2
forward  blocks.2
free     blocks.2
free     root
----     backward
gather   root (on demand)
wait     root
backward root
gather   blocks.2 (ahead)
reduce   root
wait     blocks.2
backward blocks.2
reduced  root
gather   blocks.1 (ahead)
reduce   blocks.2
free     blocks.2
reduced  blocks.2
gather   blocks.0 (ahead)
wait     blocks.1
backward blocks.1
reduce   blocks.1
free     blocks.1
reduced  blocks.1
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_all_kept(self) -> None:
        """With ``False`` everything is gathered once, as early as forward allows."""
        self.assertExpectedInline(self.trace_of(steady_step, False), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
gather   blocks.2 (ahead)
forward  blocks.0
wait     blocks.1
forward  blocks.1
wait     blocks.2
forward  blocks.2
----     backward
backward root
reduce   root
backward blocks.2
reduced  root
reduce   blocks.2
free     blocks.2
reduced  blocks.2
backward blocks.1
reduce   blocks.1
free     blocks.1
reduced  blocks.1
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_limit_of_one(self) -> None:
        """One group in flight: nothing is gathered ahead."""
        self.assertExpectedInline(self.trace_of(steady_step, None, 1), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
gather   blocks.1 (on demand)
wait     blocks.1
forward  blocks.1
free     blocks.1
gather   blocks.2 (on demand)
wait     blocks.2
forward  blocks.2
free     blocks.2
----     backward
backward root
gather   blocks.2 (ahead)
reduce   root
wait     blocks.2
backward blocks.2
reduced  root
reduce   blocks.2
free     blocks.2
reduced  blocks.2
gather   blocks.1 (ahead)
wait     blocks.1
backward blocks.1
reduce   blocks.1
free     blocks.1
reduced  blocks.1
gather   blocks.0 (ahead)
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_limit_of_three(self) -> None:
        """Three groups in flight: two arrive while one computes."""
        self.assertExpectedInline(self.trace_of(steady_step, None, 3), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
gather   blocks.2 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.1
forward  blocks.1
free     blocks.1
wait     blocks.2
forward  blocks.2
free     blocks.2
----     backward
backward root
gather   blocks.2 (ahead)
gather   blocks.1 (ahead)
gather   blocks.0 (ahead)
reduce   root
wait     blocks.2
backward blocks.2
reduced  root
reduce   blocks.2
free     blocks.2
reduced  blocks.2
wait     blocks.1
backward blocks.1
reduce   blocks.1
free     blocks.1
reduced  blocks.1
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_listed(self) -> None:
        """Lists say what to gather before each compute, whatever the limit says."""
        self.assertExpectedInline(self.trace_of(listed_step), """\
gather   root (on demand)
wait     root
forward  root
gather   blocks.0 (on demand)
wait     blocks.0
gather   blocks.1 (as listed)
gather   blocks.2 (as listed)
forward  blocks.0
free     blocks.0
wait     blocks.1
gather   blocks.3 (as listed)
forward  blocks.1
free     blocks.1
wait     blocks.2
forward  blocks.2
free     blocks.2
wait     blocks.3
forward  blocks.3
free     blocks.3
free     root
----     backward
gather   root (on demand)
wait     root
backward root
reduce   root
gather   blocks.3 (on demand)
wait     blocks.3
backward blocks.3
reduced  root
gather   blocks.2 (as listed)
gather   blocks.1 (as listed)
reduce   blocks.3
free     blocks.3
reduced  blocks.3
wait     blocks.2
backward blocks.2
gather   blocks.0 (as listed)
reduce   blocks.2
free     blocks.2
reduced  blocks.2
wait     blocks.1
backward blocks.1
reduce   blocks.1
free     blocks.1
reduced  blocks.1
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_step_with_another_order(self) -> None:
        """What was gathered ahead in vain is freed; from there on nothing is predicted."""
        self.assertExpectedInline(self.trace_of(changed_order)[0], """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
free     blocks.1
gather   blocks.2 (on demand)
wait     blocks.2
forward  blocks.2
free     blocks.2
gather   blocks.1 (on demand)
wait     blocks.1
forward  blocks.1
free     blocks.1
----     backward
backward root
gather   blocks.2 (ahead)
gather   blocks.1 (ahead)
reduce   root
free     blocks.2
wait     blocks.1
backward blocks.1
reduced  root
reduce   blocks.1
free     blocks.1
reduced  blocks.1
gather   blocks.2 (on demand)
wait     blocks.2
backward blocks.2
reduce   blocks.2
free     blocks.2
reduced  blocks.2
gather   blocks.0 (on demand)
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_step_after_another_order(self) -> None:
        """The changed order is the prediction of the next step."""
        self.assertExpectedInline(self.trace_of(changed_order)[1], """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.2 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.2
gather   blocks.1 (ahead)
forward  blocks.2
free     blocks.2
wait     blocks.1
forward  blocks.1
free     blocks.1
----     backward
backward root
gather   blocks.1 (ahead)
gather   blocks.2 (ahead)
reduce   root
wait     blocks.1
backward blocks.1
reduced  root
reduce   blocks.1
free     blocks.1
reduced  blocks.1
gather   blocks.0 (ahead)
wait     blocks.2
backward blocks.2
reduce   blocks.2
free     blocks.2
reduced  blocks.2
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_nested(self) -> None:
        """An outer group stays in memory while the groups inside it come and go."""
        self.assertExpectedInline(self.trace_of(nested_step), """\
gather   root (on demand)
wait     root
gather   0 (ahead)
gather   0.inner (ahead)
forward  root
wait     0
forward  0
wait     0.inner
gather   1 (ahead)
forward  0.inner
free     0.inner
free     0
wait     1
gather   1.inner (ahead)
forward  1
wait     1.inner
forward  1.inner
free     1.inner
free     1
----     backward
gather   1 (on demand)
wait     1
backward 1
gather   1.inner (ahead)
reduce   1
wait     1.inner
backward 1.inner
reduced  1
gather   0 (ahead)
reduce   1.inner
free     1.inner
reduced  1.inner
gather   0.inner (ahead)
free     1
wait     0
backward 0
reduce   0
wait     0.inner
backward 0.inner
reduced  0
reduce   0.inner
reduced  0.inner
free     root
free     0
free     0.inner
""")

    def test_by_hand(self) -> None:
        """``unshard`` gathers early and ``reshard`` frees early; what is missing is gathered."""
        self.assertExpectedInline(self.trace_of(step_by_hand), """\
gather   blocks.1 (by hand)
gather   blocks.0 (by hand)
wait     blocks.0
wait     blocks.1
----     forward
gather   root (on demand)
wait     root
forward  root
forward  blocks.0
forward  blocks.1
----     by hand
free     blocks.1
----     backward
backward root
gather   blocks.1 (ahead)
reduce   root
wait     blocks.1
backward blocks.1
reduced  root
reduce   blocks.1
free     blocks.1
reduced  blocks.1
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_accumulating(self) -> None:
        """A backward without gradient sync gathers and frees, and reduces nothing."""
        self.assertExpectedInline(self.trace_of(accumulating_steps), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.1
forward  blocks.1
free     blocks.1
----     backward
backward root
gather   blocks.1 (ahead)
gather   blocks.0 (ahead)
wait     blocks.1
backward blocks.1
free     blocks.1
wait     blocks.0
backward blocks.0
free     root
free     blocks.0
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.1
forward  blocks.1
free     blocks.1
----     backward
backward root
gather   blocks.1 (ahead)
gather   blocks.0 (ahead)
reduce   root
wait     blocks.1
backward blocks.1
reduced  root
reduce   blocks.1
free     blocks.1
reduced  blocks.1
wait     blocks.0
backward blocks.0
reduce   blocks.0
reduced  blocks.0
free     root
free     blocks.0
""")

    def test_frozen(self) -> None:
        """Frozen blocks that no gradient passes through are not gathered in backward."""
        self.assertExpectedInline(self.trace_of(frozen_step), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.1
gather   blocks.2 (ahead)
forward  blocks.1
free     blocks.1
wait     blocks.2
forward  blocks.2
free     blocks.2
----     backward
backward root
gather   blocks.2 (ahead)
reduce   root
wait     blocks.2
backward blocks.2
reduced  root
reduce   blocks.2
reduced  blocks.2
free     root
free     blocks.2
""")

    def test_evaluation(self) -> None:
        """A forward without gradients is prefetched like any other; it keeps the root."""
        self.assertExpectedInline(self.trace_of(evaluation), """\
gather   root (on demand)
wait     root
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
wait     blocks.0
forward  blocks.0
free     blocks.0
wait     blocks.1
gather   blocks.2 (ahead)
forward  blocks.1
free     blocks.1
wait     blocks.2
forward  blocks.2
free     blocks.2
""")


# ---- Order and limits


@distributed(2, 3)
def test_wrong_order_in_the_first_step(ranks: Ranks) -> None:
    """A rank that calls its modules in another order is named on all ranks; nothing hangs."""
    model = shard_blocks(Chain())
    order = [0, 2, 1] if ranks.rank == 1 else [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"different orders.*rank 0: 'blocks.1'") as raised:
        model(torch.ones(2, 4), order)
    assert "rank 1: 'blocks.2'" in str(raised.value)
    model.reset_iter_state()
    model(torch.ones(2, 4)).sum().backward()
    assert_idle(model)


@distributed(2)
def test_missing_module_in_the_first_step(ranks: Ranks) -> None:
    """A rank that leaves the last module out is found when its forward ends."""
    model = shard_blocks(Chain())
    with pytest.raises(RuntimeError, match="rank 0: 'blocks.2'; rank 1: the end of forward"):
        model(torch.ones(2, 4), [0, 1, 2] if ranks.rank == 0 else [0, 1])
    model.reset_iter_state()
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_limit_is_a_whole_number(ranks: Ranks, limit: object) -> None:
    """A limit that makes no sense is refused where it is given."""
    model = shard_blocks(Chain())
    with pytest.raises(ValueError, match="from 1 on"):
        fsdp2.set_inflight_limit(model, limit)  # type: ignore[arg-type]
    assert_idle(model)


@distributed(2)
def test_nothing_is_recorded_outside_a_trace(ranks: Ranks) -> None:
    """Once its block has ended a trace takes no more events."""
    model = shard_blocks(Chain())
    with fsdp2.trace(model) as events:
        model(torch.ones(2, 4)).sum().backward()
    recorded = len(events.events)
    model(torch.ones(2, 4)).sum().backward()
    assert len(events.events) == recorded > 0
    assert events.exposed_seconds == sum(event.seconds for event in events.events) > 0
    assert_idle(model)
