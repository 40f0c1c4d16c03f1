"""Full parameters and full gradients of a sharded model, between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.calls import Phase
from fsdp2.errors import UsageError
from fsdp2.gathering import gather, own_part, scatter, wire_device
from fsdp2.hooks import State, state_of, states_below
from fsdp2.sharded_param import IS_SHARD, Place, owner_of

_SHARD = "_fsdp2_shard"
"""Left on a full parameter that is shown: the shard in whose place it is."""

_NOT_COPIED = ("_local_tensor", "_spec", "_fsdp2")
"""Beginnings of what is not users' own in a shard's ``__dict__``."""

_shown: WeakSet[State] = WeakSet()


@contextmanager
def full_parameters(
    model: nn.Module, write_back: bool = False, recurse: bool = True, rank0_only: bool = False
) -> Iterator[None]:
    """Show the full parameters under the modules' names, as plain ``nn.Parameter`` s.

    Inside, ``module.weight``, ``named_parameters()`` and ``state_dict()`` see them, in the
    dtype in which they are stored and on their shards' device. Tied parameters stay tied.
    They are copies and have no gradients: :func:`full_gradients` has those. Parameters that
    are not sharded, ``ignored_params``, stay what they are. Leaving shows the shards again,
    the same objects as before.

    Every rank enters and leaves, between steps. Modules whose parameters are shown cannot
    be called inside. An exception on one rank alone leaves the others waiting, as it does
    around any collective.

    Args:
        model: A module with ``fully_shard``, or one around such modules.
        write_back: Write what the parameters then hold into the shards at the end, unless
            the body raises. Each rank writes its own part of its own copy: edits must be
            alike on all ranks, or ranks keep parts of different parameters.
        recurse: Also show what modules below ``model`` gather for themselves. Without it
            only the parameters of ``model``'s own ``fully_shard`` call are shown, those that
            ``model.unshard()`` gathers.
        rank0_only: Only the first rank of the mesh holds and shows full parameters. The
            others see their shards and hold no more than a bucket of at most 64 MiB. With
            ``write_back`` the first rank's edits are sent to all.

    Raises:
        UsageError: Inside forward, backward or another ``full_parameters`` of these modules;
            a parameter is on the meta device, or was replaced by one that cannot be
            written back. Then no shard of any rank has been written.

    Usage::

        with fsdp2.full_parameters(model, write_back=True), torch.no_grad():
            model.head.weight[0].zero_()
    """
    states = _states(model, recurse, "full_parameters")
    _check_idle(states, "full_parameters")
    _check_not_shown(states)
    sharded = _find(model, states, recurse)
    if rank0_only:
        _check_one_first(sharded)
    for state in states:
        state.reshard()
    classes = [(module, type(module)) for state in states for module in state.modules]
    _shown.update(states)
    try:
        for module, cls in classes:
            module.__class__ = _uncallable(cls)
        for index, full in gather([_dtensor(each) for each in sharded], rank0_only):
            if full is not None:
                sharded[index].show(full)
        yield
        edited = _Edits.of(sharded) if write_back else None
    finally:
        for each in sharded:
            each.hide()
        for module, cls in classes:
            module.__class__ = cls
        _shown.difference_update(states)
    if edited is not None:
        edited.write(rank0_only)


def full_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """The name and full gradient of every parameter, as plain tensors; None where there is none.

    For logging, masking or comparing. All ranks must iterate in step and to the end, since
    gradients travel in buckets: one gather for every 64 MiB of full gradients that the same
    mesh dim splits, whatever the number of parameters. A bucket is all that is held, and what
    the caller keeps. Gradients that are repeated, over the replicate dim of a hybrid mesh for
    one, do not travel. Buckets decide the order, alike on all ranks.

    The tensors are copies in the gradients' dtype, on their device: changing them does not
    change the gradients. What ``set_requires_gradient_sync(False)`` keeps back is not included.

    Raises:
        UsageError: Inside forward or backward, or ``fully_shard`` was called on no module here.

    Usage::

        norms = {name: g.norm() for name, g in fsdp2.full_gradients(model) if g is not None}
    """
    _check_idle(_states(model, True, "full_gradients"), "full_gradients")
    return _full_gradients(model)


def _full_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    names: list[str] = []
    gradients: list[_torch.DTensor] = []
    for name, param in model.named_parameters():
        gradient = getattr(param, _SHARD, param).grad
        if isinstance(gradient, _torch.DTensor):
            names.append(name)
            gradients.append(gradient)
        else:
            yield name, None if gradient is None else gradient.detach().clone()
    for index, full in gather(gradients):
        yield names[index], full


# When it is allowed


def _states(model: nn.Module, recurse: bool, what: str) -> list[State]:
    own = state_of(model)
    states = states_below(model) if recurse else [own] if own is not None else []
    if not states:
        where = "no module of" if recurse else "no call's own module, with recurse=False:"
        raise UsageError(f"{what}: fully_shard was called on {where} {type(model).__name__}")
    return states


def _check_idle(states: Sequence[State], what: str) -> None:
    for state in states:
        phase = Phase.IDLE if state.schedule is None else state.schedule.phase
        if _torch.in_backward():
            phase = Phase.BACKWARD
        if phase is Phase.FAILED:
            raise UsageError(
                f"{what}: the last forward of '{state.group.name}' or around it raised; call "
                "reset_iter_state() on the root first"
            )
        if phase is not Phase.IDLE:
            raise UsageError(
                f"{what}: '{state.group.name}' is in {phase.value}; call it between steps"
            )


def _check_not_shown(states: Sequence[State]) -> None:
    for state in states:
        if state in _shown:
            raise UsageError(
                f"full_parameters: the parameters of '{state.group.name}' are shown in full "
                "already; leave that context first"
            )


def _uncallable(cls: type) -> type:
    """A class whose objects do all but forward. The hooks of a call would gather again."""

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            f"'{cls.__name__}' was called while full_parameters shows its parameters; leave "
            "the context before forward"
        )

    # The class of a sharded module counts from itself up to the user's class.
    index = getattr(cls, "_orig_cls_mro_index", 0) + 1
    body = {"__call__": refuse, "__module__": cls.__module__, "_orig_cls_mro_index": index}
    return type(cls.__name__, (cls,), body)


# One parameter


@dataclass
class _Sharded:
    """A shard that is registered, and the full parameter that takes its place."""

    places: list[Place]
    shard: nn.Parameter
    full: nn.Parameter | None = None

    @property
    def name(self) -> str:
        return self.places[0].name

    def show(self, full: Tensor) -> None:
        self.full = nn.Parameter(full, requires_grad=self.shard.requires_grad)
        own = {k: v for k, v in self.shard.__dict__.items() if not k.startswith(_NOT_COPIED)}
        self.full.__dict__.update(own)
        setattr(self.full, _SHARD, self.shard)
        for place in self.places:
            place.module._parameters[place.attribute] = self.full

    def hide(self) -> None:
        for place in self.places:
            place.module._parameters[place.attribute] = self.shard
        self.full = None

    def edited(self) -> Tensor | None:
        """What the user left in this parameter's place; the shard where nothing was shown."""
        found = [place.module._parameters.get(place.attribute) for place in self.places]
        if any(each is not found[0] for each in found):
            names = ", ".join(f"'{place.name}'" for place in self.places)
            raise UsageError(
                f"{names} were one tied parameter and are several now; assign the same "
                "nn.Parameter to all of them"
            )
        if self.full is None:
            return None
        if found[0] is None:
            raise UsageError(f"parameter '{self.name}' is gone; put one there")
        self._check(found[0])
        return found[0].detach()

    def _check(self, found: Tensor) -> None:
        is_plain = not isinstance(found, _torch.DTensor)
        wanted = (tuple(self.shard.shape), self.shard.dtype)
        if not is_plain or (tuple(found.shape), found.dtype) != wanted:
            kind = "plain tensor" if is_plain else "DTensor"
            raise UsageError(
                f"parameter '{self.name}' is now a {kind} {tuple(found.shape)} of {found.dtype}; "
                f"a plain tensor {wanted[0]} of {wanted[1]} can be written back"
            )


