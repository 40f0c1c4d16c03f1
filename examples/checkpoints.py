"""Checkpoints of a training run, read and written by ``torch.distributed.checkpoint``.

Each rank writes the shards that it has, and any number of ranks can load them. A folder is named
``step-000123`` only once every rank has written its part, so one with that name is complete.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from gpt import GPT

# Said at each save and load of --no-shard, where one process is what is meant.
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")


def save(
    folder: Path, step: int, model: GPT, optimizer: Optimizer, group: dist.ProcessGroup | None
) -> Path:
    """Write ``folder/step-<step>`` and return it; every rank of ``group`` calls this.

    ``group`` is None where one process trains alone.
    """
    complete = folder / f"step-{step:06d}"
    unfinished = complete.with_suffix(".unfinished")
    is_first = group is None or dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
    _wait(group)
    state = _state(model, optimizer, step)
    dcp.save(state, checkpoint_id=unfinished, process_group=group, no_dist=group is None)
    if is_first:
        shutil.rmtree(complete, ignore_errors=True)
        unfinished.rename(complete)
    _wait(group)
    return complete


def latest(folder: Path) -> Path:
    """The complete checkpoint that was written last; FileNotFoundError where there is none."""
    metadata = [
        path for path in folder.glob("step-*/.metadata") if path.parent.suffix != ".unfinished"
    ]
    if not metadata:
        raise FileNotFoundError(f"no checkpoint in {folder}; start without --resume to make one")
    # By time and not by step: a folder may also hold the later steps of an older run.
    return max(metadata, key=lambda path: path.stat().st_mtime_ns).parent


def load(path: Path, model: GPT, optimizer: Optimizer, group: dist.ProcessGroup | None) -> int:
    """Fill ``model`` and ``optimizer`` from ``path`` and return the step it was saved after."""
    state = _state(model, optimizer, step=0)
    dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    # Another number of heads fits the same tensors, and would train another model in silence.
    wanted = asdict(model.config)
    if state["config"] != wanted:
        raise ValueError(
            f"{path} holds a model of {state['config']}, and this run asks for {wanted}; "
            f"resume with the options that the checkpoint was made with"
        )
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def _state(model: GPT, optimizer: Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "config": asdict(model.config),
        "step": step,
    }


def _wait(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)
