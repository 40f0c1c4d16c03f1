"""Gradient clipping by the global norm, whatever meshes the parameters live on.

Every rank measures the local tensors that it has, each element of a gradient counted on
exactly one rank of its mesh; one number a mesh travels; the gradients are scaled in place.
No DTensor operation runs and nothing is read back to the host.

==============================================  =========================================
a mesh whose parameters                         costs
==============================================  =========================================
are all repeated                                nothing
are split over one mesh dim, all the same one   one all-reduce over that dim
are split over k > 1 dims, together             one all-reduce if the mesh has every rank
                                                of the default group, else k
==============================================  =========================================

A dim of size 1 splits nothing. One all-reduce more for all meshes together is needed where
a mesh of its own (no slice of a larger one) has only some of the ranks that the others have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import isinf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.gathering import wire_device
from fsdp2.norms import Kernels, Measure

Parameters = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]

_NAMED = 5
"""How many parameters an error lists."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    The norm is taken over all gradients as if they were one vector on one device. Sharded,
    repeated and plain parameters may be mixed, and DTensors may lie on different meshes.
    All ranks of these meshes must call this with the same parameters in the same order;
    a rank on which some gradients are ``None`` takes part all the same.

    A parameter counts once: plain tensors are taken to be alike on all ranks, and DTensors
    on a slice of a mesh (``mesh["dp"]``) to be alike on the other slices. What other ranks
    hold and this one does not list, for example other pipeline stages, counts if ``group``
    says whom to add up with.

    Args:
        parameters: A module, tensors, or pairs of a name and a tensor. Errors use the names.
        max_norm: The largest norm that is left as it is. With ``inf`` gradients are only
            measured, and never written to.
        norm_type: The p of the p-norm: above 0, ``inf`` for the largest absolute value.
        error_if_nonfinite: Raise where the norm is infinite or NaN. Reads one number back
            to the host.
        foreach: ``False`` takes one kernel for every tensor instead of one for many.
        group: Ranks with different parts of the model, whose norms are combined.

    Returns:
        The norm before clipping: a plain 0-dim tensor, float32, or float64 if a parameter
        is; the same on all ranks.

    Raises:
        UsageError: A gradient is Partial: its sum over ranks is still to be done. Or
            ``norm_type`` is not above 0, ``max_norm`` is negative, or this rank belongs to no
            mesh that would tell it the norm.
        RuntimeError: The norm is not finite, with ``error_if_nonfinite``; on all ranks, with
            the same text, before any gradient is changed.

    Usage::

        loss.backward()
        norm = fsdp2.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    _check_numbers(max_norm, norm_type)
    listed = list(_listed(parameters))
    if not listed:
        return torch.zeros(())
    kernels = Kernels(foreach is not False)
    measure = Measure(float(norm_type), kernels)
    ranks = _Ranks(listed)
    home = _home(listed)
    terms = ranks.combine([measure.of(on.counted(), on.device) for on in ranks.meshes], measure.op)
    terms.append(measure.of(_gradients(ranks.plain), home))
    term = reduce(measure.join, (each.to(home) for each in terms))
    if group is not None:
        dist.all_reduce(wire := term.to(wire_device(group, home.type, home)), measure.op, group)
        term = wire.to(home)
    norm = measure.norm(term).to(_norm_dtype(listed))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(_nonfinite_text(ranks, float(norm_type), norm.item()))
    if not isinf(max_norm):
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        kernels.scale(_gradients(listed), scale)
    return norm


def _check_numbers(max_norm: float, norm_type: float) -> None:
    if not float(norm_type) > 0:
        raise UsageError(f"norm_type is a number above 0 or inf, got {norm_type!r}")
    if not max_norm >= 0:
        raise UsageError(f"max_norm is a number from 0 on, got {max_norm!r}")


# The parameters


class _Listed(NamedTuple):
    """One parameter and this rank's part of its gradient."""

    name: str
    param: Tensor
    gradient: Tensor | None
    """The local tensor."""
    mesh: DeviceMesh | None
    """None for a plain tensor."""
    split_dims: frozenset[int]
    """Mesh dims over which the gradient is split. Where there is none, the parameter."""

    @property
    def local_device(self) -> torch.device:
        return _local(self.param).device


def _listed(parameters: Parameters) -> Iterator[_Listed]:
    """Each parameter once."""
    seen: set[int] = set()
    for name, param in _named(parameters):
        if id(param) not in seen:
            seen.add(id(param))
            yield _list_one(name, param)


