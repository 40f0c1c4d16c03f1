"""The public face: names, signatures, types, and what `fully_shard` makes of a module."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.resources
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, assert_same_params, data_parallel, shard_blocks

PUBLIC = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "FSDPModule",
    "Memory",
    "MixedPrecisionPolicy",
    "Muon",
    "NotGatheredError",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "Trace",
    "UnshardHandle",
    "UsageError",
    "__version__",
    "clip_grad_norm_",
    "deferred_init",
    "explain",
    "full_gradients",
    "full_parameters",
    "fully_shard",
    "load_safetensors",
    "local_step",
    "materialize",
    "memory",
    "register_fsdp_forward_method",
    "save_safetensors",
    "set_inflight_limit",
    "share_comm_ctx",
    "sync_from_rank0",
    "sync_replicas",
    "trace",
    "use_in_torch",
]


def sum_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


# ---- Names and signatures


def test_all_is_what_users_get() -> None:
    """`__all__`, `dir` and the attributes of the package agree; unknown names raise."""
    assert fsdp2.__all__ == PUBLIC
    assert dir(fsdp2) == PUBLIC
    for name in PUBLIC:
        assert getattr(fsdp2, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'fully_shrad'"):
        fsdp2.fully_shrad  # noqa: B018


def test_metadata() -> None:
    """The version is that of the installed package, and type checkers find `py.typed`."""
    assert fsdp2.__version__ == importlib.metadata.version("fsdp2")
    assert importlib.resources.files("fsdp2").joinpath("py.typed").is_file()


def test_import_is_cheap() -> None:
    """`import fsdp2` costs less than 50 ms once torch is there."""
    script = (
        "import time, torch; start = time.perf_counter(); import fsdp2; "
        "print(time.perf_counter() - start)"
    )
    costs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
        )
        costs.append(float(done.stdout))
        if costs[-1] < 0.05:
            return
    pytest.fail(f"import fsdp2 took {costs} seconds")


# ---- What happens to the module


@distributed(2)
def test_class_swap(ranks: Ranks) -> None:
    """The module stays itself and gains `FSDP<Name>`, an instance of all three classes."""
    model = two_layers()
    names = [name for name, _ in model.named_parameters()]
    assert fully_shard(model[0]) is model[0]
    assert fully_shard(model) is model
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0]).__name__ == "FSDPLinear"
    assert type(model[1]) is nn.Tanh
    assert type(model[2]) is nn.Linear
    for module, cls in ((model, nn.Sequential), (model[0], nn.Linear)):
        assert isinstance(module, cls)
        assert isinstance(module, fsdp2.FSDPModule)
        assert isinstance(module, theirs.FSDPModule)
    assert not isinstance(model[2], theirs.FSDPModule)
    assert [name for name, _ in model.named_parameters()] == names
    assert type(fully_shard(nn.Linear(2, 2))) is type(model[0]), "one class for each class"
    handle = model.unshard(async_op=True)
    assert isinstance(handle, fsdp2.UnshardHandle)
    assert isinstance(handle, theirs.UnshardHandle)
    handle.wait()
    model.reshard()
    assert_idle(model)


@distributed(2)
def test_slice_of_a_sequential_is_plain(ranks: Ranks) -> None:
    """`model[:2]` is an ordinary Sequential of the same modules, and computes."""
    model = two_layers()
    reference = two_layers()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert_same(model(x), reference(x))
        front = model[:2]
        assert type(front) is nn.Sequential
        assert front[0] is model[0]
        assert_same(front(x), reference[:2](x))
    model.reshard()
    assert_idle(model)


@distributed(2)
def test_state_is_one_object_for_each_call(ranks: Ranks) -> None:
    """`fully_shard.state` knows the modules of a call, and no others."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    assert fully_shard.state(model) is None
    fully_shard(model[0])
    fully_shard([model[1], model[2]])
    fully_shard(model)
    states = [fully_shard.state(module) for module in (model, model[0], model[1])]
    assert None not in states
    assert len(set(states)) == 3
    assert fully_shard.state(model[2]) is fully_shard.state(model[1])
    assert fully_shard.state(model[3]) is None
    assert_idle(model)


# ---- Containers and lists


