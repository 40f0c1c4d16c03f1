"""What sharding costs on a GPU when communication is free: time, copies, host time and memory.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --shape tiny

Trains a chain of Llama-8B-shaped blocks on a process group that does nothing (noop.py), as
rank 0 of 8: unsharded, with PyTorch's FSDP2 and with fsdp2. One GPU is enough; with several
the bandwidth of grouped all-gathers follows (bandwidth.py). README.md says what the columns
mean. On a CPU only the time of a step can be told.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import bandwidth
import fsdp2
import noop
import tables
from copies import Copies, count_copies
from llama import SHAPES, Chain, Rotary

HEADER = (
    "engine",
    "tokens",
    "step ms",
    "step / torch",
    "min-max",
    "host ms",
    "copy kernels",
    "copy ms",
    "peak allocated MB",
    "peak reserved MB",
    "alloc retries",
)

SHARDERS: dict[str, Callable[..., Any] | None] = {
    "plain": None,
    "torch": torch_fully_shard,
    "fsdp2": fsdp2.fully_shard,
}


@dataclass(frozen=True)
class Setting:
    """What all engines of one table share, but for the number of tokens."""

    shape: str
    blocks: int
    device: str  # "cpu" or "cuda"


class StepTime(NamedTuple):
    """Seconds of one step, and until its calls had returned and the GPU was left to work."""

    step: float
    host: float


class Runner:
    """One engine with its model and input."""

    def __init__(self, engine: str, setting: Setting, tokens: int) -> None:
        torch.manual_seed(0)
        shape, device, dtype = SHAPES[setting.shape], setting.device, torch.bfloat16
        with torch.device(device):
            model = Chain(shape, setting.blocks)
            # Its gradient is asked for too, as that of an embedding's output would be.
            self.inputs = torch.randn(1, tokens, shape.width, dtype=dtype, requires_grad=True)
            self.gradient = torch.randn(1, tokens, shape.width, dtype=dtype)
        self.model = _sharded(engine, model, device)
        self.rotary = Rotary(shape, tokens, dtype, device)
        self._finish = torch.cuda.synchronize if device == "cuda" else _nothing

    def step(self) -> StepTime:
        """One forward and backward; there is no optimizer, and gradients are dropped after."""
        self._finish()
        start = time.perf_counter()
        self.model(self.inputs, self.rotary).backward(self.gradient)
        returned = time.perf_counter()
        self._finish()
        end = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        self.inputs.grad = None
        return StepTime(end - start, returned - start)


def _sharded(engine: str, model: Chain, device: str) -> Any:
    """Plain is bf16 altogether: it runs the kernels that the others run under their policy."""
    fully_shard = SHARDERS[engine]
    if fully_shard is None:
        return model.bfloat16()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _nothing() -> None:
    pass


class Usage(NamedTuple):
    """What a GPU tells of one engine's steps."""

    copies: Copies | None
    allocated: int
    reserved: int
    retries: int


def measure_times(
    setting: Setting, tokens: int, engines: Sequence[str], rounds: int, steps: int
) -> dict[str, list[StepTime]]:
    """The median step of each engine in each round; the engines take turns."""
    runners = {engine: Runner(engine, setting, tokens) for engine in engines}
    for runner in runners.values():
        for _ in range(3):
            runner.step()  # the first ones set up what later ones reuse
    found: dict[str, list[StepTime]] = {engine: [] for engine in engines}
    for index in range(rounds):
        for engine in engines if index % 2 == 0 else reversed(engines):
            runners[engine].step()  # not timed: the caches still hold another engine's data
            found[engine].append(_medians([runners[engine].step() for _ in range(steps)]))
    return found


def _medians(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(median(part) for part in zip(*times, strict=True)))


