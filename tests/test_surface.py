"""PyTorch's public surface for FSDP2, walked by introspection: what is there must be here.

A new name, method, argument or field in a release of PyTorch fails one of these tests, and so
does a method of ours that PyTorch's class would answer: its engine is not there.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_api as their_api
from torch.distributed.fsdp._fully_shard import _fsdp_common as their_common
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches

FSDP1 = {
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}
"""Names beside FSDP2's that belong to PyTorch's older, flat-parameter implementation."""

FSDP2 = sorted(set(theirs.__all__) - FSDP1)
FUNCTIONS = [name for name in FSDP2 if inspect.isfunction(getattr(theirs, name))]
CLASSES = [name for name in FSDP2 if inspect.isclass(getattr(theirs, name))]
POLICIES = [name for name in CLASSES if dataclasses.is_dataclass(getattr(theirs, name))]
ENGINE = [name for name in CLASSES if name not in POLICIES]
"""Classes with methods that drive PyTorch's engine."""

COMMUNICATION = ["Comm", "AllGather", "ReduceScatter"]


def api_of(name: str) -> Any:
    """PyTorch keeps the interfaces of custom collectives in a private module."""
    return getattr(their_api if name in COMMUNICATION else theirs, name)


def differences(ours: Callable[..., Any], base: Callable[..., Any]) -> list[str]:
    """Why some call that ``base`` accepts would fail with ``ours``, or mean something else.

    Parameters must agree in place, name, kind and default. Further ones may follow if they can
    be left out.
    """
    found = list(inspect.signature(ours).parameters.values())
    expected = list(inspect.signature(base).parameters.values())
    texts = [f"lacks '{p.name}'" for p in expected if p.name not in {q.name for q in found}]
    for mine, parameter in zip(found, expected):
        if (mine.name, mine.kind) != (parameter.name, parameter.kind):
            texts.append(f"{mine.kind.description} '{mine}' stands where '{parameter}' is expected")
        elif not same_default(mine.default, parameter.default):
            texts.append(f"'{mine.name}' defaults to {mine.default}, not to {parameter.default}")
    texts += [
        f"'{extra}' is required"
        for extra in found[len(expected) :]
        if extra.default is extra.empty
        and extra.kind not in (extra.VAR_POSITIONAL, extra.VAR_KEYWORD)
    ]
    return texts


def same_default(ours: Any, base: Any) -> bool:
    """Equal, or a policy that derives from PyTorch's and has the same values."""
    if dataclasses.is_dataclass(base) and isinstance(ours, type(base)):
        names = [field.name for field in dataclasses.fields(base)]
        return all(getattr(ours, name) == getattr(base, name) for name in names)
    return bool(ours == base)


def attributes_of(cls: type) -> Iterator[str]:
    """What a class gives to those that derive from it, beyond what every class has."""
    bookkeeping = {"__annotations__", "__dict__", "__doc__", "__module__", "__weakref__"}
    bookkeeping |= {"__firstlineno__", "__static_attributes__", "__annotate_func__"}
    bookkeeping |= {"__annotations_cache__", "__abstractmethods__", "_abc_impl"}
    yield from sorted({name for base in cls.__mro__[:-1] for name in vars(base)} - bookkeeping)


def methods_of(*names: str) -> list[tuple[str, str]]:
    """Class and method, for every method that users may call."""
    return [
        (name, method)
        for name in names
        for method in attributes_of(api_of(name))
        if callable(getattr(api_of(name), method)) and method not in ("__init__", "__new__")
    ]


# ---- Names and arguments


def test_the_walk_finds_something() -> None:
    """It would be easy to pass by looking at nothing."""
    assert set(FUNCTIONS) >= {"fully_shard", "register_fsdp_forward_method"}
    assert ENGINE == ["FSDPModule", "UnshardHandle"]
    assert set(POLICIES) >= {"CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"}
    assert len(methods_of("FSDPModule")) >= 20
    assert ("UnshardHandle", "wait") in methods_of("UnshardHandle")
    assert len(methods_of(*COMMUNICATION)) == 5


@pytest.mark.parametrize("name", FSDP2 + COMMUNICATION)
def test_every_name_is_here(name: str) -> None:
    """What users import from `torch.distributed.fsdp` they can import from `fsdp2`."""
    assert name in fsdp2.__all__
    assert inspect.isclass(getattr(fsdp2, name)) == inspect.isclass(api_of(name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_same_arguments(name: str) -> None:
    """The same names, order, kinds and defaults."""
    assert differences(getattr(fsdp2, name), getattr(theirs, name)) == []


def test_attributes_of_fully_shard() -> None:
    """`fully_shard.state` and whatever else hangs on the function."""
    for name, value in vars(theirs.fully_shard).items():
        if not name.startswith("__"):
            assert differences(getattr(fully_shard, name), value) == []
    assert "state" in vars(theirs.fully_shard)


@pytest.mark.parametrize(("cls", "method"), methods_of(*ENGINE))
def test_methods_take_the_same_arguments(cls: str, method: str) -> None:
    """Every method, private ones that other libraries call included."""
    assert differences(getattr(getattr(fsdp2, cls), method), getattr(api_of(cls), method)) == []


@pytest.mark.parametrize(("cls", "method"), methods_of(*COMMUNICATION))
def test_collectives_are_called_with_the_same_arguments(cls: str, method: str) -> None:
    """A collective that was written for PyTorch's interface can be called through ours."""
    assert differences(getattr(getattr(fsdp2, cls), method), getattr(api_of(cls), method)) == []


def takes_one(a: int, *, b: int = 1) -> None: ...
def takes_more(a: int, *, b: int = 1, c: int = 2) -> None: ...
def requires_more(a: int, *, b: int = 1, c: int) -> None: ...
def renames(x: int, *, b: int = 1) -> None: ...
def turns_positional(a: int, b: int = 1) -> None: ...
def changes_a_default(a: int, *, b: int = 2) -> None: ...
def forgets(a: int) -> None: ...


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (takes_one, []),
        (takes_more, []),
        (requires_more, ["'c: 'int'' is required"]),
        (renames, ["lacks 'a'", "'x: 'int'' stands where 'a: 'int'' is expected"]),
        (turns_positional, ["'b: 'int' = 1' stands where"]),
        (changes_a_default, ["'b' defaults to 2, not to 1"]),
        (forgets, ["lacks 'b'"]),
    ],
)
def test_differences_are_found(ours: Callable[..., Any], expected: Sequence[str]) -> None:
    """The comparison of signatures that the tests above rely on."""
    found = differences(ours, takes_one)
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found))


