"""Muon on sharded matrices: momentum where the rows are, orthogonal updates on their owners."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.guard import name_of
from fsdp2.owners import Matrix, Owners


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` for sharded parameters: the same arguments, numbers and state dict.

    Each rank keeps the momentum of its own rows. In a step every matrix goes to one rank, which
    computes the orthogonal update of the whole of it, and the rows of the update come back: two
    collectives for all matrices that share a mesh and a dtype, and no matrix is computed twice
    among the ranks that split it. Replicas of an HSDP mesh compute for themselves.

    A matrix is what one parameter holds: a fused ``qkv`` weight is made orthogonal as one. Keep
    the three as parameters of their own where they are meant to be separate.

    Every rank must have gradients for the same matrices, as after a backward of a sharded model.

    Usage::

        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        optimizer = fsdp2.Muon(matrices, lr=0.02)

    Raises:
        ValueError: A parameter is not a matrix.
        UsageError: In ``step``, a parameter is split over more than one dimension of its mesh, as
            with tensor parallelism.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        alone: list[_Job] = []
        shared: dict[tuple[dist.ProcessGroup, torch.dtype, torch.device], list[_Job]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    job = _Job(param, group, _split_of(param))
                    if job.split is None:
                        alone.append(job)
                    else:
                        local = _local(param)
                        key = job.split.group, local.dtype, local.device
                        shared.setdefault(key, []).append(job)
        for job in alone:
            _apply(job, _orthogonal(self._with_momentum(job), job.options))
        for (process_group, dtype, device), jobs in shared.items():
            owners = Owners([job.matrix for job in jobs], process_group, dtype, device)
            wholes = owners.bring([self._with_momentum(job) for job in jobs])
            for i, whole in zip(owners.own, wholes):
                whole.copy_(_orthogonal(whole, jobs[i].options))
            for job, part in zip(jobs, owners.take_back(wholes)):
                _apply(job, part)

    def _with_momentum(self, job: _Job) -> Tensor:
        """Move this rank's part of the momentum on; returns what is to be made orthogonal."""
        grad, options, state = job.param.grad, job.options, self.state[job.param]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum, local = _local(state["momentum_buffer"]), _local(grad)
        momentum.lerp_(local, 1 - options["momentum"])
        return local.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum


class _Split(NamedTuple):
    """The ranks that a matrix is split over, and along which of its dimensions."""

    group: dist.ProcessGroup
    dim: int


class _Job(NamedTuple):
    param: Tensor
    options: dict[str, Any]
    """Its param group."""
    split: _Split | None
    """None where this rank has the whole matrix."""

    @property
    def matrix(self) -> Matrix:
        assert self.split is not None
        rows, columns = self.param.shape
        return Matrix(rows, columns, self.split.dim)


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, _torch.DTensor) else tensor


def _split_of(param: Tensor) -> _Split | None:
    if not isinstance(param, _torch.DTensor):
        return None
    mesh = param.device_mesh
    placements = [
        (i, placement)
        for i, placement in enumerate(param.placements)
        if not placement.is_replicate() and mesh.size(i) > 1
    ]
    if not placements:
        return None
    (index, placement), *others = placements
    if others or type(placement) is not _torch.Shard:
        raise UsageError(
            f"Muon: parameter {name_of(param)} has placements {param.placements} on {mesh}: it is "
            "split over more than one dimension of the mesh, and whole matrices are put together "
            "along one; give it to an optimizer that works on elements, such as AdamW"
        )
    return _Split(mesh.get_group(index), placement.dim % 2)


def _orthogonal(matrix: Tensor, options: dict[str, Any]) -> Tensor:
    """What ``torch.optim.Muon`` subtracts from a parameter for a learning rate of 1.

    Without momentum and decay its step on a zero matrix leaves the negative of that. Wide
    matrices have no factor in the learning rate then, and tall ones become wide.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    zero = torch.zeros_like(wide)
    zero.grad = wide
    names = ("ns_coefficients", "ns_steps", "eps")
    newton_schulz = torch.optim.Muon(
        [zero],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="original",
        **{name: options[name] for name in names},
    )
    _torch.step_without_hooks(newton_schulz)(newton_schulz)
    update = zero.neg_()
    return update.T if is_tall else update


def _apply(job: _Job, update: Tensor) -> None:
    """Decay this rank's part of the parameter and subtract its part of the update."""
    options, (rows, columns) = job.options, job.param.shape
    rate = float(options["lr"])
    if options["adjust_lr_fn"] == "match_rms_adamw":
        factor = 0.2 * sqrt(max(rows, columns))
    else:
        factor = sqrt(max(1.0, rows / columns))
    local = _local(job.param)
    local.mul_(1 - rate * options["weight_decay"])
    local.add_(update, alpha=-rate * factor)
    if local is not job.param:  # written to behind the parameter's back
        torch.autograd.graph.increment_version(job.param)
