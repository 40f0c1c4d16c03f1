"""One parameter: its shard, its full form, and the modules that it is an attribute of.

The tensors of a parameter have these names everywhere:

``shard``   the ``nn.Parameter`` over a DTensor that module and optimizer hold
``local``   the tensor inside it: this rank's rows, a view of the shard buffer
``full``    the gathered ``nn.Parameter`` that forward and backward compute with,
            a view of the full buffer; a DTensor over such a view where the parameter
            was a DTensor before it was sharded (tensor parallelism)

"Rows" are slices along the dimension that is split, the first unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.guard import NAMES, guard
from fsdp2.layout import Rows
from fsdp2.mesh import ShardMesh
from fsdp2.outer import data_dims, joint_layout

OWNER = "_fsdp2_owner"
"""Left on a parameter that was sharded away: a weak reference to its ``ShardedParam``."""

IS_SHARD = "_fsdp2_is_shard"

IS_FULL = "_fsdp2_is_full"
"""Left on full parameters: a name."""

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""What a tensor subclass has that says itself how it is gathered; see ``subclasses``."""


class Place(NamedTuple):
    """One attribute of one module. A tied parameter has several places."""

    module: nn.Module
    attribute: str
    name: str
    """Full name, from the module given to ``fully_shard``."""

    @property
    def registered(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.attribute)


class Deal(NamedTuple):
    """How one parameter is dealt to the ranks."""

    mesh: ShardMesh
    dim: int = 0
    """The dimension that is split."""


def has_own_form(name: str, local: Tensor) -> bool:
    """Whether ``local``, of parameter ``name``, has both methods of the protocol, or neither.

    Raises:
        UsageError: It has one of them.
    """
    has_pre, has_post = hasattr(local, PRE), hasattr(local, POST)
    if has_pre != has_post:
        found, lacks = (PRE, POST) if has_pre else (POST, PRE)
        raise UsageError(
            f"parameter '{name}' of type {type(local).__name__} has {found} but no {lacks}; "
            "define both, or neither"
        )
    return has_pre


def owner_of(param: Tensor) -> ShardedParam | None:
    """Who owns a parameter that was sharded away; None for any other."""
    reference = getattr(param, OWNER, None)
    return None if reference is None else reference()


