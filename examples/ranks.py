"""Who trains together, and what they tell each other besides parameters and gradients."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``mesh``, or this process alone where it is None."""

    mesh: DeviceMesh | None
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group() if self.mesh else None

    @property
    def size(self) -> int:
        return self.mesh.size() if self.mesh else 1

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank() if self.mesh else 0

    def slice_of(self, batch: Tensor) -> Tensor:
        """This rank's rows of a global batch, on its device."""
        rows = len(batch) // self.size
        return batch[self.rank * rows : (self.rank + 1) * rows].to(self.device)

    def mean(self, *values: Tensor | float) -> list[float]:
        """Each value's mean over the ranks, the same on all of them, in one all-reduce."""
        numbers = [torch.as_tensor(value, device=self.device).double() for value in values]
        total = torch.stack(numbers)
        if self.mesh:
            dist.all_reduce(total, group=self.group)
        return [number / self.size for number in total.tolist()]


def join(mesh_size: int) -> Ranks | None:
    """Meet the other ranks that torchrun started; None on a rank that the mesh leaves out.

    ``mesh_size`` 0 means all ranks.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit("start with torchrun --standalone --nproc-per-node 2, or pass --no-shard")
    launched = int(os.environ["WORLD_SIZE"])
    if mesh_size > launched:
        sys.exit(f"--mesh {mesh_size} needs as many ranks, but torchrun started {launched}")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (mesh_size or launched,))
    return Ranks(mesh, device) if mesh.get_coordinate() is not None else None


def alone() -> Ranks:
    """This process without any other."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.exit("--no-shard trains in one process; start it with python, not with torchrun")
    return Ranks(None, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def leave() -> None:
    """Part from the other ranks, if there were any."""
    if dist.is_initialized():
        # gloo's threads need the interpreter to let go of the last tensors that they sent, and
        # abort the process where it is already shutting down (pytorch/pytorch#179291).
        time.sleep(0.1)
        dist.destroy_process_group()
