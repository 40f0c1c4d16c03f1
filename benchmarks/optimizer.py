"""What an optimizer step costs per parameter, when there is next to nothing to compute.

    python benchmarks/optimizer.py --parameters 400

AdamW on 16 x 16 matrices and biases: on the DTensors of both engines, on plain tensors of the
shards' shapes, and after ``fsdp2.local_step``. Communication is free (noop.py) and the engines
take turns.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import fsdp2
import noop
import tables
from models import TinyChain

PER_BLOCK = 16

HEADER = ("steps on", "kernels", "groups", "us per parameter", "/ torch's DTensors", "min-max")

SHARDERS: dict[str, Callable[..., Any]] = {
    "torch's DTensors": torch_fully_shard,
    "fsdp2's DTensors": fsdp2.fully_shard,
    "plain tensors": fsdp2.fully_shard,
    "fsdp2.local_step": fsdp2.fully_shard,
}


class Case(NamedTuple):
    kernels: str
    groups: int
    """Two: matrices with weight decay, biases without."""


class Stepper:
    """A model with gradients, which all steps use, and its optimizer."""

    def __init__(self, engine: str, parameters: int, case: Case) -> None:
        torch.manual_seed(0)
        model = TinyChain(parameters // PER_BLOCK, PER_BLOCK // 2)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            SHARDERS[engine](block, mesh=mesh)
        SHARDERS[engine](model, mesh=mesh)
        model(torch.randn(2, 16)).backward()
        params: list[Tensor] = list(model.parameters())
        if engine == "plain tensors":
            params = [_plain(param) for param in params]
        self.optimizer = torch.optim.AdamW(
            _grouped(params, case.groups), lr=1e-9, **{case.kernels: True}
        )
        if engine == "fsdp2.local_step":
            fsdp2.local_step(self.optimizer)
        self._model = model
        self._parameters = len(params)

    def step(self) -> float:
        """Seconds per parameter."""
        start = time.perf_counter()
        self.optimizer.step()
        return (time.perf_counter() - start) / self._parameters


def _plain(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
    plain = param.detach().to_local().clone().requires_grad_()
    plain.grad = param.grad.to_local().clone()
    return plain


def _grouped(params: list[Tensor], groups: int) -> list[Any]:
    if groups == 1:
        return [{"params": params}]
    matrices = [param for param in params if param.ndim > 1]
    others = [param for param in params if param.ndim < 2]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def measure(parameters: int, case: Case, rounds: int, steps: int) -> list[tuple[str, ...]]:
    """The rows of the table for one case."""
    steppers = {engine: Stepper(engine, parameters, case) for engine in SHARDERS}
    for stepper in steppers.values():
        for _ in range(3):
            stepper.step()  # the first ones make the state
    found: dict[str, list[float]] = {engine: [] for engine in steppers}
    for index in range(rounds):
        for engine in list(steppers) if index % 2 == 0 else reversed(steppers):
            steppers[engine].step()  # not timed: the caches hold another engine's data
            found[engine].append(median(steppers[engine].step() for _ in range(steps)))
    rows = []
    reference = found["torch's DTensors"]
    for engine, times in found.items():
        ratios = [own / other for own, other in zip(times, reference, strict=True)]
        spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
        cells = f"{median(times) * 1e6:.2f}", f"{median(ratios):.3f}", spread
        rows.append((engine, case.kernels, str(case.groups), *cells))
    return rows


def main() -> None:
    """Measure what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=400, help=f"a multiple of {PER_BLOCK}")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round and engine")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_flush_denormal(True)
    noop.start(options.world)
    rows = []
    for case in (Case("foreach", 1), Case("foreach", 2), Case("fused", 1)):
        rows += measure(options.parameters, case, options.rounds, options.steps)
    dist.destroy_process_group()
    print(f"{tables.machine()}; blocks of {PER_BLOCK} parameters, {options.world} ranks\n")
    print(tables.markdown(HEADER, rows))


if __name__ == "__main__":
    main()
