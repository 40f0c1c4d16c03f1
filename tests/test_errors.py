"""Every misuse that is recognised: the exception's type, and what its message teaches.

A message says three things: which parameter, module or argument it is about, what was found
there, and what to do instead. Where PyTorch recognises the same misuse, ours raises what catches
PyTorch's exception, and holds the words that code written for PyTorch looks for.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches

Misuse = Callable[[Ranks, Any], Any]
"""Does what is wrong, on every rank, with the `fully_shard` it is given: ours or PyTorch's."""

MISTAKE: tuple[type[Exception], ...] = (AssertionError, ValueError)
"""PyTorch's users catch the first, everyone else the second: `UsageError`."""


class Case(NamedTuple):
    """A misuse: what is done, and what must be raised."""

    misuse: Misuse
    raises: tuple[type[Exception], ...]
    """The exception is an instance of all of these."""
    where: str
    """Regex for the parameter, module or argument that the message names."""
    found: str
    """Regex for what was found there."""
    remedy: str
    """Regex for what to do."""
    pytorchs: str = ""
    """Regex for words that PyTorch's message has and clients may look for."""
    as_in_pytorch: bool = False
    """PyTorch raises for it too; ours is an instance of that exception's class."""
    num_ranks: int = 2


def layer() -> nn.Linear:
    return nn.Linear(4, 2)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def sharded() -> Any:
    return fully_shard(small())


def batch() -> Tensor:
    return torch.ones(3, 4)


def call(method: str, *arguments: Any, **options: Any) -> Misuse:
    """Call a method of a sharded Sequential with these arguments."""
    return lambda ranks, shard: getattr(shard(small()), method)(*arguments, **options)


def shard_with(make: Callable[[], nn.Module] = layer, **options: Any) -> Misuse:
    """Shard a plain module with these arguments."""
    return lambda ranks, shard: shard(make(), **options)


def train_with(**options: Any) -> Misuse:
    """Shard with these arguments and take a step: it must not get that far silently."""
    return lambda ranks, shard: shard(layer(), **options)(batch()).sum().backward()


def shard_on(*shape: int, names: tuple[str, ...] | None = None, **options: Any) -> Misuse:
    """Shard a plain module over a mesh of this shape."""
    return lambda ranks, shard: shard(layer(), mesh=ranks.mesh(*shape, names=names), **options)


def laid_out(module: nn.Module, mesh: DeviceMesh, *placements: Placement) -> Any:
    """Make all parameters DTensors, as tensor parallelism does."""
    for child in module.modules():
        for name, param in child.named_parameters(recurse=False):
            value = distribute_tensor(param.detach(), mesh, placements)
            child.register_parameter(name, nn.Parameter(value))
    return module


# ---- fully_shard's arguments


def apply_twice(ranks: Ranks, shard: Any) -> None:
    shard(shard(layer()))


def share_a_list_member(ranks: Ranks, shard: Any) -> None:
    model = small()
    shard(model[0])
    shard([model[0], model[1]])


def list_a_module_twice(ranks: Ranks, shard: Any) -> None:
    module = layer()
    shard([module, module])


class Late(nn.Module):
    """Shards one of its layers when it is called."""

    def __init__(self, shard: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shard = shard

    def forward(self, x: Tensor) -> Tensor:
        self.shard(self.layer)
        return self.layer(x)


def shard_inside_forward(ranks: Ranks, shard: Any) -> None:
    shard(Late(shard))(batch()).sum().backward()


def tie(model: nn.Sequential) -> nn.Sequential:
    model[1] = nn.Linear(4, 4)
    model[1].weight = model[0].weight
    return model


def tie_over_two_calls(ranks: Ranks, shard: Any) -> None:
    model = tie(small())
    for each in model:
        shard(each)
    model[0](batch())
    model[1](batch())


def tie_over_two_meshes(ranks: Ranks, shard: Any) -> None:
    model = nn.Sequential(tie(small()), nn.Tanh())
    shard(model[0][0], mesh=ranks.mesh(2, names=("dp",)))
    shard(model, mesh=ranks.mesh(2, 1, names=("replicate", "shard")))


def shard_a_sparse_parameter(ranks: Ranks, shard: Any) -> None:
    model = small()
    model[1].weight = nn.Parameter(torch.eye(2, 4).to_sparse())
    shard(model)


def shard_a_lazy_module(ranks: Ranks, shard: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules announce that they may change
        model = nn.Sequential(nn.LazyLinear(3))
    shard(model)


def ignore_what(select: Callable[[nn.Sequential], Any]) -> Misuse:
    def misuse(ranks: Ranks, shard: Any) -> None:
        model = small()
        shard(model, ignored_params=select(model))

    return misuse


# ---- Parameters that are DTensors already


def shard_a_dtensor_of_another_mesh(ranks: Ranks, shard: Any) -> None:
    mesh = ranks.mesh()
    shard(laid_out(small(), mesh, Replicate()), mesh=mesh)


def shard_what_pytorch_sharded(ranks: Ranks, shard: Any) -> None:
    model = small()
    theirs.fully_shard(model[0])
    shard(model)


def shard_over_a_dim_that_splits_already(ranks: Ranks, shard: Any) -> None:
    mesh = ranks.mesh(1, 2, names=("tp", "dp"))
    shard(laid_out(small(), mesh, Replicate(), Replicate()), mesh=mesh["dp"])


def spmd(*placements: Placement, make_mesh: Any = None, **options: Any) -> Misuse:
    """Parameters as DTensors on a mesh of one dimension, "dp", which ``dp_mesh_dims`` names."""

    def misuse(ranks: Ranks, shard: Any) -> None:
        theirs_mesh = ranks.mesh(2, names=("dp",))
        mesh = theirs_mesh if make_mesh is None else make_mesh(ranks)
        model = laid_out(small(), theirs_mesh, *placements)
        shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), **options)

    return misuse


