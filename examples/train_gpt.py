"""Train a small GPT on the source of Python's standard library, sharded with fsdp2.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py --no-shard

The batch is global: each rank takes its slice, and the losses do not depend on how many ranks
there are, up to rounding. The second command trains the plain model in one process.
Ctrl-C saves and stops; --resume continues as if nothing had happened.
"""

from __future__ import annotations

import argparse
import math
import resource
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from corpus import load_corpus, random_windows, spread_windows
from fsdp2 import MixedPrecisionPolicy, checkpoint, fully_shard, trace
from gpt import GPT, GPTConfig
from ranks import Ranks, alone, join, leave
from report import Report, Row


def option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of ``Options`` that is a command-line option of the same name and type."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Options:
    """What can be chosen on the command line."""

    layers: int = option(3, "blocks of the model")
    width: int = option(128, "channels between the blocks")
    heads: int = option(4, "attention heads per block")
    positions: str = option("rope", "how the model knows positions", ("rope", "learned"))
    tied: bool = option(False, "use the embedding as the output layer too")
    sequence: int = option(128, "bytes that the model sees at once")
    batch: int = option(16, "sequences per step, over all ranks together")
    steps: int = option(800, "steps to train, counted from the very first")
    schedule_steps: int = option(0, "steps of the learning-rate schedule; 0: as many as --steps")
    lr: float = option(4e-3, "highest learning rate")
    warmup: int = option(50, "steps in which the learning rate rises")
    grad_clip: float = option(1.0, "largest norm of the gradients; larger ones are scaled down")
    seed: int = option(0, "seed of the initial weights and of the data order")
    dtype: str = option("float32", "dtype of the computation", ("float32", "bfloat16"))
    gathers: str = option("plain", "how weights travel", ("plain", "float8", "int8"))
    gradients: str = option("plain", "how gradients travel", ("plain", "float8", "int8"))
    mesh: int = option(0, "ranks in the mesh, the others leave; 0: all")
    reshard_after_forward: str = option(
        "auto", "free parameters between forward and backward", ("auto", "true", "false")
    )
    no_shard: bool = option(False, "train the plain model in one process")
    out: str = option("out", "folder for loss.csv and loss.png")
    checkpoint: str = option("", "folder for checkpoints; empty: <out>/checkpoints")
    resume: bool = option(False, "continue from the latest checkpoint")

    def __post_init__(self) -> None:
        if self.no_shard and self.dtype != "float32":
            raise ValueError(
                "--no-shard has no mixed precision; for bfloat16 in one process, "
                "use torchrun --nproc-per-node 1"
            )

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.checkpoint or Path(self.out, "checkpoints"))