def _find(model: nn.Module, states: Sequence[State], recurse: bool) -> list[_Sharded]:
    """The registered shards of the groups, each once, with all places where they are seen."""
    below: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module._parameters.items():
            place = Place(module, attribute, f"{prefix}.{attribute}".lstrip("."))
            below.setdefault(id(param), []).append(place)
    found: list[_Sharded] = []
    for state in states:
        for param in state.group.params:
            shard = _registered_shard(param.places[0])
            places = below.get(id(shard), [])
            known = {(id(place.module), place.attribute) for place in places}
            outside = [p for p in param.places if (id(p.module), p.attribute) not in known]
            found.append(_Sharded([*places, *outside], shard))
    if recurse:
        _check_all_owned(model, found)
    return found


def _registered_shard(place: Place) -> nn.Parameter:
    shard = place.module._parameters.get(place.attribute)
    if not isinstance(shard, _torch.DTensor):
        kind = "missing" if shard is None else f"a {type(shard).__name__}"
        raise UsageError(
            f"full_parameters: parameter '{place.name}' was replaced after fully_shard and is "
            f"{kind}; put a DTensor there, for example by load_state_dict(..., assign=True)"
        )
    if shard.device.type == "meta":
        raise UsageError(
            f"full_parameters: parameter '{place.name}' {tuple(shard.shape)} is on the meta "
            "device; call model.to_empty(device=...) and load or reset it first"
        )
    return shard


