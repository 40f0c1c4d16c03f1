"""What else PyTorch's `fully_shard` promises: behaviours that belong to no single room.

Every other file here tests one idea of ours. These are the lines of PyTorch's own tests of its
public behaviour that no other file covers, against one process where that says it all.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule as OldImport
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
)
from harness import Ranks, distributed
from models import (
    Block,
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
    whole,
)

HYBRID = ("replicate", "shard")
ROUNDING: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
"""For sums over replicas or over tensor parallel ranks, whose order is another one."""


class MLP(nn.Module):
    """Two layers, for tensor parallelism one by columns and one by rows."""

    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Stack(nn.Module):
    """Three MLPs in a row."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(hidden=hidden) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def inputs(world_size: int, steps: int = 2, dim: int = 8) -> list[list[Tensor]]:
    """For every step one input for each rank, alike wherever it is called."""
    generator = torch.Generator().manual_seed(7)
    return [
        [torch.randn(3, dim, generator=generator) for _ in range(world_size)] for _ in range(steps)
    ]


def train_like_one_process(
    model: nn.Module,
    reference: nn.Module,
    batches: list[list[Tensor]],
    index: int,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = squares,
    **bound: float,
) -> None:
    """Both take the same steps of SGD; the sharded one sees the input number ``index``."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    for batch in batches:
        losses = data_parallel(reference, batch, loss_of)
        loss = loss_of(model, batch[index])
        torch.testing.assert_close(whole(loss), losses[index], **(bound or {"rtol": 0, "atol": 0}))
        loss.backward()
        assert_same_params(model, reference, **bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_sharded(model: nn.Module) -> None:
    """All groups are sharded again; `assert_idle` measures memory of plain full parameters."""
    for module in model.modules():
        state = fully_shard.state(module)
        assert state is None or state.group.state.value == "sharded"
        assert state is None or state.schedule is None or state.schedule.phase.value == "idle"


# ---- Construction


@distributed(2)
def test_old_import(ranks: Ranks) -> None:
    """Code that tests with the class at its older, private place finds our modules; bf16 trains."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_blocks(Stack(), mp_policy=policy)
    assert isinstance(model, OldImport)
    before = [param.full_tensor() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squares(model, inputs(2)[0][ranks.rank]).backward()
    optimizer.step()
    after = [param.full_tensor() for param in model.parameters()]
    assert not any(torch.equal(*pair) for pair in zip(before, after))
    assert_idle(model)


@distributed(2)
def test_layer_by_layer_from_meta(ranks: Ranks) -> None:
    """Materialise, shard and forget one layer after the other: no id is taken for another's."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    for i, layer in enumerate(model):
        layer.to_empty(device="cpu")
        nn.init.constant_(layer.weight, i)
        nn.init.zeros_(layer.bias)
        fully_shard(layer)
        gc.collect()
    fully_shard(model)
    for i, layer in enumerate(model):
        assert_same(layer.weight.full_tensor(), torch.full((8, 8), float(i)))
    model(torch.ones(1, 8)).sum().backward()
    assert_idle(model)


# ---- Inputs, devices and dtypes


class Nested(nn.Module):
    """A root without parameters of its own, whose inputs are nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, tuple[Tensor, int]]) -> Tensor:
        first, (second, factor) = pair
        return self.left(first) + factor * self.right(second)


@distributed(2)
def test_root_without_parameters_and_nested_inputs(ranks: Ranks) -> None:
    """It trains like the plain model although the root has nothing to gather."""
    torch.manual_seed(1)
    reference = Nested()
    model = copy.deepcopy(reference)
    for each in (model.left, model.right, model):
        fully_shard(each)
    batch = [torch.randn(3, 4) for _ in range(2)]

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        return net((x, (x * 2, 3))).square().sum()

    train_like_one_process(model, reference, [batch], ranks.rank, loss_of)
    assert_idle(model)


