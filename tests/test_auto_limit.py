"""``set_inflight_limit(model, "auto")``: the rule, and what ranks make of it together."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import adapting, measuring, pairwise, streams
from fsdp2.events import Event
from fsdp2.hooks import state_of
from fsdp2.limits import Change, Figures, Rule
from fsdp2.tracing import Trace
from fsdp2.transfers import Why
from harness import Ranks, distributed
from models import assert_idle, assert_same, assert_same_params, by_messages, shard_blocks

# ---- The rule, with invented figures

WINDOW = 5
"""Steps that a raise is judged by."""


def show(rule: Rule, figures: Figures, highest: int = 8, steps: int = WINDOW) -> list[str]:
    """The changes that so many equal steps lead to."""
    found = [rule.judge(figures, highest) for _ in range(steps)]
    return [str(change) for change in found if change is not None]


def exposed(milliseconds: float, **more: Any) -> Figures:
    """Of a step of 100 ms."""
    return Figures(milliseconds / 1e3, 0.1, **more)


def test_raised_as_long_as_it_helps() -> None:
    """Exposed time raises the limit by one; once it is hidden the limit stays."""
    rule = Rule()
    assert show(rule, exposed(20)) == ["2 -> 3: 20.0 ms of 100.0 ms exposed"]
    assert show(rule, exposed(10)) == ["3 -> 4: 10.0 ms of 100.0 ms exposed"]
    assert show(rule, exposed(1), steps=50) == []
    assert rule.limit == 4


def test_a_raise_without_gain_is_taken_back() -> None:
    """It comes back after five steps, and is tried again a hundred steps later."""
    rule = Rule()
    show(rule, exposed(20))
    assert show(rule, exposed(19)) == ["3 -> 2: 19.0 ms exposed, 20.0 ms with one group less"]
    assert show(rule, exposed(20), steps=99) == []
    assert show(rule, exposed(20), steps=WINDOW) == ["2 -> 3: 20.0 ms of 100.0 ms exposed"]


def test_one_slow_step_changes_nothing() -> None:
    """The median of five steps counts."""
    rule = Rule()
    for _ in range(20):
        assert show(rule, exposed(90), steps=2) == []
        assert show(rule, exposed(0), steps=3) == []


def test_a_retry_is_a_ceiling() -> None:
    """The allocator's retries lower the limit at once, and for good."""
    rule = Rule()
    show(rule, exposed(20))
    assert show(rule, exposed(5, retries=1), steps=1) == ["3 -> 2: the allocator retried once"]
    assert show(rule, exposed(50), steps=500) == []
    assert show(rule, exposed(50, retries=2), steps=3) == ["2 -> 1: the allocator retried 2 times"]
    assert rule.limit == 1


def test_the_budget_is_a_ceiling() -> None:
    """Near the budget the limit falls by as many groups as are too many; never below 1."""
    rule = Rule(limit=6)
    near = Figures(0.05, 0.1, 0, excess_nbytes=1_500_000, group_nbytes=1_000_000)
    assert show(rule, near, steps=1) == ["6 -> 4: 1.5 MB above 95% of the budget"]
    roomy = Figures(0.05, 0.1, 0, excess_nbytes=-10_000_000, group_nbytes=1_000_000)
    assert show(rule, roomy, steps=500) == []
    assert show(rule, near, steps=5) == [
        "4 -> 2: 1.5 MB above 95% of the budget",
        "2 -> 1: 1.5 MB above 95% of the budget",
    ]


def test_raised_only_where_one_more_group_fits() -> None:
    """What the largest group takes is added before the limit is raised."""
    tight = Figures(0.05, 0.1, 0, excess_nbytes=-999_999, group_nbytes=1_000_000)
    assert show(Rule(), tight, steps=50) == []
    fits = Figures(0.05, 0.1, 0, excess_nbytes=-1_000_000, group_nbytes=1_000_000)
    assert show(Rule(), fits) == ["2 -> 3: 50.0 ms of 100.0 ms exposed"]


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_stays_in_its_bounds(seed: int) -> None:
    """Whatever is measured, it is at least 1 and at most the groups there are; ranks agree."""
    numbers = random.Random(seed)
    rules = [Rule(), Rule()]
    for _ in range(1000):
        share, retries = numbers.random() ** 2, int(numbers.random() < 0.003)
        excess = int(numbers.gauss(-5, 2) * 1e6)
        figures = Figures(share, 1.0, retries, excess, 1_000_000)
        before = rules[0].limit
        change, same = [rule.judge(figures, 4) for rule in rules]
        assert change == same
        assert 1 <= rules[0].limit <= 4
        assert rules[0].limit <= before + 1
        assert change is None or (change.before, change.after) == (before, rules[0].limit)