# ---- Nothing reaches PyTorch's engine


@pytest.mark.parametrize("name", ENGINE)
def test_nothing_is_inherited(name: str) -> None:
    """Every attribute of PyTorch's class is overridden: theirs would find no engine."""
    ours, base = getattr(fsdp2, name), getattr(theirs, name)
    assert issubclass(ours, base), "other libraries test with isinstance"
    assert [each for each in attributes_of(base) if each not in vars(ours)] == []


@distributed(2)
def test_sharded_module_reaches_no_inherited_method(ranks: Ranks) -> None:
    """The same holds for the class that a module ends up with, where `nn.Module` joins in."""
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    for name in attributes_of(theirs.FSDPModule):
        provider = next(cls for cls in type(model).__mro__ if name in vars(cls))
        assert provider is not theirs.FSDPModule, name
    assert_idle(model)


# ---- Policies


@pytest.mark.parametrize("name", POLICIES)
def test_policies_have_the_same_fields(name: str) -> None:
    """PyTorch's fields come first, in their order and with their defaults; so do attributes."""
    ours, base = getattr(fsdp2, name), getattr(theirs, name)
    assert issubclass(ours, base), "other libraries test with isinstance"
    expected = [(field.name, field.default) for field in dataclasses.fields(base)]
    found = [(field.name, field.default) for field in dataclasses.fields(ours)]
    assert found[: len(expected)] == expected
    assert differences(ours, base) == []
    assert [each for each in attributes_of(base) if not hasattr(ours, each)] == []


# Renamed in 2.12, where the old names warn; 2.11 has the old ones alone.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TheirAllGather(their_api.AllGather):
    """A collective of PyTorch's interface, which counts its calls."""

    calls = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        return all_gather(output_tensor, input_tensor, group, async_op)


class TheirReduceScatter(TheirAllGather, their_api.ReduceScatter):
    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        return reduce_scatter(output_tensor, input_tensor, op, group, async_op)


@distributed(2)
def test_pytorchs_policies_are_accepted(ranks: Ranks) -> None:
    """Policy objects that were built for PyTorch's `fully_shard` work here."""
    policy = theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    for offload in (theirs.OffloadPolicy(), theirs.CPUOffloadPolicy(pin_memory=False)):
        model = fully_shard(nn.Linear(3, 2), mp_policy=policy, offload_policy=offload)
        output = model(torch.randn(4, 3))
        assert output.dtype is torch.float64
        assert torch.equal(output.bfloat16().double(), output), "not computed in bfloat16"
        output.sum().backward()
        assert all(param.grad.dtype is torch.float32 for param in model.parameters())
        assert_idle(model)


@distributed(2)
def test_pytorchs_mesh_dims_and_placements_are_accepted(ranks: Ranks) -> None:
    """`DataParallelMeshDims`, and the result type of a `shard_placement_fn`, from PyTorch."""
    if not hasattr(their_common, "ShardPlacementResult"):
        pytest.skip("this release of PyTorch has neither")
    dims = theirs.DataParallelMeshDims(replicate="dp")
    model = fully_shard(nn.Linear(4, 2), mesh=ranks.mesh(2, names=("dp",)), dp_mesh_dims=dims)
    assert model.weight.placements == (Replicate(),)

    info = their_common.FSDPMeshInfo(mesh=ranks.mesh(), shard_mesh_dim=0)
    result = their_common.ShardPlacementResult(placement=Shard(1), mesh_info=info)
    model = fully_shard(
        nn.Linear(4, 2), shard_placement_fn=lambda p: result if p.ndim == 2 else None
    )
    assert model.weight.placements == (Shard(1),)
    assert model.weight.to_local().shape == (2, 2)
    assert model.bias.placements == (Shard(0),)


@distributed(2)
def test_pytorchs_collectives_are_accepted(ranks: Ranks) -> None:
    """Custom collectives that derive from PyTorch's interfaces carry gathers and reductions."""
    model = shard_blocks(Net())
    gather, scatter = TheirAllGather(), TheirReduceScatter()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    [batch] = token_batches(2, 1)
    next_token_loss(model, batch[ranks.rank]).backward()
    assert (gather.calls, scatter.calls) == (1, 1)
    assert_idle(model)
