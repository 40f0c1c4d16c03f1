"""Step time and bytes sent by each host, of engines that take turns. Run it in a cluster:

    python benchmarks/cluster.py --hosts 2 -- benchmarks/wire.py
    python benchmarks/cluster.py --hosts 2 --ranks-per-host 2 \\
        -- benchmarks/wire.py --engines torch,fsdp2,hsdp

Bytes are read from the host's interface, with all that TCP and gloo add to them. What ranks
of one host send to each other does not pass through it.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import tables
from compare import measure_times
from engines import ENGINES, Setting, Trainer, ranks_per_host
from models import SHAPES

HEADER = (
    *("engine", "step ms", "MB sent per step and host", "predicted MB", "sent / predicted"),
    *("step / torch", "min-max", "loss"),
)


def sent_nbytes() -> int:
    """By the interface that gloo uses; 0 where the kernel does not tell."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo") + ":"
    counts = [line.split() for line in lines if line.strip().startswith(name)]
    return int(counts[0][9]) if counts else 0


@dataclass(frozen=True)
class Sent:
    """Bytes that one host sent to the others in one step."""

    measured: float
    predicted: float | None


def measure_sent(setting: Setting, engine: str, steps: int) -> Sent:
    """The mean over hosts and ``steps``."""
    trainer = Trainer(engine, setting)
    for _ in range(2):
        trainer.step()
    dist.barrier()
    before = sent_nbytes()
    for _ in range(steps):
        trainer.step()
    dist.barrier()
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, sent_nbytes() - before)
    measured = sum(found) / len(found) / steps  # ranks of one host read the same counter
    return Sent(measured, predict_sent(trainer, setting))


def predict_sent(trainer: Trainer, setting: Setting) -> float | None:
    """What a host of G ranks must send in a step to the W - 1 others, by the engine's rules.

    Fully sharded, a rank has 1/(GW) of the model and sends it to the G (W - 1) ranks of other
    hosts, in each gather; of its gradients it sends each of them as much. So every gather and
    every reduction takes M (W - 1) / W from a rank. Blocks are gathered twice, the root once.

    Sharded inside the hosts only, a rank adds up its 1/G of the gradients with its replicas: a
    ring of W sends 2 (W - 1) / W of that.
    """
    ranks = ranks_per_host()
    hosts = dist.get_world_size() // ranks
    share = (hosts - 1) / hosts
    if trainer.engine == "fsdp2":
        named = trainer.model.named_parameters()
        blocks = sum(param.numel() for name, param in named if name.startswith("blocks."))
        numel = 2 * trainer.parameter_numel + blocks
        return ranks * share * numel * getattr(torch, setting.dtype).itemsize
    if trainer.engine == "hsdp":
        return 2 * share * trainer.parameter_numel * torch.float32.itemsize
    return 0.0 if trainer.engine == "plain" else None


def _sent_cells(sent: Sent) -> tuple[str, str, str]:
    measured = f"{sent.measured / 1e6:.1f}"
    if not sent.predicted:
        return measured, "-" if sent.predicted is None else "0.0", "-"
    return measured, f"{sent.predicted / 1e6:.1f}", f"{sent.measured / sent.predicted:.3f}"


def main() -> None:
    """Every rank runs this, started by torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="14m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engines", default="plain,ddp,torch,fsdp2")
    options = parser.parse_args()
    engines = options.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engines {sorted(unknown)}; choose from {', '.join(ENGINES)}")
    dist.init_process_group("gloo")
    setting = Setting(options.model, options.dtype, options.batch, options.sequence, "cpu")
    timings = measure_times(setting, engines, options.rounds, options.steps)
    sent = {engine: measure_sent(setting, engine, options.steps) for engine in engines}
    if dist.get_rank() == 0:
        rows = []
        for engine in engines:
            timing, reference = timings[engine], timings.get("torch")
            ratio, spread = "-", "-"
            if reference is not None:
                pairs = zip(timing.round_seconds(), reference.round_seconds(), strict=True)
                ratios = [own / other for own, other in pairs]
                ratio, spread = f"{median(ratios):.3f}", f"{min(ratios):.2f}-{max(ratios):.2f}"
            step = f"{timing.median_step().step * 1e3:.1f}"
            loss = f"{timing.loss:.4f}"
            rows.append((engine, step, *_sent_cells(sent[engine]), ratio, spread, loss))
        print(f"{tables.machine()}; {dist.get_world_size()} ranks, {setting}\n")
        print(tables.markdown(HEADER, rows))
    time.sleep(0.3)  # gloo's threads let go of the last tensors that they sent
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
