"""Large parameters on NCCL go direct while that is fast enough; it is tried once, and told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, _torch, direct_or_packed, fully_shard, portion, transports
from fsdp2.direct_or_packed import Choice, choose_path, median_seconds
from fsdp2.grouped import Grouped
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, next_token_loss, shard_blocks, token_batches

SLOWER = (1.0, 0.9)
"""Seconds of a grouped and of a packed gather: 90 % of the bandwidth."""
AS_FAST = (1.0, 0.99)


@contextlib.contextmanager
def measured(monkey: pytest.MonkeyPatch, seconds: Sequence[float]) -> Iterator[list[int]]:
    """What is sharded inside is treated as on NCCL, with all parameters large, and has measured.

    Gives for each measurement how many blocks it tried.
    """
    tried: list[int] = []

    def measure(group: dist.ProcessGroup, blocks: Sequence[Tensor]) -> list[float]:
        tried.append(len(blocks))
        for block in blocks:
            block.zero_()  # what they held is lost
        return list(seconds)

    with monkey.context() as patch:
        patch.setattr(direct_or_packed, "measure", measure)
        patch.setattr(direct_or_packed, "_choices", {})
        patch.setattr(Grouped, "pack_below_nbytes", 0)
        patch.setattr(portion, "choose_transport", lambda *to: Grouped(*to[:2], is_measured=True))
        yield tried


@contextlib.contextmanager
def counted(monkey: pytest.MonkeyPatch, *names: str) -> Iterator[dict[str, int]]:
    """How often each of these functions of ``_torch`` is called inside."""
    calls = dict.fromkeys(names, 0)

    def counting(name: str) -> Any:
        original = getattr(_torch, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return original(*args)

        return call

    with monkey.context() as patch:
        for name in names:
            patch.setattr(_torch, name, counting(name))
        yield calls


def trained(
    ranks: Ranks, device: str = "cpu", mesh: Any = None, **options: Any
) -> tuple[Any, list[Tensor]]:
    """A model after three steps, with the losses and the full parameters."""
    torch.manual_seed(0)
    model = shard_blocks(Net().to(device), mesh=mesh or ranks.mesh(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for batches in token_batches(ranks.world_size, 3):
        loss = next_token_loss(model, batches[ranks.rank].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += [param.full_tensor() for param in model.parameters()]
    assert_idle(model)
    return model, found


def test_95_percent_is_enough() -> None:
    """The switch, from the seconds of both ways; its text is what `explain` prints."""
    assert Choice(direct=1.0, packed=0.95).is_direct
    assert Choice(direct=0.5, packed=1.0).is_direct
    slower = Choice(direct=1.0, packed=0.949)
    assert not slower.is_direct
    assert str(slower) == (
        "a grouped gather reached only 0.949 of a packed one's bandwidth, where 0.95 is enough"
    )


@distributed(2, 3)
def test_ranks_agree(ranks: Ranks) -> None:
    """The slowest rank's times count, on every rank: a single slow one sends all packed."""
    group, blocks = dist.group.WORLD, [torch.empty(ranks.world_size, 4)] * 2
    assert group is not None
    is_last = ranks.rank == ranks.world_size - 1
    with pytest.MonkeyPatch.context() as monkey:
        with measured(monkey, (2.0, 1.0) if is_last else (1.0, 1.0)):
            choice = choose_path(group, blocks)
        assert choice == Choice(2.0, 1.0) and not choice.is_direct
        with measured(monkey, (1.0, 1.0) if is_last else (0.5, 0.7)):
            assert choose_path(group, blocks) == Choice(1.0, 1.0)


@distributed(2)
def test_each_group_and_size_is_tried_once(ranks: Ranks) -> None:
    """The answer is kept for each process group and what is gathered in it."""
    group, other = dist.group.WORLD, dist.new_group()
    assert group is not None and isinstance(other, dist.ProcessGroup)
    short, long = torch.empty(2, 4), torch.empty(2, 8)
    with pytest.MonkeyPatch.context() as monkey, measured(monkey, AS_FAST) as tried:
        first = choose_path(group, [short, long])
        assert choose_path(group, [short.clone(), long]) is first
        assert tried == [2]
        choose_path(group, [short, short, short])
        choose_path(other, [short, long])
        assert tried == [2, 3, 2]
    dist.destroy_process_group(other)