# ---- Optimizers, forward and backward


def train_with_an_old_optimizer(ranks: Ranks, shard: Any) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    model(batch()).sum().backward()
    optimizer.step()


def forward_on_meta(ranks: Ranks, shard: Any) -> None:
    with torch.device("meta"):
        model = small()
    shard(model[1])
    shard(model)
    model(batch())


def unshard_on_meta(ranks: Ranks, shard: Any) -> None:
    with torch.device("meta"):
        model = small()
    shard(model).unshard()


def replace(attribute: str, make: Callable[[Ranks], nn.Parameter | None]) -> Misuse:
    """Put something else in the place of a sharded parameter, and call forward."""

    def misuse(ranks: Ranks, shard: Any) -> None:
        model = shard(small(), mesh=ranks.mesh())
        setattr(model[1], attribute, make(ranks))
        model(batch())

    return misuse


def dtensor(rows: int, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.zeros(rows, 4), mesh, placements))


def train_a_sparse_embedding(ranks: Ranks, shard: Any) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    shard(model)
    model(torch.tensor([1, 2, 3])).sum().backward()


def move_while_gradients_are_kept(ranks: Ranks, shard: Any) -> None:
    model = shard(small())
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    model.double()
    model.set_requires_gradient_sync(True)
    model(batch().double()).sum().backward()


def hybrid(ranks: Ranks, shard: Any) -> Any:
    return shard(small(), mesh=ranks.mesh(2, 2, names=("replicate", "shard")))


def freeze_while_sums_wait(ranks: Ranks, shard: Any) -> None:
    model = hybrid(ranks, shard)
    model.set_requires_all_reduce(False)
    model(batch()).sum().backward()
    model[1].weight.requires_grad_(False)
    model.set_requires_all_reduce(True)
    model(batch()).sum().backward()


def start_with_unequal_replicas(ranks: Ranks, shard: Any) -> None:
    torch.manual_seed(ranks.rank)
    hybrid(ranks, shard)(batch())


class Stumbling(nn.Module):
    """Raises on demand in the middle of forward or of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.stumbles = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.stumbles == "forward":
            raise ArithmeticError("on purpose")
        if self.stumbles == "backward":
            hidden.register_hook(self.stumble)
        return self.second(hidden)

    def stumble(self, gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")


def forget_to_reset(direction: str) -> Misuse:
    def misuse(ranks: Ranks, shard: Any) -> None:
        model = Stumbling()
        for each in (model.first, model.second, model):
            shard(each)
        model.stumbles = direction
        with pytest.raises(ArithmeticError):
            model(batch()).sum().backward()
        model(batch())

    return misuse


class Undecided(nn.Module):
    """Calls its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            x = self.layers[i](x)
        return x


def call_in_orders(*orders: Sequence[int]) -> Misuse:
    """Every rank calls the layers in an order of its own."""

    def misuse(ranks: Ranks, shard: Any) -> None:
        model = Undecided()
        for each in (*model.layers, model):
            shard(each)
        model(batch(), orders[ranks.rank])

    return misuse


def call_the_outer_in_the_middle(ranks: Ranks, shard: Any) -> None:
    """The inner module is its own root; its backward calls the module around it."""
    model = small()
    shard(model[0])
    shard(model)
    output = model[0](batch())

    def call_outer(gradient: Tensor) -> None:
        model(batch())

    hidden = output * 1
    middle = model[0](hidden)
    hidden.register_hook(call_outer)
    middle.sum().backward()


# ---- Methods


