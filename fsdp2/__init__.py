"""Fully sharded data parallelism for PyTorch, with the API of ``torch.distributed.fsdp``.

Usage::

    from fsdp2 import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

Names are loaded when they are first used: `torch.distributed.tensor`, which a sharded
model needs, takes PyTorch half a second to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp2._torch import DataParallelMeshDims as DataParallelMeshDims
    from fsdp2.accounting import Memory as Memory
    from fsdp2.accounting import memory as memory
    from fsdp2.api import fully_shard as fully_shard
    from fsdp2.api import register_fsdp_forward_method as register_fsdp_forward_method
    from fsdp2.api import set_inflight_limit as set_inflight_limit
    from fsdp2.api import share_comm_ctx as share_comm_ctx
    from fsdp2.api import sync_replicas as sync_replicas
    from fsdp2.api import trace as trace
    from fsdp2.clipping import clip_grad_norm_ as clip_grad_norm_
    from fsdp2.custom import AllGather as AllGather
    from fsdp2.custom import Comm as Comm
    from fsdp2.custom import ReduceScatter as ReduceScatter
    from fsdp2.deferred import deferred_init as deferred_init
    from fsdp2.errors import NotGatheredError as NotGatheredError
    from fsdp2.errors import UsageError as UsageError
    from fsdp2.explain import explain as explain
    from fsdp2.interop import use_in_torch as use_in_torch
    from fsdp2.materializing import materialize as materialize
    from fsdp2.module import FSDPModule as FSDPModule
    from fsdp2.module import UnshardHandle as UnshardHandle
    from fsdp2.muon import Muon as Muon
    from fsdp2.placing import ShardPlacementResult as ShardPlacementResult
    from fsdp2.policies import CPUOffloadPolicy as CPUOffloadPolicy
    from fsdp2.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp2.policies import OffloadPolicy as OffloadPolicy
    from fsdp2.safetensors_io import load_safetensors as load_safetensors
    from fsdp2.safetensors_io import save_safetensors as save_safetensors
    from fsdp2.stepping import local_step as local_step
    from fsdp2.syncing import sync_from_rank0 as sync_from_rank0
    from fsdp2.tracing import Trace as Trace
    from fsdp2.whole import full_gradients as full_gradients
    from fsdp2.whole import full_parameters as full_parameters

__version__ = "0.1.0"

_HOMES = {
    "AllGather": "custom",
    "CPUOffloadPolicy": "policies",
    "Comm": "custom",
    "DataParallelMeshDims": "_torch",
    "FSDPModule": "module",
    "Memory": "accounting",
    "MixedPrecisionPolicy": "policies",
    "Muon": "muon",
    "NotGatheredError": "errors",
    "OffloadPolicy": "policies",
    "ReduceScatter": "custom",
    "ShardPlacementResult": "placing",
    "Trace": "tracing",
    "UnshardHandle": "module",
    "UsageError": "errors",
    "clip_grad_norm_": "clipping",
    "deferred_init": "deferred",
    "explain": "explain",
    "full_gradients": "whole",
    "full_parameters": "whole",
    "fully_shard": "api",
    "load_safetensors": "safetensors_io",
    "local_step": "stepping",
    "materialize": "materializing",
    "memory": "accounting",
    "register_fsdp_forward_method": "api",
    "save_safetensors": "safetensors_io",
    "set_inflight_limit": "api",
    "share_comm_ctx": "api",
    "sync_from_rank0": "syncing",
    "sync_replicas": "api",
    "trace": "api",
    "use_in_torch": "interop",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name == "checkpoint":  # a folder of its own, which few runs of a test or a notebook need
        return import_module("fsdp2.checkpoint")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fsdp2' has no attribute '{name}'")
    value = getattr(import_module(f"fsdp2.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
