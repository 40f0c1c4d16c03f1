"""One parameter: its shard, its full form, and the modules that it is an attribute of.

The tensors of a parameter have these names everywhere:

``shard``   the ``nn.Parameter`` over a DTensor that module and optimizer hold
``local``   the tensor inside it: this rank's rows, a view of the shard buffer
``full``    the gathered ``nn.Parameter`` that forward and backward compute with,
            a view of the full buffer
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fsdp2 import _torch
from fsdp2.errors import UsageError
from fsdp2.layout import Rows
from fsdp2.mesh import ShardMesh

OWNER = "_fsdp2_owner"
"""Left on a parameter that was sharded away: the name under which it now lives."""

_IS_SHARD = "_fsdp2_is_shard"


class Place(NamedTuple):
    """One attribute of one module. A tied parameter has several places."""

    module: nn.Module
    attribute: str
    name: str
    """Full name, from the module given to ``fully_shard``."""


class ShardedParam:
    """A parameter of one group and the tensors that stand for it."""

    def __init__(self, places: list[Place], mesh: ShardMesh) -> None:
        original = places[0].module._parameters[places[0].attribute]
        assert original is not None
        self.places = places
        self.name = places[0].name
        self.spec: _torch.DTensorSpec
        """Of the shard, and so of its gradient."""
        self.rows = Rows(tuple(original.shape), mesh.world_size)
        self.rank = mesh.rank
        self.mesh = mesh
        self.dtype = original.dtype
        self.shard = self._make_shard(original)
        self.local = _torch.local_of(self.shard)
        self.full: nn.Parameter | None = None
        self.accumulated: Tensor | None = None
        """Gradients kept back by ``set_requires_gradient_sync(False)``, in the reduce dtype."""

    def _make_shard(self, original: nn.Parameter) -> nn.Parameter:
        """Cut this rank's rows out of a full parameter and register them in its stead."""
        placement = Replicate() if self.rows.is_scalar else Shard(0)
        spec = _torch.dtensor_spec(self.mesh.mesh, (placement,), self.rows.shape, self.dtype)
        source = original.detach()
        if not self.rows.is_scalar:
            start, stop = self.rows.bounds(self.rank)
            source = source[start:stop]
        shard = nn.Parameter(_torch.dtensor(source, spec), requires_grad=original.requires_grad)
        _torch.set_local(shard, source)
        shard.__dict__.update({k: v for k, v in original.__dict__.items() if k != OWNER})
        setattr(shard, _IS_SHARD, True)
        self.spec = spec
        for place in self.places:
            place.module._parameters[place.attribute] = shard
        setattr(original, OWNER, self.name)
        return shard

    def bind(self, local: Tensor) -> None:
        """Move this rank's rows into ``local``, a view of the shard buffer."""
        if self.local.device.type != "meta":
            local.copy_(self.local)
        _torch.set_local(self.shard, local)
        self.local = local

    @property
    def registered(self) -> nn.Parameter | None:
        """What the module's table holds now: the shard, unless the user replaced it."""
        module, attribute, _ = self.places[0]
        return module._parameters.get(attribute)

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
                f"{_described(registered)}; put a DTensor with placement Shard(0) on the same "
                "mesh there, for example through load_state_dict(..., assign=True)"
            )
        if tuple(registered.shape) != self.rows.shape:
            raise UsageError(
                f"parameter '{self.name}' was replaced after fully_shard by one of shape "
                f"{tuple(registered.shape)}; its shape was {self.rows.shape}"
            )
        expected = _torch.spec_of(self.shard)
        if registered.device_mesh != self.mesh.mesh or registered.placements != expected.placements:
            raise UsageError(
                f"parameter '{self.name}' was replaced after fully_shard by a DTensor with "
                f"{registered.placements} on {registered.device_mesh}; it must have "
                f"{expected.placements} on {self.mesh.mesh}"
            )
        self.shard = registered
        self.spec = _torch.spec_of(registered)
        setattr(self.shard, _IS_SHARD, True)
        self.local = _torch.local_of(registered)
        self.dtype = self.local.dtype
        for place in self.places[1:]:
            place.module._parameters[place.attribute] = self.shard

    def make_full(self, view: Tensor) -> nn.Parameter:
        """Build the full parameter over its slice of the full buffer."""
        full = nn.Parameter(view, requires_grad=self.shard.requires_grad)
        ours = ("_local_tensor", "_spec", _IS_SHARD)
        full.__dict__.update({k: v for k, v in self.shard.__dict__.items() if k not in ours})
        self.full = full
        return full

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


def _described(value: Tensor | None) -> str:
    if value is None:
        return "None"
    return f"a {type(value).__name__} of shape {tuple(value.shape)}"


def find_params(
    modules: list[nn.Module], mesh: ShardMesh, ignored: set[nn.Parameter], owned: set[nn.Module]
) -> list[ShardedParam]:
    """Shard what lies below ``modules`` and no earlier call owns."""
    places: dict[nn.Parameter, list[Place]] = {}
    visited: set[nn.Module] = set(owned)
    for root in modules:
        _find_places(root, "", ignored, visited, places)
    for found in places.values():
        _check(found[0])
    return [ShardedParam(found, mesh) for found in places.values()]


def _find_places(
    module: nn.Module,
    prefix: str,
    ignored: set[nn.Parameter],
    visited: set[nn.Module],
    places: dict[nn.Parameter, list[Place]],
) -> None:
    """Depth first; a module that an earlier call owns ends the descent."""
    if module in visited:
        return
    visited.add(module)
    for attribute, param in module._parameters.items():
        is_taken = param is None or param in ignored or hasattr(param, _IS_SHARD)
        if param is not None and not is_taken:
            places.setdefault(param, []).append(Place(module, attribute, prefix + attribute))
    for name, child in module.named_children():
        _find_places(child, f"{prefix}{name}.", ignored, visited, places)


def _check(place: Place) -> None:
    param = place.module._parameters[place.attribute]
    assert param is not None
    owner = getattr(param, OWNER, None)
    if owner is not None:
        raise UsageError(
            f"parameter '{place.name}' is already managed by another fully_shard call, under the "
            f"name '{owner}': tied weights must belong to one call; shard their modules together, "
            "fully_shard([a, b]), or leave both to an outer call"
        )
    if isinstance(param, _torch.DTensor):
        raise NotImplementedError(
            f"parameter '{place.name}' is a DTensor on {param.device_mesh} already; "
            "sharding a tensor-parallel layout is not built yet"
        )
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise UsageError(
            f"parameter '{place.name}' is not initialised yet; run the lazy module once first"
        )
    if param.layout is not torch.strided:
        raise UsageError(
            f"parameter '{place.name}' has layout {param.layout}; only dense ones shard"
        )