# ---- Ranks together


class Chain(nn.Module):
    """Blocks, then a projection of the root's."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().mean()


COUNTED = 11
"""Waits of a step of six blocks that a limit could hide: the first of each pass is another's."""


class Clock(streams.HostStreams):
    """The host, with an invented time: each gather takes 10 ms to issue, then ``wait()``."""

    def __init__(self, wait: Callable[[], float]) -> None:
        super().__init__()
        self.now = 0.0
        self.wait = wait

    def gathering(self) -> AbstractContextManager[object]:
        self.now += 0.010
        return super().gathering()

    def compute_waits(self, event: object) -> None:
        self.now += self.wait()

    def mark(self) -> float:
        return self.now


@contextlib.contextmanager
def clock(made: Clock) -> Iterator[None]:
    """Models whose first forward is inside live in that time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(streams, "streams_of", lambda device: made)
        yield


def waits(milliseconds: float) -> AbstractContextManager[None]:
    """Every gather is waited for so long."""
    return clock(Clock(lambda: milliseconds / 1e3))


@contextlib.contextmanager
def slow_gathers(seconds: float) -> Iterator[None]:
    """Every gather arrives so long after its start; others may be under way meanwhile."""
    start = pairwise.PairwiseGather.start

    def slowly(plan: Any, channel: int) -> Any:
        pending, arrival = start(plan, channel), perf_counter() + seconds

        class Late:
            def wait(self) -> None:
                pending.wait()
                sleep(max(0.0, arrival - perf_counter()))

        return Late()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(pairwise.PairwiseGather, "start", slowly)
        yield


def limit_of(model: nn.Module) -> int:
    state = state_of(model)
    assert state is not None
    return state.limit


def batch(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, rank: int, steps: int) -> list[int]:
    """The limit behind each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = []
    for _ in range(steps):
        model(batch(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        limits.append(limit_of(model))
    return limits


def on_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def assert_alike(value: Any) -> None:
    found = on_all_ranks(value)
    assert all(each == found[0] for each in found), found


def changes(trace: Trace) -> list[str]:
    return [event.detail for event in trace.events if event.name == "limit"]


@distributed(2)
def test_raised_where_gathers_are_slow(ranks: Ranks) -> None:
    """Real waits, on one rank only; the other one raises its limit with it."""
    with by_messages():
        model = shard_blocks(Chain(blocks=4))
    fsdp2.set_inflight_limit(model, "auto")
    is_slow = ranks.rank == 1
    with slow_gathers(0.01) if is_slow else contextlib.nullcontext(), fsdp2.trace(model) as trace:
        limits = train(model, ranks.rank, 8)
    assert limits[:5] == [2] * 5 and 3 in limits
    assert_alike(limits)
    assert_alike(changes(trace))
    assert changes(trace)[0].startswith("2 -> 3: ")
    assert_idle(model)


@distributed(2, 4)
def test_raised_as_far_as_it_helps_one_rank(ranks: Ranks) -> None:
    """All ranks have the same limit after every step, though only the last one waits."""
    model = shard_blocks(Chain())
    is_slow = ranks.rank == ranks.world_size - 1
    made = Clock(lambda: max(0.0, 0.040 - 0.010 * limit_of(model)) if is_slow else 0.0)
    fsdp2.set_inflight_limit(model, "auto")
    with clock(made), fsdp2.trace(model) as trace:
        limits = train(model, ranks.rank, 24)
    # Five steps, the last of which is judged behind the sixth; then it measures anew.
    assert limits == [2] * 5 + [3] * 6 + [4] * 13
    found = changes(trace)
    assert_alike(found)
    assert [change.split(" ms of ")[0] for change in found] == ["2 -> 3: 220.0", "3 -> 4: 110.0"]
    assert all(event.group == "root" for event in trace.events if event.name == "limit")
    assert_idle(model)


@distributed(2)
def test_stays_where_all_is_hidden(ranks: Ranks) -> None:
    """Waits that are hardly any change nothing, nor do those at the start of a pass."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto")
    with waits(0.1):
        assert set(train(model, ranks.rank, 12)) == {2}
    single = shard_blocks(Chain(blocks=1), reshard_after_forward=True)
    fsdp2.set_inflight_limit(single, "auto")
    with waits(0.1):
        assert set(train(single, ranks.rank, 12)) == {2}
    assert_idle(model)
    assert_idle(single)


@distributed(2)
def test_not_above_the_groups_that_are_freed(ranks: Ranks) -> None:
    """More groups than are freed behind their use cannot be in flight."""
    model, single = shard_blocks(Chain(blocks=3)), shard_blocks(Chain(blocks=1))
    made = Clock(lambda: 0.1 / limit_of(model))
    with clock(made):
        for each in (model, single):
            fsdp2.set_inflight_limit(each, "auto")
        assert train(model, ranks.rank, 30)[-15:] == [3] * 15
        assert set(train(single, ranks.rank, 2)) == {1}
    assert_idle(model)
    assert_idle(single)


@distributed(2, 3)
def test_lowered_near_the_budget(ranks: Ranks) -> None:
    """The full parameters held at once are compared with the budget; the tightest rank counts."""
    model = shard_blocks(Chain())
    with fsdp2.trace(model) as trace:
        train(model, ranks.rank, 1)
        root, block = (state_of(m).group.full_nbytes for m in (model, model.blocks[0]))
        budget = int((root + 1.5 * block) / 0.95)
        fsdp2.set_inflight_limit(model, "auto", budget if ranks.rank == 1 else 1 << 40)
        limits = train(model, ranks.rank, 6)
    assert limits == [2, 1, 1, 1, 1, 1]
    assert changes(trace) == ["2 -> 1: 0.0 MB above 95% of the budget"]
    assert_idle(model)


@distributed(2)
def test_the_budget_is_kept(ranks: Ranks) -> None:
    """However slow gathers are, no raise passes the budget; without it there would be one."""
    model = shard_blocks(Chain())
    with waits(5):
        train(model, ranks.rank, 1)
        root, block = (state_of(m).group.full_nbytes for m in (model, model.blocks[0]))
        fsdp2.set_inflight_limit(model, "auto", budget=int((root + 2.9 * block) / 0.95))
        assert set(train(model, ranks.rank, 10)) == {2}
        fsdp2.set_inflight_limit(model, "auto", budget=int((root + 3.1 * block) / 0.95))
        assert set(train(model, ranks.rank, 10)) == {2, 3}
    assert_idle(model)


@distributed(2)
def test_lowered_when_the_allocator_retried(ranks: Ranks) -> None:
    """On one rank is enough, and the reason is in the trace of all."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto")
    retries = iter([0, 1] if ranks.rank == 0 else [])
    with pytest.MonkeyPatch.context() as monkeypatch, fsdp2.trace(model) as trace:
        monkeypatch.setattr(measuring.Counted, "take_retries", lambda _: next(retries, 0))
        limits = train(model, ranks.rank, 6)
    assert limits == [2, 2, 1, 1, 1, 1]
    assert changes(trace) == ["2 -> 1: the allocator retried once"]
    assert_idle(model)


@distributed(2, 4)
def test_the_numbers_are_those_of_a_given_limit(ranks: Ranks) -> None:
    """While the limit changes, losses, gradients and weights are those with limit 2, bit by bit."""
    torch.manual_seed(0)
    given = shard_blocks(Chain())
    found = copy.deepcopy(given)
    fsdp2.set_inflight_limit(found, "auto")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (given, found)]
    limits = set()
    with waits(5):
        for step in range(14):
            losses = []
            for model, optimizer in zip((given, found), optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(batch(ranks.rank + step))
                loss.backward()
                losses.append(loss.detach())
            assert_same(*losses)
            assert_same_params(found, given)
            for optimizer in optimizers:
                optimizer.step()
            limits.add(limit_of(found))
    assert len(limits) > 1
    assert_idle(found)
    assert_idle(given)


@distributed(4)
def test_agreed_on_over_replicas(ranks: Ranks) -> None:
    """On a mesh of two dimensions the figures of the one slow rank reach all four."""
    model = shard_blocks(Chain(), mesh=ranks.mesh(2, 2, names=("replicate", "shard")))
    fsdp2.set_inflight_limit(model, "auto")
    with waits(5 if ranks.rank == 3 else 0):
        limits = train(model, ranks.rank, 12)
    assert limits == [2] * 10 + [3] * 2  # two steps for each agreement
    assert_alike(limits)
    assert_idle(model)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """The element counts of all-reduces, which nothing else issues without replicas."""
    found: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "all_reduce", counting)
        yield found