def _named(parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
    if isinstance(parameters, nn.Module):
        for name, param in parameters.named_parameters():
            yield f"'{name}'", param
        return
    each: Iterable[Tensor | tuple[str, Tensor]]
    each = [parameters] if isinstance(parameters, Tensor) else parameters
    for index, item in enumerate(each):
        if isinstance(item, Tensor):
            yield f"{index} of shape {tuple(item.shape)}", item
        else:
            yield f"'{item[0]}'", item[1]


def _list_one(name: str, param: Tensor) -> _Listed:
    gradient = param.grad
    laid_out = param if gradient is None else gradient
    if not isinstance(laid_out, _torch.DTensor):
        if isinstance(param, _torch.DTensor):
            raise UsageError(
                f"parameter {name} is a DTensor and its gradient a plain tensor; "
                "give the gradient the mesh and placements of the parameter"
            )
        return _Listed(name, param, gradient, None, frozenset())
    mesh = laid_out.device_mesh
    if isinstance(param, _torch.DTensor) and param.device_mesh != mesh:
        raise UsageError(
            f"parameter {name} lies on {param.device_mesh} and its gradient on {mesh}; "
            "redistribute the gradient to the mesh of its parameter"
        )
    if any(placement.is_partial() for placement in laid_out.placements):
        raise UsageError(
            f"the gradient of parameter {name} has placements {laid_out.placements}: its sum over "
            "ranks is still to be done, so it has no norm yet; redistribute it to Replicate() or "
            "Shard() first"
        )
    local = None if gradient is None else _local(gradient)
    return _Listed(name, param, local, mesh, _split_dims(laid_out))


def _split_dims(tensor: _torch.DTensor) -> frozenset[int]:
    return frozenset(
        dim
        for dim, placement in enumerate(tensor.placements)
        if tensor.device_mesh.size(dim) > 1 and not placement.is_replicate()
    )


def _gradients(listed: Sequence[_Listed]) -> list[Tensor]:
    return [each.gradient for each in listed if each.gradient is not None]


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, _torch.DTensor) else tensor


def _home(listed: Sequence[_Listed]) -> torch.device:
    """Where the norm is returned: with the first gradient, else with the first parameter."""
    for each in listed:
        if each.gradient is not None:
            return each.gradient.device
    return listed[0].local_device


def _norm_dtype(listed: Sequence[_Listed]) -> torch.dtype:
    """A function of the parameters, since gradients may be missing on some ranks."""
    wide = (torch.float64, torch.complex128)
    return torch.float64 if any(each.param.dtype in wide for each in listed) else torch.float32


# The ranks


class _OnMesh:
    """The parameters of one mesh, and how a number about them becomes that of all its ranks."""

    def __init__(self, mesh: DeviceMesh, listed: list[_Listed]) -> None:
        self.mesh = mesh
        self.listed = listed
        self.coordinate = mesh.get_coordinate()
        """None if this rank is not part of the mesh."""
        self.dims: list[int] = []
        """The dims that numbers are combined over. Where one repeats a gradient, the ranks
        that come first in it speak for the others."""
        self.groups: list[dist.ProcessGroup] = []
        """One all-reduce over each of them combines all."""
        self._find_groups()
        self.device = self._device()

    def _find_groups(self) -> None:
        """All dims that split any of the parameters, with or without a gradient here."""
        dims = frozenset().union(*(each.split_dims for each in self.listed))
        for each in self.listed:
            if isinstance(each.param, _torch.DTensor):
                dims |= _split_dims(each.param)
        everyone = dist.group.WORLD
        if self.coordinate is None:
            return
        if len(dims) > 1 and everyone is not None and self.mesh.size() == everyone.size():
            self.dims = list(range(self.mesh.ndim))
            self.groups = [everyone]
        else:
            self.dims = sorted(dims)
            self.groups = [self.mesh.get_group(dim) for dim in self.dims]

    def _device(self) -> torch.device:
        """Where numbers are reduced. A function of what all ranks see alike: the parameters."""
        device_type = self.mesh.device_type
        locals_ = [each.local_device for each in self.listed]
        found = next((device for device in locals_ if device.type == device_type), locals_[0])
        group = self.groups[0] if self.groups else dist.group.WORLD
        return found if group is None else wire_device(group, device_type, found)

    @property
    def is_first(self) -> bool:
        return self.coordinate is not None and not any(self.coordinate)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.mesh.mesh.flatten().tolist())

    def counted(self) -> list[Tensor]:
        """The gradients that this rank measures: where others repeat one, the first of them."""
        if self.coordinate is None:
            return []
        repeats = [dim for dim in self.dims if self.coordinate[dim]]
        return _gradients([e for e in self.listed if e.split_dims.issuperset(repeats)])

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        for group in self.groups:
            dist.all_reduce(value, op, group)


