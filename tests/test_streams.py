"""Streams and events of an accelerator, proved on the CPU with streams that only record.

DESIGN asks for this order: a buffer is allocated on the stream that fills it; that stream runs
behind what compute was given before; compute waits for the event recorded behind a gather before
it reads full parameters, and for the one behind a reduction before it lets go of what the
reduction reads and hands its result to the shards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp2
from fsdp2 import buffers, collectives, pairwise, param_group, streams
from harness import Ranks, distributed, run
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
)


class RecordedStreams:
    """Streams that write down what they are asked for, in the order of a trace's events."""

    runs_ahead = True

    def __init__(self) -> None:
        self.trace = fsdp2.Trace()
        self.current = "compute"
        self.events: dict[str, str] = {}
        """Where each event was recorded."""
        self.waited: list[str] = []
        self.on_wait: Any = None

    def gathering(self) -> Any:
        return self._scope("gathering")

    def reducing(self) -> Any:
        return self._scope("reducing")

    def replicating(self, behind: Any) -> Any:
        self.trace.add("behind", f"{behind} (replicating)")
        return self._scope("replicating")

    @contextmanager
    def _scope(self, name: str) -> Iterator[None]:
        around = self.current
        allowed = ("compute", "reducing") if name == "replicating" else ("compute",)
        assert around in allowed, f"{name} starts inside {around}"
        self.trace.add("{", name)
        self.current = name
        try:
            yield
        finally:
            self.current = around
            self.trace.add("}", name)

    def event(self) -> Any:
        name = f"{self.current} {sum(s == self.current for s in self.events.values())}"
        self.events[name] = self.current
        self.trace.add("record", name)
        return name

    def compute_waits(self, event: Any) -> None:
        assert self.current == "compute"
        if event is None:
            return
        self.trace.add("behind", event)
        self.waited.append(event)
        if self.on_wait is not None:
            self.on_wait(event)


@contextmanager
def recorded() -> Iterator[tuple[RecordedStreams, pytest.MonkeyPatch]]:
    """All models whose first forward is inside run on one set of recorded streams."""
    made = RecordedStreams()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(streams, "streams_of", lambda device: made)
        yield made, monkeypatch


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def steady_step(ranks: Ranks) -> str:
    with recorded() as (made, _):
        model = shard_blocks(Chain())
        model(torch.ones(2, 4)).sum().backward()
        made.events.clear()
        with fsdp2.trace(model) as events:
            made.trace = events
            loss = model(torch.ones(2, 4)).sum()
            events.add("----", "backward")
            loss.backward()
    assert_idle(model)
    return str(events) + "\n"


