"""Blocks of one kind at equal distances are found, and reached by one view."""

from random import Random

import torch

from fsdp2.runs import Run, runs_of


def test_layers_repeat_shapes() -> None:
    """Matrices of one shape are one run, the vectors behind them another."""
    assert runs_of([32, 32, 32, 2, 2], [0, 32, 64, 96, 98]) == [
        Run(0, 3, (32,)),
        Run(3, 2, (2,)),
    ]


def test_runs_end() -> None:
    """Another kind ends a run, and so does another distance in any one of the memories."""
    assert runs_of(["a", "b", "b"], [0, 8, 16]) == [Run(0, 1, (0,)), Run(1, 2, (8,))]
    assert runs_of([2, 2, 2, 2], [0, 2, 4, 6], [0, 4, 8, 16]) == [
        Run(0, 3, (2, 4)),
        Run(3, 1, (0, 0)),
    ]
    assert runs_of([], []) == []


def test_every_block_is_reached() -> None:
    """The views of all runs, one behind the other, are the blocks in their order."""
    random = Random(0)
    for _ in range(200):
        sizes = [random.choice([1, 2, 3]) for _ in range(random.randrange(12))]
        offsets, at = [], 0
        for size in sizes:
            at += random.choice([0, 0, 0, 1])  # padding now and then
            offsets.append(at)
            at += size
        memory = torch.arange(at)
        found: list[list[int]] = []
        for run in runs_of(sizes, offsets):
            shape, stride = (run.length, sizes[run.first]), (*run.steps, 1)
            found += torch.as_strided(memory, shape, stride, offsets[run.first]).tolist()
        assert found == [[*range(o, o + n)] for o, n in zip(offsets, sizes, strict=True)]
