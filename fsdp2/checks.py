"""What must hold when the first forward begins."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from fsdp2.collectives import gather_values
from fsdp2.emptied import held_below, is_untouched
from fsdp2.errors import UsageError
from fsdp2.find import Tie
from fsdp2.mesh import ShardMesh
from fsdp2.param_group import ParamGroup


def refuse_meta(groups: list[ParamGroup]) -> None:
    on_meta = [
        param.name
        for group in groups
        for param in group.params
        if param.registered is not None and param.registered.device.type == "meta"
    ]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {on_meta}\n"
            "Call model.to_empty(device=...) and then reset or load every parameter"
        )


def refuse_unjoined(group: ParamGroup, ties: list[Tie]) -> None:
    for tie in ties:
        raise UsageError(
            f"parameter '{tie.place.name}' of '{group.name}' is tied to '{tie.param.name}', which "
            "is already managed by another fully_shard call, and no call around both was made "
            "that could own it: call fully_shard on a module that contains both, or on both "
            "together, fully_shard([a, b])"
        )


def refuse_untouched(modules: list[nn.Module], mesh: ShardMesh) -> None:
    """After ``to_empty``, ranks agree on what is as empty as before. Tables have no error else."""
    held = {name: tensor for top in modules for name, tensor in held_below(top).items()}
    mine = [int(is_untouched(tensor)) for tensor in held.values()]
    groups = [axis.group for axis in (mesh.shard, mesh.replicas) if axis.group is not None]
    # A rank that has no rows of a parameter does not see it, and must not wait for the others.
    everyone = gather_values(mine, groups, mesh.device)
    names = [name for i, name in enumerate(held) if any(everyone[i :: len(held)])]
    if names:
        raise RuntimeError(
            f"parameters and buffers {names} have memory from to_empty() and no values: nobody "
            "initialised or loaded them. Non-persistent buffers are in no checkpoint, and "
            "reset_parameters computes few of them: build the model under "
            "fsdp2.deferred_init() and call fsdp2.materialize(model), or fill them by hand"
        )


def refuse_offloaded_on_device(groups: list[ParamGroup]) -> None:
    found = [
        (param.name, param.registered.device)
        for group in groups
        for portion in group.portions
        if portion.is_offloaded
        for param in portion.params
        if param.registered is not None and param.registered.device.type not in ("cpu", "meta")
    ]
    if found:
        raise RuntimeError(
            "FSDP parameters should be on the CPU when they are offloaded. "
            f"Found following parameters on non-CPU device: {found}\n"
            "Load or materialise them there: model.to_empty(device='cpu')"
        )


def warn_without_masters(groups: list[ParamGroup]) -> None:
    """Mixed precision keeps shards in float32; a checkpoint loaded in bfloat16 has none."""
    for group in groups:
        dtype = group.policy.param_dtype
        if dtype not in (torch.bfloat16, torch.float16):
            continue
        for param in group.params:
            if param.shard.requires_grad and param.shard.dtype == dtype:
                warnings.warn(
                    f"parameter '{param.name}' is stored in {dtype}, the dtype that the mixed "
                    "precision policy computes in: its shards and optimizer state are no more "
                    "precise, and small updates are lost. Call model.float() before fully_shard "
                    "to train float32 shards, or pass no param_dtype",
                    stacklevel=2,
                )
                return