class TestSteps(TestCase):
    maxDiff = None

    def test_steady_step(self) -> None:
        """Gathers and reductions have scopes of their own; compute waits where it reads."""
        first, second = run(steady_step, 2)
        self.assertEqual(first, second)
        self.assertExpectedInline(first, """\
gather   root (on demand)
{        gathering
record   gathering 0
}        gathering
behind   gathering 0
wait     root
gather   blocks.0 (ahead)
{        gathering
record   gathering 1
}        gathering
gather   blocks.1 (ahead)
{        gathering
record   gathering 2
}        gathering
forward  root
behind   gathering 1
wait     blocks.0
forward  blocks.0
free     blocks.0
behind   gathering 2
wait     blocks.1
forward  blocks.1
free     blocks.1
----     backward
backward root
gather   blocks.1 (ahead)
{        gathering
record   gathering 3
}        gathering
gather   blocks.0 (ahead)
{        gathering
record   gathering 4
}        gathering
reduce   root
{        reducing
record   reducing 0
}        reducing
behind   gathering 3
wait     blocks.1
backward blocks.1
behind   reducing 0
reduced  root
reduce   blocks.1
{        reducing
record   reducing 1
}        reducing
free     blocks.1
behind   reducing 1
reduced  blocks.1
behind   gathering 4
wait     blocks.0
backward blocks.0
reduce   blocks.0
{        reducing
record   reducing 2
}        reducing
behind   reducing 2
reduced  blocks.0
free     root
free     blocks.0
""")


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_numbers_are_those_of_the_host(ranks: Ranks, reshard: bool | None) -> None:
    """The path that runs ahead of the device computes what the host's path computes."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    with recorded() as (made, _):
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for inputs in token_batches(ranks.world_size, 3):
            loss = next_token_loss(model, inputs[ranks.rank])
            loss.backward()
            assert_same(loss, data_parallel(reference, inputs)[ranks.rank])
            assert_same_params(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert sorted(made.waited) == sorted(made.events), "each event is waited for, once"
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_compute_waits_before_it_reads(ranks: Ranks, reshard: bool | None) -> None:
    """No forward or backward of a group starts before the event of its last gather."""
    model = shard_blocks(Net(), reshard_after_forward=reshard)
    gathered: dict[str, str] = {}
    with recorded() as (made, monkeypatch):
        finish = param_group.ParamGroup.finish_gather
        start = param_group.ParamGroup.start_gather

        def start_gather(group: Any, streams: Any, is_backward: bool) -> None:
            start(group, streams, is_backward)
            gathered[group.name] = list(made.events)[-1]
            assert made.events[gathered[group.name]] == "gathering"

        def finish_gather(group: Any, streams: Any) -> None:
            assert gathered[group.name] not in made.waited
            finish(group, streams)
            assert gathered[group.name] in made.waited

        monkeypatch.setattr(param_group.ParamGroup, "start_gather", start_gather)
        monkeypatch.setattr(param_group.ParamGroup, "finish_gather", finish_gather)
        for inputs in token_batches(ranks.world_size, 2):
            with fsdp2.trace(model) as events:
                made.trace = events
                next_token_loss(model, inputs[ranks.rank]).backward()
            waited: set[str] = set()
            gathers: dict[str, str] = {}
            pending = ""
            for event in events.events:
                if event.name == "gather":
                    pending = event.group
                elif event.name == "record" and event.group.startswith("gathering"):
                    gathers[pending] = event.group
                elif event.name == "behind":
                    waited.add(event.group)
                elif event.name in ("forward", "backward"):
                    assert gathers[event.group] in waited, str(events)
    assert gathered
    assert_idle(model)


@distributed(2)
def test_buffers_are_made_where_they_are_filled(ranks: Ranks) -> None:
    """Full buffers get memory in the scope of a gather, gradient buffers in that of a reduction."""
    with by_messages():
        model = shard_blocks(Net())
    with recorded() as (made, monkeypatch):
        places: list[tuple[str, str]] = []

        def watch(owner: type, name: str) -> None:
            original = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                places.append((name, made.current))
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, watched)

        watch(buffers.FullBuffer, "allocate")
        watch(pairwise.PairwiseGather, "start")
        watch(collectives.Works, "wait")
        watch(buffers.PackedBlock, "copy_out")
        watch(pairwise.Pairwise, "reduce")
        watch(pairwise.PairwiseSum, "wait")
        for inputs in token_batches(ranks.world_size, 2):
            next_token_loss(model, inputs[ranks.rank]).backward()
    assert set(places) == {
        ("allocate", "gathering"),
        ("start", "gathering"),
        ("copy_out", "gathering"),
        ("reduce", "reducing"),
        ("wait", "gathering"),
        ("wait", "reducing"),
    }
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_what_a_reduction_reads_lives_until_it_is_over(
    ranks: Ranks, param_dtype: torch.dtype | None
) -> None:
    """Full gradients and packed copies keep their memory until compute is behind the reduction."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype, torch.float32)
    with by_messages():
        model = shard_blocks(Net(), mp_policy=policy)
    read: dict[str, list[StorageWeakRef]] = {}
    latest: list[StorageWeakRef] = []
    with recorded() as (made, monkeypatch):
        reduce, event = pairwise.Pairwise.reduce, made.event
        start_reduce = param_group.ParamGroup.start_reduce

        def started(group: Any, *args: Any) -> Any:
            gradients = [param.full.grad for param in group.params]
            latest[:] = [StorageWeakRef(grad.untyped_storage()) for grad in gradients]
            del gradients
            return start_reduce(group, *args)

        def watched(self: Any, sources: Any, *args: Any) -> Any:
            for source in sources:
                latest.append(StorageWeakRef(source.flat.untyped_storage()))
                latest.append(StorageWeakRef(source.out.untyped_storage()))
            return reduce(self, sources, *args)

        def record() -> Any:
            name = event()
            if made.current == "reducing":
                read[name] = latest[:]
            return name

        checked: list[str] = []

        def on_wait(name: str) -> None:
            if name.startswith("reducing"):
                assert not any(reference.expired() for reference in read[name]), name
                checked.append(name)

        monkeypatch.setattr(pairwise.Pairwise, "reduce", watched)
        monkeypatch.setattr(param_group.ParamGroup, "start_reduce", started)
        made.event = record  # type: ignore[method-assign]
        made.on_wait = on_wait
        for inputs in token_batches(ranks.world_size, 2):
            next_token_loss(model, inputs[ranks.rank]).backward()
    assert sorted(checked) == sorted(read)
    assert len(checked) == 6
    assert_idle(model)


@distributed(2)
def test_gather_by_hand_before_the_first_forward(ranks: Ranks) -> None:
    """``unshard`` before there is a root also makes compute wait for its event."""
    model = shard_blocks(Chain())
    with recorded() as (made, _):
        handle = model.blocks[0].unshard(async_op=True)
        assert made.waited == []
        handle.wait()
        assert made.waited == ["gathering 0"]
        model(torch.ones(2, 4)).sum().backward()
    assert sorted(made.waited) == sorted(made.events)
    assert_idle(model)


