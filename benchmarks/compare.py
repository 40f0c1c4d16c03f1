"""Step time, waiting and memory of fsdp2 beside plain training, DDP and PyTorch's FSDP2.

    python benchmarks/compare.py --ranks 2

All engines run in one set of processes and take turns, forwards and backwards,
so that whatever else the machine does falls on all of them. Only for the peak
memory does each get fresh processes. README.md says what the columns mean.
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TypeVar

import torch
import torch.distributed as dist

import memory
import tables
from engines import ENGINES, Setting, StepTime, Trainer
from launch import on_ranks
from models import SHAPES

T = TypeVar("T")

HEADER = (
    "engine",
    "step ms",
    "forward ms",
    "backward ms",
    "optimizer ms",
    "waiting ms",
    "peak MB",
    "step / torch",
    "min-max",
    "loss",
)


@dataclass(frozen=True)
class Timing:
    """What one engine did in all rounds; ``rounds[i]`` holds the steps of round ``i``."""

    rounds: list[list[StepTime]]
    loss: float  # of the last timed step, the mean over ranks
    waited: float | None  # seconds per step, the mean over ranks
    parameter_numel: int

    def round_seconds(self) -> list[float]:
        """The median step of each round."""
        return [median(time.step for time in steps) for steps in self.rounds]

    def median_step(self) -> StepTime:
        """The medians over all steps, for the step and each part on its own."""
        steps = [time for steps in self.rounds for time in steps]
        return StepTime(*(median(values) for values in zip(*steps, strict=True)))


def measure_times(
    setting: Setting, engines: Sequence[str], rounds: int, steps: int
) -> dict[str, Timing]:
    """Every rank runs this: ``rounds`` turns of ``steps`` timed steps for each engine."""
    trainers = {engine: Trainer(engine, setting) for engine in engines}
    for trainer in trainers.values():
        trainer.step()  # the first step allocates, records an order, makes communicators
    times: dict[str, list[list[StepTime]]] = {engine: [] for engine in engines}
    for index in range(rounds):
        for engine in engines if index % 2 == 0 else reversed(engines):
            trainers[engine].step()  # not timed: the caches still hold another engine's data
            times[engine].append([trainers[engine].step() for _ in range(steps)])
        if dist.get_rank() == 0:
            print(f"round {index + 1} of {rounds}", file=sys.stderr)
    return {
        engine: Timing(
            rounds=[_slowest_rank(turn) for turn in times[engine]],
            loss=mean(_from_all_ranks(float(trainer.loss))),  # before waited() trains on
            waited=_mean_if_known(_from_all_ranks(trainer.waited(steps))),
            parameter_numel=trainer.parameter_numel,
        )
        for engine, trainer in trainers.items()
    }


def measure_peak(setting: Setting, engine: str, steps: int) -> int:
    """Every rank runs this: bytes by which training grew the process, on the largest rank.

    Counted from before the model is made to the peak of the steps. A tiny
    model is trained before, so that imports and thread stacks do not count;
    the peak while sharding, when the whole model exists, does not count either.
    """
    rehearsal = Trainer(engine, replace(setting, model="tiny", batch=1, sequence=8))
    for _ in range(2):
        rehearsal.step()
    del rehearsal
    gc.collect()
    before = memory.resident_nbytes(setting.device)
    trainer = Trainer(engine, setting)
    memory.reset_peak(setting.device)
    for _ in range(steps):
        trainer.step()
    grown = memory.peak_nbytes(setting.device) - before
    return max(_from_all_ranks(grown))


def _slowest_rank(turn: list[StepTime]) -> list[StepTime]:
    """For each step and part, the time of the rank that took longest."""
    ranks = _from_all_ranks(turn)
    return [
        StepTime(*(max(part) for part in zip(*times, strict=True)))
        for times in zip(*ranks, strict=True)
    ]


def _mean_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _from_all_ranks(value: T) -> list[T]:
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _row(engine: str, timing: Timing, peak: int, reference: Timing | None) -> tuple[str, ...]:
    parts = [f"{seconds * 1e3:.1f}" for seconds in timing.median_step()]
    waited = "-" if timing.waited is None else f"{timing.waited * 1e3:.1f}"
    ratio, spread = "-", "-"
    if reference is not None:
        pairs = zip(timing.round_seconds(), reference.round_seconds(), strict=True)
        ratios = [own / other for own, other in pairs]
        ratio, spread = f"{median(ratios):.3f}", f"{min(ratios):.2f}-{max(ratios):.2f}"
    return (engine, *parts, waited, f"{peak / 1e6:.0f}", ratio, spread, f"{timing.loss:.4f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="14m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round and engine")
    engines = "plain,ddp,torch,fsdp2"
    parser.add_argument("--engines", default=engines, help="separated by commas")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(f"unknown engines {sorted(unknown)}; choose from {', '.join(ENGINES)}")
    if options.device == "cuda" and options.ranks > torch.cuda.device_count():
        parser.error(
            f"{options.ranks} ranks need as many GPUs; here are {torch.cuda.device_count()}"
        )
    return options


def main() -> None:
    """Measure what the command line asks for and print the table."""
    options = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    setting = Setting(options.model, options.dtype, options.batch, options.sequence, options.device)
    ranks, engines = options.ranks, options.engines
    timings: dict[str, Timing] = on_ranks(
        ranks, setting.device, measure_times, setting, engines, options.rounds, options.steps
    )
    with memory.goes_back_when_freed():
        peaks: dict[str, int] = {
            engine: on_ranks(ranks, setting.device, measure_peak, setting, engine, 3)
            for engine in engines
        }
    numel = timings[engines[0]].parameter_numel
    print(
        f"{tables.machine()}; {ranks} ranks on {setting.device}, {numel / 1e6:.1f} M parameters, "
        f"{setting.dtype}, {setting.batch} x {setting.sequence} tokens per rank\n"
    )
    reference = timings.get("torch")
    rows = [_row(name, timings[name], peaks[name], reference) for name in engines]
    print(tables.markdown(HEADER, rows))


if __name__ == "__main__":
    main()