class Alone(nn.Module):
    """Computes from its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6.0).view(3, 2))
        self.layer = nn.Linear(2, 2)

    def forward(self) -> Tensor:
        return self.layer(self.table)


@distributed(2)
def test_forward_without_inputs(ranks: Ranks) -> None:
    """A root whose forward takes nothing."""
    reference = Alone()
    model = copy.deepcopy(reference)
    fully_shard(model.layer)
    fully_shard(model)
    data_parallel(reference, [0, 1], lambda net, _: net().square().sum())
    model().square().sum().backward()
    assert_same_params(model, reference)
    assert_idle(model)


class Float8(nn.Module):
    """A frozen float8 weight beside one that trains."""

    def __init__(self) -> None:
        super().__init__()
        frozen = torch.eye(4).to(torch.float8_e4m3fn)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        assert self.frozen.dtype is torch.float8_e4m3fn
        return x @ self.frozen.to(x.dtype) @ self.weight


@distributed(2)
def test_frozen_float8_beside_float32(ranks: Ranks) -> None:
    """They are one group; the float8 bits arrive as they are, and the float32 ones train."""
    reference = Float8()
    model = fully_shard(copy.deepcopy(reference))
    batch = [torch.randn(3, 4) for _ in range(2)]
    data_parallel(reference, batch, squares)
    squares(model, batch[ranks.rank]).backward()  # type: ignore[arg-type]
    assert_same(model.weight.grad, reference.weight.grad)
    bits = model.frozen.to_local().view(torch.uint8)
    assert torch.equal(bits, reference.frozen.view(torch.uint8).chunk(2)[ranks.rank])
    assert_idle(model)


# ---- Layout


def largest_dim(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(-1)


@distributed(2, 4)
@pytest.mark.parametrize("place", [largest_dim, last_dim])
@pytest.mark.parametrize("hidden", [16, 10])
def test_placement_of_other_dims(ranks: Ranks, place: Any, hidden: int) -> None:
    """Any dim, counted from either end, uneven too: placements, whole tensors, training."""
    torch.manual_seed(2)
    reference = Stack(hidden)
    model = shard_blocks(copy.deepcopy(reference), shard_placement_fn=place)
    for (name, param), plain in zip(model.named_parameters(), reference.parameters()):
        dim = place(plain).dim % plain.ndim
        assert param.placements == (Shard(dim),), name
        chunks = plain.chunk(ranks.world_size, dim)
        empty = plain.narrow(dim, 0, 0)
        expected = chunks[ranks.rank] if ranks.rank < len(chunks) else empty
        assert_same(param.to_local(), expected, name)
        assert_same(param.full_tensor(), plain, name)
    batches = inputs(ranks.world_size)
    train_like_one_process(model, reference, batches, ranks.rank)
    squares(model, batches[0][ranks.rank]).backward()
    for param in model.parameters():
        assert param.to_local().is_contiguous()
        assert param.grad.to_local().is_contiguous()
        assert param.is_contiguous()
    assert_idle(model)


def tensor_parallel(model: Stack, mesh: DeviceMesh) -> None:
    """Columns of the first layer and rows of the second are on different ranks."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@distributed(4)
@pytest.mark.parametrize("hidden", [16, 10])
def test_placements_of_tensor_parallel_parameters(ranks: Ranks, hidden: int) -> None:
    """On the whole mesh: PyTorch's placements for columns, rows and biases.

    Of 10 rows each tensor parallel rank has five, which the two others split into three and two.
    """
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    reference = Stack(hidden)
    models = [copy.deepcopy(reference) for _ in range(2)]
    for model, shard in zip(models, (fully_shard, theirs.fully_shard)):
        tensor_parallel(model, mesh["tp"])
        shard_blocks(model, shard, mesh=mesh["dp"])
    ours, pytorchs = (dict(model.named_parameters()) for model in models)
    for name, param in ours.items():
        assert param.placements == pytorchs[name].placements, name
        assert param.device_mesh == mesh, name
        assert_same(param.to_local(), pytorchs[name].to_local(), name)
        assert_same(param.full_tensor(), dict(reference.named_parameters())[name], name)
    block = models[0].blocks[0]
    assert block.up.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert block.down.weight.placements == (Shard(0), Shard(1))
    assert block.down.bias.placements == (Shard(0), Replicate())
    assert_idle(models[0])