def parse_options() -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for each in fields(Options):
        name, text = "--" + each.name.replace("_", "-"), each.metadata["help"]
        if isinstance(each.default, bool):
            parser.add_argument(name, action="store_true", help=text)
        else:
            kind, choices = type(each.default), each.metadata["choices"]
            parser.add_argument(name, type=kind, default=each.default, choices=choices, help=text)
    try:
        return Options(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


def build_model(options: Options, ranks: Ranks) -> GPT:
    """The same initial weights on every number of ranks, and then sharded."""
    torch.manual_seed(options.seed)
    config = GPTConfig(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        sequence=options.sequence,
        positions=options.positions,
        tied=options.tied,
    )
    model = GPT(config).to(ranks.device)
    if ranks.mesh is None:
        return model
    wire = {"plain": None, "float8": torch.float8_e4m3fn, "int8": torch.int8}
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if options.dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
        all_gather_dtype=wire[options.gathers],
        exchange_dtype=wire[options.gradients],
    )
    reshard = {"auto": None, "true": True, "false": False}[options.reshard_after_forward]
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def build_optimizer(model: GPT, options: Options) -> AdamW:
    """AdamW that decays matrices, and leaves the gains of the norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


def resume(model: GPT, optimizer: Optimizer, options: Options, ranks: Ranks) -> int:
    """Load the latest checkpoint, of any number of ranks; returns the step it was saved after."""
    restored = checkpoint.load(
        options.checkpoint_folder, model, optimizer, process_group=ranks.group
    )
    # Another number of heads fits the same tensors, and would train another model in silence.
    saved, wanted = restored.extra_of(0)["config"], asdict(model.config)
    if saved != wanted:
        raise ValueError(
            f"{restored.path} holds a model of {saved}, and this run asks for {wanted}; "
            f"resume with the options that the checkpoint was made with"
        )
    return restored.step


def set_learning_rate(optimizer: Optimizer, step: int, options: Options) -> None:
    """A linear rise, then half a cosine down to a twentieth."""
    total = options.schedule_steps or options.steps
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    rate = options.lr * min(step / options.warmup, 0.05 + 0.95 * cosine)
    for group in optimizer.param_groups:
        group["lr"] = rate


def loss_of(model: GPT, windows: Tensor, ranks: Ranks) -> Tensor:
    """Cross-entropy of the next byte in nats, over this rank's slice of the global batch."""
    mine = ranks.slice_of(windows)
    inputs, targets = mine[:, :-1], mine[:, 1:]
    # In float32, because a bfloat16 softmax over the bytes would lose the small probabilities.
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def take_step(
    model: GPT, optimizer: Optimizer, windows: Tensor, options: Options, ranks: Ranks
) -> Tensor:
    """One update of the parameters; returns this rank's loss before it."""
    loss = loss_of(model, windows, ranks)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def evaluate(model: GPT, data: Tensor, options: Options, ranks: Ranks) -> float:
    """Mean loss over 16 batches of windows that are spread over all of ``data``."""
    windows = spread_windows(data, 16 * options.batch, options.sequence + 1)
    losses = [loss_of(model, batch, ranks) for batch in windows.split(options.batch)]
    return ranks.mean(torch.stack(losses).mean())[0]


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this rank has held: of its GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def catch_stop_signals() -> list[int]:
    """A list that stays empty until SIGINT or SIGTERM arrives."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def train(options: Options, ranks: Ranks) -> None:
    """Everything between joining the other ranks and leaving them."""
    stop_signals = catch_stop_signals()
    corpus = load_corpus()
    model = build_model(options, ranks)
    optimizer = build_optimizer(model, options)
    finished = 0
    if options.resume:
        finished = resume(model, optimizer, options, ranks)
    report = Report(Path(options.out), finished, options.steps, active=ranks.rank == 0)

    for step in range(finished + 1, options.steps + 1):
        started = time.perf_counter()
        set_learning_rate(optimizer, step, options)
        length = options.sequence + 1
        windows = random_windows(corpus.train, options.batch, length, options.seed, step)
        with trace(model) if ranks.mesh else nullcontext() as traced:
            loss = take_step(model, optimizer, windows, options, ranks)
        # A signal may reach one rank only, so the ranks agree on stopping where they meet anyway.
        mean_loss, stopping, exposed, memory = ranks.mean(
            loss,
            bool(stop_signals),
            traced.exposed_seconds if traced else 0.0,
            peak_memory_gib(ranks.device),
        )
        seconds = time.perf_counter() - started
        tokens_per_second = options.batch * options.sequence / seconds
        report.add(Row(step, mean_loss, tokens_per_second, exposed / seconds), memory)
        is_stopped = stopping > 0 and step < options.steps
        if step == options.steps or is_stopped:
            folder = options.checkpoint_folder
            extra = {"config": asdict(model.config)}
            saving = checkpoint.save(
                folder, model, optimizer, step=step, extra=extra, process_group=ranks.group
            )
            report.say(f"saved {saving.path}")
        if is_stopped:
            report.say(f"stopped by a signal after step {step}; --resume continues")
            return

    train_loss = evaluate(model, corpus.train, options, ranks)
    validation_loss = evaluate(model, corpus.validation, options, ranks)
    report.say(f"loss: train {train_loss:.4f}, validation {validation_loss:.4f} nats per byte")
    report.plot(validation_loss)


def main() -> None:
    """Join the other ranks, train, and leave them."""
    options = parse_options()
    ranks = alone() if options.no_shard else join(options.mesh)
    if ranks is not None:
        if options.batch % ranks.size:
            sys.exit(f"--batch {options.batch} does not divide over {ranks.size} ranks")
        train(options, ranks)
    leave()


if __name__ == "__main__":
    main()
