"""The arguments of ``fully_shard``, checked at the door: before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2._torch import DataParallelMeshDims
from fsdp2.errors import UsageError
from fsdp2.find import is_container
from fsdp2.hooks import state_of
from fsdp2.limits import Auto
from fsdp2.mesh import ShardMesh, named_mesh, shard_mesh
from fsdp2.policies import OffloadPolicy
from fsdp2.quantising import WIRE_DTYPES
from fsdp2.sharded_param import ShardedParam


def check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise UsageError(
            "fully_shard got an empty list of modules; pass a module or a list of modules"
        )
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise UsageError(f"fully_shard shards nn.Modules and got a {name}: {module!r}")
        if modules.count(module) > 1:
            raise UsageError(
                f"module '{name}' is twice in one list; name it once. Each distinct composable "
                "distributed API can only be applied to a module once."
            )
        if state_of(module) is not None:
            raise UsageError(
                f"module '{name}': fully_shard was applied to it before. Each distinct composable "
                "distributed API can only be applied to a module once."
            )
    if all(is_container(module) for module in modules):
        name = type(modules[0]).__name__
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {name}; "
            "shard its members, or pass them as a list"
        )
    for top in modules:
        _refuse_pytorchs(top)


def _refuse_pytorchs(top: nn.Module) -> None:
    for name, module in top.named_modules():
        is_sharded = isinstance(module, _torch.FSDPModule)
        if is_sharded and state_of(module) is None:
            raise UsageError(
                f"module '{name or type(module).__name__}' was sharded by PyTorch's fully_shard, "
                "torch.distributed.fsdp; one model takes one of the two: import fully_shard from "
                "fsdp2 everywhere, or call fsdp2.use_in_torch() before anything is sharded"
            )


def check_memory(params: list[ShardedParam]) -> None:
    """One buffer holds the shards of a group: all of them have values, or none has."""
    on_meta = [param.name for param in params if param.local.is_meta]
    others = [param.name for param in params if not param.local.is_meta]
    if on_meta and others:
        raise UsageError(
            f"parameter '{on_meta[0]}' is on the meta device and parameter '{others[0]}' of the "
            "same group is not; build both under fsdp2.deferred_init() or on the meta device, or "
            "give the first one its values before fully_shard"
        )


def check_mesh(mesh: object, dims: object) -> ShardMesh:
    """The ranks that parameters are dealt to."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh is a DeviceMesh, got a {type(mesh).__name__}: {mesh!r}; make one with "
            "init_device_mesh(...), or DeviceMesh.from_group(group, device_type)"
        )
    if dims is None:
        return shard_mesh(mesh)
    if not isinstance(dims, DataParallelMeshDims):
        raise UsageError(
            f"dp_mesh_dims is a DataParallelMeshDims, got {dims!r}; pass for example "
            "DataParallelMeshDims(shard='dp')"
        )
    return named_mesh(mesh, dims)


def check_ignored(params: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    ignored = list(params) if params is not None else []
    for each in ignored:
        if not isinstance(each, nn.Parameter):
            raise UsageError(
                f"ignored_params holds nn.Parameters, got a {type(each).__name__}: {each!r}; pass "
                "the parameters themselves, such as set(module.parameters())"
            )
    return set(ignored)


def check_policies(policy: _torch.MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    if not isinstance(policy, _torch.MixedPrecisionPolicy):
        raise UsageError(
            f"mp_policy is a MixedPrecisionPolicy, got {policy!r}; pass for example "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    if not isinstance(offload, OffloadPolicy):
        raise UsageError(
            f"offload_policy is an OffloadPolicy, got {offload!r}; pass CPUOffloadPolicy() to "
            "keep shards on the host"
        )
    for each in getattr(policy, "uncast_inputs", ()):
        if not isinstance(each, str) and not (isinstance(each, int) and each >= 0):
            raise UsageError(
                f"mp_policy: uncast_inputs holds names or positions of forward's arguments, "
                f"counted from 0; got {each!r}"
            )
    for field in ("all_gather_dtype", "exchange_dtype"):
        dtype = getattr(policy, field, None)
        if dtype is not None and dtype not in WIRE_DTYPES:
            raise UsageError(
                f"mp_policy: {field} is one of {', '.join(map(str, WIRE_DTYPES))} or None, "
                f"got {dtype!r}; param_dtype and reduce_dtype take wider ones"
            )
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
        dtype = getattr(policy, field, None)
        if field == "param_dtype" and callable(dtype):
            continue
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"mp_policy: {field} is a floating-point torch.dtype or None, got {dtype!r}"
            )
        if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
            raise UsageError(
                f"mp_policy: {field} is a floating-point torch.dtype such as torch.bfloat16, "
                f"got {dtype}"
            )


def check_placement_fn(function: object) -> None:
    if function is not None and not callable(function):
        raise UsageError(
            f"shard_placement_fn is a callable that takes a parameter, got {function!r}; pass for "
            f"example lambda param: {function!r}"
        )


def frees_after_forward(reshard_after_forward: bool | int | None) -> bool:
    """A group of one rank keeps everything."""
    is_int = isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
    return reshard_after_forward != 1 if is_int else reshard_after_forward is not False


def part_size_of(reshard_after_forward: bool | int | None, mesh: ShardMesh) -> int | None:
    """Over how many ranks backward gathers; None where an int means the same as a bool."""
    value = reshard_after_forward
    if value is None or isinstance(value, bool):
        return None
    if not isinstance(value, int):
        raise UsageError(f"reshard_after_forward is a bool, an int or None; got {value!r}")
    if mesh.spmd is not None:
        raise NotImplementedError(
            f"reshard_after_forward as int ({value}) does not go with dp_mesh_dims; pass a bool"
        )
    if value < 1 or mesh.world_size % value:
        raise UsageError(
            f"reshard_after_forward={value}: an int is the number of ranks to gather over in "
            f"backward and must be a factor of {mesh.world_size}, the ranks of the shard mesh"
        )
    return value if 1 < value < mesh.world_size else None


def check_divide_factor(factor: float) -> float:
    if not factor > 0 or not isfinite(factor):
        raise UsageError(
            f"the divide factor of gradients is positive and finite, got {factor!r}; 1.0 gives the "
            "sum over all ranks"
        )
    return float(factor)


def check_limit(limit: object, budget: object) -> int | Auto:
    """On groups in flight; ``budget`` goes with ``"auto"``."""
    if isinstance(limit, str) and limit == "auto":
        return Auto(_check_budget(budget))
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UsageError(
            "the limit on groups in flight is a whole number from 1 on, or 'auto' to have it "
            f"found, got {limit!r}"
        )
    if budget is not None:
        raise UsageError(
            f"a budget ({budget!r}) is for a limit that is to be found, and this one is {limit}; "
            "pass 'auto', or leave the budget out"
        )
    return limit


def _check_budget(budget: object) -> int | None:
    if budget is None:
        return None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    raise UsageError(
        f"the budget is a whole number of bytes above 0, got {budget!r}; leave it out to go by the "
        "allocator alone"
    )