class Gather(fsdp2.AllGather):
    """A collective of the user's that is never called."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise NotImplementedError

    def __call__(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError


def give_memory_to_a_custom_gather(ranks: Ranks, shard: Any) -> None:
    model = shard(small())
    model.set_custom_all_gather(Gather())
    model.set_allocate_memory_from_process_group_for_comm(True)


def register_forward(method: str) -> Misuse:
    def misuse(ranks: Ranks, shard: Any) -> None:
        package = theirs if shard is theirs.fully_shard else fsdp2
        package.register_fsdp_forward_method(shard(small()), method)

    return misuse


def share_streams(ranks: Ranks, shard: Any) -> None:
    package = theirs if shard is theirs.fully_shard else fsdp2
    package.share_comm_ctx([layer()])


CASES = {
    # What is sharded
    "empty list": Case(
        lambda ranks, shard: shard([]), MISTAKE, "fully_shard", "empty list of modules", "pass"
    ),
    "no module": Case(
        lambda ranks, shard: shard("model"),
        MISTAKE,
        "fully_shard",
        "got a str",
        "shards nn.Modules",
    ),
    "no module in a list": Case(
        lambda ranks, shard: shard([layer(), 3]),
        MISTAKE,
        "fully_shard",
        "got a int",
        "shards nn.Modules",
    ),
    "twice": Case(
        apply_twice,
        MISTAKE,
        "'FSDPLinear'",
        "applied to it before",
        "only be applied to a module once",
        "Each distinct composable distributed API can only be applied to a module once.",
        as_in_pytorch=True,
    ),
    "twice through a list": Case(
        share_a_list_member,
        MISTAKE,
        "'FSDPLinear'",
        "applied to it before",
        "only be applied to a module once",
        "Each distinct composable distributed API can only be applied to a module once.",
        as_in_pytorch=True,
    ),
    "twice in one list": Case(
        list_a_module_twice,
        MISTAKE,
        "Linear",
        "twice|before",
        "once",
        "Each distinct composable distributed API can only be applied to a module once.",
        as_in_pytorch=True,
    ),
    "inside forward": Case(
        shard_inside_forward, MISTAKE, "'(FSDP)?Linear'|layer", "forward", "before|outside"
    ),
    "ModuleList": Case(
        lambda ranks, shard: shard(nn.ModuleList([layer()])),
        (ValueError,),
        "ModuleList",
        "do not implement forward",
        "shard its members, or pass them as a list",
        "fully_shard does not support containers that do not implement forward",
        as_in_pytorch=True,
    ),
    "ModuleDict": Case(
        lambda ranks, shard: shard(nn.ModuleDict({"a": layer()})),
        (ValueError,),
        "ModuleDict",
        "do not implement forward",
        "shard its members, or pass them as a list",
        "fully_shard does not support containers that do not implement forward",
        as_in_pytorch=True,
    ),
    "ModuleDict in a list": Case(
        lambda ranks, shard: shard([nn.ModuleDict({"a": layer()})]),
        (ValueError,),
        "ModuleDict",
        "do not implement forward",
        "shard its members, or pass them as a list",
        "fully_shard does not support containers that do not implement forward",
    ),
    "sparse parameter": Case(
        shard_a_sparse_parameter, MISTAKE, "'1.weight'", "sparse_coo", "to_dense|ignored_params"
    ),
    "lazy module": Case(
        shard_a_lazy_module, MISTAKE, "'0.weight'", "not initialised yet", "run the .* once first"
    ),
    "tied over two calls": Case(
        tie_over_two_calls,
        (ValueError,),
        "'weight' of 'root' is tied to 'weight'",
        "is already managed by another fully_shard call",
        "call fully_shard on a module that contains both, or on both together",
        "already managed by another",
    ),
    "tied over two meshes": Case(
        tie_over_two_meshes,
        (ValueError,),
        r"'weight'.*'0\.1\.weight'",
        r"over DeviceMesh\(\(dp=2\).*over DeviceMesh\(\(replicate=2, shard=1\)",
        "pass the same mesh to both calls, or untie them",
        "already managed by another",
    ),
    # The mesh
    "3D mesh": Case(
        shard_on(1, 1, 2),
        (ValueError,),
        "fully_shard",
        r"got DeviceMesh\(\(1, 1, 2\)",
        "name the dimensions to use with dp_mesh_dims, or slice",
        "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
        as_in_pytorch=True,
    ),
    "unnamed 2D mesh": Case(
        shard_on(1, 2),
        (AssertionError,),
        r"DeviceMesh\(\(1, 2\)",
        "no names",
        "Please init the 2D mesh",
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        as_in_pytorch=True,
    ),
    "mesh of other dimensions": Case(
        shard_on(1, 2, names=("dp_shard", "cp")),
        MISTAKE,
        "'dp_shard'",
        r"reads the 2D mesh .* as \(replicate, shard\)",
        r"mesh\['dp_shard'\] or mesh\['cp'\].*dp_mesh_dims=.*shard=\('dp_shard', 'cp'\)",
    ),
    "mesh the wrong way round": Case(
        shard_on(1, 2, names=("shard", "replicate")),
        MISTAKE,
        "'shard'",
        r"as \(replicate, shard\)",
        "dp_mesh_dims=",
    ),
    "process group as mesh": Case(
        lambda ranks, shard: shard(layer(), mesh=dist.group.WORLD),
        MISTAKE,
        "mesh",
        "ProcessGroup",
        "DeviceMesh",
    ),
    "dims of no mesh": Case(
        shard_with(dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        (ValueError,),
        "dp_mesh_dims",
        "mesh=None",
        "must have mesh_dim_names",
        "mesh must have mesh_dim_names when dp_mesh_dims is provided",
        as_in_pytorch=True,
    ),
    "dims of an unnamed mesh": Case(
        shard_on(2, dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        (ValueError,),
        "dp_mesh_dims",
        r"mesh=DeviceMesh\(\(2,\)",
        "must have mesh_dim_names",
        "mesh must have mesh_dim_names when dp_mesh_dims is provided",
        as_in_pytorch=True,
    ),
    "dims that the mesh lacks": Case(
        shard_on(2, names=("dp",), dp_mesh_dims=DataParallelMeshDims(shard="nonexistent")),
        (ValueError,),
        "dp_mesh_dims|DataParallelMeshDims",
        r"'nonexistent' not found in mesh.mesh_dim_names \('dp',\)",
        "name|pass|use",
        "not found in mesh.mesh_dim_names",
        as_in_pytorch=True,
    ),
    "dims in both roles": Case(
        shard_on(2, names=("dp",), dp_mesh_dims=DataParallelMeshDims("dp", "dp")),
        MISTAKE,
        "dp_mesh_dims|DataParallelMeshDims",
        "'dp'.* as shard and as replicate",
        "one of|either|only",
    ),
    "dims out of order": Case(
        shard_on(1, 2, names=("a", "b"), dp_mesh_dims=DataParallelMeshDims(("b", "a"))),
        (ValueError,),
        "dp_mesh_dims|DataParallelMeshDims|mesh dims",
        r"\('b', 'a'\)",
        r"must stand in the order of the mesh's, \('a', 'b'\)",
    ),
    "dims named twice": Case(
        shard_on(1, 2, names=("a", "b"), dp_mesh_dims=DataParallelMeshDims(("b", "b"))),
        MISTAKE,
        "dp_mesh_dims|DataParallelMeshDims|mesh dim",
        "'b'",
        "once",
    ),
    "string as dims": Case(
        shard_on(2, names=("dp",), dp_mesh_dims="dp"),
        MISTAKE,
        "dp_mesh_dims",
        "'dp'",
        "DataParallelMeshDims",
    ),
    "plain parameters on a larger mesh": Case(
        shard_on(1, 2, names=("tp", "dp"), dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        (ValueError,),
        "'weight'",
        r"is a plain tensor.*mesh DeviceMesh\(\(tp=1, dp=2\)",
        "distribute_module",
        "must be DTensors",
        as_in_pytorch=True,
    ),
    "split along the data-parallel dim": Case(
        spmd(Shard(0)),
        (ValueError,),
        "'0.weight'.*'dp'",
        r"but got S(hard)?\((dim=)?0\)",
        r"Expected Replicate\(\)",
        "Expected Replicate",
        as_in_pytorch=True,
    ),
    "DTensor of another mesh than dims": Case(
        spmd(Replicate(), make_mesh=lambda ranks: ranks.mesh(1, 2, names=("tp", "dp"))),
        (ValueError,),
        "'0.weight'",
        r"its mesh is DeviceMesh\(\(dp=2\)",
        r"must be a DTensor on the same mesh.*DeviceMesh\(\(tp=1, dp=2\)",
        "same mesh",
        as_in_pytorch=True,
    ),
    "int reshard with dims": Case(
        spmd(Replicate(), reshard_after_forward=2),
        (NotImplementedError,),
        "reshard_after_forward",
        r"\(2\)",
        "pass a bool",
        "reshard_after_forward as int",
        as_in_pytorch=True,
    ),
    "DTensor of an unnamed mesh": Case(
        shard_a_dtensor_of_another_mesh,
        MISTAKE,
        "'0.weight'",
        "is a DTensor on DeviceMesh",
        "mesh_dim_names",
    ),
    "DTensor that PyTorch sharded": Case(
        shard_what_pytorch_sharded,
        MISTAKE,
        "'0.weight'|'0'",
        "PyTorch's fully_shard|is a DTensor on DeviceMesh",
        "use_in_torch|mesh_dim_names",
    ),
    "DTensor over the same dim": Case(
        shard_over_a_dim_that_splits_already,
        MISTAKE,
        "'0.weight'",
        r"is a DTensor on DeviceMesh\(\(tp=1, dp=2\).*shares a dimension",
        "pass dp_mesh_dims",
    ),
    # Where to split
    "no factor": Case(
        shard_with(reshard_after_forward=3),
        (ValueError,),
        "reshard_after_forward",
        "=3",
        "must be a factor of 2",
        as_in_pytorch=True,
    ),
    "zero ranks": Case(
        shard_with(reshard_after_forward=0),
        (ValueError,),
        "reshard_after_forward",
        "=0",
        "must be a factor of 2",
        as_in_pytorch=True,
    ),
    "reshard at times": Case(
        shard_with(reshard_after_forward="yes"),
        (ValueError,),
        "reshard_after_forward",
        "'yes'",
        "a bool, an int or None",
        as_in_pytorch=True,
    ),
    "dimension that a parameter lacks": Case(
        shard_with(small, shard_placement_fn=lambda param: Shard(1)),
        (AssertionError,),
        "'0.bias'",
        r"shape \(4,\)",
        "return a dimension that it has, or None",
        "Shard dim 1 is invalid for 1D tensor",
        as_in_pytorch=True,
    ),
    "negative dimension that a parameter lacks": Case(
        shard_with(small, shard_placement_fn=lambda param: Shard(-3)),
        (AssertionError,),
        "'0.weight'",
        r"Shard dim -3 is invalid .* shape \(4, 4\)",
        "return a dimension that it has, or None",
        as_in_pytorch=True,
    ),
    "no Shard": Case(
        shard_with(small, shard_placement_fn=lambda param: Replicate()),
        (ValueError,),
        "'0.weight'",
        r"returned Replicate\(\)",
        r"it returns None, a Shard\(dim\), or a ShardPlacementResult",
        as_in_pytorch=True,
    ),
    "no function": Case(
        shard_with(shard_placement_fn=Shard(0)), MISTAKE, "shard_placement_fn", "Shard", "callable"
    ),
    # Policies
    "string as mp_policy": Case(
        train_with(mp_policy="bf16"), MISTAKE, "mp_policy", "'bf16'|str", "MixedPrecisionPolicy"
    ),
    "dtype as mp_policy": Case(
        train_with(mp_policy=torch.bfloat16),
        MISTAKE,
        "mp_policy",
        "torch.bfloat16",
        "MixedPrecisionPolicy",
    ),
    "string as param_dtype": Case(
        lambda ranks, shard: train_with(mp_policy=MixedPrecisionPolicy("bf16"))(ranks, shard),
        MISTAKE,
        "param_dtype",
        "'bf16'",
        "torch.dtype|torch.bfloat16",
    ),
    "string as reduce_dtype": Case(
        lambda ranks, shard: train_with(mp_policy=theirs.MixedPrecisionPolicy(None, "fp32"))(
            ranks, shard
        ),
        MISTAKE,
        "reduce_dtype",
        "'fp32'",
        "torch.dtype|torch.float32",
    ),
    "integers as param_dtype": Case(
        train_with(mp_policy=MixedPrecisionPolicy(torch.int32)),
        MISTAKE,
        "param_dtype",
        "torch.int32",
        "floating",
    ),
    "param_dtype that returns a string": Case(
        train_with(mp_policy=MixedPrecisionPolicy(lambda name, param: "bf16")),
        MISTAKE,
        "param_dtype.*'weight'|'weight'.*param_dtype",
        "'bf16'",
        "torch.dtype|None",
    ),
    "offload_policy=True": Case(
        train_with(offload_policy=True), MISTAKE, "offload_policy", "True", "CPUOffloadPolicy"
    ),
    "class as offload_policy": Case(
        train_with(offload_policy=fsdp2.CPUOffloadPolicy),
        MISTAKE,
        "offload_policy",
        "CPUOffloadPolicy",
        r"CPUOffloadPolicy\(\)",
    ),
    "names as ignored_params": Case(
        ignore_what(lambda model: {"0.weight"}),
        MISTAKE,
        "ignored_params",
        "'0.weight'|str",
        "nn.Parameter|parameters",
    ),
    "module as ignored_params": Case(
        ignore_what(lambda model: {model[0]}),
        MISTAKE,
        "ignored_params",
        "Linear",
        r"nn.Parameter|parameters\(\)",
    ),
    # Steps
    "optimizer built before": Case(
        train_with_an_old_optimizer,
        MISTAKE,
        "SGD.*'0.weight'",
        "was built before fully_shard",
        r"build it after fully_shard, from model.parameters\(\)",
    ),
    "forward on meta": Case(
        forward_on_meta,
        (RuntimeError,),
        r"\['0.weight', '0.bias', '1.weight', '1.bias'\]",
        "on meta device",
        "to_empty",
        "FSDP parameters should be materialized from meta device before training, but the "
        r"following were still on meta device: \['0.weight'",
        as_in_pytorch=True,
    ),
    "unshard on meta": Case(
        unshard_on_meta,
        (RuntimeError,),
        r"\['0.weight', '0.bias', '1",
        "on meta device",
        "to_empty",
        "FSDP parameters should be materialized from meta device",
        as_in_pytorch=True,
    ),
    "replaced by a plain parameter": Case(
        replace("weight", lambda ranks: nn.Parameter(torch.zeros(2, 4))),
        MISTAKE,
        "'1.weight'",
        r"was replaced after fully_shard by a Parameter of shape \(2, 4\)",
        r"put a DTensor .*Shard\(dim=0\).*assign=True",
    ),
    "replaced by nothing": Case(
        replace("bias", lambda ranks: None),
        MISTAKE,
        "'1.bias'",
        "was replaced after fully_shard by None",
        "put a DTensor .*assign=True",
    ),
    "replaced by another shape": Case(
        replace("weight", lambda ranks: dtensor(6, ranks.mesh(), Shard(0))),
        MISTAKE,
        "'1.weight'",
        r"was replaced .* \(6, 4\); its shape was \(2, 4\)",
        "put|must|give|call fully_shard",
    ),
    "replaced by another placement": Case(
        replace("weight", lambda ranks: dtensor(2, ranks.mesh(), Replicate())),
        MISTAKE,
        "'1.weight'",
        r"was replaced .* DTensor with \(Replicate\(\),\)",
        r"must have \(Shard\(dim=0\),\)",
    ),
    "replaced by one on another mesh": Case(
        replace(
            "weight",
            lambda ranks: dtensor(2, ranks.mesh(1, 2, names=("a", "b")), Replicate(), Shard(0)),
        ),
        MISTAKE,
        "'1.weight'",
        r"was replaced .* on DeviceMesh\(\(a=1, b=2\)",
        r"must have .* on DeviceMesh\(\(2,\)",
    ),
    "sparse gradient": Case(
        train_a_sparse_embedding,
        (NotImplementedError,),
        "'0.weight'",
        "gradient of layout torch.sparse_coo",
        "sparse=False",
        as_in_pytorch=True,
    ),
    "moved while gradients are kept": Case(
        move_while_gradients_are_kept,
        (RuntimeError,),
        "'root'",
        "replaced or moved while gradients are kept back",
        r"reduce them first, or call reset_iter_state\(\)",
    ),
    "frozen while sums wait": Case(
        freeze_while_sums_wait,
        (RuntimeError,),
        "'1.weight'",
        "frozen or thawed while sums of gradients wait",
        "finish the step first",
        num_ranks=4,
    ),
    "unequal replicas": Case(
        start_with_unequal_replicas,
        (RuntimeError,),
        "'0.weight'",
        r"different values on different replicas of DeviceMesh\(\(replicate=2, shard=2\)",
        r"one seed or one checkpoint, or call fsdp2.sync_replicas\(model\)",
        num_ranks=4,
    ),
    "no reset after forward": Case(
        forget_to_reset("forward"),
        (RuntimeError,),
        r"FSDPStumbling \(root\)",
        "the previous forward did not finish",
        r"reset_iter_state\(\)",
    ),
    "no reset after backward": Case(
        forget_to_reset("backward"),
        (RuntimeError,),
        r"FSDPStumbling \(root\)",
        "the previous backward did not finish",
        r"reset_iter_state\(\)",
    ),
    "different orders": Case(
        call_in_orders([0, 1], [1, 0]),
        (RuntimeError,),
        "rank 0: 'layers.0'; rank 1: 'layers.1'",
        "different orders",
        "must call the same modules in the same order",
    ),
    "module left out": Case(
        call_in_orders([0, 1], [0]),
        (RuntimeError,),
        "rank 0: 'layers.1'; rank 1: the end of forward",
        "different orders",
        "must call the same modules in the same order",
    ),
    "outer call in the middle": Case(
        call_the_outer_in_the_middle,
        (RuntimeError,),
        "'0'",
        "was called by itself and is still in backward",
        "finish its step before calling the module around it",
    ),
    # Setters
    "set_reshard_after_forward(2)": Case(
        call("set_reshard_after_forward", 2),
        (ValueError,),
        "reshard_after_forward",
        "got 2",
        "must be a bool",
        as_in_pytorch=True,
    ),
    "divide by zero": Case(
        call("set_gradient_divide_factor", 0),
        MISTAKE,
        "divide factor",
        "got 0",
        "positive",
    ),
    "divide by infinity": Case(
        call("set_gradient_divide_factor", float("inf")),
        MISTAKE,
        "divide factor",
        "inf",
        "positive|finite",
    ),
    "divide by NaN, in the older method": Case(
        call("set_reduce_scatter_divide_factor", float("nan")),
        MISTAKE,
        "divide factor",
        "nan",
        "positive",
    ),
    "no input buffer": Case(
        call("set_reduce_scatter_max_input_buffers", 0),
        (ValueError,),
        "max_input_buffers",
        "got 0",
        "1 or more",
        as_in_pytorch=True,
    ),
    "half an input buffer": Case(
        call("set_reduce_scatter_max_input_buffers", 2.5),
        (TypeError,),
        "max_input_buffers",
        "got 2.5",
        "is an int",
        as_in_pytorch=True,
    ),
    "a bool of input buffers": Case(
        call("set_reduce_scatter_max_input_buffers", True),
        (TypeError,),
        "max_input_buffers",
        "got True",
        "is an int",
        as_in_pytorch=True,
    ),
    "no hook": Case(
        call("set_all_reduce_hook", 3), (TypeError,), "set_all_reduce_hook", "got 3", "a callable"
    ),
    "hook's stream beside replicas": Case(
        lambda ranks, shard: hybrid(ranks, shard).set_all_reduce_hook(print, stream=object()),
        (ValueError,),
        "native HSDP",
        "stream",
        "cannot be set",
        "^stream cannot be set when using native HSDP$",
        as_in_pytorch=True,
        num_ranks=4,
    ),
    "custom gather that is none": Case(
        call("set_custom_all_gather", None),
        (TypeError,),
        "set_custom_all_gather",
        "got None",
        r"with allocate\(\) and __call__\(\), like fsdp2.AllGather",
    ),
    "custom reduce-scatter without allocate": Case(
        call("set_custom_reduce_scatter", print),
        (TypeError,),
        "set_custom_reduce_scatter",
        "got <built-in function print>",
        r"with allocate\(\) and __call__\(\), like .*fsdp2.ReduceScatter",
    ),
    "memory for a custom gather": Case(
        give_memory_to_a_custom_gather,
        (AssertionError,),
        "set_allocate_memory_from_process_group_for_comm",
        "together with set_custom_all_gather",
        "which allocate themselves",
    ),
    "symmetric memory": Case(
        call("set_symm_mem_for_comm"),
        (NotImplementedError,),
        r"set_symm_mem_for_comm\('NCCL'\)",
        "no staging buffer",
        "leave it out, or allocate it in a collective of your own",
    ),
    "forward prefetch of a plain module": Case(
        call("set_modules_to_forward_prefetch", [layer()]),
        (ValueError,),
        "prefetch",
        "got a Linear, on which fully_shard was not called",
        "hold FSDP modules",
        as_in_pytorch=True,
    ),
    "backward prefetch of a name": Case(
        call("set_modules_to_backward_prefetch", ["blocks.0"]),
        (ValueError,),
        "prefetch",
        "got a str",
        "hold FSDP modules",
        as_in_pytorch=True,
    ),
    # Functions
    "missing forward method": Case(
        register_forward("encode"),
        (ValueError,),
        "FSDPSequential",
        "has no method 'encode'",
        "pass|register|name",
        as_in_pytorch=True,
    ),
    "forward method that is none": Case(
        register_forward("training"),
        (ValueError,),
        "FSDPSequential",
        "has no method 'training'",
        "pass|register|name",
    ),
    "streams of a plain module": Case(
        share_streams,
        (ValueError,),
        "share_comm_ctx",
        "got Linear, on which fully_shard was not called",
        "expects a list of FSDPModules",
        as_in_pytorch=True,
    ),
    "no limit": Case(
        lambda ranks, shard: fsdp2.set_inflight_limit(sharded(), 0),
        (ValueError,),
        "limit on groups in flight",
        "got 0",
        "a whole number from 1 on",
    ),
    "half a limit": Case(
        lambda ranks, shard: fsdp2.set_inflight_limit(sharded(), 2.5),  # type: ignore[arg-type]
        (ValueError,),
        "limit on groups in flight",
        "got 2.5",
        "a whole number from 1 on",
    ),
    "a bool as limit": Case(
        lambda ranks, shard: fsdp2.set_inflight_limit(sharded(), True),
        (ValueError,),
        "limit on groups in flight",
        "got True",
        "a whole number from 1 on",
    ),
}

# Functions that need something sharded to look at.
CASES |= {
    f"{name} of nothing": Case(
        misuse, MISTAKE, f"{name}.*Linear", "called on no module of", "call fully_shard|first"
    )
    for name, misuse in {
        "set_inflight_limit": lambda ranks, shard: fsdp2.set_inflight_limit(layer(), 2),
        "sync_replicas": lambda ranks, shard: fsdp2.sync_replicas(layer()),
        "explain": lambda ranks, shard: fsdp2.explain(layer()),
        "trace": lambda ranks, shard: fsdp2.trace(layer()).__enter__(),
    }.items()
}


def check(ranks: Ranks, case: Case) -> None:
    with pytest.raises(case.raises) as raised:
        case.misuse(ranks, fully_shard)
    error = raised.value
    assert all(isinstance(error, cls) for cls in case.raises), type(error).__mro__
    message = str(error)
    for part in ("where", "found", "remedy", "pytorchs"):
        pattern = getattr(case, part)
        assert re.search(pattern, message, re.DOTALL), f"{part}: /{pattern}/ is not in: {message}"
    if case.as_in_pytorch:
        with pytest.raises(Exception) as their_own:  # noqa: PT011 -- its type is what we ask
            case.misuse(ranks, theirs.fully_shard)
        assert isinstance(error, type(their_own.value)), f"PyTorch raises {their_own.value!r}"
        if case.pytorchs:
            assert re.search(case.pytorchs, str(their_own.value), re.DOTALL), their_own.value


def of_size(num_ranks: int) -> list[str]:
    return [name for name, case in CASES.items() if case.num_ranks == num_ranks]


@distributed(2)
@pytest.mark.parametrize("case", of_size(2))
def test_misuse(ranks: Ranks, case: str) -> None:
    """It raises, on every rank, and says what, where and what to do."""
    check(ranks, CASES[case])


@distributed(4)
@pytest.mark.parametrize("case", of_size(4))
def test_misuse_of_replicas(ranks: Ranks, case: str) -> None:
    """The same for what needs two mesh dimensions of more than one rank."""
    check(ranks, CASES[case])


def test_no_process_group() -> None:
    """Without a process group the message says how to get one."""
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        fully_shard(layer())


def test_no_mesh_dims() -> None:
    """PyTorch's `DataParallelMeshDims` refuses to be empty itself, since 2.12."""
    with pytest.raises(ValueError, match="At least one of shard or replicate must be set"):
        DataParallelMeshDims()