def _check_all_owned(model: nn.Module, found: Sequence[_Sharded]) -> None:
    """What belongs to a call that is not below ``model`` would be left as it is, unseen."""
    shards = {id(each.shard) for each in found}
    for name, param in model.named_parameters():
        if id(param) in shards:
            continue
        if hasattr(param, IS_SHARD):
            raise UsageError(
                f"full_parameters: parameter '{name}' belongs to the fully_shard call of a module "
                f"around this {type(model).__name__}; call full_parameters on that module"
            )
        owner = owner_of(param)
        if owner is not None:
            raise UsageError(
                f"full_parameters: parameter '{name}' is tied to '{owner.name}' of another "
                "fully_shard call, and no call around both was made yet; make it first"
            )


def _check_one_first(sharded: Sequence[_Sharded]) -> None:
    firsts = {int(mesh.mesh.flatten()[0]): mesh for mesh in _meshes(sharded)}
    if len(firsts) > 1:
        raise UsageError(
            f"full_parameters: rank0_only needs one first rank and the meshes of these parameters "
            f"begin with ranks {sorted(firsts)}; call it for each mesh's modules"
        )


def _meshes(sharded: Sequence[_Sharded]) -> list[DeviceMesh]:
    return list(dict.fromkeys(_dtensor(each).device_mesh for each in sharded))


def _dtensor(each: _Sharded) -> _torch.DTensor:
    assert isinstance(each.shard, _torch.DTensor)
    return each.shard


# Writing back


@dataclass
class _Edits:
    """What the body left, taken before the shards are shown again."""

    sharded: list[_Sharded]
    values: list[Tensor | None]
    problem: str

    @classmethod
    def of(cls, sharded: list[_Sharded]) -> _Edits:
        try:
            return cls(sharded, [each.edited() for each in sharded], "")
        except UsageError as error:
            return cls(sharded, [], f"full_parameters: {error}; nothing was written back")

    @torch.no_grad()
    def write(self, rank0_only: bool) -> None:
        """All ranks write, or none does."""
        self._agree()
        shards = [_dtensor(each) for each in self.sharded]
        if rank0_only:
            scatter(shards, self.values)
        else:
            for shard, value in zip(shards, self.values):
                assert value is not None
                local = _torch.local_of(shard)
                local.copy_(own_part(value.to(local.device), shard))
        # The local tensors were written to behind the parameters' backs: a backward through
        # what a forward before saved must be refused as after any other change in place.
        torch.autograd.graph.increment_version(shards)

    def _agree(self) -> None:
        """Raise on all ranks if one of them cannot write."""
        has_problem = bool(self.problem)
        for mesh in _meshes(self.sharded):
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                device = wire_device(group, mesh.device_type, torch.device("cpu"))
                count = torch.tensor([float(has_problem)], device=device)
                dist.all_reduce(count, dist.ReduceOp.MAX, group)
                has_problem |= bool(count.item())
        if self.problem:
            raise UsageError(self.problem)
        if has_problem:
            raise UsageError(
                "full_parameters: another rank left parameters that cannot be written back, and "
                "says which; nothing was written back"
            )
