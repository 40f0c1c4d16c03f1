"""What of an optimizer goes into a checkpoint: as much as there is, under the parameters' names.

States are read where the optimizer keeps them and put back there. No step is taken to make
them, and none is cast: a packed state is in the dtype that its optimizer gave it.

| a state is | it is saved | it can be loaded |
|---|---|---|
| a DTensor | as one tensor | on any mesh, if it is laid out like its parameter or repeated |
| a plain tensor of one element, or any other value | once: it is the same on all ranks | anywhere |
| a larger plain tensor of a sharded parameter | by each rank | on the same ranks and mesh |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.optim import Optimizer

from fsdp2 import _torch
from fsdp2.checkpoint.model_state import describe, detached, placement_of, plain_name
from fsdp2.checkpoint.storage import Reader
from fsdp2.errors import CheckpointError, UsageError
from fsdp2.mesh import mesh_device

PREFIX = "optimizer."
_GROUPS = "optimizer.param_groups."

Layout = dict[str, dict[str, dict[str, Any]]]
"""By the parameter's name and the state's key: what the manifest says of it."""

Missing = Literal["default", "error"]


def names_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Tensor, str]:
    """The plain name of every parameter that the optimizers step."""
    names: dict[Tensor, str] = {}
    for name, param in model.named_parameters():
        names[param] = plain_name(name)
    found = {}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param not in names:
                    raise UsageError(
                        f"{type(optimizer).__name__} steps a parameter {tuple(param.shape)} in "
                        f"group {index} that is none of the model's; build it from "
                        "model.parameters(), after fully_shard"
                    )
                found[param] = names[param]
    return found


def _groups(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def _owners(optimizers: Sequence[Optimizer]) -> dict[Tensor, tuple[Optimizer, dict[str, Any]]]:
    """By parameter: the optimizer that steps it, and the group in which it is."""
    return {
        param: (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }


# Saving


def collect(
    model: nn.Module, optimizers: Sequence[Optimizer], rank: int
) -> tuple[dict[str, Any], Layout]:
    """The states and options to write, as PyTorch's own functions lay them out, and their layout.

    Raises:
        CheckpointError: A state is of a tensor subclass, which files cannot hold.
    """
    names = names_of(model, optimizers)
    owners = _owners(optimizers)
    state: dict[str, dict[str, Any]] = {}
    local: dict[str, dict[str, Any]] = {}
    layout: Layout = {}
    for param, name in names.items():
        for key, value in owners[param][0].state.get(param, {}).items():
            about = layout.setdefault(name, {})[key] = _about(name, key, value, param)
            target = local if about.get("per_rank") else state
            saved = detached(value) if isinstance(value, Tensor) else value
            target.setdefault(name, {})[key] = saved
    options = [
        {**group, "params": [names[param] for param in group["params"]]}
        for group in _groups(optimizers)
    ]
    found: dict[str, Any] = {"state": state, "param_groups": options}
    if local:
        found[_own(rank)] = local
    return found, layout


def _own(rank: int) -> str:
    return f"rank{rank}"


def _about(name: str, key: str, value: Any, param: Tensor) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {}
    inner = _torch.local_of(value) if isinstance(value, _torch.DTensor) else value
    if type(inner) not in (Tensor, nn.Parameter):
        raise CheckpointError(
            f"optimizer state '{key}' of parameter '{name}' is a {type(inner).__name__}, and only "
            "plain tensors can be written; keep what it is made of as states of their own"
        )
    about = describe(value)
    is_plain = not isinstance(value, _torch.DTensor)
    if is_plain and isinstance(param, _torch.DTensor) and value.numel() > 1:
        about["per_rank"] = describe(param)
    return about


def merged(layouts: Sequence[Layout]) -> Layout:
    """The layout of all ranks, which may have states for different parameters.

    Raises:
        CheckpointError: Ranks disagree on what should be one tensor.
    """
    found: Layout = {}
    for layout in layouts:
        for name, states in layout.items():
            known = found.setdefault(name, {})
            for key, about in states.items():
                first = known.setdefault(key, about)
                if first != about and "per_rank" not in about:
                    raise CheckpointError(
                        f"optimizer state '{key}' of parameter '{name}' is {first} on one rank and "
                        f"{about} on another; give DTensor.from_local the shape of the whole, or "
                        "keep each rank's own as a plain tensor"
                    )
    return found


# Loading


class OptimizerTargets:
    """Where the states of a checkpoint go, checked before anything is read."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        reader: Reader,
        layout: Layout,
        rank: int,
        missing: Missing,
    ) -> None:
        self._optimizers = optimizers
        self._owners = _owners(optimizers)
        self._names = names_of(model, optimizers)
        self._reader = reader
        self._rank = rank
        self._options = [key for key in reader.keys if key.startswith(_GROUPS)]
        self._places: dict[str, tuple[Tensor, str]] = {}
        """By the checkpoint's key: the parameter, and its state's key."""
        self.wanted: dict[str, Any] = {}
        self.without = [name for name in self._names.values() if name not in layout]
        """Parameters that have no state in the checkpoint, and will start without one."""
        self.unused = sorted(set(layout) - set(self._names.values()))
        """Parameters whose states are in the checkpoint and which this optimizer does not step."""
        if not any(key.startswith(PREFIX) for key in reader.keys):
            raise CheckpointError(
                "the checkpoint was saved without an optimizer; load the model alone, without one"
            )
        if missing == "error":
            self._refuse_differences()
        for param, name in self._names.items():
            for key, about in layout.get(name, {}).items():
                self._add(param, name, key, about)
        for key in self._options:
            shape = reader.shape(key)
            value = None if shape is None else torch.empty(shape, dtype=reader.dtype(key))
            self.wanted[key] = value

    def _refuse_differences(self) -> None:
        for names, what in (
            (self.without, "has no state in the checkpoint"),
            (self.unused, "has state in the checkpoint and is not stepped by this optimizer"),
        ):
            if names:
                raise CheckpointError(
                    f"parameter '{names[0]}' {what} ({len(names)} in all); with "
                    "missing_state='default' parameters without state start with none, and state "
                    "without a parameter is left out"
                )

    def _add(self, param: Tensor, name: str, key: str, about: Mapping[str, Any]) -> None:
        what = f"optimizer state '{key}' of parameter '{name}'"
        saved_for, now = about.get("per_rank"), describe(param)
        if saved_for is not None and saved_for != now:
            raise CheckpointError(
                f"{what} {tuple(about['shape'])} is a plain tensor that each rank has for itself, "
                f"saved for a parameter laid out as {saved_for}; the parameter is now {now}, and "
                "where its pieces belong is not known: load it on as many ranks and the same mesh"
            )
        where = f"{PREFIX}{_own(self._rank) if saved_for else 'state'}.{name}.{key}"
        if where not in self._reader.keys:
            return  # this rank had none
        self._places[where] = param, key
        shape = self._reader.shape(where)
        if shape is None:
            self.wanted[where] = None
        else:
            dtype = self._reader.dtype(where)
            self.wanted[where] = self._target(param, key, shape, dtype, about, what)

    def _target(
        self,
        param: Tensor,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        about: Mapping[str, Any],
        what: str,
    ) -> Tensor:
        """An empty tensor, laid out as the state is to be."""
        is_sharded, is_split = isinstance(param, _torch.DTensor), "placements" in about
        is_like_param = shape == tuple(param.shape) and (is_split or param.numel() > 1)
        if "per_rank" in about or not (is_like_param or (is_sharded and is_split)):
            return torch.empty(shape, dtype=dtype, device=self._device(param, key))
        if not isinstance(param, _torch.DTensor):
            return torch.empty(shape, dtype=dtype, device=_device_of(param))
        if is_like_param:
            local = _torch.local_of(param).detach()
            made = torch.empty_like(local, dtype=dtype, device=_device_of(param))
            spec = _torch.dtensor_spec(param.device_mesh, param.placements, shape, dtype)
            return _torch.dtensor(made, spec)
        return _as_saved(param, shape, dtype, about, what)

    def _device(self, param: Tensor, key: str) -> torch.device:
        """Step counts stay on the CPU unless the optimizer's kernels read them."""
        _, group = self._owners[param]
        reads_steps = bool(group.get("fused") or group.get("capturable"))
        return _device_of(param) if key != "step" or reads_steps else torch.device("cpu")

    def apply(self, read: Mapping[str, Any]) -> None:
        """Put the states in place of the optimizer's own, and set the options of its groups."""
        for param, (optimizer, _) in self._owners.items():
            optimizer.state.pop(param, None)
        for where, (param, key) in self._places.items():
            self._owners[param][0].state[param][key] = read[where]
        self._set_options(read)

    def _set_options(self, read: Mapping[str, Any]) -> None:
        """Each group takes the options under which its first known parameter was saved."""
        saved: dict[str, dict[str, Any]] = {}
        for where in self._options:
            index, _, option = where[len(_GROUPS) :].partition(".")
            saved.setdefault(index, {})[option] = read[where]
        options_of = {name: options for options in saved.values() for name in options["params"]}
        for group in _groups(self._optimizers):
            names = [self._names[param] for param in group["params"]]
            options = next((options_of[name] for name in names if name in options_of), {})
            group.update({key: value for key, value in options.items() if key != "params"})