def refuse_placement(ranks: Ranks, model: Any) -> None:
    """The first parameter's dimension is there, the second's is not."""
    fully_shard(model, shard_placement_fn=lambda param: Shard(1))


def refuse_layout(ranks: Ranks, model: Any) -> None:
    """The first parameter is replicated, the second is not."""
    mesh = ranks.mesh(2, names=("dp",))
    for i, placement in enumerate([Replicate(), Shard(0)]):
        laid_out(model[i], mesh, placement)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def refuse_size(ranks: Ranks, model: Any) -> None:
    fully_shard(model, reshard_after_forward=3)


def refuse_tie(ranks: Ranks, model: Any) -> None:
    """The tied weight is below an inner call over another mesh."""
    inner = nn.Linear(4, 4)
    inner.weight = model[0].weight
    fully_shard(inner, mesh=ranks.mesh(2, names=("dp",)))
    model.append(inner)
    fully_shard(model, mesh=ranks.mesh(2, 1, names=("replicate", "shard")))


def refuse_policy(ranks: Ranks, model: Any) -> None:
    fully_shard(model, mp_policy="bf16")  # type: ignore[call-overload]


def refuse_member(ranks: Ranks, model: Any) -> None:
    """The first module of the list could be sharded, the second was before."""
    fully_shard([model, fully_shard(layer())])


