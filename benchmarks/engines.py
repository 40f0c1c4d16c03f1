"""Ways to train one model on several ranks, behind one small interface.

``plain`` trains on every rank for itself and communicates nothing: it is the
time that computing takes. The others train one model together.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from models import GPT, SHAPES, VOCABULARY


@dataclass(frozen=True)
class Setting:
    """What all engines of one comparison share."""

    model: str
    dtype: str  # "float32" or "bfloat16": what forward and backward compute with
    batch: int  # sequences per rank and step
    sequence: int  # tokens per sequence
    device: str  # "cpu" or "cuda"


class StepTime(NamedTuple):
    """Seconds that one rank spent in one step and in its three parts."""

    step: float
    forward: float
    backward: float
    optimizer: float


class Trainer:
    """One engine with its model, optimizer and data; every rank makes one.

    Ranks start from the same parameters and read different tokens, the same
    ones in each step, so that engines which train together reach the same loss.
    """

    def __init__(self, engine: str, setting: Setting) -> None:
        self.engine = engine
        torch.manual_seed(0)
        model = GPT(SHAPES[setting.model], setting.sequence).to(setting.device)
        self.parameter_numel = sum(p.numel() for p in model.parameters())
        self.model = ENGINES[engine](model, setting)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(1 + dist.get_rank())
        size = (setting.batch, setting.sequence + 1)
        text = torch.randint(VOCABULARY, size).to(setting.device)
        self.tokens, self.targets = text[:, :-1], text[:, 1:]
        self.loss = torch.zeros(())
        self._now = time.perf_counter if setting.device == "cpu" else _cuda_now

    def step(self) -> StepTime:
        """Train one step, started by all ranks together."""
        dist.barrier()
        start = self._now()
        loss: Tensor = self.model(self.tokens, self.targets)
        after_forward = self._now()
        loss.backward()
        after_backward = self._now()
        self.optimizer.step()
        end = self._now()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return StepTime(
            end - start, after_forward - start, after_backward - after_forward, end - after_backward
        )

    def waited(self, steps: int) -> float | None:
        """Seconds per step that this rank was blocked by communication.

        Measured in steps of its own, because looking costs time. None where
        nobody can tell from outside, as in DDP's reducer.
        """
        on_cpu = self.tokens.device.type == "cpu"
        if self.engine == "plain":
            return 0.0
        if self.engine in ("fsdp2", "hsdp"):
            with fsdp2.trace(self.model) as trace:
                self._repeat(steps)
            return trace.exposed_seconds / steps
        if self.engine == "torch" and on_cpu:
            with _blocked_in_collectives() as blocked:
                self._repeat(steps)
            return sum(blocked) / steps
        return None

    def _repeat(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def _cuda_now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _plain(model: GPT, setting: Setting) -> nn.Module:
    """Under bfloat16 the model itself is bf16: the same kernels as the sharded engines run."""
    return model.to(getattr(torch, setting.dtype))


def _ddp(model: GPT, setting: Setting) -> nn.Module:
    """Under bfloat16 like plain, so its gradients are summed in bf16 too."""
    return DistributedDataParallel(_plain(model, setting))


def _torch(model: GPT, setting: Setting) -> nn.Module:
    return _shard(model, setting, torch_fully_shard)


def _fsdp2(model: GPT, setting: Setting) -> nn.Module:
    return _shard(model, setting, fsdp2.fully_shard)


def _hsdp(model: GPT, setting: Setting) -> nn.Module:
    """Sharded over the ranks of each host, repeated on every host."""
    ranks = ranks_per_host()
    shape = (dist.get_world_size() // ranks, ranks)
    mesh = init_device_mesh(setting.device, shape, mesh_dim_names=("replicate", "shard"))
    return _shard(model, setting, fsdp2.fully_shard, mesh)


def ranks_per_host() -> int:
    """As torchrun says; without it all ranks are on one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _shard(
    model: GPT, setting: Setting, fully_shard: Callable[..., Any], mesh: DeviceMesh | None = None
) -> nn.Module:
    """Each block is a param group; embeddings, last norm and head are the root's."""
    if mesh is None:
        mesh = init_device_mesh(setting.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if setting.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


ENGINES: dict[str, Callable[[GPT, Setting], nn.Module]] = {
    "plain": _plain,
    "ddp": _ddp,
    "torch": _torch,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
}


@contextmanager
def _blocked_in_collectives() -> Iterator[list[float]]:
    """Collect the seconds spent inside the collectives that PyTorch's FSDP2 calls.

    On CPU it calls them without ``async_op``: each returns when its result is
    there, so the time inside is the time blocked. Releases before 2.13 call
    them by the older names, and newer ones implement the older by the newer.
    """
    names = ["all_gather_single", "reduce_scatter_single"]
    if not hasattr(dist, names[0]):
        names = ["all_gather_into_tensor", "reduce_scatter_tensor"]
    originals = {name: getattr(dist, name) for name in names}
    seconds: list[float] = []
    for name, original in originals.items():
        setattr(dist, name, _timed(original, seconds))
    try:
        yield seconds
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _timed(collective: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = collective(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    return call
