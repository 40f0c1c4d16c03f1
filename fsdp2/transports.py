"""Which way bytes travel between the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp2.collectives import Transport
from fsdp2.grouped import Grouped
from fsdp2.pairwise import Pairwise
from fsdp2.shared_memory import SharedMemory


def choose_transport(group: dist.ProcessGroup, rank: int, device: torch.device) -> Transport:
    """On gloo shared memory or else messages, the backend's own collectives elsewhere.

    Only NCCL's are measured: of other backends we do not know what a measurement does to them.
    """
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    backend = backends.get(device.type)
    if backend == "gloo":
        return SharedMemory(Pairwise(group, rank))
    return Grouped(group, rank, is_measured=backend == "nccl" and device.type == "cuda")