REFUSED = [
    refuse_placement,
    refuse_layout,
    refuse_size,
    refuse_tie,
    refuse_policy,
    refuse_member,
]


@distributed(2)
@pytest.mark.parametrize("refuse", REFUSED, ids=lambda refuse: str(refuse.__name__))
def test_refused_call_changes_nothing(
    ranks: Ranks, refuse: Callable[[Ranks, nn.Module], None]
) -> None:
    """After a call that raised, the module is the plain module that it was."""
    model = small()
    hooks = dict(model._forward_hooks), dict(model._forward_pre_hooks)
    with pytest.raises(Exception):  # noqa: B017, PT011 -- which one the table above says
        refuse(ranks, model)
    assert type(model) is nn.Sequential
    assert fully_shard.state(model) is None
    assert (dict(model._forward_hooks), dict(model._forward_pre_hooks)) == hooks
    for name, param in model.named_parameters():
        is_shard = isinstance(param, DTensor) and refuse is not refuse_layout
        assert not is_shard or name.startswith("2."), name  # the inner call's
        if refuse is refuse_layout:
            expected = Replicate() if name.startswith("0") else Shard(0)
            assert param.placements == (expected,), name


@distributed(2)
@pytest.mark.parametrize("kind", ["list", "tuple", "generator"])
def test_ignored_params_need_not_be_a_set(ranks: Ranks, kind: str) -> None:
    """Any collection of parameters is honoured, or refused by name; a generator too."""
    model = small()
    params: dict[str, Any] = {
        "list": list(model[0].parameters()),
        "tuple": tuple(model[0].parameters()),
        "generator": model[0].parameters(),
    }
    try:
        fully_shard(model, ignored_params=params[kind])
    except fsdp2.UsageError as error:
        assert "ignored_params" in str(error)  # noqa: PT017 -- either is right
        return
    assert [isinstance(param, DTensor) for param in model.parameters()] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.gpu
