"""`full_parameters` and `full_gradients`: the whole model in sight, between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2.gathering
from fsdp2 import MixedPrecisionPolicy, UsageError, fully_shard
from fsdp2.gathering import gather, scatter
from fsdp2.whole import full_gradients, full_parameters
from harness import Ranks, distributed
from models import (
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


class Odd(nn.Module):
    """Everything that is not a float matrix of many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 3))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(4, 2).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.row + self.narrow.float().sum()


def pair(ranks: Ranks, make: Any = Net, **options: Any) -> tuple[Any, Any]:
    """A sharded model and the unsharded one it was made of."""
    reference = make()
    model = copy.deepcopy(reference)
    if hasattr(model, "blocks"):
        shard_blocks(model, mesh=ranks.mesh(), **options)
    else:
        fully_shard(model, mesh=ranks.mesh(), **options)
    return model, reference


def step(model: Any, ranks: Ranks, reference: Any = None) -> None:
    """Forward and backward, of the reference too."""
    (batches,) = token_batches(ranks.world_size, 1)
    next_token_loss(model, batches[ranks.rank]).backward()
    if reference is not None:
        data_parallel(reference, batches)


def assert_shown(model: nn.Module, reference: nn.Module) -> None:
    """Names, values, dtypes and ties are those of the unsharded model."""
    shown = dict(model.named_parameters())
    expected = dict(reference.named_parameters())
    assert list(shown) == list(expected)
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, param in shown.items():
        assert type(param) is nn.Parameter, name
        assert param.requires_grad == expected[name].requires_grad, name
        assert param.grad is None
        assert_same(param, expected[name], name)
        assert_same(model.state_dict()[name], expected[name], name)


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.dtype is torch.bool:
                param.logical_not_()
            elif param.dtype is torch.int64:
                param.add_(3)
            else:
                param.mul_(2).sub_(1)


# Showing


@distributed(1, 2, 3)
@pytest.mark.parametrize("make", [Net, Odd])
def test_shows_the_whole_model(ranks: Ranks, make: Any) -> None:
    """Inside the modules look unsharded; afterwards the same shards are back."""
    model, reference = pair(ranks, make)
    shards = list(model.parameters())
    with full_parameters(model):
        assert_shown(model, reference)
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                assert getattr(module, name) is param
        edit(model)
    assert all(a is b for a, b in zip(model.parameters(), shards))
    assert_same_params(model, reference)  # edits are not kept
    assert_idle(model)


@distributed(1, 2, 3)
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("make", [Net, Odd])
def test_writes_edits_back(ranks: Ranks, rank0_only: bool, make: Any) -> None:
    """Edits reach the shards; with ``rank0_only`` those of rank 0, whatever the others do."""
    model, reference = pair(ranks, make)
    shards = list(model.parameters())
    with full_parameters(model, write_back=True, rank0_only=rank0_only):
        if ranks.rank == 0 or not rank0_only:
            edit(model)
    edit(reference)
    assert all(a is b for a, b in zip(model.parameters(), shards))
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2, 3)
def test_training_goes_on_with_the_edits(ranks: Ranks) -> None:
    """After an edit, losses and gradients are those of the edited model, optimizer included."""
    model, reference = pair(ranks)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for write_back in (True, False):
        step(model, ranks, reference)
        for optimizer in optimizers:
            optimizer.step()
        with full_parameters(model, write_back=write_back):
            edit(model)
        if write_back:
            edit(reference)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_idle(model)


@distributed(2)
def test_ties_stay_tied(ranks: Ranks) -> None:
    """A tied parameter is one object at all its places, inside and after."""
    model, reference = pair(ranks, tied_net)
    with full_parameters(model, write_back=True):
        assert model.head.weight is model.embedding.weight
        assert_shown(model, reference)
        edit(model)
    edit(reference)
    assert model.head.weight is model.embedding.weight
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_ties_between_units(ranks: Ranks) -> None:
    """A weight that two calls reach is one full parameter; refused until a call joins them."""
    model: Any = Net(tied=True)
    reference = copy.deepcopy(model)
    fully_shard(model.embedding, mesh=ranks.mesh())
    fully_shard(model.head, mesh=ranks.mesh())
    text = "'head.weight' is tied to 'weight' of another fully_shard call"
    with pytest.raises(UsageError, match=text), full_parameters(model):
        pass
    fully_shard(model, mesh=ranks.mesh())
    with full_parameters(model, write_back=True):
        assert model.head.weight is model.embedding.weight
        assert_shown(model, reference)
        edit(model)
    edit(reference)
    assert model.head.weight is model.embedding.weight
    assert_same_params(model, reference)


