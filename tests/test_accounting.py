"""`fsdp2.memory`: what is alive, against what PyTorch's allocator has given out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2 import Memory, MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed
from models import assert_idle

WIDTH, BLOCKS = 1024, 8
MARK = 123_456
"""Bytes of an allocation by which a moment is found again among the allocator's events."""


class Chain(nn.Module):
    """Blocks of one matrix that pass one row on: activations take next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def sharded(mp_policy: MixedPrecisionPolicy | None = None, **options: object) -> nn.Module:
    model = Chain()
    for block in model.blocks:
        fully_shard(block, mp_policy=mp_policy or MixedPrecisionPolicy(), **options)
    return fully_shard(model, mp_policy=mp_policy or MixedPrecisionPolicy(), **options)


class Allocator:
    """What was allocated and not freed inside ``watched``."""

    alive: list[int]
    """After each event."""
    marks: list[int]
    """The same at each mark, without the mark."""


@contextmanager
def watched() -> Iterator[Allocator]:
    found = Allocator()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = [e for e in profiler.profiler.kineto_results.events() if e.nbytes()]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    found.alive = list(accumulate(changes))
    found.marks = [at - MARK for at, change in zip(found.alive, changes) if change == MARK]


def mark() -> None:
    torch.empty(MARK, dtype=torch.uint8)


@distributed(1, 2, 4)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_all_that_is_alive(ranks: Ranks, param_dtype: torch.dtype | None) -> None:
    """Between steps, behind forward, in the middle of backward and with gradients, all that was
    allocated is accounted for, but for a few kB of flags and activations."""
    model: nn.Module
    counted: list[Memory] = []

    def count(*_: object) -> None:
        counted.append(fsdp2.memory(model, optimizer))
        mark()

    warm = sharded(MixedPrecisionPolicy(param_dtype))
    warm(torch.randn(1, WIDTH)).backward()  # what is made once for a process group
    staging = fsdp2.memory(warm).staging  # segments that others had use for
    with watched() as allocator:
        model = sharded(MixedPrecisionPolicy(param_dtype))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        count()
        for step in range(3):
            if step == 2:
                handle = model.blocks[4].register_full_backward_pre_hook(count)
            loss = model(torch.randn(1, WIDTH))
            count()
            loss.backward()
            del loss
            count()
            optimizer.step()
            optimizer.zero_grad()
            count()
        handle.remove()
    assert (len(allocator.marks), len(counted)) == (11, 11)
    for mine, theirs in zip(counted, allocator.marks):
        assert abs(mine.total - staging - theirs) < 70_000, f"{theirs}\n{mine}"
    last = counted[-1]
    assert last.full_parameters == last.full_gradients == last.gradients == 0
    owned = 4 * BLOCKS * WIDTH * WIDTH // ranks.world_size
    assert last.parameters == owned and last.optimizer == pytest.approx(2 * owned, rel=1e-4)
    in_backward = counted[-3]
    assert ranks.world_size == 1 or in_backward.full_parameters > 0
    assert counted[-2].gradients == pytest.approx(owned, rel=1e-3)
    assert_idle(model)


@distributed(2, 4)
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_nothing_but_shards_and_groups_in_flight(ranks: Ranks, limit: int) -> None:
    """The most that is ever alive is 16 bytes for each parameter of this rank, the groups in
    flight and the gradients of the one in backward, within 2 %. In float32 no segment is used."""
    warm = sharded()
    warm(torch.randn(1, WIDTH)).backward()
    staging = fsdp2.memory(warm).staging  # segments that others had use for
    with watched() as allocator:
        model = sharded()
        fsdp2.set_inflight_limit(model, limit)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.randn(1, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        mark()
        model(torch.randn(1, WIDTH)).backward()
    start = allocator.alive.index(allocator.marks[0] + MARK)
    block = 4 * WIDTH * WIDTH
    expected = 16 * BLOCKS * WIDTH * WIDTH // ranks.world_size + (limit + 1) * block
    assert max(allocator.alive[start:]) <= 1.02 * expected, (max(allocator.alive[start:]), expected)
    assert fsdp2.memory(model).staging - staging <= 0.001 * expected
    assert_idle(model)


def test_reads_as_a_table() -> None:
    """One line for each kind and their sum."""
    text = str(Memory(1_000_000, 2_000, 0, 0, 0, 0, 0))
    assert text.splitlines()[0] == "       1.000 MB  parameters"
    assert text.splitlines()[-1] == "       1.002 MB  total"


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="memory: fully_shard was called on no module of Linear"):
        fsdp2.memory(nn.Linear(2, 2))


@distributed(2)
def test_parameters_that_are_not_sharded_count(ranks: Ranks) -> None:
    """Ignored parameters, buffers, and gradients kept back for later."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    before = copy.deepcopy(model)
    fully_shard(model, ignored_params=set(model[1].parameters()))
    found = fsdp2.memory(model)
    assert found.parameters == 64 * 64 * 4 // 2 + 2 * 64 * 4
    assert found.buffers == sum(b.nbytes for b in before.buffers())
    model.set_requires_gradient_sync(False)
    model(torch.randn(4, 64)).sum().backward()
    assert fsdp2.memory(model).full_gradients == 64 * 64 * 4
    model.reset_iter_state()