@distributed(2, 3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_packed_gathers_give_the_same_numbers(ranks: Ranks, dtype: torch.dtype | None) -> None:
    """Losses and parameters are bit by bit those of the direct path, also where rows are uneven."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with pytest.MonkeyPatch.context() as monkey:
        found = {}
        for seconds in (AS_FAST, SLOWER):
            with (
                measured(monkey, seconds) as tried,
                counted(monkey, "all_gather_grouped") as calls,
            ):
                _, found[seconds] = trained(ranks, mp_policy=policy)
                # The blocks are alike: one of them, and the root.
                assert len(tried) == 2 and min(tried) > 1
                assert bool(calls["all_gather_grouped"]) == (seconds is AS_FAST)
    for packed, direct in zip(found[SLOWER], found[AS_FAST], strict=True):
        assert_same(packed, direct)


class TwoDtypes(nn.Module):
    """Parameters of two dtypes in one group, so in two packed blocks; one has 5 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 5, dtype=torch.float64)
        self.narrow = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x.double()).float())


@distributed(3)
def test_dtypes_are_packed_apart(ranks: Ranks) -> None:
    """A group of float64 and float32 parameters gathers what it was built with."""
    torch.manual_seed(0)
    reference = TwoDtypes()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkey, measured(monkey, SLOWER) as tried:
        model = fully_shard(TwoDtypes(), mesh=ranks.mesh())
        assert not tried, "fully_shard does not communicate"
        x = torch.randn(2, 6)
        with counted(monkey, "all_gather_into") as calls:
            model(x)  # which checks a few things first, once
            model.reshard()
            calls["all_gather_into"] = 0
            model.unshard()
            assert calls["all_gather_into"] == 2
        for name, param in reference.named_parameters():
            assert_same(model.get_parameter(name).data, param.data, name)
        model.reshard()
        assert_same(model(x), reference(x))
        model.reshard()
    assert tried == [4]
    assert_idle(model)


@distributed(4)
def test_parts_are_measured_over_their_own_ranks(ranks: Ranks) -> None:
    """Backward's gather over fewer ranks asks its own process group; the numbers stay."""
    with pytest.MonkeyPatch.context() as monkey:
        with measured(monkey, SLOWER) as tried:
            _, packed = trained(ranks, reshard_after_forward=2)
            assert len(tried) == 4
        with measured(monkey, AS_FAST):
            _, direct = trained(ranks, reshard_after_forward=2)
    for found, expected in zip(packed, direct, strict=True):
        assert_same(found, expected)


@distributed(2)
def test_explain_tells_the_measurement(ranks: Ranks) -> None:
    """Before the first gather the size decides; then the measured ratio stands behind it."""
    size = "its shard has 0 B or more"
    for seconds, way in (
        (SLOWER, f"packed: {size}; a grouped gather reached only 0.900 of a packed one's"),
        (AS_FAST, f"direct: {size}; a grouped gather reached 0.990 of a packed one's"),
    ):
        with pytest.MonkeyPatch.context() as monkey, measured(monkey, seconds):
            model = fully_shard(nn.Linear(4, 4), mesh=ranks.mesh())
            assert f"gather: direct: {size}\n" in str(fsdp2.explain(model))
            model(torch.randn(2, 4)).sum().backward()
            text = f"gather: {way} bandwidth, where 0.95 is enough\n"
            assert str(fsdp2.explain(model)).count(text) == 2
            assert_idle(model)


