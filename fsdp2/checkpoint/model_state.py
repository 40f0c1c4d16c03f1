"""What of a model goes into a checkpoint, and where it comes back to."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch
from fsdp2.checkpoint.storage import Reader
from fsdp2.errors import CheckpointError
from fsdp2.hooks import states_below
from fsdp2.mesh import mesh_device

PREFIX = "model."
REPLICATE = "replicate"
SHARD = "shard "
_EXTRA_STATE = "_extra_state"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What `torch.compile` and PyTorch's checkpoint wrapper add to the names below them."""


def plain_name(name: str) -> str:
    """The name in the plain model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Entry:
    """One value of the state dict, under all of its plain names. Tied parameters are one entry."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    """The names in this model's own state dict."""
    value: Any

    @property
    def name(self) -> str:
        return self.names[0]


def entries(model: nn.Module) -> list[Entry]:
    """The state dict, with the parameters themselves and not copies."""
    state = model.state_dict(keep_vars=True)
    places: dict[int, list[str]] = {}
    for key, value in state.items():
        places.setdefault(id(value), []).append(key)
    return [
        Entry(tuple(map(plain_name, keys)), tuple(keys), state[keys[0]]) for keys in places.values()
    ]


def is_tensor(entry: Entry) -> bool:
    return isinstance(entry.value, Tensor) and not entry.name.endswith(_EXTRA_STATE)


def collect(model: nn.Module) -> dict[str, Any]:
    """Tensors as they are, without a copy; extra states packed."""
    return {
        each.name: detached(each.value) if is_tensor(each) else _packed(each.value)
        for each in entries(model)
    }


def detached(tensor: Tensor) -> Tensor:
    """The same memory, as a plain DTensor or a plain tensor."""
    if isinstance(tensor, _torch.DTensor):
        return _torch.dtensor(_torch.local_of(tensor).detach(), _torch.spec_of(tensor))
    return tensor.detach()


def describe(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype and layout of a tensor, as the manifest has them."""
    about: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
    if isinstance(tensor, _torch.DTensor):
        about["mesh"] = list(tensor.device_mesh.mesh.shape)
        about["placements"] = [_word(placement) for placement in tensor.placements]
    return about


def _word(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"{SHARD}{placement.dim}"
    return REPLICATE if placement.is_replicate() else repr(placement)


def placement_of(word: str) -> Placement | None:
    """What :func:`describe` said, where it is a plain placement."""
    if word == REPLICATE:
        return Replicate()
    dim = word.removeprefix(SHARD)
    return Shard(int(dim)) if dim.isdigit() else None


@dataclass
class ModelTargets:
    """Where each value of a checkpoint goes, checked before anything is read."""

    model: nn.Module
    tensors: dict[str, Tensor]
    """By the checkpoint's key: the model's own tensors, or new ones for those on meta."""
    packed: dict[str, Entry]
    """Extra states, by the checkpoint's key."""
    fresh: list[tuple[Entry, Tensor]]
    """New tensors."""
    missing: list[str]
    unexpected: list[str]

    @classmethod
    def of(cls, model: nn.Module, reader: Reader, strict: bool) -> ModelTargets:
        """Raises CheckpointError with the first names that do not fit."""
        for state in states_below(model):
            state.reshard()  # what was gathered before would go on being used
        found = cls(model, {}, {}, [], [], [])
        known: set[str] = set()
        for entry in entries(model):
            keys = [PREFIX + name for name in entry.names]
            known.update(keys)
            key = next((key for key in keys if key in reader.keys), None)
            if key is None:
                found.missing.append(entry.name)
            else:
                found._add(key, entry, reader)
        found.unexpected = [
            key[len(PREFIX) :]
            for key in sorted(reader.keys)
            if key.startswith(PREFIX) and key not in known
        ]
        if strict:
            found._refuse_differences()
        return found

    def _add(self, key: str, entry: Entry, reader: Reader) -> None:
        if not is_tensor(entry):
            self.packed[key] = entry
            return
        shape = reader.shape(key)
        if shape != tuple(entry.value.shape):
            saved = "no tensor" if shape is None else f"a tensor {shape}"
            raise CheckpointError(
                f"parameter or buffer '{entry.name}' {tuple(entry.value.shape)} is {saved} in the "
                "checkpoint; it is one of another model"
            )
        if entry.value.is_meta:
            self.tensors[key] = fresh = materialised(entry.value, self.model)
            self.fresh.append((entry, fresh))
        else:
            self.tensors[key] = detached(entry.value)

    def _refuse_differences(self) -> None:
        problems = [
            f"it lacks {_some(self.missing)}" if self.missing else "",
            f"the model has no {_some(self.unexpected)}" if self.unexpected else "",
        ]
        if any(problems):
            raise CheckpointError(
                "the checkpoint is one of another model: "
                + " and ".join(filter(None, problems))
                + "; load what both have with strict=False"
            )

    @property
    def wanted(self) -> dict[str, Any]:
        """What to read; values of the packed keys are replaced."""
        return {**self.tensors, **dict.fromkeys(self.packed, b"")}

    def apply(self, read: Mapping[str, Any]) -> None:
        """Register what is new, and hand over extra states."""
        for entry, fresh in self.fresh:
            replace(self.model, entry, fresh)
        for key, entry in self.packed.items():
            module = self.model.get_submodule(entry.keys[0].rpartition(".")[0])
            module.set_extra_state(_unpacked(read[key]))


def replace(model: nn.Module, entry: Entry, tensor: Tensor) -> None:
    """Put ``tensor`` in the place of one on meta. A parameter stays the same object, which
    an optimizer may hold and several modules may share."""
    if isinstance(entry.value, nn.Parameter):
        made = nn.Parameter(tensor, requires_grad=entry.value.requires_grad)
        torch.utils.swap_tensors(entry.value, made)
        return
    for key in entry.keys:
        prefix, _, name = key.rpartition(".")
        setattr(model.get_submodule(prefix), name, tensor)


def materialised(tensor: Tensor, model: nn.Module) -> Tensor:
    """An empty tensor like one on meta, on the device of its mesh; a buffer on the model's."""
    if not isinstance(tensor, _torch.DTensor):
        devices = [state.group.mesh.device for state in states_below(model)]
        return torch.empty_like(tensor, device=devices[0] if devices else "cpu")
    device = mesh_device(tensor.device_mesh)
    local = torch.empty_like(_torch.local_of(tensor).detach(), device=device)
    return _torch.dtensor(local, _torch.spec_of(tensor))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