@distributed(2)
def test_what_it_sends(ranks: Ranks) -> None:
    """One all-reduce of five numbers per step; none in evaluation, and none once it is off."""
    model = shard_blocks(Chain())
    train(model, ranks.rank, 2)
    for limit, expected in ((2, []), ("auto", [5] * 4), (3, [])):
        fsdp2.set_inflight_limit(model, limit)
        with counted_all_reduces() as found:
            train(model, ranks.rank, 4)
            with torch.no_grad():
                model(batch(ranks.rank))
                model(batch(ranks.rank))
            model.reshard()
        assert found == expected, limit
    assert_idle(model)


@distributed(2)
def test_off_means_off(ranks: Ranks) -> None:
    """With a given limit the schedule tells nobody of anything, or the trace alone."""
    model = shard_blocks(Chain())
    train(model, ranks.rank, 1)
    schedule = state_of(model).schedule
    assert schedule.listener is None
    fsdp2.set_inflight_limit(model, "auto")
    assert isinstance(schedule.listener, adapting.Adapting)
    with fsdp2.trace(model) as trace:
        fsdp2.set_inflight_limit(model, 4)
        assert schedule.listener is trace
    assert schedule.listener is None
    assert limit_of(model) == 4
    assert_idle(model)


@distributed(2)
def test_back_to_a_number(ranks: Ranks) -> None:
    """A number ends the search, behind a step or before the first; asking again begins at 2."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto")
    assert limit_of(model) == 2
    fsdp2.set_inflight_limit(model, 3)
    with waits(5):
        assert set(train(model, ranks.rank, 8)) == {3}
        fsdp2.set_inflight_limit(model, "auto")
        assert limit_of(model) == 2
        found = train(model, ranks.rank, 8)[-1]
        assert found == 3
        fsdp2.set_inflight_limit(model, "auto")  # asked already: goes on
        assert limit_of(model) == found
        fsdp2.set_inflight_limit(model, 1)
        assert set(train(model, ranks.rank, 8)) == {1}
    assert_idle(model)


@distributed(2)
def test_a_copy_searches_for_itself(ranks: Ranks) -> None:
    """``deepcopy`` keeps what was asked for, not what was found."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto", budget=1)
    assert train(model, ranks.rank, 3)[-1] == 1
    made = copy.deepcopy(model)
    assert limit_of(made) == 2
    assert train(made, ranks.rank, 3) == [2, 1, 1]
    assert_idle(model)
    assert_idle(made)