@distributed(2)
def test_mispredicted_gathers(ranks: Ranks) -> None:
    """A gather that nobody reads is freed without making compute wait, and leaves no event."""

    class Either(Chain):
        def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:  # type: ignore[override]
            for i in order:
                x = self.blocks[i](x)
            return self.head(x)

    model = shard_blocks(Either())
    reference = Either()
    reference.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    with recorded() as (made, _):
        for order in ((0, 1), (1, 0), (0, 1)):
            model(torch.ones(2, 4), order).sum().backward()
            reference(torch.ones(2, 4), order).sum().backward()
        assert set(made.waited) < set(made.events)
        assert len(made.waited) == len(set(made.waited))
    assert_same_params(model, reference)
    assert_idle(model)


# ---- The streams of a device, on a module that only records


class RecordingDevice:
    """Stands for ``torch.cuda``: streams with names, and what they were told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = RecordingStream(self, "compute")
        self.made = 0

    def Stream(self, device: torch.device, priority: int = 0) -> RecordingStream:  # noqa: N802
        self.made += 1
        return RecordingStream(self, f"stream {self.made}")

    def current_stream(self, *_: object) -> RecordingStream:
        return self.now

    @contextmanager
    def stream(self, stream: RecordingStream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class RecordingStream:
    def __init__(self, device: RecordingDevice, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: RecordingStream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Any:
        self.device.log.append(f"event on {self.name}")
        return SimpleNamespace(name=f"event on {self.name}")

    def wait_event(self, event: Any) -> None:
        self.device.log.append(f"{self.name} waits for {event.name}")


def test_scopes_start_behind_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scope makes its own stream wait for all that compute was given; then it is current."""
    device = RecordingDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    made = streams.streams_of(torch.device("cuda", 0))
    assert made.runs_ahead
    for scope in (made.gathering, made.reducing, made.gathering):
        with scope():
            event = made.event()
        made.compute_waits(event)
        made.compute_waits(None)
    assert device.log == [
        "stream 1 waits for compute",
        "event on stream 1",
        "compute waits for event on stream 1",
        "stream 2 waits for compute",
        "event on stream 2",
        "compute waits for event on stream 2",
        "stream 1 waits for compute",
        "event on stream 1",
        "compute waits for event on stream 1",
    ]
    assert device.now.name == "compute"


def test_the_host_has_no_streams() -> None:
    """On the CPU scopes do nothing and there are no events."""
    made = streams.streams_of(torch.device("cpu"))
    assert not made.runs_ahead
    with made.gathering(), made.reducing():
        assert made.event() is None
    made.compute_waits(None)


# ---- On a device


@pytest.fixture
def cuda_mesh() -> Iterator[Any]:
    """One rank with NCCL, in this process."""
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.cuda.set_device(0)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


def train_on_cuda(model: nn.Module, steps: int = 5) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for [tokens] in token_batches(1, steps):
        loss = next_token_loss(model, tokens.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("reshard", [True, False, None])
def test_training_on_cuda(cuda_mesh: Any, reshard: bool | None) -> None:
    """On one GPU five steps of AdamW give the losses and weights of the plain model."""
    torch.manual_seed(0)
    reference = Net().cuda()
    model = shard_blocks(copy.deepcopy(reference), mesh=cuda_mesh, reshard_after_forward=reshard)
    for found, expected in zip(train_on_cuda(model), train_on_cuda(reference), strict=True):
        assert_same(found, expected)
    assert_same_params(model, reference)
    assert_idle(model)


@pytest.mark.gpu
def test_training_in_bfloat16_on_cuda(cuda_mesh: Any) -> None:
    """With a cast the gather has a stream and a buffer of its own; the same numbers.

    The reference computes with a bf16 copy of its weights and keeps the weights in float32,
    which is what the policy does.
    """
    torch.manual_seed(0)
    reference = Net().cuda()
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard_blocks(copy.deepcopy(reference), mesh=cuda_mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=True)
    expected = []
    for [tokens] in token_batches(1, 5):
        lowered = copy.deepcopy(reference).bfloat16()
        loss = next_token_loss(lowered, tokens.cuda())
        loss.backward()
        for param, low in zip(reference.parameters(), lowered.parameters(), strict=True):
            param.grad = low.grad.float()
        optimizer.step()
        expected.append(loss.detach())
    for found, loss in zip(train_on_cuda(model), expected, strict=True):
        assert_same(found, loss)
    optimizer.zero_grad()
    assert_same_params(model, reference)
    assert_idle(model)


@pytest.mark.gpu
def test_memory_on_cuda(cuda_mesh: Any) -> None:
    """Between steps nothing is allocated beyond shards, gradients and optimizer states."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard_blocks(Net(dim=256, blocks=4).cuda(), mesh=cuda_mesh, mp_policy=policy)
    train_on_cuda(model, steps=2)
    settled = torch.cuda.memory_allocated()
    train_on_cuda(model, steps=3)
    assert torch.cuda.memory_allocated() <= settled
    assert_idle(model)
