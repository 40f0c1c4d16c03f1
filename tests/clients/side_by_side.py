"""One training, first with PyTorch's ``fully_shard`` and then with ours in its place."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.interop import use_in_torch

Report = dict[str, object]


def options(*flags: str) -> argparse.Namespace:
    """The folder for results, and switches that are off unless given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def compare(train: Callable[[Path], Report], out: Path) -> None:
    """Write what either implementation gives on this rank to ``rank<r>.json``.

    JSON keeps every bit of a float.
    """
    for name in ("torch", "fsdp2"):
        (out / name).mkdir(exist_ok=True)
    theirs = train(out / "torch")
    with use_in_torch():
        ours = train(out / "fsdp2")
    found = {"torch": theirs, "fsdp2": ours}
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def sharded_by(model: nn.Module) -> str:
    """The package whose ``fully_shard`` was applied to the model: torch or fsdp2."""
    state = torch.distributed.fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
    return type(state).__module__.split(".")[0]


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """The same for the same bytes in the same order; of a DTensor this rank's shard counts."""
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(local.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
