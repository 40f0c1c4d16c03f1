"""All ranks start from rank 0's model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.checksums import checksum
from fsdp2.collectives import gather_values
from fsdp2.errors import UsageError
from fsdp2.hooks import State, states_below
from fsdp2.param_group import ParamGroup
from fsdp2.replicas import broadcast_first_replica, check_replicas
from fsdp2.sharded_param import IS_SHARD


@torch.no_grad()
def sync_from_rank0(model: nn.Module, *, check: bool = False) -> None:
    """Give all ranks rank 0's parameters and buffers, as DDP does when it wraps a model.

    Before ``fully_shard`` whole tensors travel, among all ranks of the default group: ranks may
    have drawn under different seeds. Behind it the shards of the first replica go to the others,
    and buffers and parameters that no group owns travel from the first rank of the mesh; ranks
    that split one model have nothing of each other's shards then. Call it on all ranks.

    Args:
        check: Change nothing, and compare checksums instead.

    Raises:
        UsageError: Something is on the meta device, or laid out by others as a DTensor.
        RuntimeError: With ``check``, on all ranks: the first tensor that differs, by name.
    """
    states = states_below(model)
    whole = _whole_tensors(model)
    first = next(iter(whole.values()), None)
    groups, device = _reached(states, torch.device("cpu") if first is None else first.device)
    if check:
        check_replicas(_refreshed(states))
        _compare(whole, groups, device)
        return
    broadcast_first_replica(state.group for state in states)
    for tensor in whole.values():
        here = tensor.detach().contiguous().to(device)
        for group in reversed(groups):
            dist.broadcast(here, group=group, group_src=0)
        tensor.detach().copy_(here)


def _refreshed(states: list[State]) -> list[ParamGroup]:
    for state in states:
        state.group.refresh()
    return [state.group for state in states]


def _reached(
    states: list[State], device: torch.device
) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The groups that lead to all ranks, and the device that their collectives read.

    ``device`` is where the model is; shards may be offloaded from the mesh's device.
    """
    if not states:
        if not dist.is_initialized():
            raise UsageError("sync_from_rank0: call torch.distributed.init_process_group first")
        assert dist.group.WORLD is not None
        return [dist.group.WORLD], device
    mesh = states[0].group.mesh
    groups = [axis.group for axis in (mesh.shard, mesh.replicas) if axis.group is not None]
    return groups, mesh.device


def _whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that every rank holds whole, by name."""
    found: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise UsageError(
                f"sync_from_rank0: '{name}' {tuple(tensor.shape)} is on the meta device; call "
                "fsdp2.materialize(model) first"
            )
        if hasattr(tensor, IS_SHARD):
            continue
        if isinstance(tensor, _torch.DTensor):
            raise UsageError(
                f"sync_from_rank0: '{name}' is a DTensor with {tensor.placements} that was not "
                "made by fully_shard; call sync_from_rank0 before the model is laid out"
            )
        found[name] = tensor
    return found


def _compare(
    tensors: dict[str, Tensor], groups: list[dist.ProcessGroup], device: torch.device
) -> None:
    sums = [int(checksum(tensor.detach())) for tensor in tensors.values()]
    everyone = gather_values(sums, groups, device)
    for i, name in enumerate(tensors):
        found = everyone[i :: len(sums)]
        differing = [rank for rank, value in enumerate(found) if value != found[0]]
        if differing:
            raise RuntimeError(
                f"'{name}' {tuple(tensors[name].shape)} has other values on ranks {differing} than "
                "on rank 0; start all ranks from one seed or one checkpoint, or call "
                "fsdp2.sync_from_rank0(model)"
            )