@distributed(2)
def test_evaluation_between_steps(ranks: Ranks) -> None:
    """Forwards without backward neither count nor disturb."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto")
    with waits(5):
        for _ in range(8):
            with torch.no_grad():
                for _ in range(3):
                    model(batch(ranks.rank))
            limits = train(model, ranks.rank, 1)
    assert limits == [3]
    assert_alike(limits)
    assert_idle(model)


@distributed(2)
def test_steps_that_ranks_take_alone(ranks: Ranks) -> None:
    """Ranks may accumulate over different counts of batches while nothing is communicated."""
    model = shard_blocks(Chain(), reshard_after_forward=False)
    fsdp2.set_inflight_limit(model, "auto")
    train(model, ranks.rank, 3)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        model(batch(0)).backward()  # gathers, and keeps what it gathered
        for _ in range(3 * ranks.rank):
            model(batch(0)).backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        assert_alike(train(model, ranks.rank, 2))
    assert_idle(model)


@distributed(2)
def test_accumulation(ranks: Ranks) -> None:
    """Two forwards, then their two backwards: figures of every backward are agreed on."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto", budget=1)
    for _ in range(3):
        losses = [model(batch(ranks.rank)) for _ in range(2)]
        for loss in losses:
            loss.backward()
    assert limit_of(model) == 1
    assert_idle(model)


class Fault(torch.autograd.Function):
    """Passes on; raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("fault in backward")


@distributed(2)
@pytest.mark.parametrize("failing", [[0, 1], [0]])
def test_after_a_backward_that_raised(ranks: Ranks, failing: list[int]) -> None:
    """Ranks stay together, also where only one failed, behind all communication of its step."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto")
    for _ in range(3):
        train(model, ranks.rank, 2)
        x = batch(ranks.rank).requires_grad_()
        loss = model(Fault.apply(x) if ranks.rank in failing else x)
        with (
            pytest.raises(ValueError, match="fault")
            if ranks.rank in failing
            else (contextlib.nullcontext())
        ):
            loss.backward()
        if ranks.rank in failing:
            model.reset_iter_state()
        model.zero_grad()
    assert_alike(train(model, ranks.rank, 8))
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize(
    "limit, budget, message",
    [
        ("automatic", None, r"from 1 on, or 'auto' to have it found, got 'automatic'"),
        ("2", None, "got '2'"),
        (None, None, "got None"),
        (3, 10**9, r"a budget \(1000000000\) is for a limit that is to be found"),
        ("auto", 0, "a whole number of bytes above 0, got 0"),
        ("auto", -5, "got -5"),
        ("auto", 1e9, "got 1000000000.0"),
        ("auto", True, "got True"),
    ],
)
def test_what_is_refused(ranks: Ranks, limit: Any, budget: Any, message: str) -> None:
    """A mistake is named, with what to do, and changes nothing."""
    model = shard_blocks(Chain())
    with pytest.raises(fsdp2.UsageError, match=message):
        fsdp2.set_inflight_limit(model, limit, budget)
    assert limit_of(model) == 2
    assert_idle(model)