def tied_net() -> Net:
    return Net(tied=True)


@distributed(2)
def test_storage_dtype_under_mixed_precision(ranks: Ranks) -> None:
    """What is shown is what is stored, not the casts that forward computes with."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, reference = pair(ranks, mp_policy=policy, reshard_after_forward=False)
    step(model, ranks)
    next_token_loss(model, token_batches(2, 1)[0][0])  # leaves the cast parameters in sight
    assert model.head.weight.dtype is torch.bfloat16
    with full_parameters(model):
        assert model.head.weight.dtype is torch.float32
        assert_shown(model, reference)
    assert_idle(model)


@distributed(2)
def test_ignored_parameters_stay(ranks: Ranks) -> None:
    """They are neither copied nor written."""
    model = Net()
    kept = model.head.weight
    fully_shard(model, mesh=ranks.mesh(), ignored_params={kept})
    with full_parameters(model, write_back=True):
        assert model.head.weight is kept
        assert not isinstance(model.norm.weight, DTensor)
        with torch.no_grad():
            kept.fill_(2)
    assert model.head.weight is kept
    assert (kept == 2).all()
    assert_idle(model)


@distributed(2)
def test_users_attributes_are_shown(ranks: Ranks) -> None:
    """What a user left on a parameter is on the full one too."""
    model = Net()
    model.head.weight.learning_rate_scale = 3
    fully_shard(model, mesh=ranks.mesh())
    with full_parameters(model):
        assert model.head.weight.learning_rate_scale == 3
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("write_back", [False, True])
def test_without_recursion(ranks: Ranks, write_back: bool) -> None:
    """``recurse=False`` shows the module's own group, as ``unshard()`` gathers it, no other."""
    model, reference = pair(ranks)
    with full_parameters(model, write_back, recurse=False):
        assert_same(model.head.weight, reference.head.weight)
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) == name.startswith("blocks."), name
        with torch.no_grad():
            model.head.weight.zero_()
    if write_back:
        nn.init.zeros_(reference.head.weight)
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_of_one_block(ranks: Ranks) -> None:
    """A unit below the root can be shown by itself, and the root trains on."""
    model, reference = pair(ranks)
    step(model, ranks, reference)
    with full_parameters(model.blocks[0], write_back=True):
        assert not isinstance(model.blocks[0].up.weight, DTensor)
        assert isinstance(model.blocks[1].up.weight, DTensor)
        edit(model.blocks[0])
    edit(reference.blocks[0])
    step(model, ranks, reference)
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_full_state_dict_loads(ranks: Ranks) -> None:
    """``state_dict()`` inside is the unsharded one, and ``load_state_dict`` takes one."""
    model, _ = pair(ranks)
    other = Net()
    with full_parameters(model, write_back=True):
        model.load_state_dict(other.state_dict())
    assert_same_params(model, other)
    with full_parameters(model, write_back=True):
        model.load_state_dict(Net(tied=True).state_dict(), assign=True)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
    other.load_state_dict(saved)
    assert_same_params(model, other)
    assert_idle(model)


# Rank 0 only


@distributed(2, 3)
def test_only_rank0_holds_the_model(ranks: Ranks) -> None:
    """The others see their shards, and gathered nothing."""
    model, reference = pair(ranks)
    with full_parameters(model, rank0_only=True):
        if ranks.rank == 0:
            assert_shown(model, reference)
        else:
            assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(3)
def test_other_ranks_edits_are_dropped(ranks: Ranks) -> None:
    """With ``rank0_only`` what another rank writes into its shards is overwritten."""
    model, reference = pair(ranks)
    with full_parameters(model, write_back=True, rank0_only=True):
        if ranks.rank:
            for param in model.parameters():
                param.to_local().detach().fill_(7)
        else:
            edit(model)
    edit(reference)
    assert_same_params(model, reference)


@distributed(2)
def test_other_ranks_allocate_no_full_tensor(ranks: Ranks) -> None:
    """A rank that shows nothing holds its own part of a bucket and no more."""
    model, _ = pair(ranks)
    made: list[int] = []
    empty = torch.empty

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.nbytes)
        return tensor

    full_nbytes = sum(param.numel() * 4 for param in model.parameters())
    torch.empty = spy  # type: ignore[assignment]
    try:
        with full_parameters(model, write_back=True, rank0_only=True):
            pass
    finally:
        torch.empty = empty  # type: ignore[assignment]
    limit = full_nbytes if ranks.rank == 0 else 0.6 * full_nbytes
    assert max(made) < 1.2 * limit