def _device_of(param: Tensor) -> torch.device:
    """Where the values of a parameter are, or will be once one on meta is made."""
    if not isinstance(param, _torch.DTensor):
        return torch.device("cpu") if param.is_meta else param.device
    return mesh_device(param.device_mesh) if param.is_meta else _torch.local_of(param).device


def _as_saved(
    param: _torch.DTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    about: Mapping[str, Any],
    what: str,
) -> Tensor:
    """A DTensor of a shape of its own, laid out as it was."""
    mesh = param.device_mesh
    found = [placement_of(word) for word in about["placements"]]
    placements = [each for each in found if each is not None]
    if all(each == Replicate() for each in found):
        placements = [Replicate()] * mesh.ndim
    elif None in found or about["mesh"] != list(mesh.mesh.shape):
        raise CheckpointError(
            f"{what} has the shape {shape}, another than its parameter, and was split as "
            f"{about['placements']} over a mesh {about['mesh']}; the mesh is now "
            f"{list(mesh.mesh.shape)}, and where its pieces belong is not known: load it on a "
            "mesh of the same shape, or repeat it on all ranks"
        )
    made = torch.distributed.tensor.empty(
        shape, dtype=dtype, device_mesh=mesh, placements=placements
    )
    local = _torch.local_of(made).to(_device_of(param))
    return _torch.dtensor(local, _torch.spec_of(made))
