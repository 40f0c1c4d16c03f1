"""`benchmarks/gpu.py` runs where there is no GPU as far as it can, and counts copies right."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import Ranks, distributed

FOLDER = Path(__file__).parent.parent / "benchmarks"


def benchmark(monkey: pytest.MonkeyPatch, name: str) -> Any:
    monkey.syspath_prepend(FOLDER)
    return importlib.import_module(name)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_tiny_shape_on_the_cpu() -> None:
    """A step of every engine is timed; what only a GPU tells is a dash."""
    turns = ("--rounds", "1", "--steps", "1")
    done = call("--device", "cpu", "--shape", "tiny", "--tokens", "8,16", "--blocks", "1", *turns)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[:2] for row in rows] == [
        [engine, tokens] for tokens in ("8", "16") for engine in ("plain", "torch", "fsdp2")
    ]
    for row in rows:
        assert float(row[header.index("step ms")]) > 0
        assert row[header.index("host ms") :] == ["-"] * 6
    assert "needs two GPUs" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    """One sentence and exit status 2 for whoever expected numbers of a GPU."""
    done = call()
    assert done.returncode == 2 and not done.stdout
    [line] = done.stderr.splitlines()
    assert "finds none here" in line and "--device cpu --shape tiny" in line


def event(name: str, *kernels: tuple[str, float]) -> SimpleNamespace:
    launched = [SimpleNamespace(name=kernel, duration=time) for kernel, time in kernels]
    return SimpleNamespace(name=name, kernels=launched)


def test_copies_are_told_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator that launched a kernel decides, or the driver's name for it."""
    copies = benchmark(monkeypatch, "copies")
    events = [
        event("aten::mm", ("gemm", 90.0)),
        event("aten::to"),
        event("aten::copy_", ("vectorized_elementwise_kernel", 3.0)),
        event("aten::mul", ("vectorized_elementwise_kernel", 5.0)),
        event("aten::_foreach_copy_", ("multi_tensor_apply_kernel", 2.0), ("Memcpy DtoD", 4.0)),
        event("aten::item", ("Memcpy DtoH (Device -> Pinned)", 1.0)),
    ]
    assert copies.copies_among(events) == (4, pytest.approx(10e-6))
    assert copies.copies_among(events[:1]) == (0, 0.0)
    assert copies.copies_among([event("aten::mm")]) is None


@distributed(2)
def test_bandwidth_rows(ranks: Ranks) -> None:
    """Bytes received in a second, both ways and with copies, from times made up here."""
    with pytest.MonkeyPatch.context() as monkey:
        bandwidth, llama = benchmark(monkey, "bandwidth"), benchmark(monkey, "llama")
        monkey.setattr(bandwidth, "measure", lambda group, blocks: [2.0e-6, 1.0e-6])
        monkey.setattr(bandwidth, "median_seconds", lambda ways: [way() or 4.0e-6 for way in ways])
        shape = llama.LlamaShape(width=1000, heads=4, kv_heads=2, hidden=2000)
        attention, feed_forward, block = bandwidth.rows_of_rank(shape, "cpu")
    # 3 M bfloat16 numbers, of which the other rank has half.
    speeds = ("1500.0", "3000.0", "750.0")
    assert attention == ("attention", "4", "6", *speeds, "0.500", "packed")
    assert feed_forward[:3] == ("feed-forward", "3", "12")
    assert block[:3] == ("block", "7", "18")


@pytest.mark.gpu
@pytest.mark.slow
def test_one_block_on_a_gpu() -> None:
    """With a GPU no column is empty."""
    done = call("--tokens", "256", "--blocks", "1", "--rounds", "1", "--steps", "2")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| fsdp2")]
    assert rows and not any(cell.strip() == "-" for row in rows for cell in row.split("|"))