@distributed(4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("hidden", [16, 12])
def test_training_with_tensor_parallelism(
    ranks: Ranks, shape: tuple[int, int], reshard: bool, hidden: int
) -> None:
    """Data times tensor parallel: losses, gradients, norm and weights of one process, to rounding.

    Of 12 rows each of four tensor parallel ranks has three, an odd number for whoever splits them.
    """
    mesh = ranks.mesh(*shape, names=("dp", "tp"))
    torch.manual_seed(3)
    reference = Stack(hidden)
    model = copy.deepcopy(reference)
    tensor_parallel(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"], reshard_after_forward=reshard)
    batches = inputs(shape[0])
    train_like_one_process(model, reference, batches, mesh.get_local_rank("dp"), **ROUNDING)
    [batch] = inputs(shape[0], 1)
    data_parallel(reference, batch, squares)
    squares(model, batch[mesh.get_local_rank("dp")]).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(
        whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), expected, **ROUNDING
    )
    assert expected > 0.1
    assert_same_params(model, reference, **ROUNDING)


@distributed(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_training_with_replicas_and_tensor_parallelism(
    ranks: Ranks, shape: tuple[int, int, int]
) -> None:
    """Three dimensions: replicated, split, and tensor parallel."""
    mesh = ranks.mesh(*shape, names=(*HYBRID, "tp"))
    torch.manual_seed(3)
    reference = Stack()
    model = copy.deepcopy(reference)
    tensor_parallel(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["replicate", "shard"])
    batches = inputs(2)
    index = mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    train_like_one_process(model, reference, batches, index, **ROUNDING)
    assert_sharded(model)


@distributed(2)
def test_a_shard_mesh_of_one_rank_communicates_nothing(ranks: Ranks) -> None:
    """Tensor parallelism on all ranks and FSDP on one: the full parameters are the shards."""
    mesh = ranks.mesh(1, 2, names=("dp", "tp"))
    reference = Stack()
    model = copy.deepcopy(reference)
    tensor_parallel(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    local = model.blocks[0].up.weight.to_local()
    model.blocks[0].unshard()
    full = model.blocks[0].up.weight
    assert full.to_local().data_ptr() == local.data_ptr(), "nothing was copied"
    model.blocks[0].reshard()
    train_like_one_process(model, reference, inputs(1), 0, **ROUNDING)
    assert_sharded(model)


SPMD: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]] = {
    "FSDP": ((4,), ("dp",), DataParallelMeshDims(shard="dp")),
    "DDP": ((4,), ("dp",), DataParallelMeshDims(replicate="dp")),
    "HSDP": ((2, 2), HYBRID, DataParallelMeshDims(shard="shard", replicate="replicate")),
    "two that split": ((2, 2), ("a", "b"), DataParallelMeshDims(shard=("a", "b"))),
    "two that repeat": ((2, 2), ("a", "b"), DataParallelMeshDims(replicate=("a", "b"))),
    "FSDP + TP": ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp")),
    "DDP + TP": ((2, 2), ("dp", "tp"), DataParallelMeshDims(replicate="dp")),
    "HSDP + TP": (
        (1, 2, 2),
        (*HYBRID, "tp"),
        DataParallelMeshDims(shard="shard", replicate="replicate"),
    ),
}


def on_whole_mesh(model: Stack, mesh: DeviceMesh) -> None:
    """Every parameter a DTensor on ``mesh``: split along "tp" where there is one."""
    names = mesh.mesh_dim_names or ()

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for attribute, param in module.named_parameters(recurse=False):
            if name.endswith("up"):
                split: Any = Shard(0)
            else:
                split = Shard(1) if attribute == "weight" else Replicate()
            placements = [split if each == "tp" else Replicate() for each in names]
            value = distribute_tensor(param.detach(), mesh, placements)
            module.register_parameter(attribute, nn.Parameter(value))

    distribute_module(model, mesh, place)


@distributed(4)
@pytest.mark.parametrize("kind", SPMD)
def test_training_on_one_mesh_with_named_dims(ranks: Ranks, kind: str) -> None:
    """``dp_mesh_dims``: the gradients and weights of one process, whatever the dimensions mean."""
    shape, names, dims = SPMD[kind]
    mesh = ranks.mesh(*shape, names=names)
    torch.manual_seed(4)
    reference = Stack()
    model = copy.deepcopy(reference)
    on_whole_mesh(model, mesh)
    shard_blocks(model, mesh=mesh, dp_mesh_dims=dims)
    placements = [Replicate() if name == "tp" else Shard(0) for name in names]
    index, count = 0, 1
    for name in names:
        if name != "tp":
            index = index * mesh[name].size() + mesh.get_local_rank(name)
            count *= mesh[name].size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    for batch in inputs(count):
        losses = data_parallel(reference, batch, squares)
        loss = squares(model, DTensor.from_local(batch[index], mesh, placements))
        torch.testing.assert_close(whole(loss), torch.stack(losses).sum(), **ROUNDING)
        loss.backward()
        assert_same_params(model, reference, **ROUNDING)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_sharded(model)


@distributed(4)
def test_two_meshes_that_have_a_part_in_common(ranks: Ranks) -> None:
    """DTensors remember the first of several equal meshes; a second whole mesh works as well."""
    for names in (("dp", "tp"), ("data", "tp")):
        mesh = ranks.mesh(2, 2, names=names)
        model = Stack()
        tensor_parallel(model, mesh["tp"])
        shard_blocks(model, mesh=mesh[names[0]])
        assert model.blocks[0].up.weight.device_mesh == mesh
        squares(model, inputs(1)[0][0]).backward()
        assert_sharded(model)


# ---- Meshes from process groups


@distributed(2)
def test_mesh_from_a_process_group(ranks: Ranks) -> None:
    """A mesh that was made of a group trains like one that made its group itself."""
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu")
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), mesh=mesh)
    model.set_separate_reduce_scatter_group()
    train_like_one_process(model, reference, inputs(2), ranks.rank)
    assert_idle(model)


