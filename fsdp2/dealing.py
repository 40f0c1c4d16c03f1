"""State dicts of another layout, dealt to the shards as ``load_state_dict`` reads them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.gathering import own_part


def deal_state_dict(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """A load pre-hook: full tensors and DTensors of other layouts become those of the shards.

    A full tensor must be the same on all ranks, each of which takes its own part. DTensors of
    other layouts are gathered, one at a time. What has another shape is left for PyTorch to name.
    """
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    for name, param in module.named_parameters(remove_duplicate=False):
        key = prefix + name
        value = state_dict.get(key)
        if not isinstance(param, _torch.DTensor) or not isinstance(value, Tensor):
            continue
        if _is_laid_out_like(value, param) or value.is_meta or value.shape != param.shape:
            continue
        try:
            state_dict[key] = _dealt(value.detach(), param, assign)
        except Exception as error:
            error_msgs.append(
                f'parameter "{key}" {tuple(param.shape)} cannot be sharded as {param.placements} '
                f"from {_described(value)}: {error}"
            )


def _is_laid_out_like(value: Tensor, param: _torch.DTensor) -> bool:
    return (
        isinstance(value, _torch.DTensor)
        and value.device_mesh == param.device_mesh
        and value.placements == param.placements
    )


def _dealt(value: Tensor, param: _torch.DTensor, assign: bool) -> Tensor:
    if isinstance(value, _torch.DTensor):
        if value.device_mesh.get_coordinate() is None:
            raise ValueError("this rank is not in its mesh; gather it first, full_tensor()")
        value = value.full_tensor()
    own = own_part(value, param)
    local = _torch.local_of(param)
    if assign:  # its own memory, where the shard is, and not a view of the whole
        own = own.to(own.device if local.is_meta else local.device)
        is_view = own.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        own = own.clone() if is_view else own.contiguous()
    mesh, placements = param.device_mesh, param.placements
    spec = _torch.dtensor_spec(mesh, placements, tuple(param.shape), own.dtype)
    return _torch.dtensor(own, spec)


def _described(value: Tensor) -> str:
    if isinstance(value, _torch.DTensor):
        return f"a DTensor {value.placements} on {value.device_mesh}"
    return f"a {type(value).__name__} of {value.dtype}"
