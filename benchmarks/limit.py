"""How many groups in flight are worth it: limits 1 to 4, and the one that "auto" finds.

    python benchmarks/limit.py --workload compute
    python benchmarks/limit.py --workload memory
    python benchmarks/cluster.py --hosts 2 --rate 1gbit -- benchmarks/limit.py --workload link

Starts its ranks itself, unless torchrun did. All limits train the same model in turns.
README.md says what the columns mean.
"""

import argparse
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

import fsdp2
import memory
import tables
from engines import Setting, Trainer
from launch import on_ranks
from models import SHAPES

HEADER = ("limit", "step ms", "waiting ms", "grows by MB", "reached", "step / limit 2", "min-max")

Limit = int | Literal["auto"]
LIMITS: tuple[Limit, ...] = (1, 2, 3, 4, "auto")


@dataclass(frozen=True)
class Workload:
    """What a step computes, and how many blocks' bytes the budget has beside the root's."""

    batch: int
    sequence: int
    budget_blocks: float | None = None


WORKLOADS = {
    "compute": Workload(batch=4, sequence=128),
    "link": Workload(batch=1, sequence=32),
    "memory": Workload(batch=2, sequence=64, budget_blocks=1.5),
}


class Found(NamedTuple):
    """What one limit led to, the slowest or largest rank; alike on all of them."""

    rounds: list[float]
    """The median step of each round, in seconds."""
    waited: float
    grown_nbytes: int
    reached: int
    changes: list[str]


def measure(
    setting: Setting, budget_blocks: float | None, settling: int, rounds: int, steps: int
) -> dict[Limit, Found]:
    """Every rank runs this: all limits settle first, then take turns."""
    trainers = {limit: Trainer("fsdp2", setting) for limit in LIMITS}
    changes: dict[Limit, list[str]] = {}
    for limit, trainer in trainers.items():
        trainer.step()
        budget = _budget(trainer, budget_blocks) if limit == "auto" else None
        fsdp2.set_inflight_limit(trainer.model, limit, budget)
        with fsdp2.trace(trainer.model) as trace:
            for _ in range(settling if limit == "auto" else 1):
                trainer.step()
        changes[limit] = [event.detail for event in trace.events if event.name == "limit"]
    times: dict[Limit, list[float]] = {limit: [] for limit in LIMITS}
    grown = dict.fromkeys(LIMITS, 0)
    for index in range(rounds):
        for limit in LIMITS if index % 2 == 0 else reversed(LIMITS):
            trainer = trainers[limit]
            memory.reset_peak(setting.device)
            before = memory.peak_nbytes(setting.device)
            trainer.step()  # not timed: the caches still hold another one's data
            grown[limit] = max(grown[limit], memory.peak_nbytes(setting.device) - before)
            times[limit].append(median(trainer.step().step for _ in range(steps)))
    return {
        limit: Found(
            rounds=[max(_of_all_ranks(seconds)) for seconds in times[limit]],
            waited=mean(_of_all_ranks(trainer.waited(steps) or 0.0)),
            grown_nbytes=max(_of_all_ranks(grown[limit])),
            reached=_limit_of(trainer),
            changes=changes[limit],
        )
        for limit, trainer in trainers.items()
    }


def _budget(trainer: Trainer, blocks: float | None) -> int | None:
    """Bytes of the root's full parameters and so many blocks', with what "near" leaves free."""
    if blocks is None:
        return None
    nbytes = [group.full_nbytes for group in fsdp2.explain(trainer.model).groups]
    return int((nbytes[0] + blocks * max(nbytes[1:])) / 0.95)


def _limit_of(trainer: Trainer) -> int:
    with fsdp2.trace(trainer.model) as trace:
        return trace.limit


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(found: dict[Limit, Found]) -> Iterable[str]:
    """The table, and why "auto" came to its limit."""
    rows = []
    for limit, each in found.items():
        pairs = zip(each.rounds, found[2].rounds, strict=True)
        ratios = [own / other for own, other in pairs]
        rows.append(
            (
                str(limit),
                f"{median(each.rounds) * 1e3:.1f}",
                f"{each.waited * 1e3:.1f}",
                f"{each.grown_nbytes / 1e6:.1f}",
                str(each.reached),
                f"{median(ratios):.3f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
            )
        )
    yield tables.markdown(HEADER, rows)
    yield ""
    yield "auto: " + ("; ".join(found["auto"].changes) or "2 from the start")


def main() -> None:
    """Measure what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="compute")
    parser.add_argument("--ranks", type=int, default=2, help="unless torchrun starts them")
    parser.add_argument("--model", choices=SHAPES, default="14m")
    parser.add_argument("--batch", type=int, help="sequences per rank; else the workload's")
    parser.add_argument("--settling", type=int, default=30, help='steps of "auto" before the turns')
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round and limit")
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    workload = replace(workload, batch=options.batch or workload.batch)
    setting = Setting(options.model, "float32", workload.batch, workload.sequence, "cpu")
    rest = (setting, workload.budget_blocks, options.settling, options.rounds, options.steps)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        found, ranks, is_first = measure(*rest), dist.get_world_size(), dist.get_rank() == 0
        time.sleep(0.3)  # gloo's threads let go of the last tensors that they sent
        dist.destroy_process_group()
    else:
        with memory.goes_back_when_freed():
            found, ranks, is_first = (
                on_ranks(options.ranks, "cpu", measure, *rest),
                options.ranks,
                True,
            )
    if is_first:
        print(f"{tables.machine()}; {ranks} ranks, workload {options.workload}, {setting}\n")
        print("\n".join(report(found)))


if __name__ == "__main__":
    main()
