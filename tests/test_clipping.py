"""`clip_grad_norm_`: one global norm, whatever meshes and placements the parameters have."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import UsageError, fully_shard
from fsdp2.clipping import clip_grad_norm_
from fsdp2.gathering import wire_device
from harness import Ranks, distributed, run
from models import (
    Net,
    assert_idle,
    assert_same,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
    whole,
)

INF = float("inf")
CLOSE = {"rtol": 1e-6, "atol": 0.0}
"""The same float32 squares, added in another order."""

PLACEMENTS: dict[str, Any] = {
    "shard": (Shard(0),),
    "shard 1": (Shard(1),),
    "repeated": (Replicate(),),
    "repeated, shard": (Replicate(), Shard(0)),
    "shard, repeated": (Shard(1), Replicate()),
    "shard, shard": (Shard(0), Shard(0)),
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
    "repeated twice": (Replicate(), Replicate()),
}


def trained(ranks: Ranks, **options: Any) -> tuple[Any, Net]:
    """A sharded model and the unsharded one, after one step's backward."""
    reference, model = Net(), Net()
    model.load_state_dict(reference.state_dict())
    shard_blocks(model, mesh=ranks.mesh(), **options)
    (batches,) = token_batches(ranks.world_size, 1)
    data_parallel(reference, batches)
    next_token_loss(model, batches[ranks.rank]).backward()
    return model, reference


def laid_out(full: Tensor, mesh: DeviceMesh | None, placements: str = "") -> nn.Parameter:
    """A parameter of zeros whose gradient is ``full``, alike on all ranks."""
    gradient, value = full.clone(), torch.zeros_like(full)
    if mesh is not None:
        how = PLACEMENTS[placements]
        gradient = distribute_tensor(gradient, mesh, how, src_data_rank=None)
        value = distribute_tensor(value, mesh, how, src_data_rank=None)
    param = nn.Parameter(value)
    param.grad = gradient
    return param


def gradients(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Some with fewer rows than ranks, alike wherever they are called."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(5, 4), (1, 4), (8, 3), (7, 6)]
    return [
        torch.randn(shapes[i % 4], generator=generator, dtype=torch.float64).to(dtype)
        for i in range(count)
    ]


def clipped(fulls: Sequence[Tensor], max_norm: float, p: float = 2.0) -> tuple[Tensor, list[Any]]:
    """What PyTorch makes of the same gradients in one process."""
    params = [laid_out(full, None) for full in fulls]
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, p)
    return norm, [param.grad for param in params]


@contextmanager
def all_reduces(expected: int) -> Iterator[None]:
    """Exactly so many all-reduces, and no other collective."""
    with CommDebugMode() as comms:
        yield
    counts = {str(op): count for op, count in comms.get_comm_counts().items()}
    assert sum(counts.values()) == expected, counts
    assert all("all_reduce" in op or "allreduce" in op for op in counts), counts


def same_on_all_ranks(value: object) -> bool:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(each == found[0] for each in found)


# One mesh


@distributed(2, 3, 4)
@pytest.mark.parametrize(
    ("p", "foreach"),
    [(0.5, None), (1.0, True), (2.0, None), (2.0, False), (3.5, None), (INF, None)],
)
def test_one_mesh_equals_pytorch(ranks: Ranks, p: float, foreach: bool | None) -> None:
    """On one mesh the norm and the gradients are PyTorch's, at the cost of one all-reduce."""
    model, _ = trained(ranks)
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    with all_reduces(1):
        norm = clip_grad_norm_(model.parameters(), 0.1, p, foreach=foreach)
    ours = {name: param.grad for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.grad = before[name]
    theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, p)
    assert not isinstance(norm, DTensor)
    assert norm.shape == ()
    torch.testing.assert_close(norm, theirs.full_tensor(), **CLOSE)
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(ours[name]), whole(param.grad), rtol=2e-6, atol=0)
    assert_idle(model)


