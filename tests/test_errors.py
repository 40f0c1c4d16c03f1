"""Every misuse that is recognised: the exception's type, and what its message teaches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches


class Case(NamedTuple):
    """A misuse: what is done, and what must be raised."""

    misuse: Callable[[Ranks], Any]
    raises: tuple[type[Exception], ...]
    """The exception is an instance of all of these."""
    message: str


MISTAKE = (AssertionError, ValueError)
"""PyTorch's users catch the first, everyone else the second."""

NOT_BUILT = (NotImplementedError,)


def layer() -> nn.Linear:
    return nn.Linear(4, 2)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def sharded() -> Any:
    return fully_shard(small())


# ---- fully_shard's arguments


def apply_twice(ranks: Ranks) -> None:
    fully_shard(fully_shard(layer()))


def share_a_list_member(ranks: Ranks) -> None:
    model = small()
    fully_shard(model[0])
    fully_shard([model[0], model[1]])


def tie_over_two_calls(ranks: Ranks) -> None:
    model = Net(tied=True)
    fully_shard(model.embedding)
    fully_shard(model.head)


def shard_a_dtensor(ranks: Ranks) -> None:
    model = small()
    mesh = ranks.mesh()
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Replicate()]))
    fully_shard(model, mesh=mesh)


def shard_a_sparse_parameter(ranks: Ranks) -> None:
    model = small()
    model[1].weight = nn.Parameter(torch.eye(2, 4).to_sparse())
    fully_shard(model)


def shard_a_lazy_module(ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules announce that they may change
        model = nn.Sequential(nn.LazyLinear(3))
    fully_shard(model)


# ---- Optimizers, forward and backward


def train_with_an_old_optimizer(ranks: Ranks) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def forward_on_meta(ranks: Ranks) -> None:
    with torch.device("meta"):
        model = small()
    fully_shard(model[1])
    fully_shard(model)
    model(torch.randn(3, 4))


def unshard_on_meta(ranks: Ranks) -> None:
    with torch.device("meta"):
        model = small()
    fully_shard(model).unshard()


def replace_by_a_plain_parameter(ranks: Ranks) -> None:
    model = sharded()
    model[1].weight = nn.Parameter(torch.zeros(2, 4))
    model(torch.randn(3, 4))


def replace_by_nothing(ranks: Ranks) -> None:
    model = sharded()
    model[1].bias = None
    model(torch.randn(3, 4))


def replace_by_another_shape(ranks: Ranks) -> None:
    model = sharded()
    mesh = fully_shard.state(model).group.mesh.mesh
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))
    model(torch.randn(3, 4))


def replace_by_another_placement(ranks: Ranks) -> None:
    model = sharded()
    mesh = fully_shard.state(model).group.mesh.mesh
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 4), mesh, [Replicate()]))
    model(torch.randn(3, 4))


