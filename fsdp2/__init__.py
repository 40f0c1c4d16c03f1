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
    from fsdp2.api import fully_shard as fully_shard
    from fsdp2.api import register_fsdp_forward_method as register_fsdp_forward_method
    from fsdp2.api import set_inflight_limit as set_inflight_limit
    from fsdp2.api import trace as trace
    from fsdp2.errors import UsageError as UsageError
    from fsdp2.explain import explain as explain
    from fsdp2.module import FSDPModule as FSDPModule
    from fsdp2.module import UnshardHandle as UnshardHandle
    from fsdp2.policies import CPUOffloadPolicy as CPUOffloadPolicy
    from fsdp2.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp2.policies import OffloadPolicy as OffloadPolicy
    from fsdp2.tracing import Trace as Trace

__version__ = "0.1.0"

_HOMES = {
    "CPUOffloadPolicy": "policies",
    "FSDPModule": "module",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "Trace": "tracing",
    "UnshardHandle": "module",
    "UsageError": "errors",
    "explain": "explain",
    "fully_shard": "api",
    "register_fsdp_forward_method": "api",
    "set_inflight_limit": "api",
    "trace": "api",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fsdp2' has no attribute '{name}'")
    value = getattr(import_module(f"fsdp2.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