class ShardedParam:
    """A parameter of one group and the tensors that stand for it."""

    def __init__(self, places: list[Place], deal: Deal) -> None:
        original = places[0].registered
        assert original is not None
        self.places = places
        self.name = self.given_name = places[0].name
        """``name`` is full from the first forward on; the other one is what policies know."""
        self.group_name = ""
        """Of the module that ``fully_shard`` got; for errors."""
        self.mesh, self.dim = deal
        self.rank = self.mesh.rank
        self.outer = _torch.spec_of(original) if isinstance(original, _torch.DTensor) else None
        """How the parameter was laid out before it was sharded; None if it was a plain tensor."""
        whole = original.detach() if self.outer is None else _torch.local_of(original.detach())
        self.rows = Rows(_moved(tuple(whole.shape), self.dim), self.mesh.world_size)
        self.dtype = original.dtype
        self.spec = self._spec_of_shard(tuple(original.shape))
        """Of the shard, and so of its gradient."""
        self._original: nn.Parameter | None = original
        self._kind = type(original)
        self.shard = self._make_shard(original, whole)
        self.local = _torch.local_of(self.shard)
        self.full: nn.Parameter | None = None
        self.accumulated: Tensor | None = None
        """Gradients kept back by ``set_requires_gradient_sync(False)``, in the reduce dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full parameter on this rank: its own part, where others have cut it already."""
        return _restored(self.rows.shape, self.dim)

    def _spec_of_shard(self, shape: tuple[int, ...]) -> _torch.DTensorSpec:
        dim = None if self.rows.is_scalar else self.dim
        mesh, placements = self.mesh.mesh, self.mesh.placements(dim)
        if self.outer is not None:
            mesh, placements = joint_layout(self.name, self.outer, self.mesh, dim)
        return _torch.dtensor_spec(mesh, placements, shape, self.dtype)

    def _make_shard(self, original: nn.Parameter, whole: Tensor) -> nn.Parameter:
        """Cut this rank's rows out of a full parameter."""
        return self.shard_over(self._cut(whole), original)

    def shard_over(self, local: Tensor, like: nn.Parameter) -> nn.Parameter:
        """A new shard over ``local``, with what users have put on the parameter ``like``."""
        nothing = torch.empty(0, dtype=self.dtype, device=local.device)
        shard = nn.Parameter(_torch.dtensor(nothing, self.spec), requires_grad=like.requires_grad)
        _torch.set_local(shard, local)
        # A subclass keeps its data in attributes, all of which a detached one has too.
        theirs = {"_local_tensor", "_spec", OWNER, NAMES, *like.detach().__dict__}
        shard.__dict__.update({k: v for k, v in like.__dict__.items() if k not in theirs})
        setattr(shard, IS_SHARD, True)
        return shard

    def replace(self, local: Tensor) -> None:
        """Put a new shard over ``local`` in all places; the group adopts it when it refreshes."""
        shard = self.shard_over(local, self.shard)
        for place in self.places:
            place.module._parameters[place.attribute] = shard

    def _cut(self, whole: Tensor) -> Tensor:
        if self.rows.is_scalar:
            return whole
        if not has_own_form(self.name, whole):
            start, stop = self.rows.bounds(self.rank)
            return whole.narrow(self.dim, start, stop - start)
        if self.dim:
            raise NotImplementedError(
                f"parameter '{self.name}' of type {type(whole).__name__} says itself how it is "
                f"gathered ({PRE}): such parameters are split along dim 0; got Shard({self.dim})"
            )
        # No buffer will hold it: it gets memory of its own, by the operators that every
        # subclass with the protocol has, since PyTorch's own engine needs them.
        pieces = whole.split(self.rows.per_rank) if self.rows.count else (whole,)
        own = pieces[0].new_zeros(self.rows.local_shape(self.rank))
        if self.rank < len(pieces):
            own.copy_(pieces[self.rank])
        return own

    @property
    def has_own_form(self) -> bool:
        """Whether its tensor subclass says what travels. Asked of the shard as it is now."""
        return not self.rows.is_scalar and has_own_form(self.name, self.local)

    def guard(self) -> None:
        """Let the shard name itself where it is taken for the full parameter."""
        guard(self.shard, self.name, self.group_name)

    def register(self) -> None:
        """Put the shard in the place of the parameter. Until then nothing has changed."""
        for place in self.places:
            place.module._parameters[place.attribute] = self.shard
        setattr(self._original, OWNER, ref(self))
        self._original = None

    def add_places(self, places: list[Place]) -> None:
        """Further attributes that hold this parameter."""
        self.places += places
        for place in places:
            place.module._parameters[place.attribute] = self.shard

    def rename(self, names: dict[int, str]) -> None:
        """Name it from another root; ``names`` has those of modules, by ``id``."""

        def renamed(place: Place) -> Place:
            prefix = names.get(id(place.module))
            if prefix is None:
                return place
            return place._replace(name=f"{prefix}.{place.attribute}".lstrip("."))

        self.places = [renamed(place) for place in self.places]
        self.name = self.places[0].name
        self.guard()

    def bind(self, local: Tensor) -> None:
        """Move this rank's rows into ``local``, a view of the shard buffer."""
        if self.local.device.type != "meta":
            local.copy_(self.local)
        _torch.set_local(self.shard, local)
        self.local = local

    def stay(self, device: torch.device) -> None:
        """Keep this rank's rows outside the shard buffer, on ``device``."""
        if self.local.device != device:
            self.local = self.local.to(device)
            _torch.set_local(self.shard, self.local)

    @property
    def registered(self) -> nn.Parameter | None:
        """What the module's table holds now: the shard, unless the user replaced it."""
        return self.places[0].registered

    @property
    def has_moved(self) -> bool:
        """Whether the user registered another parameter or gave this one another tensor."""
        return self.registered is not self.shard or _torch.local_of(self.shard) is not self.local

    def adopt(self) -> None:
        """Take over what the user put in this parameter's place."""
        registered = self.registered
        if not isinstance(registered, _torch.DTensor):
            raise UsageError(
                f"parameter '{self.name}' was replaced after fully_shard by "
                f"{_described(registered)}; put a DTensor with placements {self.spec.placements} "
                "on the same mesh there, for example through load_state_dict(..., assign=True)"
            )
        if registered.shape != self.spec.shape:
            raise UsageError(
                f"parameter '{self.name}' was replaced after fully_shard by one of shape "
                f"{tuple(registered.shape)}; its shape was {tuple(self.spec.shape)}: put one of "
                "that shape there, or call fully_shard on the changed model"
            )
        expected = self.spec
        if registered.device_mesh != expected.mesh or registered.placements != expected.placements:
            raise UsageError(
                f"parameter '{self.name}' was replaced after fully_shard by a DTensor with "
                f"{registered.placements} on {registered.device_mesh}; it must have "
                f"{expected.placements} on {expected.mesh}"
            )
        self.shard = registered
        self.spec = _torch.spec_of(registered)
        setattr(self.shard, IS_SHARD, True)
        self.guard()
        self.local = _torch.local_of(registered)
        self.dtype = self.local.dtype
        for place in self.places[1:]:
            place.module._parameters[place.attribute] = self.shard

    def make_full(self, view: Tensor) -> nn.Parameter:
        """Build the full parameter over its slice of the full buffer."""
        tensor = view
        if self.outer is not None:
            spec = self.outer
            shape = tuple(spec.shape)
            made = _torch.dtensor_spec(spec.mesh, spec.placements, shape, view.dtype)
            tensor = _torch.dtensor(view, made)
        # A frozen one may thaw: the gather sets it right.
        may_train = view.is_floating_point() or view.is_complex()
        full = self._as_parameter(tensor, may_train)
        if self.outer is not None:
            _torch.set_local(full, view)
        ours = ("_local_tensor", "_spec", IS_SHARD, NAMES)
        full.__dict__.update({k: v for k, v in self.shard.__dict__.items() if k not in ours})
        setattr(full, IS_FULL, self.name)
        self.full = full
        return full

    def _as_parameter(self, tensor: Tensor, may_train: bool) -> nn.Parameter:
        """Of the class that the parameter had, if it was one derived from ``nn.Parameter``."""
        if self._kind is nn.Parameter or not issubclass(self._kind, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=may_train)
        full: nn.Parameter = tensor.detach().as_subclass(self._kind)
        full.requires_grad_(may_train)
        return full

    def plain(self, gradient: Tensor) -> Tensor:
        """This rank's part of a full gradient, summed over all meshes that are not ours."""
        if self.outer is None or not isinstance(gradient, _torch.DTensor):
            return gradient
        ours = data_dims(self.outer, self.mesh)
        wanted = [
            found if dim in ours and found.is_partial() else placement
            for dim, (found, placement) in enumerate(
                zip(gradient.placements, self.outer.placements)
            )
        ]
        if tuple(wanted) != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        return _torch.local_of(gradient)

    def set_gradient(self, local: Tensor) -> None:
        """Give the shard its reduced gradient, or add to the one it has.

        ``local`` has the shape and dtype of this rank's rows.
        """
        if self.shard.grad is None:
            self.shard.grad = _torch.dtensor(local, self.spec)
        else:
            _torch.local_of(self.shard.grad).add_(local)
        # Users' hooks on the shard expect to see its gradient, once per backward.
        for hook in _torch.post_accumulate_hooks(self.shard):
            hook(self.shard)


def set_gradients(params: Sequence[ShardedParam], gradients: Iterable[Tensor]) -> None:
    """``set_gradient`` for many; most often they have none yet, and nobody listens.

    Where users' hooks may free one before the next is made, ``gradients`` is read one by one.
    """
    shards = [param.shard for param in params]
    if _torch.may_be_given(shards):
        made = _torch.dtensors(gradients, [param.spec for param in params])
        with _torch.plain_attributes():
            for shard, gradient in zip(shards, made):
                shard.grad = gradient
        return
    for param, local in zip(params, gradients):
        param.set_gradient(local)


def _moved(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[dim : dim + 1], *shape[:dim], *shape[dim + 1 :])


def _restored(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[1 : dim + 1], *shape[:1], *shape[dim + 1 :])


def _described(value: Tensor | None) -> str:
    if value is None:
        return "None"
    return f"a {type(value).__name__} of shape {tuple(value.shape)}"