@distributed(2, 3, 4)
@pytest.mark.parametrize("p", [1.0, 2.0, INF])
def test_equals_unsharded(ranks: Ranks, p: float) -> None:
    """The norm is that of the whole model, not of this rank's shards; rows may be uneven."""
    model, reference = trained(ranks)
    norm = clip_grad_norm_(model, 0.1, p)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, p)
    assert expected > 0.1
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert same_on_all_ranks(norm.item())
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=2e-6, atol=0, msg=name)
    after = clip_grad_norm_(model, INF, p)
    torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-4, atol=0)  # + 1e-6 below
    assert_idle(model)


@distributed(2)
def test_below_the_limit_nothing_changes(ranks: Ranks) -> None:
    """Gradients whose norm is below the limit keep every bit."""
    model, reference = trained(ranks)
    norm = clip_grad_norm_(model, 1e6)
    assert 0 < norm < 1e6
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert_same(ours.grad, theirs.grad)


@distributed(2)
def test_infinite_limit_only_measures(ranks: Ranks) -> None:
    """With ``max_norm=inf`` gradients are not written to, not even where the norm is infinite."""
    full = gradients(1)[0]
    full[0, 0] = INF
    param = laid_out(full, ranks.mesh(), "shard")
    local = param.grad.to_local()
    version = local._version
    assert clip_grad_norm_([param], INF) == INF
    assert param.grad.to_local()._version == version
    assert_same(param.grad, full)


@distributed(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [2.0, INF])
def test_16_bit_gradients(ranks: Ranks, dtype: torch.dtype, p: float) -> None:
    """Gradients of 16 bits are summed and scaled in float32; the norm is float32."""
    fulls = gradients(4, dtype)
    params = [laid_out(full, ranks.mesh(), "shard") for full in fulls]
    norm = clip_grad_norm_(params, 1.0, p)
    expected = torch.nn.utils.get_total_norm([full.float() for full in fulls], p)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, expected, **CLOSE)
    for param, full in zip(params, fulls):
        scaled = (full.double() * (1.0 / (norm.double() + 1e-6))).to(dtype)
        bound = torch.finfo(dtype).eps  # one rounding, perhaps to the other neighbour
        torch.testing.assert_close(whole(param.grad), scaled, rtol=bound, atol=1e-7)


@distributed(2)
def test_large_gradients_do_not_overflow(ranks: Ranks) -> None:
    """Powers are summed in float64: a norm that float32 can hold is found, for any p."""
    full = torch.full((4, 4), 1e30)
    param = laid_out(full.double().float(), ranks.mesh(), "shard")
    assert clip_grad_norm_([param], INF, INF) == torch.tensor(1e30)
    small = laid_out(torch.full((4, 4), 1e4), ranks.mesh(), "shard")
    norm = clip_grad_norm_([small], INF, 9.0)
    torch.testing.assert_close(norm, torch.tensor(1e4 * 16 ** (1 / 9)), rtol=1e-5, atol=0)


@distributed(2)
def test_float64(ranks: Ranks) -> None:
    """A float64 parameter makes the norm float64, to its precision."""
    fulls = gradients(4, torch.float64)
    params = [laid_out(full, ranks.mesh(), "shard") for full in fulls]
    expected, after = clipped(fulls, 1.0)
    torch.testing.assert_close(clip_grad_norm_(params, 1.0), expected, rtol=1e-14, atol=0)
    for param, wanted in zip(params, after):
        torch.testing.assert_close(whole(param.grad), wanted, rtol=1e-13, atol=0)


# Several meshes


