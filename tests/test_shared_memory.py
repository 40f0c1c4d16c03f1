"""Ranks of one host read each other's memory: the same numbers as with messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard, segments
from fsdp2.loans import Loan
from fsdp2.param_group import ParamGroup
from fsdp2.peer_memory import read_all
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, by_messages, next_token_loss, token_batches
from models import shard_blocks as shard

BF16, FP32 = torch.bfloat16, torch.float32


class Wide(nn.Module):
    """Weights that travel by themselves, rows that 2 and 4 divide and 3 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def results(ranks: Ranks, policy: MixedPrecisionPolicy, mesh: Any) -> list[Tensor]:
    """Losses, gradients and parameters of four steps, one of them with two micro-batches."""
    torch.manual_seed(0)
    model = shard(Wide(), mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + ranks.rank)
    found: list[Tensor] = []
    for step in range(4):
        for is_last in (False, True) if step == 2 else (True,):
            model.set_requires_gradient_sync(is_last)
            loss = model(torch.randn(4, 512)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert_idle(model)
    return found + [p.to_local().detach() for p in model.parameters()]


@contextmanager
def through_segments() -> Iterator[None]:
    """As where the system lets no process read another's memory."""
    held, segments._met = segments._met, WeakKeyDictionary()
    original, segments.let_peers_read = segments.let_peers_read, lambda: False
    try:
        yield
    finally:
        segments._met, segments.let_peers_read = held, original


@distributed(2, 3, 4)
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16, BF16)],
    ids=["float32", "bfloat16", "bfloat16 sums"],
)
def test_equals_messages_bit_by_bit(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Sums have the same order, whatever they come by."""
    ours = results(ranks, policy, ranks.mesh())
    with through_segments():
        written = results(ranks, policy, ranks.mesh())
    with by_messages():
        theirs = results(ranks, policy, ranks.mesh())
    assert len(ours) == len(written) == len(theirs)
    for one, another, other in zip(ours, written, theirs):
        assert_same(one, other)
        assert_same(another, other)


@distributed(2, 3)
def test_float16_sums_do_not_overflow(ranks: Ranks) -> None:
    """Terms are scaled before they are added, in all three ways alike."""
    found = []
    for way in (nullcontext, through_segments, by_messages):
        with way():
            torch.manual_seed(0)
            policy = MixedPrecisionPolicy(torch.float16, torch.float16, torch.float32)
            model = fully_shard(nn.Linear(512, 512), mesh=ranks.mesh(), mp_policy=policy)
            (model(torch.full((1, 512), 40.0)) * 1000).sum().backward()
            found.append(model.weight.grad.to_local().clone())
            assert_idle(model)
    assert found[0].isfinite().all() and found[0].max() > 30000
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@distributed(4)
def test_equals_messages_with_replicas(ranks: Ranks) -> None:
    """Shared memory inside each replica, the backend's sum over them."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    ours = results(ranks, MixedPrecisionPolicy(), mesh)
    with through_segments():
        written = results(ranks, MixedPrecisionPolicy(), mesh)
    with by_messages():
        theirs = results(ranks, MixedPrecisionPolicy(), mesh)
    for one, another, other in zip(ours, written, theirs):
        assert_same(one, other)
        assert_same(another, other)


@distributed(2)
def test_gradients_are_read_in_place(ranks: Ranks) -> None:
    """No segment is written, and the gradients of one group are gone before those of the next
    are all there."""
    model = shard(Wide(), mesh=ranks.mesh())
    model(torch.randn(2, 512)).sum().backward()
    held = segments.held_nbytes(fully_shard.state(model).group.mesh.shard.group)
    seen: list[ref[Tensor]] = []
    alive: list[int] = []
    start_reduce = ParamGroup.start_reduce

    def count(group: ParamGroup, *args: Any) -> Any:
        seen.extend(ref(param.full.grad) for param in group.params)
        alive.append(sum(grad.numel() for each in seen if (grad := each()) is not None))
        return start_reduce(group, *args)

    ParamGroup.start_reduce = count
    try:
        model(torch.randn(2, 512)).sum().backward()
    finally:
        ParamGroup.start_reduce = start_reduce
    one, head = 512 * 512 + 512, 10 * 512 + 10
    assert max(alive) <= one + head, alive
    met = segments.meet(fully_shard.state(model).group.mesh.shard.group)
    assert met is not None and met.reads_peers
    assert met.held_nbytes == held
    assert_idle(model)


def test_memory_that_is_not_there() -> None:
    """Reading what another process does not have raises and names the process."""
    with pytest.raises(OSError, match=f"memory of process {os.getpid()}: "):
        read_all([torch.zeros(4)], os.getpid(), [8])


@distributed(2)
def test_explain_says_which(ranks: Ranks) -> None:
    """From the first forward on: it finds out where the ranks are."""
    model = fully_shard(Wide(), mesh=ranks.mesh())
    model(torch.randn(2, 512)).sum().backward()
    assert "shared memory" in str(fsdp2.explain(model))
    with by_messages():
        model = fully_shard(Wide(), mesh=ranks.mesh())
        model(torch.randn(2, 512)).sum().backward()
    assert "pairwise messages" in str(fsdp2.explain(model))


@distributed(3)
@pytest.mark.parametrize("what", ["_can_share", "_can_map", "_host"])
def test_one_rank_elsewhere(ranks: Ranks, what: str) -> None:
    """If one of them cannot share, all of them send messages."""
    group = dist.new_group([0, 1, 2])
    original = getattr(segments, what)
    if ranks.rank == 1:
        answers = {"_can_share": lambda: False, "_can_map": lambda *a: False, "_host": lambda: 7}
        setattr(segments, what, answers[what])
    try:
        assert segments.meet(group) is None
    finally:
        setattr(segments, what, original)
    assert segments.meet(dist.new_group([0, 1, 2])) is not None


@distributed(3)
@pytest.mark.parametrize("what", ["let_peers_read", "_can_read"])
def test_one_rank_that_may_not_read(ranks: Ranks, what: str) -> None:
    """If one of them may not read the others' memory, all of them write to segments."""
    group = dist.new_group([0, 1, 2])
    original = getattr(segments, what)
    if ranks.rank == 1:
        setattr(segments, what, lambda *a: False)
    try:
        met = segments.meet(group)
    finally:
        setattr(segments, what, original)
    assert met is not None and not met.reads_peers


def our_files() -> int:
    """Anonymous files of ours that this process has open or mapped."""
    opened = sum(
        "memfd:fsdp2" in os.readlink(entry)
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink()
    )
    return opened + Path("/proc/self/maps").read_text().count("memfd:fsdp2")


@distributed(2)
def test_memory_is_used_again(ranks: Ranks) -> None:
    """After the first steps no further segment is made, and none has a name on disk."""
    counts = []
    with through_segments():
        model = shard(Wide(), mesh=ranks.mesh())
        for _ in range(8):
            model(torch.randn(2, 512)).sum().backward()
            counts.append(our_files())
    assert 0 < counts[3] == counts[-1], counts
    assert not [name for name in os.listdir("/dev/shm") if "fsdp2" in name]
    assert_idle(model)


@distributed(2)
def test_two_models_in_turns(ranks: Ranks) -> None:
    """Gathers of two roots under way at once have segments of their own."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    batch = token_batches(ranks.world_size, 1)[0][ranks.rank]
    with torch.no_grad():
        expected = [next_token_loss(model, batch) for model in models]
    models = [shard(model, mesh=ranks.mesh()) for model in models]
    for model in models:
        for block in model.blocks:
            block.unshard(async_op=True)
    for model, loss in zip(models, expected):
        with torch.no_grad():
            assert_same(next_token_loss(model, batch), loss)
        for module in model.modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.reshard()
        assert_idle(model)


@distributed(2)
def test_what_an_exception_left_behind(ranks: Ranks) -> None:
    """A model that is dropped in the middle of a step does not confuse the next one."""
    x = torch.randn(2, 512)
    for _ in range(3):
        dropped = shard(Wide(), mesh=ranks.mesh())
        dropped(x).sum().backward()
        for block in dropped.blocks:
            block.unshard(async_op=True)  # nobody waits for them
        del dropped
        torch.manual_seed(0)
        model = Wide()
        expected = model(x).detach()
        shard(model, mesh=ranks.mesh())
        out = model(x)
        assert_same(out.detach(), expected)
        out.sum().backward()
        assert_idle(model)


@distributed(2)
def test_a_loan_that_cannot_be_read(ranks: Ranks) -> None:
    """A peer whose memory is gone is named, not only its process."""
    group = dist.new_group([0, 1])
    met = segments.meet(group)
    assert met is not None
    loan = Loan([torch.ones(4)], met, 0)
    addresses = loan.addresses()
    with pytest.raises(RuntimeError, match=r"could not read what rank \d"):
        met.read(1 - ranks.rank, [torch.zeros(4)], [8])
    found = torch.zeros(4)
    met.read(1 - ranks.rank, [found], addresses[1 - ranks.rank])
    assert_same(found, torch.ones(4))
    loan.have_read()
    loan.take_back()