@distributed(4)
def test_mesh_from_process_groups(ranks: Ranks) -> None:
    """The same for a list of groups, replicas and shards, in two dimensions."""
    made = [[dist.new_group(list(ids)) for ids in pairs] for pairs in REPLICAS_AND_SHARDS]
    replicas, shards = made[0][ranks.rank % 2], made[1][ranks.rank // 2]
    mesh = DeviceMesh.from_group(
        [replicas, shards], "cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=HYBRID
    )
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference), mesh=mesh)
    train_like_one_process(model, reference, inputs(4), ranks.rank, **ROUNDING)
    assert_idle(model)


REPLICAS_AND_SHARDS = (((0, 2), (1, 3)), ((0, 1), (2, 3)))


@distributed(4)
def test_shards_that_the_user_broadcasts(ranks: Ranks) -> None:
    """Replicas that start from other seeds, made equal by hand through the local tensors."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(100 + mesh.get_local_rank("replicate"))
    model = shard_blocks(
        Stack() if mesh.get_local_rank("replicate") else copy.deepcopy(reference), mesh=mesh
    )
    group = mesh.get_group("replicate")
    for param in model.parameters():
        dist.broadcast(param.to_local().detach(), group=group, group_src=0)
    train_like_one_process(model, reference, inputs(4), ranks.rank, **ROUNDING)
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("names", [("dp",), HYBRID], ids=len)
def test_from_meta_in_two_dimensions(ranks: Ranks, names: tuple[str, ...]) -> None:
    """Sharded on meta, materialised, reset and trained; some ranks have no rows of a layer."""
    mesh = ranks.mesh(*([2, 2] if len(names) == 2 else [4]), names=names)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
        for each in (*model, model):
            fully_shard(each, mesh=mesh)
    assert all(param.device.type == "meta" for param in model.parameters())
    model.to_empty(device="cpu")
    for i, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.1 * (i + 1))
    reference = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    for i, param in enumerate(reference.parameters()):
        nn.init.constant_(param, 0.1 * (i + 1))
    train_like_one_process(model, reference, inputs(4), ranks.rank, **ROUNDING)
    assert_idle(model)


# ---- Counts


class Counts(NamedTuple):
    forward: int
    backward: int
    reductions: int


def counts_of(model: nn.Module, x: Tensor) -> Counts:
    """What one step communicates, in calls of groups."""
    with fsdp2.trace(model) as events:
        loss = squares(model, x)
        forward = sum(event.name == "gather" for event in events.events)
        loss.backward()
    gathers = sum(event.name == "gather" for event in events.events)
    reductions = sum(event.name == "reduce" for event in events.events)
    return Counts(forward, gathers - forward, reductions)


@distributed(4)
@pytest.mark.parametrize(
    ("reshard", "backward"), [(None, 3), (True, 4), (False, 0), (2, 4)], ids=str
)
def test_gathers_and_reductions_are_counted(
    ranks: Ranks, reshard: bool | int | None, backward: int
) -> None:
    """N blocks and a root with parameters: N + 1 gathers, and as many reductions.

    Backward gathers N + 1 groups again, without the root for None, and none for False.
    """
    model = Stack()
    model.register_parameter("unused", None)
    model.blocks.append(nn.Linear(8, 8))
    for block in model.blocks[:3]:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    x = inputs(4)[0][ranks.rank]
    for _ in range(2):
        assert counts_of(model, x) == Counts(4, backward, 4)
        for module in (model, *model.blocks[:3]):
            assert isinstance(next(module.parameters()), DTensor)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_switching_between_keeping_and_freeing(ranks: Ranks, recurse: bool) -> None:
    """`set_reshard_after_forward` changes the counts, of one group or of all below."""
    model = Stack()
    model.blocks.append(nn.Linear(8, 8))
    for block in model.blocks[:3]:
        fully_shard(block)
    fully_shard(model)
    x = inputs(2)[0][ranks.rank]
    assert counts_of(model, x) == Counts(4, 3, 4)
    model.set_reshard_after_forward(True, recurse)
    assert counts_of(model, x) == Counts(4, 4, 4)
    model.set_reshard_after_forward(False, recurse)
    assert counts_of(model, x) == Counts(4, 0 if recurse else 3, 4)
    assert_idle(model)


@distributed(2)
def test_freeing_by_hand_makes_backward_gather(ranks: Ranks) -> None:
    """What `reshard_after_forward=False` kept and the user freed is gathered again."""
    model = shard_blocks(Net(), reshard_after_forward=False)
    [batch] = token_batches(2, 1)
    with fsdp2.trace(model) as events:
        loss = next_token_loss(model, batch[ranks.rank])
        for module in (model, *model.blocks):
            module.reshard()
        loss.backward()
    assert sum(event.name == "gather" for event in events.events) == 6
    assert_idle(model)


# ---- Training in unusual ways


@distributed(2)
def test_forward_and_backward_of_what_is_not_the_root(ranks: Ranks) -> None:
    """A block that is called by itself between steps of the whole model has its own gradients."""
    torch.manual_seed(5)
    reference = Stack()
    model = shard_blocks(copy.deepcopy(reference))
    for batch in inputs(2):
        data_parallel(reference, batch, squares)
        squares(model, batch[ranks.rank]).backward()
        data_parallel(reference.blocks[1], batch, squares)
        squares(model.blocks[1], batch[ranks.rank]).backward()
        assert_same_params(model, reference)
    assert_idle(model)


def wrap_composable(block: nn.Module) -> nn.Module:
    composable_checkpoint(block)
    return block


def wrap_class(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block)


@distributed(2)
@pytest.mark.parametrize("wrap", [wrap_composable, wrap_class])
@pytest.mark.parametrize("reshard", [True, False, 2], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_other_ways_to_checkpoint_activations(
    ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], reshard: bool | int, grouped: bool
) -> None:
    """PyTorch's composable call and its wrapper, with a group per block or one for two."""
    torch.manual_seed(6)
    reference = Stack()
    model = copy.deepcopy(reference)
    for i, block in enumerate(list(model.blocks)):
        model.blocks[i] = wrap(block)
    if grouped:
        fully_shard([model.blocks[0], model.blocks[1]], reshard_after_forward=reshard)
        fully_shard(model.blocks[2], reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    else:
        shard_blocks(model, reshard_after_forward=reshard)
    for batch in inputs(2):
        data_parallel(reference, batch, squares)
        squares(model, batch[ranks.rank]).backward()
    gradients = [param.grad for param in model.parameters()]
    for found, plain in zip(gradients, reference.parameters(), strict=True):
        assert_same(found, plain.grad)


@distributed(4)
@pytest.mark.parametrize("reshard", [True, False, 2], ids=str)
@pytest.mark.parametrize("offload", [None, False, True], ids=["device", "host", "pinned"])
def test_hybrid_sharding_with_everything(
    ranks: Ranks, reshard: bool | int, offload: bool | None
) -> None:
    """Replicas, activation checkpointing, offload, and synchronising on the last of two only."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    torch.manual_seed(7)
    reference = Stack()
    model = copy.deepcopy(reference)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if offload is not None:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=offload)
    for block in model.blocks:
        composable_checkpoint(block)
    shard_blocks(model, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    for _ in range(2):
        for i, batch in enumerate(inputs(4)):
            model.set_requires_gradient_sync(i == 1)
            data_parallel(reference, batch, squares)
            squares(model, batch[ranks.rank]).backward()
        assert_same_params(model, reference, **ROUNDING)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = MLP(), MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@distributed(2)
def test_sharded_module_between_ddp_modules(ranks: Ranks) -> None:
    """DDP around a model whose middle is sharded and ignored by it: the mean everywhere."""
    torch.manual_seed(8)
    reference = Three()
    model = copy.deepcopy(reference)
    middle = set(model.middle.parameters())
    rest = {p for p in model.parameters() if p not in middle}
    fully_shard(model.middle)
    fully_shard(model, ignored_params=rest)
    assert not any(isinstance(param, DTensor) for param in rest)
    names = [name for name, _ in model.named_parameters() if name.startswith("middle")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    for batch in inputs(2):
        data_parallel(reference, batch, squares)
        squares(ddp, batch[ranks.rank]).backward()
        assert_same_params(model, reference, **ROUNDING)


# ---- Lists of modules that are one group


class Tower(nn.Module):
    """A body, and a head in two parts that form one group with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, with_head: bool = True) -> Tensor:
        hidden = self.norm(self.body(x))
        return self.head(hidden) if with_head else hidden


