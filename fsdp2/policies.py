"""What users fill in: PyTorch's own policy classes, which other libraries build and test for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp2._torch import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Switches",
    "compute_dtype",
    "reduce_dtype",
]


def compute_dtype(policy: MixedPrecisionPolicy, storage: torch.dtype) -> torch.dtype:
    """The dtype of a full parameter: integers and bools are never cast."""
    if policy.param_dtype is None or not storage.is_floating_point:
        return storage
    return policy.param_dtype


def reduce_dtype(policy: MixedPrecisionPolicy, compute: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed; that of the gradients if nothing is asked."""
    return policy.reduce_dtype or compute


@dataclass
class Switches:
    """What users flip on one group between steps. Alike on all ranks."""

    reshard_after_forward: bool
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduces_gradients: bool = True
    divide_factor: float | None = None
    """Gradient sums are divided by this; by the number of ranks if None."""