def measure_usage(setting: Setting, tokens: int, engine: str, steps: int) -> Usage:
    """Copies and memory of one engine, with no other in memory; sharding does not count."""
    _forget()
    runner = Runner(engine, setting, tokens)
    runner.step()
    _forget()
    torch.cuda.reset_peak_memory_stats()
    retries = _retries()
    for _ in range(steps):
        runner.step()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    retries = _retries() - retries
    return Usage(count_copies(runner.step, steps), allocated, reserved, retries)


def _forget() -> None:
    """Give back what nobody needs, and the allocator's reserve."""
    gc.collect()
    torch.cuda.empty_cache()


def _retries() -> int:
    """How often the allocator had to give its reserve back to find memory, which is slow."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0)


def _rows(
    tokens: int, times: dict[str, list[StepTime]], usages: dict[str, Usage], on_gpu: bool
) -> list[tuple[str, ...]]:
    rows = []
    for engine, rounds in times.items():
        ratio, spread = "-", "-"
        if "torch" in times:
            pairs = zip(rounds, times["torch"], strict=True)
            ratios = [own.step / other.step for own, other in pairs]
            ratio, spread = f"{median(ratios):.3f}", f"{min(ratios):.2f}-{max(ratios):.2f}"
        step, host = (seconds * 1e3 for seconds in _medians(rounds))
        shown = f"{host:.2f}" if on_gpu else "-"
        columns = (f"{step:.2f}", ratio, spread, shown, *_usage_columns(usages.get(engine)))
        rows.append((engine, str(tokens), *columns))
    return rows


def _usage_columns(usage: Usage | None) -> tuple[str, ...]:
    if usage is None:
        return ("-",) * 5
    copies = ("-", "-")
    if usage.copies is not None:
        copies = (f"{usage.copies.kernels:.0f}", f"{usage.copies.seconds * 1e3:.2f}")
    memory = (f"{nbytes / 1e6:.0f}" for nbytes in (usage.allocated, usage.reserved))
    return (*copies, *memory, str(usage.retries))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--tokens", default="2048,4096,8192", help="separated by commas")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--world", type=int, default=8, help="ranks that each step believes in")
    parser.add_argument("--engines", default=",".join(SHARDERS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round and engine")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]
    if unknown := set(options.engines) - set(SHARDERS):
        parser.error(f"unknown engines {sorted(unknown)}; choose from {', '.join(SHARDERS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2,
            f"gpu.py measures a GPU, and torch {torch.__version__} finds none here; "
            "`--device cpu --shape tiny --tokens 64` shows that the script itself works\n",
        )
    return options


def main() -> None:
    """Measure what the command line asks for and print the tables."""
    options = _arguments()
    on_gpu = options.device == "cuda"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Outputs that no collective fills may hold denormals, slow to compute with on a CPU.
    torch.set_flush_denormal(True)
    if on_gpu:
        torch.cuda.set_device(0)
    noop.start(options.world)
    setting = Setting(options.shape, options.blocks, options.device)
    rows: list[tuple[str, ...]] = []
    for tokens in options.tokens:
        times = measure_times(setting, tokens, options.engines, options.rounds, options.steps)
        usages: dict[str, Usage] = {}
        if on_gpu:
            usages = {e: measure_usage(setting, tokens, e, options.steps) for e in options.engines}
        rows += _rows(tokens, times, usages, on_gpu)
    dist.destroy_process_group()
    print(
        f"{tables.machine()}; rank 0 of {options.world} on {options.device}, {options.blocks} "
        f"blocks of {options.shape}, bfloat16\n"
    )
    print(tables.markdown(HEADER, rows))
    _print_bandwidth(options.shape, torch.cuda.device_count() if on_gpu else 0)


def _print_bandwidth(shape: str, ranks: int) -> None:
    if ranks < 2:
        print(f"\nGrouped against packed all-gathers: that needs two GPUs, and this had {ranks}.")
        return
    print(f"\nAll-gathers over {ranks} GPUs:\n")
    print(tables.markdown(bandwidth.HEADER, bandwidth.rows(ranks, SHAPES[shape])))


if __name__ == "__main__":
    main()