def mixed(ranks: Ranks) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Two on a 1-D mesh, five on a 2-D mesh, two plain."""
    line, square = ranks.mesh(), ranks.mesh(2, 2, names=("replicate", "shard"))
    layouts = [
        (line, "shard"),
        (square, "repeated, shard"),
        (square, "shard, shard"),
        (None, ""),
        (square, "strided"),
        (line, "repeated"),
        (square, "shard, repeated"),
        (square, "repeated twice"),
        (None, ""),
    ]
    fulls = gradients(len(layouts))
    return [laid_out(full, *layout) for full, layout in zip(fulls, layouts)], fulls


@distributed(4)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_different_meshes(ranks: Ranks, p: float) -> None:
    """One norm over a 1-D mesh, a 2-D mesh in all placements, and plain tensors together."""
    params, fulls = mixed(ranks)
    expected, after = clipped(fulls, 1.0, p)
    with all_reduces(2):  # one for each mesh
        norm = clip_grad_norm_(params, 1.0, p)
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert same_on_all_ranks(norm.item())
    for param, wanted in zip(params, after):
        torch.testing.assert_close(whole(param.grad), wanted, rtol=2e-6, atol=0)


@distributed(4)
@pytest.mark.parametrize("p", [2.0, INF])
def test_one_unit_on_a_mesh_of_its_own(ranks: Ranks, p: float) -> None:
    """One unit sharded over all ranks, the rest hybrid: the unsharded model's norm."""
    reference = Net()
    model: Any = copy.deepcopy(reference)
    fully_shard(model.blocks[0], mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh(2, 2, names=("replicate", "shard")))
    (batches,) = token_batches(ranks.world_size, 1)
    data_parallel(reference, batches)
    next_token_loss(model, batches[ranks.rank]).backward()
    with all_reduces(2):
        norm = clip_grad_norm_(model, 0.1, p)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, p)
    # The gradients themselves were added in another order.
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert same_on_all_ranks(norm.item())
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert_idle(model)


@distributed(4)
def test_pytorch_refuses_different_meshes(ranks: Ranks) -> None:
    """The reason for this room; if PyTorch learns it, look at what it returns."""
    params, _ = mixed(ranks)
    with pytest.raises(Exception, match="mesh"):
        torch.nn.utils.clip_grad_norm_([p for p in params if isinstance(p, DTensor)], 1.0)


@distributed(4)
@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((4,), ["shard", "shard 1", "repeated"], 1),
        ((4,), ["repeated"], 0),
        ((2, 2), ["repeated twice"], 0),
        ((2, 2), ["repeated, shard", "repeated twice"], 1),
        ((2, 2), ["shard, repeated"], 1),
        ((2, 2), ["repeated, shard", "shard, repeated"], 1),
        ((2, 2), ["shard, shard", "strided", "repeated, shard", "repeated twice"], 1),
        ((1, 4), ["shard, shard"], 1),
        ((4, 1), ["repeated, shard"], 0),
    ],
)
def test_collectives(
    ranks: Ranks, shape: tuple[int, ...], placements: list[str], expected: int
) -> None:
    """A mesh costs one all-reduce for all its parameters, none if they are all repeated."""
    mesh = ranks.mesh(*shape)
    fulls = gradients(len(placements))
    params = [laid_out(full, mesh, how) for full, how in zip(fulls, placements)]
    with all_reduces(expected):
        norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, clipped(fulls, 1.0)[0], **CLOSE)


@distributed(8)
@pytest.mark.slow
def test_two_dims_of_three(ranks: Ranks) -> None:
    """On half of the ranks there is no group of the whole mesh: one all-reduce for each dim."""
    mesh = ranks.mesh(2, 2, 2, names=("replicate", "shard", "tensor"))["shard", "tensor"]
    fulls = gradients(3)
    names = ["shard, shard", "repeated, shard", "shard, repeated"]
    params = [laid_out(full, mesh, how) for full, how in zip(fulls, names)]
    with all_reduces(2):
        norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, clipped(fulls, 1.0)[0], **CLOSE)
    assert same_on_all_ranks(norm.item())