# What goes wrong


@distributed(2)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_an_exception_keeps_the_shards(ranks: Ranks, rank0_only: bool) -> None:
    """If the body raises nothing is written, and the model is sharded and trains."""
    model, reference = pair(ranks)
    with (
        pytest.raises(ZeroDivisionError),
        full_parameters(model, write_back=True, rank0_only=rank0_only),
    ):
        edit(model) if ranks.rank == 0 else None
        raise ZeroDivisionError
    assert_same_params(model, reference)
    step(model, ranks, reference)
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_nested_use_raises(ranks: Ranks) -> None:
    """Also of a part; the outer context goes on."""
    model, reference = pair(ranks)
    with full_parameters(model, write_back=True):
        for inner in (model, model.blocks[1]):
            with pytest.raises(UsageError, match="shown in full already"), full_parameters(inner):
                pass
        assert_shown(model, reference)
    assert_same_params(model, reference)
    with full_parameters(model.blocks[0]), full_parameters(model.blocks[1]):
        assert not isinstance(model.blocks[0].up.weight, DTensor)
    assert_idle(model)


@distributed(2)
def test_forward_inside_is_refused(ranks: Ranks) -> None:
    """A clear error, and no trace of it afterwards; plain modules below can be called."""
    model, reference = pair(ranks)
    tokens = token_batches(2, 1)[0][0]
    with full_parameters(model):
        for module, argument in ((model, tokens), (model.blocks[0], torch.ones(2, 8))):
            with pytest.raises(UsageError, match="called while full_parameters shows"):
                module(argument)
        assert_shown(model, reference)
        assert_same(model.norm(torch.ones(2, 8)), reference.norm(torch.ones(2, 8)))
        assert isinstance(model, Net)
        assert type(model).__name__ == "FSDPNet"
    step(model, ranks, reference)
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_sequential_can_be_sliced_inside(ranks: Ranks) -> None:
    """A slice of a shown ``Sequential`` is a plain one over full parameters, and runs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=ranks.mesh())
    x = torch.randn(3, 4)
    with full_parameters(model):
        assert type(model[:2]) is nn.Sequential
        assert_same(model[:2](x), reference[:2](x))
    assert_idle(model)


class Curious(nn.Module):
    """Opens the context in the middle of forward, or hears of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.look: Any = lambda: None
        self.look_back: Any = lambda gradient: None

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        x = self.inner(x)
        x.register_hook(self.look_back)
        return x


@distributed(2)
@pytest.mark.parametrize("what", [full_parameters, full_gradients])
def test_refused_inside_a_step(ranks: Ranks, what: Any) -> None:
    """Inside forward and backward it names the module and the phase."""
    model = Curious()
    fully_shard(model.inner, mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh())
    texts = []

    def look(gradient: Tensor | None = None) -> None:
        with pytest.raises(UsageError) as caught:
            for part in (model, model.inner):
                opened = what(part)
                if what is full_parameters:
                    opened.__enter__()
        texts.append(str(caught.value))

    model.look = look
    model.look_back = look
    model(torch.ones(2, 4)).sum().backward()
    name = what.__name__
    assert texts == [
        f"{name}: 'root' is in forward; call it between steps",
        f"{name}: 'root' is in backward; call it between steps",
    ]
    assert_idle(model)


@distributed(2)
def test_after_a_failed_forward(ranks: Ranks) -> None:
    """The error says what to call first."""
    model = Curious()
    model.look = lambda: 1 / 0
    fully_shard(model, mesh=ranks.mesh())
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    with pytest.raises(UsageError, match="reset_iter_state"), full_parameters(model):
        pass
    model.reset_iter_state()
    with full_parameters(model):
        pass
    assert_idle(model)