class Layers(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Branches(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["left"](x) + self["right"](x)


@distributed(2)
def test_containers_with_a_forward(ranks: Ranks) -> None:
    """Subclasses of ModuleList and ModuleDict that compute are modules like any other."""
    torch.manual_seed(5)
    plain = nn.Sequential(
        Layers([nn.Linear(3, 4), nn.Linear(4, 3)]),
        Branches({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2)}),
    )
    model = copy.deepcopy(plain)
    for container in model:
        fully_shard(container)
    fully_shard(model)
    assert [type(m).__name__ for m in model] == ["FSDPLayers", "FSDPBranches"]
    inputs = [torch.randn(4, 3) for _ in range(2)]
    data_parallel(plain, inputs, sum_of_squares)
    sum_of_squares(model, inputs[ranks.rank]).backward()
    assert_same_params(model, plain)
    assert_idle(model)


class Stages(nn.Module):
    """A body, then a norm and a head that form one group."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, use_head: bool = True) -> Tensor:
        hidden = self.norm(self.body(x).tanh())
        return self.head(hidden) if use_head else hidden


def grouped_stages() -> tuple[Stages, Stages]:
    torch.manual_seed(7)
    plain = Stages()
    model = copy.deepcopy(plain)
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    return model, plain


@distributed(2)
def test_list_is_one_group(ranks: Ranks) -> None:
    """Modules of a list are gathered by the first and freed by the last of them."""
    model, plain = grouped_stages()
    inputs = [torch.randn(4, 3) for _ in range(2)]
    seen = []
    model.head.register_forward_pre_hook(
        lambda head, args: seen.append(isinstance(model.norm.__dict__["weight"], nn.Parameter))
    )
    with fsdp2.trace(model) as events:
        data_parallel(plain, inputs, sum_of_squares)
        sum_of_squares(model, inputs[ranks.rank]).backward()
    gathered = [event.group for event in events.events if event.name == "gather"]
    assert gathered.count("norm, head") == 2, "once in forward, once in backward"
    assert seen == [True], "the norm is still there when the head runs"
    assert_same_params(model, plain)
    assert_idle(model)


def chunked_loss(model: Any, x: Tensor) -> None:
    """The head runs by itself on pieces of what the rest computed."""
    hidden = model(x, use_head=False)
    cut = hidden.detach().requires_grad_()
    for chunk in cut.chunk(2):
        model.head(chunk).square().sum().backward()
    hidden.backward(cut.grad)


@distributed(2)
def test_partial_forward_then_standalone(ranks: Ranks) -> None:
    """Half of a listed group runs inside the model, the other half by itself afterwards."""
    model, plain = grouped_stages()
    inputs = [torch.randn(4, 3) for _ in range(2)]
    for _ in range(2):
        for each in inputs:
            chunked_loss(plain, each)
        chunked_loss(model, inputs[ranks.rank])
        for name, param in model.named_parameters():
            # The plain model adds chunk by chunk over both inputs: another order of sums.
            mean = dict(plain.named_parameters())[name].grad / 2
            torch.testing.assert_close(
                param.grad.full_tensor(), mean, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m
            )
    whole = [torch.randn(4, 3) for _ in range(2)]
    model.zero_grad()
    plain.zero_grad()
    data_parallel(plain, whole, sum_of_squares)
    sum_of_squares(model, whole[ranks.rank]).backward()
    assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
def test_ignored_parameters(ranks: Ranks) -> None:
    """What is in `ignored_params` stays the plain tensor that it was, with its own gradient."""
    model = two_layers()
    ignored = model[0].weight
    fully_shard(model, ignored_params={ignored})
    x = torch.full((4, 3), float(ranks.rank + 1))
    sum_of_squares(model, x).backward()
    assert model[0].weight is ignored
    assert not isinstance(ignored, DTensor)
    reference = two_layers()
    sum_of_squares(reference, x).backward()
    assert_same(ignored.grad, reference[0].weight.grad)
    assert isinstance(model[0].bias, DTensor)
    assert_idle(model)


@distributed(2)
def test_inner_calls_own_their_parameters(ranks: Ranks) -> None:
    """A call takes what no earlier call below it has taken."""
    model = shard_blocks(Net())
    groups = [fully_shard.state(m).group for m in (model, *model.blocks)]
    rest = [param.name for param in groups[0].params]
    assert rest == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]
    assert [len(group.params) for group in groups] == [4, 6, 6]
    assert_idle(model)


@distributed(2)
def test_former_root_is_freed_inside_another(ranks: Ranks) -> None:
    """A module that ran by itself first is, inside a root, freed after forward like any other."""
    model = two_layers()
    fully_shard(model[0])
    fully_shard(model)
    x = torch.randn(4, 3)
    model[0](x).sum().backward()
    output = model(x)
    assert isinstance(model[0].weight, DTensor), "not kept: it is the root no longer"
    assert not isinstance(model[2].weight, DTensor)
    output.sum().backward()
    assert_idle(model)


def test_checkpoint_needs_no_import_of_its_own() -> None:
    """``import fsdp2`` is enough for ``fsdp2.checkpoint.save``, and does not load it."""
    code = (
        "import sys, fsdp2\n"
        "assert 'fsdp2.checkpoint' not in sys.modules\n"
        "assert fsdp2.checkpoint.save is sys.modules['fsdp2.checkpoint'].save\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