@distributed(4)
def test_slices_repeat_their_parameters(ranks: Ranks) -> None:
    """What lies on a slice of a mesh, as a norm beside tensor-parallel layers, counts once."""
    square = ranks.mesh(2, 2, names=("data", "tensor"))
    fulls = gradients(2)
    params = [
        laid_out(fulls[0], square, "shard, shard"),
        laid_out(fulls[1], square["data"], "shard"),
    ]
    with all_reduces(2):
        norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, clipped(fulls, 1.0)[0], **CLOSE)
    assert same_on_all_ranks(norm.item())


# Ranks that differ


@distributed(3, 4)
def test_missing_gradients_do_not_hang(ranks: Ranks) -> None:
    """A rank without gradients on a mesh takes part in its collective."""
    line = ranks.mesh()
    params = [laid_out(full, line, "shard") for full in gradients(2)]
    local = params[1].grad.to_local().double()
    if ranks.rank != 1:
        params[1].grad = None
    with all_reduces(1):
        norm = clip_grad_norm_(params, INF)
    local = local if ranks.rank == 1 else torch.zeros_like(local)
    squares = local.square().sum()
    dist.all_reduce(squares)
    expected = (squares + gradients(2)[0].double().square().sum()).sqrt().float()
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert same_on_all_ranks(norm.item())


@distributed(2)
def test_no_gradient_at_all(ranks: Ranks) -> None:
    """Without gradients, or parameters, the norm is zero."""
    params = [laid_out(gradients(1)[0], ranks.mesh(), "shard")]
    params[0].grad = None
    norm = clip_grad_norm_(params, 1.0)
    assert norm == 0
    assert norm.dtype is torch.float32
    assert clip_grad_norm_([], 1.0) == 0


def half_meshes() -> list[DeviceMesh]:
    """Meshes of their own on ranks 0 and 1, and on ranks 2 and 3."""
    return [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]


@distributed(4)
@pytest.mark.parametrize("p", [2.0, INF])
def test_meshes_that_a_rank_is_not_part_of(ranks: Ranks, p: float) -> None:
    """All ranks list all parameters, and learn the norm of those that only others hold."""
    halves = half_meshes()
    fulls = gradients(3)
    params = [laid_out(full, mesh, "shard") for full, mesh in zip(fulls, [*halves, ranks.mesh()])]
    for param, mesh in zip(params, halves):
        if mesh.get_coordinate() is None:
            param.grad = None
    expected, after = clipped(fulls, 1.0, p)
    with all_reduces(3):  # its own half, the line, and one for both halves together
        norm = clip_grad_norm_(params, 1.0, p)
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert same_on_all_ranks(norm.item())
    for param, wanted, mesh in zip(params, after, [*halves, ranks.mesh()]):
        if mesh.get_coordinate() is not None:
            torch.testing.assert_close(whole(param.grad), wanted, rtol=2e-6, atol=0)