@distributed(2)
def test_backward_through_overwritten_parameters_is_refused(ranks: Ranks) -> None:
    """Writing back between forward and backward is a change in place to autograd."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fully_shard(model, mesh=ranks.mesh())
    out = model(torch.ones(2, 4, requires_grad=True))
    with full_parameters(model, write_back=True):
        edit(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    model.reset_iter_state()


@distributed(2)
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("shape", r"'head.weight' is now a plain tensor \(3, 8\) of torch.float32; a plain.*17, 8"),
        ("dtype", r"'head.weight' is now a plain tensor \(17, 8\) of torch.float64"),
        ("gone", "'head.weight' is gone"),
    ],
)
def test_what_cannot_be_written_back(
    ranks: Ranks, rank0_only: bool, damage: str, text: str
) -> None:
    """One rank's mistake is named there, every rank raises, and no shard has changed."""
    model, reference = pair(ranks)
    with (
        pytest.raises(UsageError, match=text if ranks.rank == 0 else "another rank"),
        full_parameters(model, write_back=True, rank0_only=rank0_only),
    ):
        if ranks.rank == 0 or not rank0_only:
            edit(model)
        if ranks.rank == 0:
            if damage == "shape":
                model.head.weight = nn.Parameter(torch.ones(3, 8))
            elif damage == "dtype":
                model.head.weight = nn.Parameter(model.head.weight.double())
            else:
                del model.head.weight
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_a_tie_that_was_cut(ranks: Ranks) -> None:
    """Two values for one parameter are refused, by both names."""
    model, reference = pair(ranks, tied_net)
    with (
        pytest.raises(UsageError, match=r"'embedding.weight', 'head.weight' were one tied"),
        full_parameters(model, write_back=True),
    ):
        model.head.weight = nn.Parameter(torch.ones(17, 8))
    assert_same_params(model, reference)
    with full_parameters(model, write_back=True):
        model.head.weight = model.embedding.weight = nn.Parameter(torch.ones(17, 8))
    assert (whole(model.head.weight) == 1).all()
    assert_idle(model)


@distributed(2)
def test_what_is_not_sharded_is_told(ranks: Ranks) -> None:
    """No unit, a module inside a unit, and parameters on the meta device."""
    with pytest.raises(UsageError, match="no module of Linear"), full_parameters(nn.Linear(2, 2)):
        pass
    with pytest.raises(UsageError, match="no module of Linear"):
        full_gradients(nn.Linear(2, 2))
    model = Net()
    fully_shard(model.blocks[0].up, mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh())
    with (
        pytest.raises(UsageError, match=r"'norm.weight' belongs to .* around this Block"),
        full_parameters(model.blocks[0]),
    ):
        pass
    with torch.device("meta"):
        model = fully_shard(Net(), mesh=ranks.mesh())
    with (
        pytest.raises(UsageError, match=r"'embedding.weight' \(17, 8\) is on the meta device"),
        full_parameters(model),
    ):
        pass


# Gradients


@distributed(1, 2, 3)
def test_full_gradients(ranks: Ranks) -> None:
    """Every name with the unsharded gradient, in one collective for each bucket."""
    model, reference = pair(ranks)
    step(model, ranks, reference)
    with CommDebugMode() as comms:
        found = dict(full_gradients(model))
    assert comms.get_total_counts() == (ranks.world_size > 1)
    expected = {name: param.grad for name, param in reference.named_parameters()}
    assert sorted(found) == sorted(expected)
    for name, gradient in found.items():
        assert not isinstance(gradient, DTensor)
        assert_same(gradient, expected[name], name)
    for gradient in found.values():
        gradient.zero_()  # copies
    assert_same_params(model, reference)
    assert_idle(model)


@distributed(2)
def test_no_gradient_is_none(ranks: Ranks) -> None:
    """Frozen parameters and those before the first backward have None; ignored ones their own."""
    model = Net()
    model.norm.weight.requires_grad_(False)
    ignored = model.head.weight
    fully_shard(model, mesh=ranks.mesh(), ignored_params={ignored})
    assert set(dict(full_gradients(model)).values()) == {None}
    step(model, ranks)
    found = dict(full_gradients(model))
    assert [name for name, gradient in found.items() if gradient is None] == ["norm.weight"]
    assert_same(found["head.weight"], ignored.grad)
    assert_idle(model)


@distributed(2, 3)
def test_buckets_are_bounded(ranks: Ranks) -> None:
    """A small limit makes more buckets, and each holds no more; the result is the same."""
    model, reference = pair(ranks)
    step(model, ranks, reference)
    before = fsdp2.gathering.BUCKET_NBYTES
    fsdp2.gathering.BUCKET_NBYTES = 1000
    try:
        with CommDebugMode() as comms:
            found = dict(full_gradients(model))
        total = sum(gradient.nbytes for gradient in found.values() if gradient is not None)
        assert comms.get_total_counts() >= total / 1000
        assert comms.get_total_counts() < len(found)
        with full_parameters(model, write_back=True, rank0_only=True):
            if ranks.rank == 0:
                edit(model)
    finally:
        fsdp2.gathering.BUCKET_NBYTES = before
    for name, param in reference.named_parameters():
        assert_same(found[name], param.grad, name)
    edit(reference)
    assert_same_params(model, reference)