def tower(**options: Any) -> tuple[Any, Tower]:
    torch.manual_seed(9)
    reference = Tower()
    model: Any = copy.deepcopy(reference)
    for block in model.body.blocks:
        fully_shard(block, **options)
    fully_shard([model.norm, model.head], **options)
    fully_shard(model, **options)
    return model, reference


def chunked(net: Any, x: Tensor) -> Tensor:
    """The loss of the head in pieces, as with a large vocabulary; backward piece by piece."""
    hidden = net(x, with_head=False)
    leaf = hidden.detach().requires_grad_()
    total = torch.zeros(())
    pieces = leaf.chunk(3)
    for piece in pieces:
        loss = net.head(piece).square().sum()
        loss.backward()
        total = total + loss.detach()
    return total + (hidden * leaf.grad).sum() - (hidden * leaf.grad).sum().detach()


@distributed(2)
def test_part_of_a_group_in_pieces(ranks: Ranks) -> None:
    """Half of a group runs inside the model and half in chunks behind it, reduced at the end."""
    model, reference = tower()
    [batch] = inputs(2, 1)
    data_parallel(reference, batch, chunked)
    model.set_requires_gradient_sync(False)
    loss = chunked(model, batch[ranks.rank])
    model.set_requires_gradient_sync(True)
    loss.backward()
    assert_same_params(model, reference, **ROUNDING)
    model.head.reshard()
    assert_idle(model)