class _Ranks:
    """All meshes of the parameters, in the order of their first parameter."""

    def __init__(self, listed: Sequence[_Listed]) -> None:
        by_mesh: dict[DeviceMesh, list[_Listed]] = {}
        self.plain: list[_Listed] = []
        for each in listed:
            if each.mesh is None:
                self.plain.append(each)
            else:
                by_mesh.setdefault(each.mesh, []).append(each)
        self.meshes = [_OnMesh(mesh, found) for mesh, found in by_mesh.items()]
        self.partial: list[_OnMesh] = []
        """Meshes that some of the ranks have no part in."""
        self.span: list[dist.ProcessGroup] = []
        """Groups that bring a number from there to all ranks."""
        if len(self.meshes) > 1:
            self._find_partial()
        self._check_reached()

    def _find_partial(self) -> None:
        ranks = [on.ranks for on in self.meshes]
        span = frozenset().union(*ranks)
        self.partial = [
            on
            for on, own in zip(self.meshes, ranks)
            if own != span and _torch.is_root_mesh(on.mesh)
        ]
        if not self.partial:
            return
        around = next((on for on, own in zip(self.meshes, ranks) if own == span), None)
        if around is not None and around.coordinate is not None:
            mesh = around.mesh
            self.span = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        if dist.group.WORLD is not None and dist.group.WORLD.size() == len(span):
            self.span = [dist.group.WORLD]
        if not self.span:
            raise UsageError(
                f"parameters lie on {[on.mesh for on in self.meshes]} and no process group has "
                "exactly the ranks of all these meshes; call clip_grad_norm_ for each mesh with "
                "max_norm=inf and combine the norms"
            )

    def _check_reached(self) -> None:
        for on in self.meshes:
            if on.coordinate is None and on not in self.partial:
                raise UsageError(
                    f"parameter {on.listed[0].name} lies on {on.mesh}, which rank "
                    f"{dist.get_rank()} is not part of, nor of a mesh around it: it cannot learn "
                    "the norm; leave the parameter out on this rank"
                )

    def combine(self, values: list[Tensor], op: dist.ReduceOp.RedOpType) -> list[Tensor]:
        """For each mesh one tensor; those of all its ranks become one, on every rank."""
        for on, value in zip(self.meshes, values):
            on.reduce(value, op)
        if not self.partial:
            return values
        chosen = [i for i, on in enumerate(self.meshes) if on in self.partial]
        device = wire_device(self.span[0], self.meshes[0].mesh.device_type, values[0].device)
        sent = torch.cat(
            [
                (values[i] if self.meshes[i].is_first else torch.zeros_like(values[i])).to(device)
                for i in chosen
            ]
        )
        for group in self.span:
            dist.all_reduce(sent, op, group)
        for i, received in zip(chosen, sent.split([values[i].numel() for i in chosen])):
            values[i] = received
        return values


# The error


def _nonfinite_text(ranks: _Ranks, p: float, norm: float) -> str:
    """Name the gradients that are not finite on any rank. Every rank comes here alike."""
    flags = [_flags(on.listed, on.device) for on in ranks.meshes]
    flags = ranks.combine(flags, dist.ReduceOp.MAX)
    if ranks.plain:
        flags.append(_flags(ranks.plain, torch.device("cpu")))
    lists = [*(on.listed for on in ranks.meshes), ranks.plain]
    names = [
        each.name
        for listed, flag in zip(lists, flags)
        for each, is_bad in zip(listed, flag.tolist())
        if is_bad
    ]
    what = f"the gradients' norm of order {p:g} is {norm}"
    if not names:
        return f"{what}, though every gradient is finite: it is out of range. No gradient changed"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{what}: not finite are the gradients of {', '.join(names[:_NAMED])}{more}. No gradient "
        "was changed; skip this step, or pass error_if_nonfinite=False to scale all the same"
    )


def _flags(listed: Sequence[_Listed], device: torch.device) -> Tensor:
    """1 for every parameter whose gradient is not finite on this rank."""
    bad = [
        each.gradient is not None and not bool(torch.isfinite(each.gradient).all())
        for each in listed
    ]
    return torch.tensor(bad, dtype=torch.float32, device=device)
