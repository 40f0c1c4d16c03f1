"""What GPT-2 Large holds on each of 8 ranks, and what keeping its full parameters costs.

    python benchmarks/large.py --ranks 8 --price-ranks 2

Parameters are stored in fp32 and computed with in bf16. Two steps of few tokens, from shards
that were never a whole model; see README.md beside this file. Takes 20 GB of memory.
"""

import argparse
import gc
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2
from launch import on_ranks
from memory import goes_back_when_freed, peak_nbytes, reset_peak, resident_nbytes, segment_nbytes
from models import GPT, SHAPES, VOCABULARY, Shape
from tables import machine, markdown

POSITIONS = 1024
GIB = 2**30


@dataclass(frozen=True)
class Trial:
    """One training that fresh processes do."""

    shape: Shape
    keeps_full: bool
    """``reshard_after_forward=False``; otherwise only the root is kept."""
    has_adam: bool
    sequence: int


@dataclass(frozen=True)
class Found:
    """Bytes on one rank; what is resident counts beside what the process held before."""

    held: int
    """Resident between steps, gradients gone."""
    tensors: int
    """The same, from the tensors: shards and optimizer state."""
    segments: int
    """Of ``held``: shared memory that ranks pass data on through."""
    with_gradients: int
    """Resident between backward and ``zero_grad``."""
    after_forward: int
    """Resident when the loss is there."""
    peak: int
    """The most that was resident in a step that began with gradients."""
    gathered: int
    """Full parameters that were gathered in a step."""
    model: int
    """All full parameters, in bf16."""
    root: int
    """Of ``model``: the root's."""
    prefetched: int
    """Of ``model``: the blocks in flight at once."""


class Training:
    """A model that was sharded before it had memory, with its optimizer and data."""

    def __init__(self, trial: Trial) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = GPT(trial.shape, POSITIONS)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        reshards = False if trial.keeps_full else None
        for block in self.model.blocks:
            fsdp2.fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
        fsdp2.fully_shard(self.model, mp_policy=policy, reshard_after_forward=reshards)
        fsdp2.materialize(self.model)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, fused=True) if trial.has_adam else None
        text = torch.randint(VOCABULARY, (1, trial.sequence + 1))
        self.tokens, self.targets = text[:, :-1], text[:, 1:]

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.tokens, self.targets)
        return loss

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def tensors_nbytes(self) -> int:
        """Shards, gradients and optimizer state."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        held = [value for state in states for value in state.values()]
        for param in self.model.parameters():
            held += [param, param.grad]
        return sum(_local_nbytes(each) for each in held if isinstance(each, Tensor))


def _local_nbytes(tensor: Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def measure(trial: Trial) -> Found:
    """Every rank runs this; of each quantity the largest rank's."""
    _rehearse(trial)
    before = resident_nbytes("cpu")
    training = Training(trial)
    training.forward().backward()  # records the order and makes the full parameters
    training.update()
    reset_peak("cpu")
    with fsdp2.trace(training.model) as trace:
        loss = training.forward()
        after_forward = resident_nbytes("cpu")
        loss.backward()
    peak = peak_nbytes("cpu")
    training.update()
    with_gradients = resident_nbytes("cpu")
    training.model.zero_grad(set_to_none=True)
    groups = {group.name: group for group in fsdp2.explain(training.model).groups}
    root, *blocks = groups.values()
    found = Found(
        held=resident_nbytes("cpu") - before,
        tensors=training.tensors_nbytes(),
        segments=segment_nbytes(),
        with_gradients=with_gradients - before,
        after_forward=after_forward - before,
        peak=peak - before,
        gathered=sum(groups[e.group].full_nbytes for e in trace.events if e.name == "gather"),
        model=sum(group.full_nbytes for group in groups.values()),
        root=root.full_nbytes,
        prefetched=root.limit * max(block.full_nbytes for block in blocks),
    )
    return _largest(found)


def _rehearse(trial: Trial) -> None:
    """Imports, stacks of threads and buffers of the process group are no part of the model."""
    small = Trial(Shape(width=64, blocks=2, heads=2), trial.keeps_full, trial.has_adam, 8)
    training = Training(small)
    for _ in range(2):
        training.forward().backward()
        training.update()
    del training
    gc.collect()


def _largest(found: Found) -> Found:
    names = [field.name for field in fields(Found)]
    values = torch.tensor([getattr(found, name) for name in names])
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return Found(**dict(zip(names, values.tolist(), strict=True)))


def row(trial: Trial, ranks: int, found: Found) -> list[str]:
    kept = "kept" if trial.keeps_full else "freed"
    sizes = (
        *(found.held, found.tensors, found.segments),
        *(found.with_gradients, found.after_forward, found.peak),
    )
    cells = [f"{nbytes / GIB:.3f}" for nbytes in sizes]
    gathers = f"{found.gathered / found.model:.3f}"
    return [kept, "AdamW" if trial.has_adam else "-", str(ranks), *cells, gathers]


def prices(freed: Found, kept: Found) -> list[list[str]]:
    """What keeping the full parameters costs, and what it saves."""
    beyond_root = freed.model - freed.root
    segments = kept.segments - freed.segments
    rows = [
        ("memory behind forward", kept.after_forward - freed.after_forward, segments, beyond_root),
        ("memory at the peak", kept.peak - freed.peak, segments, beyond_root - freed.prefetched),
        ("gathered less per step", freed.gathered - kept.gathered, 0, beyond_root),
    ]
    return [
        [
            name,
            *(f"{nbytes / GIB:.3f}" for nbytes in (found, shared, predicted)),
            f"{found / predicted:.3f}",
            f"{(found - shared) / predicted:.3f}",
        ]
        for name, found, shared, predicted in rows
    ]


def main() -> None:
    """Measure each trial in fresh processes and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="large")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--price-ranks", type=int, default=2, help="ranks for the second table")
    parser.add_argument("--sequence", type=int, default=2, help="tokens per rank and step")
    options = parser.parse_args()
    shape: Shape = SHAPES[options.model]
    trials = [
        (Trial(shape, False, True, options.sequence), options.ranks),
        (Trial(shape, False, False, options.sequence), options.price_ranks),
        (Trial(shape, True, False, options.sequence), options.price_ranks),
    ]
    found: list[Found] = []
    with goes_back_when_freed():
        for trial, ranks in trials:
            found.append(on_ranks(ranks, "cpu", measure, trial))
            print(f"{trial}, {ranks} ranks: {found[-1]}", file=sys.stderr)
    with torch.device("meta"):
        model: nn.Module = GPT(shape, POSITIONS)
    numel = sum(param.numel() for param in model.parameters())
    print(f"{machine()}; {numel / 1e6:.1f} M parameters, stored in fp32, computed with in bf16\n")
    header = [
        *("full parameters", "optimizer", "ranks", "held GiB", "of it tensors", "of it segments"),
        *("with gradients", "behind forward", "peak GiB", "models gathered"),
    ]
    rows = [row(trial, ranks, each) for (trial, ranks), each in zip(trials, found, strict=True)]
    print(markdown(header, rows))
    print()
    header = [
        *("keeping them", "measured GiB", "of it segments", "predicted GiB"),
        *("measured / predicted", "without segments"),
    ]
    print(markdown(header, prices(found[1], found[2])))


if __name__ == "__main__":
    main()
