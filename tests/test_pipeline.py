"""Pipeline schedules over fully sharded stages: two stages, two shards each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import Block, whole

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES = 4


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def two_stages() -> list[nn.Sequential]:
    return [nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(8, 5))]


def batches(shards: int, steps: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            [torch.randn(8, 8, generator=generator) for _ in range(shards)],
            [torch.randn(8, 5, generator=generator) for _ in range(shards)],
        )
        for _ in range(steps)
    ]


@distributed(4, timeout=180)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("keep", [True, False])
def test_stages_train_like_one_process(ranks: Ranks, kind: str, keep: bool) -> None:
    """Losses and parameters over 5 steps, to rounding: micro-batches are added one by one."""
    mesh = ranks.mesh(2, 2, names=("pp", "dp"))
    stages = two_stages()
    reference = nn.Sequential(*copy.deepcopy(stages))
    pp_rank, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stage = stages[pp_rank]
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=not keep)
    fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=not keep)
    group = mesh["pp"].get_group()
    pipe = PipelineStage(stage, pp_rank, 2, torch.device("cpu"), group=group)
    schedule = SCHEDULES[kind](pipe, MICRO_BATCHES, loss_fn=loss_of)
    optimizers: list[Any] = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (stage, reference)
    ]
    for step, (inputs, targets) in enumerate(batches(2, 5)):
        losses: list[Tensor] = []
        with fsdp2.trace(stage) as events:
            if pp_rank == 0:
                schedule.step(inputs[dp_rank])
            else:
                schedule.step(target=targets[dp_rank], losses=losses)
        if step:  # the first one runs each stage once more, to learn shapes
            gathers = sum(e.name == "gather" and e.group != "root" for e in events.events)
            blocks = len(list(stage)) * (1 if keep else 2 * MICRO_BATCHES)
            assert gathers == blocks if keep else gathers <= blocks, str(events)
            assert sum(e.name == "reduce" for e in events.events) == len(list(stage)), str(events)
        expected = [loss_of(reference(x), y) for x, y in zip(inputs, targets)]
        (sum(expected) / 2).backward()  # type: ignore[union-attr]
        if pp_rank == 1:
            found = torch.stack(losses).mean().detach()
            torch.testing.assert_close(found, expected[dp_rank].detach(), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(stage.parameters(), reference[pp_rank].parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
