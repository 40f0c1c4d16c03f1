"""What a group's layout needs to know of each parameter."""

from __future__ import annotations

from fsdp2 import _torch
from fsdp2.layout import ParamSpec
from fsdp2.policies import compute_dtype
from fsdp2.sharded_param import ShardedParam


def spec_of(
    param: ShardedParam, policy: _torch.MixedPrecisionPolicy, keeps_part: bool
) -> ParamSpec:
    """``keeps_part`` says that a part of it stays between forward and backward.

    Raises:
        NotImplementedError: Of a parameter with a form of its own no part can be kept.
    """
    if param.has_own_form and keeps_part:
        raise NotImplementedError(
            f"parameter '{param.name}' of type {type(param.local).__name__} says itself how it "
            "is gathered (fsdp_pre_all_gather), so no part of it can be kept: pass "
            "reshard_after_forward=True or False"
        )
    module = param.places[0].module
    compute = compute_dtype(policy, param.given_name, param.shard, module)
    return ParamSpec(
        shape=param.rows.shape,
        storage=param.dtype,
        storage_itemsize=param.dtype.itemsize,
        compute=compute,
        compute_itemsize=compute.itemsize,
        dim=0 if param.rows.is_scalar else param.dim,
        has_own_form=param.has_own_form,
    )