@distributed(4)
def test_experts_on_meshes_of_their_own(ranks: Ranks) -> None:
    """Each rank lists only its own experts: those of the other mesh count all the same."""
    fulls = gradients(3)
    own = half_meshes()[ranks.rank // 2]
    shared = laid_out(fulls[2], ranks.mesh(), "shard")
    params = [laid_out(fulls[ranks.rank // 2], own, "shard"), shared]
    norm = clip_grad_norm_(params, 1.0)
    expected, after = clipped(fulls, 1.0)
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert same_on_all_ranks(norm.item())
    torch.testing.assert_close(whole(shared.grad), after[2], rtol=2e-6, atol=0)


@distributed(4)
def test_a_rank_outside_all_meshes_is_told(ranks: Ranks) -> None:
    """It could not learn the norm, and those inside do not wait for it."""
    mesh, _ = half_meshes()
    params = [laid_out(gradients(1)[0], mesh, "shard")]
    if ranks.rank < 2:
        assert clip_grad_norm_(params, 1.0) > 0
    else:
        params[0].grad = None
        with pytest.raises(UsageError, match=r"rank \d is not part of"):
            clip_grad_norm_(params, 1.0)


@distributed(4)
@pytest.mark.parametrize("p", [2.0, INF])
def test_pipeline_stages(ranks: Ranks, p: float) -> None:
    """With ``group`` the norms of stages that list different parameters become one."""
    grid = ranks.mesh(2, 2, names=("stage", "shard"))
    stage = grid.get_local_rank("stage")
    fulls = gradients(4)
    own = fulls[:1] if stage == 0 else fulls[1:]
    params = [laid_out(full, grid["shard"], "shard") for full in own]
    norm = clip_grad_norm_(params, 1.0, p, group=grid.get_group("stage"))
    expected, after = clipped(fulls, 1.0, p)
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert same_on_all_ranks(norm.item())
    for param, wanted in zip(params, after[:1] if stage == 0 else after[1:]):
        torch.testing.assert_close(whole(param.grad), wanted, rtol=2e-6, atol=0)


# Gradients that are not finite


def error_of(ranks: Ranks, bad: float, p: float) -> str:
    """One bad number in the last row, which only one rank has."""
    model, _ = trained(ranks)
    weight = model.blocks[1].up.weight  # 13 rows
    if weight.grad.to_local().numel() and ranks.rank == ranks.world_size - 1:
        weight.grad.to_local()[-1, -1] = bad
    before = [param.grad.to_local().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(model, 1.0, p, error_if_nonfinite=True)
    for param, old in zip(model.parameters(), before):
        assert_same(param.grad.to_local(), old)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bad", [INF, float("nan")])
@pytest.mark.parametrize("p", [2.0, INF])
def test_error_is_alike_on_all_ranks(world_size: int, bad: float, p: float) -> None:
    """Every rank raises the same text, with the name; no gradient has changed."""
    texts = set(run(error_of, world_size, bad, p))
    assert len(texts) == 1
    text = texts.pop()
    assert f"is {bad}" in text
    assert "not finite are the gradients of 'blocks.1.up.weight'." in text


@distributed(4)
def test_error_across_meshes(ranks: Ranks) -> None:
    """Names reach ranks through all meshes, also those that they are no part of."""
    halves = half_meshes()
    fulls = gradients(4)
    for full in fulls[1:]:
        full[0] = INF
    meshes = [ranks.mesh(), *halves, None]
    params = [laid_out(full, mesh, "shard") for full, mesh in zip(fulls, meshes)]
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    with pytest.raises(RuntimeError, match="'p1', 'p2', 'p3'") as caught:
        clip_grad_norm_(named, 1.0, error_if_nonfinite=True)
    assert same_on_all_ranks(str(caught.value))


@distributed(2)
def test_nonfinite_norm_is_returned(ranks: Ranks) -> None:
    """A NaN on one rank makes every rank's norm NaN, for the maximum too, and is no error."""
    for p in (2.0, INF):
        full = gradients(1)[0]
        full[0, 0] = float("nan")
        param = laid_out(full, ranks.mesh(), "shard")
        assert clip_grad_norm_(param, 1.0, p).isnan()
        assert whole(param.grad).isnan().all()


@distributed(2)
def test_many_bad_names_are_cut_short(ranks: Ranks) -> None:
    """An error lists five parameters, and how many more there are; tensors by their index."""
    params = [laid_out(full / 0, ranks.mesh(), "shard") for full in gradients(7)]
    with pytest.raises(RuntimeError, match=r"0 of shape \(5, 4\), 1 of.* and 2 more"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


@distributed(2)
def test_finite_gradients_raise_nothing(ranks: Ranks) -> None:
    """``error_if_nonfinite`` costs no further collective where all is well."""
    params = [laid_out(full, ranks.mesh(), "shard") for full in gradients(2)]
    with all_reduces(1):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


# What is refused, and what does not happen


@distributed(2)
def test_partial_is_refused(ranks: Ranks) -> None:
    """A gradient that is not summed yet has no norm; by name or by index."""
    good = laid_out(gradients(1)[0], ranks.mesh(), "shard")
    bad = laid_out(gradients(1)[0], ranks.mesh(), "repeated")
    bad.grad = DTensor.from_local(gradients(1)[0], ranks.mesh(), [Partial()])
    with pytest.raises(UsageError, match=r"parameter 'norm.bias' has placements \(Partial"):
        clip_grad_norm_([("weight", good), ("norm.bias", bad)], 1.0)
    with pytest.raises(UsageError, match=r"parameter 1 of shape \(5, 4\) has placements"):
        clip_grad_norm_([good, bad], 1.0)


@pytest.mark.parametrize("p", [0.0, -1.0, -INF, float("nan")])
def test_norm_type_is_checked(p: float) -> None:
    """Only p above 0 gives a norm."""
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([laid_out(gradients(1)[0], None)], 1.0, p)


def test_negative_limit_is_refused() -> None:
    """It would turn the gradients' signs."""
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([laid_out(gradients(1)[0], None)], -1.0)


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
def test_plain_model_without_ranks(p: float) -> None:
    """No process group is needed for plain tensors; a tensor may be given by itself."""
    fulls = gradients(3)
    params = [laid_out(full, None) for full in fulls]
    expected, after = clipped(fulls, 0.5, p)
    torch.testing.assert_close(clip_grad_norm_(iter(params), 0.5, p), expected, **CLOSE)
    for param, wanted in zip(params, after):
        torch.testing.assert_close(param.grad, wanted, rtol=2e-6, atol=0)
    one = laid_out(fulls[0], None)
    torch.testing.assert_close(clip_grad_norm_(one, 0.5), fulls[0].norm(), **CLOSE)


def test_a_parameter_counts_once() -> None:
    """A tied parameter that is listed twice is measured and scaled once."""
    full = gradients(1)[0]
    param = laid_out(full, None)
    norm = clip_grad_norm_([param, param], 0.5)
    torch.testing.assert_close(norm, full.norm(), **CLOSE)
    torch.testing.assert_close(param.grad, full * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=0)


class Operations(TorchDispatchMode):
    """Which operations ran, and on what."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert DTensor not in types, f"{func} on a DTensor"
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@distributed(4)
def test_stays_off_the_host(ranks: Ranks) -> None:
    """Nothing is read back, no DTensor operation runs, and a kind of tensor costs one kernel."""
    params, _ = mixed(ranks)
    with Operations() as seen:
        clip_grad_norm_(params, 1.0)
    assert not [name for name in seen.names if "_local_scalar_dense" in name]
    kernels = sum("_foreach_norm" in name for name in seen.names)
    # One for each mesh and one for the plain; on the 1-D mesh the last rank has no rows.
    assert kernels == (2 if ranks.rank == 3 else 3)
    assert sum("_foreach_mul_" in name for name in seen.names) == 1
    with Operations() as seen:
        clip_grad_norm_(params, 1.0, foreach=False, error_if_nonfinite=True)
    assert [name for name in seen.names if "_local_scalar_dense" in name]
    assert not [name for name in seen.names if "_foreach" in name]


# Offloaded gradients


@pytest.mark.parametrize(
    ("config", "device_type", "found", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "cpu", "cpu"),
        ("cuda:nccl", "cuda", "cpu", "cuda:3"),
        ("cuda:nccl", "cuda", "cuda:1", "cuda:1"),
        ("cpu:gloo", "cpu", "cpu", "cpu"),
    ],
)
def test_where_an_offloaded_norm_travels(
    monkeypatch: pytest.MonkeyPatch, config: str, device_type: str, found: str, expected: str
) -> None:
    """A number about gradients on the CPU goes to the device unless the backend takes it."""

    class Module:
        current_device = staticmethod(lambda: 3)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: Module)
    device = wire_device(Any, device_type, torch.device(found))  # type: ignore[arg-type]
    assert device == torch.device(expected)
