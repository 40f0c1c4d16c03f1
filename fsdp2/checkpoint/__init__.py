"""Checkpoints of training: whole or not there, and loadable on any number of ranks.

Usage::

    from fsdp2 import checkpoint

    restored = checkpoint.load("checkpoints", model, optimizer)
    checkpoint.set_rng_state(restored.extra["rng"])
    for step in range(restored.step + 1, steps + 1):
        ...
        if step % 1000 == 0:
            extra = {"rng": checkpoint.rng_state()}
            checkpoint.save(
                "checkpoints", model, optimizer, step=step, extra=extra, keep=3, asynchronous=True
            )
    checkpoint.wait_for_saves()
"""

from fsdp2.checkpoint.extra import rng_state, set_rng_state
from fsdp2.checkpoint.folders import latest
from fsdp2.checkpoint.full import load_full
from fsdp2.checkpoint.loading import Restored, load
from fsdp2.checkpoint.progress import bar
from fsdp2.checkpoint.saving import Saving, save, wait_for_saves
from fsdp2.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Restored",
    "Saving",
    "bar",
    "latest",
    "load",
    "load_full",
    "rng_state",
    "save",
    "set_rng_state",
    "wait_for_saves",
]