@distributed(2)
def test_a_single_block_has_no_choice(ranks: Ranks) -> None:
    """One large parameter is one plain all-gather, in place: there is nothing to try."""
    with pytest.MonkeyPatch.context() as monkey, measured(monkey, SLOWER) as tried:
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=ranks.mesh())
        model(torch.randn(2, 4)).sum().backward()
        assert not tried
        assert "gather: direct: its shard has 0 B or more\n" in str(fsdp2.explain(model))
    assert_idle(model)


@distributed(2)
def test_only_nccl_is_measured(ranks: Ranks) -> None:
    """Neither gloo nor a backend that we do not know, nor NCCL's neighbour on the CPU."""
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(direct_or_packed, "measure", None)
        trained(ranks)
        group = dist.group.WORLD
        assert group is not None
        cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
        for backends, device, expected in (
            ("cpu:gloo,cuda:nccl", cuda, True),
            ("cuda:nccl", cuda, True),
            ("cpu:mpi,cuda:ucc", cuda, False),
            ("cpu:mpi,cuda:nccl", cpu, False),
        ):
            monkey.setattr(dist, "get_backend_config", lambda group, found=backends: found)
            transport = transports.choose_transport(group, 0, device)
            assert isinstance(transport, Grouped)
            assert transport._is_measured == expected


class Clock:
    """A device that is always just done; its events read the time."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = Clock.now

        def elapsed_time(self, end: Clock.Event) -> float:
            return (end.at - self.at) * 1e3

    def synchronize(self) -> None:
        pass


def test_times_are_medians_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways alternate; neither the first three calls count nor some slow ones among nine."""
    monkeypatch.setattr(torch.cuda, "Event", Clock.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Clock)
    order = ""

    def way(name: str, seconds: float) -> None:
        nonlocal order
        order += name
        Clock.now += 100.0 if order.count(name) in (1, 2, 3, 5, 6, 7, 8) else seconds

    found = median_seconds([lambda: way("a", 2.0), lambda: way("b", 3.0)])
    assert found == pytest.approx([2.0, 3.0])
    assert order == "ab" * 12


# ---- On GPUs


@pytest.fixture
def nccl() -> Iterator[dist.ProcessGroup]:
    """One rank with NCCL, in this process."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_measuring_on_cuda(nccl: dist.ProcessGroup) -> None:
    """On one GPU both ways run and take time; the answer is kept, and no memory."""
    blocks = [torch.randn(1, n, device="cuda").bfloat16() for n in (1 << 18, 1 << 20, 1 << 20)]
    before = torch.cuda.memory_allocated()
    choice = choose_path(nccl, blocks)
    assert torch.cuda.memory_allocated() == before
    assert 0 < choice.direct < 1 and 0 < choice.packed < 1
    assert choose_path(nccl, blocks) is choice
    assert transports.choose_transport(nccl, 0, torch.device("cuda", 0))._is_measured


def _train_on_gpus(rank: int, world_size: int, store: Path) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store.as_uri(), rank=rank, world_size=world_size)
    try:
        ranks, mesh = Ranks(rank, world_size), init_device_mesh("cuda", (world_size,))
        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(Grouped, "pack_below_nbytes", 0)
            found = {}
            for enough in (0.0, 1e9):
                monkey.setattr(direct_or_packed, "ENOUGH", enough)
                monkey.setattr(direct_or_packed, "_choices", {})
                with counted(monkey, "all_gather_grouped") as calls:
                    model, found[enough] = trained(ranks, "cuda", mesh)
                    assert calls["all_gather_grouped"], "it was measured at least"
                assert "of a packed one's bandwidth" in str(fsdp2.explain(model))
        for packed, direct in zip(found[1e9], found[0.0], strict=True):
            assert_same(packed, direct)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_both_paths_over_nccl(tmp_path: Path) -> None:
    """On several GPUs training is the same, bit by bit, whichever way was chosen."""
    world_size = min(torch.cuda.device_count(), 4)
    if world_size < 2:
        pytest.skip("needs two GPUs")
    rest = (world_size, tmp_path / "store")
    torch.multiprocessing.spawn(_train_on_gpus, rest, nprocs=world_size)