@distributed(2)
def test_part_of_a_group_is_kept_over_pieces(ranks: Ranks) -> None:
    """Keeping after forward and backward gathers the group once for all pieces; `reshard` frees."""
    model, _ = tower()
    for each in (model.norm, model.head):
        each.set_reshard_after_forward(False)
        each.set_reshard_after_backward(False)
    x = inputs(2)[0][ranks.rank]
    hidden = model(x, with_head=False).detach().requires_grad_()
    with fsdp2.trace(model) as events:
        for piece in hidden.chunk(3):
            model.head(piece).sum().backward()
    assert sum(event.name == "gather" for event in events.events) <= 1
    assert not isinstance(model.head.weight, DTensor)
    model.head.reshard()
    assert isinstance(model.head.weight, DTensor)


@distributed(2)
def test_two_partial_forwards_before_one_backward(ranks: Ranks) -> None:
    """Neither uses the whole group; the gradients of both meet in one backward."""
    model, reference = tower()
    [batch] = inputs(2, 1)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        first, second = net(x, with_head=False), net(x * 2, with_head=False)
        return (first * second).square().sum()

    data_parallel(reference, batch, loss_of)
    loss_of(model, batch[ranks.rank]).backward()
    for name, param in reference.named_parameters():
        found = dict(model.named_parameters())[name].grad
        if param.grad is None:
            assert found is None or not found.full_tensor().any(), name
        else:
            torch.testing.assert_close(whole(found), param.grad, **ROUNDING)
    model.head.reshard()
    assert_idle(model)


class Checkpointed(nn.Module):
    """A block around sharded blocks, checkpointed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


@distributed(2)
def test_two_forwards_of_nested_modules_with_checkpoints(ranks: Ranks) -> None:
    """Sharded inside sharded, checkpointed, called twice before one backward."""
    torch.manual_seed(10)
    reference = nn.Sequential(Checkpointed(), Checkpointed())
    model = copy.deepcopy(reference)
    for each in model:
        fully_shard(each.inner)
        fully_shard(each)
    fully_shard(model)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) * net(x + 1)).sum()

    train_like_one_process(model, reference, inputs(2), ranks.rank, loss_of)
    assert_idle(model)


@distributed(2)
def test_every_module_of_a_group_casts_its_inputs(ranks: Ranks) -> None:
    """Not only the first one of the list that is called."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    seen: list[torch.dtype] = []
    for each in (first, second):
        each.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard([first, second], mp_policy=policy)
    x = torch.ones(2, 4)
    assert first(x).dtype is torch.bfloat16
    assert second(x).dtype is torch.bfloat16, "a float32 input again"
    assert seen == [torch.bfloat16, torch.bfloat16]


# ---- Precision


class Casts(nn.Module):
    """Notes the dtype of its input each time that it runs, again in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.layer(x)


@distributed(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_casts_are_repeated_when_forward_is(ranks: Ranks, reentrant: bool) -> None:
    """Inputs and outputs of a checkpointed module have the same dtypes in the recomputation."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = nn.Sequential(Casts(), Casts())
    for each in model:
        fully_shard(each, mp_policy=policy)
    fully_shard(model)
    outputs: list[torch.dtype] = []

    def run(x: Tensor) -> Tensor:
        hidden = model[0](x)
        outputs.append(hidden.dtype)
        return model[1](hidden)

    x = torch.ones(2, 8, requires_grad=True)
    root = fully_shard.state(model)
    assert root is not None
    model(x.detach())  # now it is known who the root is
    for each in model:
        each.seen.clear()
    checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    assert outputs == [torch.float32, torch.float32]
    assert [each.seen for each in model] == [[torch.bfloat16] * 2] * 2
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