@distributed(2)
def test_gradients_while_parameters_are_shown(ranks: Ranks) -> None:
    """For masks and statistics over both: the full gradient belongs to the full parameter."""
    model, reference = pair(ranks)
    step(model, ranks, reference)
    with full_parameters(model, write_back=True):
        shown = dict(model.named_parameters())
        for name, gradient in full_gradients(model):
            assert shown[name].shape == gradient.shape
            shown[name].data.sub_(gradient, alpha=0.1)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_same_params(model, reference)
    assert_idle(model)


# Hybrid sharding


@distributed(4)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_hybrid_mesh(ranks: Ranks, rank0_only: bool) -> None:
    """Replicas show, write and send nothing twice; one unit may have a mesh of its own."""
    reference = Net()
    model = copy.deepcopy(reference)
    hybrid = ranks.mesh(2, 2, names=("replicate", "shard"))
    fully_shard(model.blocks[0], mesh=ranks.mesh())
    fully_shard(model, mesh=hybrid)
    step(model, ranks, reference)
    with CommDebugMode() as comms:
        found = dict(full_gradients(model))
    assert comms.get_total_counts() == 2  # one for each mesh
    for name, param in reference.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-5, atol=1e-7, msg=name)
        model.get_parameter(name).grad = param.grad = None
    with full_parameters(model, write_back=True, rank0_only=rank0_only):
        if ranks.rank == 0 or not rank0_only:
            assert_shown(model, reference)
            edit(model)
    edit(reference)
    assert_same_params(model, reference)
    assert_idle(model)


# Other layouts, built by hand


LAYOUTS: list[tuple[tuple[int, ...], Any]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((4,), (Replicate(),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Replicate())),
    ((2, 2), (Replicate(), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (Replicate(), Replicate())),
    ((1, 4), (Shard(0), Shard(0))),
]


def tensors_in_all_layouts(ranks: Ranks) -> tuple[list[DTensor], list[Tensor]]:
    fulls = [torch.randn(9, 5), torch.randn(1, 4), torch.arange(30).view(6, 5)] * len(LAYOUTS)
    tensors = []
    for i, full in enumerate(fulls):
        shape, placements = LAYOUTS[i // 3]
        mesh = ranks.mesh(*shape)
        tensors.append(distribute_tensor(full, mesh, placements, src_data_rank=None))
    return tensors, fulls


@distributed(4)
@pytest.mark.parametrize("only_first", [False, True])
def test_gathers_all_layouts(ranks: Ranks, only_first: bool) -> None:
    """Hybrid, tensor-parallel and strided layouts, floats and integers, uneven and short."""
    tensors, fulls = tensors_in_all_layouts(ranks)
    found = dict(gather(tensors, only_first))
    assert len(found) == len(fulls)
    for i, full in enumerate(fulls):
        assert_same(found[i], full if ranks.rank == 0 or not only_first else None)


@distributed(4)
def test_scatters_all_layouts(ranks: Ranks) -> None:
    """Rank 0's tensors reach every rank's part, replicas included."""
    tensors, fulls = tensors_in_all_layouts(ranks)
    edited = [full * 2 + 1 for full in fulls]
    scatter(tensors, [each if ranks.rank == 0 else None for each in edited])
    for tensor, full in zip(tensors, edited):
        expected = distribute_tensor(
            full, tensor.device_mesh, tensor.placements, src_data_rank=None
        )
        assert_same(tensor.to_local(), expected.to_local())


@distributed(4)
def test_replicas_send_nothing(ranks: Ranks) -> None:
    """A hybrid mesh gathers along the shard dim; what is repeated everywhere does not travel."""
    mesh = ranks.mesh(2, 2)
    one = torch.randn(6, 4)
    repeated = distribute_tensor(one, mesh, [Replicate()] * 2, src_data_rank=None)
    hybrid = [
        distribute_tensor(one, mesh, [Replicate(), Shard(0)], src_data_rank=None) for _ in range(3)
    ]
    with CommDebugMode() as comms:
        list(gather([repeated, *hybrid]))
    assert comms.get_total_counts() == 1
    with CommDebugMode() as comms:
        list(gather([repeated, *hybrid], only_first=True))
    assert comms.get_total_counts() == (ranks.rank < 2)
    dist.barrier()
