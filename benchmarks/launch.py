"""Start ranks on this machine and bring back what rank 0 found."""

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(ranks: int, device: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(*arguments)`` in ``ranks`` fresh processes that form one process group.

    ``function`` is defined at the top of a module, as for any spawned process.
    Returns what it returned on rank 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        rest = (ranks, device, _free_port(), answer, function, arguments)
        mp.spawn(_enter, rest, nprocs=ranks)
        return pickle.loads(answer.read_bytes())


def _enter(
    rank: int,
    ranks: int,
    device: str,
    port: int,
    answer: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # Ranks share the cores: with more threads each they would compete with one another.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
    )
    found = function(*arguments)
    if rank == 0:
        answer.write_bytes(pickle.dumps(found))
    time.sleep(0.1)  # gloo's threads let go of the last tensors that they sent
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