class Outside(nn.Module):
    """Gives a child an input that comes from outside, beside its own hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Adds()

    def forward(self, x: Tensor, outside: Tensor) -> Tensor:
        return self.second(self.first(x), outside)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, outside: Tensor) -> Tensor:
        self.seen = [x.dtype, outside.dtype]
        return self.layer(x + outside)


@distributed(2)
@pytest.mark.parametrize("cast", [True, False])
def test_inputs_from_outside_are_cast_where_they_enter(ranks: Ranks, cast: bool) -> None:
    """A child with a policy of its own casts what reaches it, unless it was told not to."""
    model = Outside()
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast)
    fully_shard(model.second, mp_policy=policy)
    fully_shard(model)
    x = torch.ones(2, 4)
    if cast:
        assert model(x, x).dtype is torch.bfloat16
        assert model.second.seen == [torch.bfloat16, torch.bfloat16]
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            model(x, x)
        assert model.second.seen == [torch.float32, torch.float32]


@distributed(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "second call"])
def test_forward_mode_derivatives(ranks: Ranks, dtype: torch.dtype, warm: bool) -> None:
    """`torch.func.jvp` before any backward, or forward, gives the plain model's derivative."""
    torch.manual_seed(11)
    reference = MLP().to(dtype)
    model = copy.deepcopy(MLP())
    model.load_state_dict(reference.float().state_dict())
    reference.to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model.up, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    x, direction = torch.randn(3, 8, dtype=dtype), torch.ones(3, 8, dtype=dtype)
    if warm:
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's first use scripts decompositions, and warns
        expected = torch.func.jvp(reference, (x,), (direction,))
    found = torch.func.jvp(model, (x,), (direction,))
    for ours, plain in zip(found, expected):
        assert_same(ours, plain)


@distributed(2, 4)
def test_gradient_scaler(ranks: Ranks) -> None:
    """An infinite activation on one rank makes all ranks skip the step and halve the scale."""
    mesh = ranks.mesh(2, 2, names=HYBRID) if ranks.world_size == 4 else ranks.mesh()
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    before = model.weight.full_tensor()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    assert_same(model.weight.grad.full_tensor(), torch.ones(4, 4))
    scaler.step(optimizer)
    scaler.update()
    assert_same(model.weight.full_tensor(), before - 0.1)
    optimizer.zero_grad()
    before = model.weight.full_tensor()
    x = torch.full((1, 4), float("inf") if ranks.rank == 0 else 1.0)
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(model.weight.full_tensor(), before)
    assert_idle(model)


# ---- Integers


@distributed(2)
def test_integers_travel_as_they_are(ranks: Ranks) -> None:
    """A group of integers and bf16 gathers 8 and 2 bytes an element, and reduces no integer."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.index = nn.Parameter(torch.arange(8), requires_grad=False)
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            assert self.index.dtype is torch.int64
            return x @ self.weight[self.index].T

    model = fully_shard(Mixed(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sent = _spy(model)
    model(torch.ones(1, 4)).sum().backward()
    assert sorted(sent["gather"], key=str) == [(torch.bfloat16, 16), (torch.int64, 4)]
    [(dtype, numel)] = sent["reduce"]
    assert dtype is torch.bfloat16
    assert 16 <= numel < 16 + 4, "a flag may travel along, the integers may not"
    assert_same(model.index.full_tensor(), torch.arange(8))
    assert model.index.grad is None


def _spy(model: Any) -> dict[str, list[tuple[torch.dtype, int]]]:
    """Dtype and number of elements that every rank gives or gets, by direction."""
    sent: dict[str, list[Any]] = {"gather": [], "reduce": []}

    class Gather(fsdp2.AllGather):
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]
            sent["gather"].append((input_tensor.dtype, input_tensor.numel()))
            return dist.all_gather(
                list(output_tensor.chunk(group.size())), input_tensor, group, async_op
            )

    class Scatter(fsdp2.ReduceScatter):
        allocate = Gather.allocate

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
            sent["reduce"].append((output_tensor.dtype, output_tensor.numel()))
            total = input_tensor.clone()
            dist.all_reduce(total, op, group)
            output_tensor.copy_(total.chunk(group.size())[group.rank()])

    model.set_custom_all_gather(Gather())
    model.set_custom_reduce_scatter(Scatter())
    return sent


# ---- State dicts of two dimensions


@distributed(4)
@pytest.mark.parametrize("kind", ["HSDP", "FSDP + TP", "HSDP + TP"])
def test_state_dicts_of_larger_meshes(ranks: Ranks, kind: str) -> None:
    """The plain model's names, DTensors of its values; another model loads them and is equal."""

    def make() -> Any:
        model = Stack()
        if kind == "HSDP":
            return shard_blocks(model, mesh=ranks.mesh(2, 2, names=HYBRID))
        shape = (2, 2) if kind == "FSDP + TP" else (2, 1, 2)
        mesh = ranks.mesh(*shape, names=("dp", "tp") if len(shape) == 2 else (*HYBRID, "tp"))
        tensor_parallel(model, mesh["tp"])
        return shard_blocks(model, mesh=mesh["dp"] if len(shape) == 2 else mesh[HYBRID])

    torch.manual_seed(12)
    plain = Stack()
    torch.manual_seed(12)
    saved = make()
    state = saved.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert isinstance(state[name], DTensor)
        assert_same(state[name], value, name)
    torch.manual_seed(13)
    loaded = make()
    loaded.load_state_dict(state)
    assert_same_params(loaded, plain)
    assert_sharded(loaded)