@distributed(1)
def test_offloaded_parameters_on_a_device(ranks: Ranks) -> None:
    """Parameters that were moved to the device although they are offloaded are named."""
    mesh = init_device_mesh("cuda", (1,))
    model = fully_shard(small(), mesh=mesh, offload_policy=fsdp2.CPUOffloadPolicy())
    model.to("cuda")
    pattern = (
        r"Found following parameters on non-CPU device: \[\('0.weight', device\(type='cuda'"
        r".*to_empty\(device='cpu'\)"
    )
    with pytest.raises(RuntimeError, match=f"(?s){pattern}"):
        model(batch().cuda())


@pytest.mark.gpu
@distributed(1)
def test_meshes_of_two_device_types(ranks: Ranks) -> None:
    """A DTensor on a CPU mesh cannot be sharded over a mesh of devices."""
    model = laid_out(small(), ranks.mesh(1, names=("tp",)), Replicate())
    pattern = (
        "'0.weight'.*Requires DTensor to have mesh of the same type as the FSDP mesh but got cpu "
        "for DTensor and cuda for FSDP"
    )
    with pytest.raises(ValueError, match=pattern):
        fully_shard(model, mesh=init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)))


@distributed(2)
def test_reset_after_an_exception(ranks: Ranks) -> None:
    """`reset_iter_state` on the root leads out of a step that raised, in either direction."""
    torch.manual_seed(1)
    model = Stumbling()
    reference = copy.deepcopy(model)
    for each in (model.first, model.second, model):
        fully_shard(each)
    x = torch.randn(3, 4)
    for direction in ("forward", "backward"):
        model.stumbles = direction
        with pytest.raises(ArithmeticError):
            model(x).sum().backward()
        model.reset_iter_state()
        model.stumbles = ""
        model.zero_grad()
        reference.zero_grad()
        model(x).sum().backward()
        reference(x).sum().backward()
        for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), plain.grad)
        assert_idle(model)


@distributed(2)
def test_optimizers_that_are_right_are_left_alone(ranks: Ranks) -> None:
    """One built after `fully_shard`, and one over a model that was never sharded, step."""
    plain = Net()
    old = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = shard_blocks(Net())
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    [tokens] = token_batches(2, 1)
    for net, optimizer in ((plain, old), (model, new)):
        before = [param.detach().clone() for param in net.parameters()]
        next_token_loss(net, tokens[ranks.rank]).backward()
        optimizer.step()
        changed = [not torch.equal(*p) for p in zip(before, net.parameters(), strict=True)]
        assert all(changed), changed
    assert_idle(model)


@distributed(2)
def test_real_and_meta_parameters_in_one_group(ranks: Ranks) -> None:
    """One buffer would lose the values of one or invent those of the other."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(fsdp2.UsageError, match=r"'1\.weight' is on the meta device.*'0\.weight'"):
        fully_shard(model, mesh=ranks.mesh())
    assert type(model[0].weight) is nn.Parameter