# ---- On an accelerator, proved with streams that only count


class Device(Clock):
    """The same time, which the host runs ahead of."""

    runs_ahead = True

    def __init__(self, wait: Callable[[], float]) -> None:
        super().__init__(wait)
        self.passed = -1.0
        """What the host has seen the device pass."""

    def event(self) -> Any:
        return self.now

    def host_waits(self, event: float) -> None:
        self.passed = max(self.passed, event)

    def seconds(self, start: float, end: float) -> float:
        assert start <= end <= self.passed, "the device may not have come there yet"
        return end - start


@distributed(2)
def test_the_host_stays_ahead(ranks: Ranks) -> None:
    """Times are read a step later; what the host waits for lies before the step just issued."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, "auto")
    device = Device(lambda: 0.050)
    with clock(device), fsdp2.trace(model) as trace:
        for _ in range(7):
            begun = device.now
            train(model, ranks.rank, 1)
            assert device.passed <= begun
    assert device.passed > 0
    [change] = changes(trace)
    assert change.startswith(f"2 -> 3: {COUNTED * 50}.0 ms of ")
    assert_alike(change)
    assert_idle(model)


class RecordingCuda:
    """Stands for ``torch.cuda``: what its allocator and its streams were asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.retries, self.peak = 3, 500

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.log.append("peak reset")

    def Stream(self, device: torch.device, priority: int = 0) -> RecordingCuda:  # noqa: N802
        return self

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self) -> RecordingCuda:
        return self

    def wait_stream(self, other: Any) -> None:
        self.log.append("waits for compute")

    def record_event(self, event: Any) -> Any:
        return event

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        return Moment(self)


class Moment:
    def __init__(self, cuda: RecordingCuda) -> None:
        self.cuda = cuda

    def synchronize(self) -> None:
        self.cuda.log.append("host waits")

    def elapsed_time(self, end: Moment) -> float:
        return 8.0


def test_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and peak since the last look; the peak is reset by looking."""
    cuda = RecordingCuda()
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    memory = measuring.Allocator(torch.device("cuda", 0))
    assert memory.take_retries() == 0
    cuda.retries = 5
    assert memory.take_retries() == 2
    assert memory.take_retries() == 0
    assert memory.take_peak_nbytes() == 500
    assert cuda.log == ["peak reset"]


def test_marks_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is an event with a time; what is done aside waits for nothing."""
    cuda = RecordingCuda()
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    made = streams.streams_of(torch.device("cuda", 0))
    with made.aside():
        start, end = made.mark(), made.mark()
    assert cuda.log == []
    made.host_waits(end)
    assert cuda.log == ["host waits"]
    assert made.seconds(start, end) == pytest.approx(0.008)


# ---- In the trace


def test_the_trace_reads_a_change() -> None:
    """Why a gather was waited for depends on the limit that held then; ``clear`` keeps the last."""
    ahead = [("gather", "b", "ahead"), ("wait", "b", ""), ("gather", "c", "on demand")]
    names = [("gather", "a", "on demand"), ("wait", "a", ""), ("forward", "a", ""), *ahead]
    events = [Event(*name, at=float(i), seconds=0.5) for i, name in enumerate(names)]
    wait = Event("wait", "c", "", 9.0, 0.5)
    assert Trace([*events, wait], limit=2).transfers[-1].why is Why.LIMIT
    trace = Trace([*events[:3]], limit=2)
    trace.change_limit("root", 3, str(Change(2, 3, "because")))
    trace.events += [*events[3:], wait]
    assert trace.transfers[-1].why is Why.SURPRISE
    assert "limit    root (2 -> 3: because)" in str(trace).splitlines()
    trace.clear()
    assert (trace.limit, trace.events) == (3, [])


def test_the_views_show_a_change(tmp_path: Path) -> None:
    """The table, the JSON and the picture have it."""
    trace = Trace()
    trace.change_limit("root", 3, str(Change(2, 3, "because")))
    assert trace.report().splitlines()[1] == "limit 2 -> 3: because"
    trace.write_perfetto(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in entries if e["ph"] == "i"] == ["limit 2 -> 3: because"]
    pytest.importorskip("matplotlib")
    trace.plot(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