@distributed(4)
def test_full_state_dict_of_a_tensor_parallel_model(ranks: Ranks) -> None:
    """Rank 0's unsharded values are dealt over both dimensions, and collected from them again."""
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(14)
    plain = Stack()
    torch.manual_seed(15)
    model = Stack()
    tensor_parallel(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    values = plain.state_dict() if ranks.rank == 0 else {}
    set_model_state_dict(model, values, options=options)
    assert_same_params(model, plain)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    collected = get_model_state_dict(model, options=options)
    assert list(collected) == (list(plain.state_dict()) if ranks.rank == 0 else [])
    for name, value in collected.items():
        assert type(value) is Tensor
        assert_same(value, plain.state_dict()[name], name)
    assert_sharded(model)


# ---- Reports of users


class Shared(nn.Module):
    """Calls one layer twice; a part of it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MLP()
        self.out = nn.Linear(8, 8)
        for param in self.layer.up.parameters():
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.layer(x)))


@distributed(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_partly_frozen_module_used_twice(ranks: Ranks, reshard: bool) -> None:
    """Several forwards of a module that trains in part, in the model and in a loss of two calls."""
    torch.manual_seed(16)
    reference = Shared()
    model = copy.deepcopy(reference)
    fully_shard(model.layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) * net(-x)).sum()

    train_like_one_process(model, reference, inputs(2), ranks.rank, loss_of)


@distributed(2, 4)
def test_mean_over_unequal_numbers_of_tokens(ranks: Ranks) -> None:
    """A divide factor of one sums over ranks: losses over all tokens' number give their mean."""
    torch.manual_seed(17)
    reference = MLP()
    model = copy.deepcopy(reference)
    mesh = ranks.mesh(2, 2, names=HYBRID) if ranks.world_size == 4 else ranks.mesh()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, model.up):
        module.set_gradient_divide_factor(1.0)
    tokens = [torch.randn(3 * rank + 1, 8) for rank in range(ranks.world_size)]
    total = sum(len(each) for each in tokens)
    (model(tokens[ranks.rank]).square().sum() / total).backward()
    (reference(torch.cat(tokens)).square().sum() / total).backward()
    assert_same_params(model, reference, **ROUNDING)
    assert_idle(model)


@distributed(4)
def test_experts_are_split_over_the_shard_dimension_only(ranks: Ranks) -> None:
    """Two experts on a mesh of two replicas and two shards: one for each rank of the shard mesh."""
    mesh = ranks.mesh(2, 2, names=HYBRID)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            numbers = torch.arange(2.0).view(2, 1, 1)
            self.weight = nn.Parameter(numbers.expand(2, 3, 4).contiguous())

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.transpose(1, 2)).sum(0)

    model = fully_shard(Experts(), mesh=mesh)
    local = model.weight.to_local()
    assert_same(local, torch.full((1, 3, 4), float(mesh.get_local_rank("shard"))))
    x = torch.ones(2, 4)
    assert_same(model(x), torch.full((2, 3), 4.0))
    model(x).sum().backward()
    assert_same(model.weight.grad.full_tensor(), torch.full((2, 3, 4), 2.0))
    assert_idle(model)
