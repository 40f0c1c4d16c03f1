"""What users fill in. PyTorch's own policy objects are accepted wherever ours are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2._torch import BatchNorm, CPUOffloadPolicy, OffloadPolicy
from fsdp2.errors import UsageError

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Switches",
    "compute_dtype",
    "input_dtype",
    "reduce_dtype",
]

ParamDtype = torch.dtype | Callable[[str, nn.Parameter], torch.dtype | None]


@dataclass(frozen=True)
class MixedPrecisionPolicy(_torch.MixedPrecisionPolicy):
    """The dtypes of computation and communication; PyTorch's four fields and four more.

    ``param_dtype``
        Of the full parameters, and so of computation and gathers. A callable
        ``(name, parameter) -> dtype | None`` decides for each parameter, by its full name
        below the module given to ``fully_shard``: a gate or a norm stays in float32 while
        the rest computes in bfloat16. ``None`` is the parameter's own dtype. Integers are
        never cast; nor are batch norms, whose running statistics would not fit.
    ``reduce_dtype``
        Of the sums of gradients; ``None`` is the dtype of the gradients.
    ``output_dtype``
        Floating-point outputs are cast to it.
    ``cast_forward_inputs``
        Cast floating-point inputs to ``param_dtype``: where that is a callable, to the
        dtype that most elements of the group compute in.
    ``uncast_inputs``
        Names or positions of forward arguments that keep their dtype, such as a float32
        rotary table.
    ``buffer_dtype``
        Floating-point buffers of the group's modules are cast to it once, by
        ``fully_shard``. ``None`` leaves them alone.
    ``all_gather_dtype``
        Large parameters travel quantised: ``torch.float8_e4m3fn`` (or ``float8_e5m2``) with
        a scale per row, ``torch.int8`` with one per 128 neighbours. Computation stays in
        ``param_dtype``; every rank computes with the same rounded values, the shards keep
        theirs. Vectors, and what is too small to travel by itself, are left alone.
    ``exchange_dtype``
        Gradients of large parameters travel quantised between the ranks of the shard mesh,
        with a scale per 128 neighbours, and are summed in ``reduce_dtype``.
    """

    param_dtype: ParamDtype | None = None  # type: ignore[assignment]
    uncast_inputs: tuple[str | int, ...] = ()
    buffer_dtype: torch.dtype | None = None
    all_gather_dtype: torch.dtype | None = None
    exchange_dtype: torch.dtype | None = None


def compute_dtype(
    policy: _torch.MixedPrecisionPolicy, name: str, param: nn.Parameter, module: nn.Module
) -> torch.dtype:
    """The dtype of the full parameter ``name``, an attribute of ``module``."""
    storage = param.dtype
    wanted: ParamDtype | None = policy.param_dtype
    if wanted is None or not storage.is_floating_point:
        return storage
    if not isinstance(wanted, torch.dtype):
        found = wanted(name, param)
        if found is not None and not isinstance(found, torch.dtype):
            raise UsageError(
                f"mp_policy: param_dtype returned {found!r} for parameter '{name}'; it returns a "
                "torch.dtype, or None for the parameter's own"
            )
        return found or storage
    if isinstance(module, BatchNorm) and module.running_mean is not None:
        return storage
    return wanted


def input_dtype(
    policy: _torch.MixedPrecisionPolicy, computing: dict[torch.dtype, int]
) -> torch.dtype | None:
    """What inputs are cast to. ``computing`` counts the elements per compute dtype."""
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return None
    if isinstance(policy.param_dtype, torch.dtype):
        return policy.param_dtype
    floating = {d: n for d, n in computing.items() if d.is_floating_point}
    return max(floating, key=lambda d: floating[d]) if floating else None


def reduce_dtype(policy: _torch.MixedPrecisionPolicy, compute: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed; that of the gradients if nothing is asked."""
    return policy.reduce_dtype or compute


@dataclass
class Switches:
    """What users flip on one group between steps. Alike on all ranks."""

    reshard_after_forward: bool
    keeps_part: bool = False
    """Freed but for the part that a backward over fewer ranks gathers."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduces_gradients: bool = True
    all_reduces: bool = True
    """Sum over the replicas too, or keep the sum of this replica for later."""
    fills_unused: bool = False
    """A parameter that no rank used gets a gradient of zeros."""
    divide_factor: float | None = None
    """Gradient sums are divided by this; by the number of ranks if None."""
    max_exchanges: int = 1
    """Reductions that may be under way; the largest number below a root is the root's."""
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_stream: torch.Stream | None = None