def train_a_sparse_embedding(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    fully_shard(model)
    model(torch.tensor([1, 2, 3])).sum().backward()


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


def forget_to_reset(ranks: Ranks, direction: str) -> None:
    model = Stumbling()
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    model.stumbles = direction
    with pytest.raises(ArithmeticError):
        model(torch.randn(3, 4)).sum().backward()
    model(torch.randn(3, 4))


class Undecided(nn.Module):
    """Calls its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = self.layers[i](x)
        return x


def call_in_different_orders(ranks: Ranks) -> None:
    model = Undecided()
    for each in model.layers:
        fully_shard(each)
    fully_shard(model)
    model(torch.randn(3, 4), [1, 0] if ranks.rank else [0, 1])


def call_the_outer_in_the_middle(ranks: Ranks) -> None:
    """The inner module is its own root; its backward calls the module around it."""
    model = small()
    fully_shard(model[0])
    fully_shard(model)
    output = model[0](torch.randn(3, 4))

    def call_outer(gradient: Tensor) -> None:
        model(torch.randn(3, 4))

    hidden = output * 1
    middle = model[0](hidden)
    hidden.register_hook(call_outer)
    middle.sum().backward()


CASES = {
    # fully_shard's arguments
    "empty list": Case(lambda ranks: fully_shard([]), MISTAKE, "empty list of modules"),
    "no module": Case(lambda ranks: fully_shard("model"), MISTAKE, "nn.Modules and got a str"),
    "no module in a list": Case(
        lambda ranks: fully_shard([layer(), 3]), MISTAKE, "nn.Modules and got a int"
    ),
    "twice": Case(
        apply_twice,
        (AssertionError, ValueError),
        "'FSDPLinear'.*Each distinct composable distributed API can only be applied to a module "
        "once.",
    ),
    "twice through a list": Case(share_a_list_member, MISTAKE, "'FSDPLinear'.*applied to it"),
    "ModuleList": Case(
        lambda ranks: fully_shard(nn.ModuleList([layer()])),
        (ValueError,),
        "fully_shard does not support containers that do not implement forward: ModuleList",
    ),
    "ModuleDict": Case(
        lambda ranks: fully_shard([nn.ModuleDict({"a": layer()})]),
        (ValueError,),
        "fully_shard does not support containers that do not implement forward: ModuleDict",
    ),
    "3D mesh": Case(
        lambda ranks: fully_shard(layer(), mesh=ranks.mesh(1, 1, 2)),
        (ValueError,),
        "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
    ),
    "unnamed 2D mesh": Case(
        lambda ranks: fully_shard(layer(), mesh=ranks.mesh(1, 2)),
        (AssertionError,),
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
    ),
    "2D mesh": Case(
        lambda ranks: fully_shard(layer(), mesh=ranks.mesh(1, 2, names=("replicate", "shard"))),
        NOT_BUILT,
        r"'mesh'.*pass a 1D mesh, for example mesh\['shard'\]",
    ),
    "reshard_after_forward=2": Case(
        lambda ranks: fully_shard(layer(), reshard_after_forward=2),
        NOT_BUILT,
        "'reshard_after_forward': 2",
    ),
    "shard_placement_fn": Case(
        lambda ranks: fully_shard(layer(), shard_placement_fn=lambda param: Shard(1)),
        NOT_BUILT,
        "'shard_placement_fn'",
    ),
    "offload_policy": Case(
        lambda ranks: fully_shard(layer(), offload_policy=fsdp2.CPUOffloadPolicy()),
        NOT_BUILT,
        "'offload_policy'",
    ),
    "dp_mesh_dims": Case(
        lambda ranks: fully_shard(layer(), dp_mesh_dims=DataParallelMeshDims(shard="shard")),
        NOT_BUILT,
        "'dp_mesh_dims'",
    ),
    "tied over two calls": Case(
        tie_over_two_calls,
        (ValueError,),
        "'weight' is already managed by another fully_shard call, under the name 'weight'",
    ),
    "DTensor parameter": Case(
        shard_a_dtensor, NOT_BUILT, "'1.weight' is a DTensor.*tensor-parallel"
    ),
    "sparse parameter": Case(shard_a_sparse_parameter, MISTAKE, "'1.weight' has layout.*sparse"),
    "lazy module": Case(shard_a_lazy_module, MISTAKE, "'0.weight' is not initialised yet"),
    "deepcopy": Case(
        lambda ranks: copy.deepcopy(sharded()),
        (AssertionError,),
        "FSDP does not support deepcopy.*FSDPSequential",
    ),
    "deepcopy from above": Case(
        lambda ranks: copy.deepcopy(nn.ModuleList([sharded()])), (AssertionError,), "FSDPSequential"
    ),
    # Steps
    "optimizer built before": Case(
        train_with_an_old_optimizer, MISTAKE, "SGD was built before fully_shard.*'0.weight'"
    ),
    "forward on meta": Case(
        forward_on_meta,
        (RuntimeError,),
        r"materialized from meta device before training, but the following were still on meta "
        r"device: \['0.weight', '0.bias', '1.weight', '1.bias'\].*to_empty",
    ),
    "unshard on meta": Case(unshard_on_meta, (RuntimeError,), r"\['0.weight', '0.bias', '1"),
    "replaced by a plain parameter": Case(
        replace_by_a_plain_parameter,
        MISTAKE,
        r"'1.weight' was replaced after fully_shard by a Parameter of shape \(2, 4\).*assign=True",
    ),
    "replaced by nothing": Case(replace_by_nothing, MISTAKE, "'1.bias' was replaced.*by None"),
    "replaced by another shape": Case(
        replace_by_another_shape, MISTAKE, r"'1.weight' was .* \(6, 4\); its shape was \(2, 4\)"
    ),
    "replaced by another placement": Case(
        replace_by_another_placement, MISTAKE, r"'1.weight' was replaced.*must have.*Shard\(dim=0\)"
    ),
    "sparse gradient": Case(
        train_a_sparse_embedding, NOT_BUILT, r"'0.weight' of group 'root'.*sparse=False"
    ),
    "no reset after forward": Case(
        lambda ranks: forget_to_reset(ranks, "forward"),
        (RuntimeError,),
        r"FSDPStumbling \(root\): the previous forward did not finish.*reset_iter_state\(\)",
    ),
    "no reset after backward": Case(
        lambda ranks: forget_to_reset(ranks, "backward"),
        (RuntimeError,),
        r"FSDPStumbling \(root\): the previous backward did not finish.*reset_iter_state\(\)",
    ),
    "different orders": Case(
        call_in_different_orders,
        (RuntimeError,),
        "different orders. Next comes rank 0: 'layers.0'; rank 1: 'layers.1'",
    ),
    "outer call in the middle": Case(
        call_the_outer_in_the_middle, (RuntimeError,), "'0' was called by itself.*backward"
    ),
    # Methods and functions
    "set_reshard_after_forward(2)": Case(
        lambda ranks: sharded().set_reshard_after_forward(2), MISTAKE, "must be a bool, got 2"
    ),
    "forward prefetch of a plain module": Case(
        lambda ranks: sharded().set_modules_to_forward_prefetch([layer()]),
        MISTAKE,
        "prefetch lists hold FSDP modules; got a Linear",
    ),
    "backward prefetch of a name": Case(
        lambda ranks: sharded().set_modules_to_backward_prefetch(["blocks.0"]),
        MISTAKE,
        "prefetch lists hold FSDP modules; got a str",
    ),
    "missing forward method": Case(
        lambda ranks: fsdp2.register_fsdp_forward_method(sharded(), "encode"),
        (ValueError,),
        "FSDPSequential has no method 'encode'",
    ),
    "forward method that is none": Case(
        lambda ranks: fsdp2.register_fsdp_forward_method(sharded(), "training"),
        (ValueError,),
        "FSDPSequential has no method 'training'",
    ),
    "no limit": Case(
        lambda ranks: fsdp2.set_inflight_limit(sharded(), 0), (ValueError,), "from 1 on, got 0"
    ),
    "half a limit": Case(
        lambda ranks: fsdp2.set_inflight_limit(sharded(), 2.5), (ValueError,), "got 2.5"
    ),
    "a bool as limit": Case(
        lambda ranks: fsdp2.set_inflight_limit(sharded(), True), (ValueError,), "got True"
    ),
    "limit of nothing": Case(
        lambda ranks: fsdp2.set_inflight_limit(layer(), 2),
        MISTAKE,
        "set_inflight_limit: fully_shard was called on no module of Linear",
    ),
    "explain nothing": Case(
        lambda ranks: fsdp2.explain(layer()), MISTAKE, "explain: fully_shard.*of Linear"
    ),
    "trace nothing": Case(
        lambda ranks: fsdp2.trace(layer()).__enter__(), MISTAKE, "trace: fully_shard.*of Linear"
    ),
}

NOT_BUILT_METHODS: dict[str, tuple[Any, ...]] = {
    "set_requires_all_reduce": (False,),
    "set_all_reduce_hook": (print,),
    "set_post_optim_event": (None,),
    "set_reduce_scatter_divide_factor": (2.0,),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_reduce_scatter_unused_params": (True,),
    "set_separate_reduce_scatter_group": (),
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_symm_mem_for_comm": (),
    "set_allocate_memory_from_process_group_for_comm": (True,),
}


@distributed(2)
@pytest.mark.parametrize("case", CASES)
def test_misuse(ranks: Ranks, case: str) -> None:
    """It raises, on every rank, and says what, where and what to do."""
    misuse, types, message = CASES[case]
    with pytest.raises(types, match=f"(?s){message}") as raised:
        misuse(ranks)
    assert all(isinstance(raised.value, cls) for cls in types), type(raised.value).__mro__


@distributed(2)
def test_methods_that_are_not_built(ranks: Ranks) -> None:
    """They name themselves, and nothing is switched half."""
    model = sharded()
    for name, arguments in NOT_BUILT_METHODS.items():
        with pytest.raises(NotImplementedError, match=rf"FSDPModule\.{name} is not built yet"):
            getattr(model, name)(*arguments)
    assert_idle(model)


def test_no_process_group() -> None:
    """Without a process group the message says how to get one."""
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        fully_shard(layer())


@distributed(2)
def test_refused_call_changes_nothing(ranks: Ranks) -> None:
    """After a call that raised, the module is the plain module that it was."""
    model = Net(tied=True)
    fully_shard(model.embedding)
    before = dict(model.head.named_parameters())
    with pytest.raises(ValueError, match="already managed"):
        fully_shard(nn.Sequential(nn.Linear(2, 2), model.head))
    assert type(model.head) is nn.Linear
    assert all(param is before[name] for name, param in model.head.named_parameters())
    assert fully_shard.state(model.head) is None
    assert not isinstance(model.head.weight, DTensor)
    assert_idle(model.embedding)


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
