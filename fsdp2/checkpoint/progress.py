"""A bar for whoever waits."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch.distributed as dist

from fsdp2.checkpoint.storage import Progress


def bar(text: str) -> Progress:
    """For ``progress``: a bar of bytes on rank 0 where tqdm is installed, and otherwise nothing.

    ``pip install 'fsdp2[progress]'`` brings tqdm.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if not is_first or importlib.util.find_spec("tqdm") is None:
        return lambda done, total: None
    tqdm: Any = importlib.import_module("tqdm").tqdm
    shown = tqdm(desc=text, unit="B", unit_scale=True, unit_divisor=1024)

    def show(done: int, total: int) -> None:
        shown.total = total
        shown.update(done - shown.n)
        if done == total:
            shown.close()

    return show
