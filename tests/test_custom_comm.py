"""Collectives that users bring: ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_api
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
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
)

BF16, FP32 = torch.bfloat16, torch.float32
HYBRID = ("replicate", "shard")


class Notes:
    """What a collective was asked for. Mixed into the classes under test."""

    is_async = True

    def __init__(self) -> None:
        self.allocated: list[Tensor] = []
        self.calls: list[dict[str, Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.full(tuple(size), 77, dtype=dtype, device=device)
        self.allocated.append(made)
        return made

    def note(self, output: Tensor, source: Tensor, **further: Any) -> None:
        for tensor in (output, source):
            # PyTorch's input is a slice of its output.
            places = {made.untyped_storage().data_ptr() for made in self.allocated}
            assert tensor.untyped_storage().data_ptr() in places, "not from allocate"
            assert tensor.is_contiguous() and tensor.ndim == 1
        assert output.dtype == source.dtype
        self.calls.append({"output": output, "source": source, **further})

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [call["output"].dtype for call in self.calls]


class Gathering(Notes):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.note(output_tensor, input_tensor, group=group, async_op=async_op)
        assert output_tensor.numel() == group.size() * input_tensor.numel()
        pieces = list(output_tensor.chunk(group.size()))
        return dist.all_gather(pieces, input_tensor, group, async_op and self.is_async)


class Scattering(Notes):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.note(output_tensor, input_tensor, group=group, async_op=async_op, op=op)
        assert input_tensor.numel() == group.size() * output_tensor.numel()
        pieces = list(input_tensor.chunk(group.size()))
        return dist.reduce_scatter(output_tensor, pieces, op, group, async_op and self.is_async)


class OurGather(Gathering, fsdp2.AllGather):
    """Derived from our interface."""


class OurScatter(Scattering, fsdp2.ReduceScatter):
    """Derived from our interface."""


class TorchGather(Gathering, torch_api.AllGather):
    """Derived from PyTorch's interface."""


class TorchScatter(Scattering, torch_api.ReduceScatter):
    """Derived from PyTorch's interface."""


class BlockingGather(OurGather):
    is_async = False


class BlockingScatter(OurScatter):
    is_async = False


PAIRS: dict[str, tuple[Any, Any]] = {
    "ours": (OurGather, OurScatter),
    "torch": (TorchGather, TorchScatter),
    "duck": (Gathering, Scattering),
    "blocking": (BlockingGather, BlockingScatter),
}


def use(model: Any, pair: str = "ours") -> tuple[list[Any], list[Any]]:
    """A collective of its own for each group, outermost first: gathers, and reduce-scatters."""
    gathers, scatters = [], []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gather, scatter = (cls() for cls in PAIRS[pair])
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
            gathers.append(gather)
            scatters.append(scatter)
    return gathers, scatters


def clear(notes: list[Any]) -> None:
    for each in notes:
        each.calls.clear()
        each.allocated.clear()


@distributed(2, 3, 4)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training_with_custom_collectives(ranks: Ranks, pair: str, reshard: bool | None) -> None:
    """One call per group, dtype and direction, and the numbers of one process.

    Bit by bit on 2 ranks, where a sum has one order; gloo's own sums of more differ by rounding.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard)
    gathers, scatters = use(model, pair)
    bound = {} if ranks.world_size == 2 else {"rtol": 1e-5, "atol": 1e-6}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for inputs in token_batches(ranks.world_size, 3):
        clear(gathers + scatters)
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference, **bound)
        times = {None: [1, 2, 2], True: [2, 2, 2], False: [1, 1, 1]}[reshard]
        assert [len(gather.calls) for gather in gathers] == times
        assert [len(scatter.calls) for scatter in scatters] == [1, 1, 1]
        for call in [call for notes in gathers + scatters for call in notes.calls]:
            assert call["async_op"] is True
            assert call["group"] is ranks.mesh().get_group() or call["group"] is dist.group.WORLD
        assert all(call["op"] == dist.ReduceOp.SUM for s in scatters for call in s.calls)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


@distributed(2)
def test_bytes_of_a_custom_gather_are_those_of_the_shards(ranks: Ranks) -> None:
    """Nothing but the padded rows travels."""
    model = fully_shard(nn.Linear(5, 7))
    [gather], _ = use(model)
    model(torch.ones(2, 5)).sum().backward()
    sizes = [(call["source"].numel(), call["output"].numel()) for call in gather.calls]
    assert sizes == [(4 * 5 + 4, 2 * (4 * 5 + 4))]


class Mixed(nn.Module):
    """Uneven rows, fewer rows than ranks, frozen parameters, 0-dim ones, integers, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Parameter(torch.randn(7, 3))
        self.few = nn.Parameter(torch.randn(1, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.narrow = nn.Parameter(torch.randn(5).to(BF16))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = (x @ self.frozen)[:, self.index]
        y = kept @ self.uneven.t() * self.scale + (kept * self.few).sum()
        return y.square().mean() + self.narrow.float().square().sum()


@distributed(2, 3, 4)
@pytest.mark.parametrize("pair", ["ours", "torch", "blocking"])
def test_parameters_of_all_kinds(ranks: Ranks, pair: str) -> None:
    """One gather per dtype, one reduction per dtype that trains, right numbers.

    fp32 differs by rounding (gloo sums in an order of its own), bf16 by one of its roundings.
    """
    reference = Mixed()
    model = fully_shard(copy.deepcopy(reference), reshard_after_forward=False)
    [gather], [scatter] = use(model, pair)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        clear([gather, scatter])
        for each in (model, reference):
            each.zero_grad()
        inputs = list(torch.randn(ranks.world_size, 2, 3, generator=generator))
        model(inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, lambda m, x: m(x))
        for name, param in reference.named_parameters():
            bound = 1e-2 if param.dtype == BF16 else 1e-5
            found = model.get_parameter(name)
            if param.grad is None:
                assert found.grad is None
            else:
                torch.testing.assert_close(
                    found.grad.full_tensor(), param.grad, rtol=bound, atol=bound
                )
        assert set(gather.dtypes) == {FP32, BF16, torch.int64}
        assert set(scatter.dtypes) == {FP32, BF16}
        assert len(gather.calls) == 3
        assert len(scatter.calls) == 2
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("reduced", [FP32, BF16, None])
def test_mixed_precision(ranks: Ranks, reduced: torch.dtype | None) -> None:
    """Gathers are in the compute dtype and reductions in the reduce dtype, as with our own."""
    policy = MixedPrecisionPolicy(BF16, reduced)
    plain = Net()
    ours = shard_blocks(copy.deepcopy(plain), mp_policy=policy)
    model = shard_blocks(plain, mp_policy=policy)
    gathers, scatters = use(model)
    for inputs in token_batches(ranks.world_size, 2):
        losses = [next_token_loss(m, inputs[ranks.rank]) for m in (model, ours)]
        assert_same(*losses)
        for loss in losses:
            loss.backward()
        if ranks.world_size == 2:
            assert_same_params(model, ours)
        else:
            # A sum of three in another order: one rounding of the reduce dtype.
            bound = 1e-5 if reduced is FP32 else 2e-2
            assert_same_params(model, ours, rtol=bound, atol=bound)
        for each in (model, ours):
            each.zero_grad()
    assert {dtype for gather in gathers for dtype in gather.dtypes} == {BF16}
    assert {dtype for scatter in scatters for dtype in scatter.dtypes} == {reduced or BF16}
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("which", ["all_gather", "reduce_scatter"])
def test_one_of_the_two(ranks: Ranks, which: str) -> None:
    """The other direction stays ours."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    comm = OurGather() if which == "all_gather" else OurScatter()
    getattr(model, f"set_custom_{which}")(comm)
    for inputs in token_batches(ranks.world_size, 2):
        next_token_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs)
        assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
    assert len(comm.calls) == 2
    assert_idle(model)


@distributed(2)
def test_set_in_the_middle_of_training(ranks: Ranks) -> None:
    """Parameters, gradients and optimizer state stay; calls begin with the next step."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    gathers: list[Any] = []
    for step, inputs in enumerate(token_batches(2, 5)):
        if step == 2:
            # Also with gradients waiting for the optimizer.
            gathers, _ = use(model)
        loss = next_token_loss(model, inputs[ranks.rank])
        assert_same(loss, data_parallel(reference, inputs)[ranks.rank])
        loss.backward()
        assert_same_params(model, reference)
        if step == 1:
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(gather.calls for gather in gathers)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("param_dtype", [None, BF16])
def test_set_while_gradients_are_kept_back(ranks: Ranks, param_dtype: torch.dtype | None) -> None:
    """What ``set_requires_gradient_sync(False)`` kept is not lost, or the setter says no."""
    policy = MixedPrecisionPolicy(param_dtype, FP32)
    model = fully_shard(nn.Linear(3, 3), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    model.set_requires_gradient_sync(True)
    try:
        use(model)
    except RuntimeError as error:
        assert "set_requires_gradient_sync" in str(error)
        return
    model(torch.ones(2, 3)).sum().backward()
    assert_same(model.bias.grad, torch.full((3,), 4.0))


@distributed(4)
def test_set_while_replicas_keep_sums_back(ranks: Ranks) -> None:
    """The same for ``set_requires_all_reduce(False)``."""
    model = fully_shard(nn.Linear(200, 200), mesh=ranks.mesh(2, 2, names=HYBRID))
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 200)).sum().backward()
    model.set_requires_all_reduce(True)
    try:
        use(model)
    except RuntimeError as error:
        assert "set_requires_all_reduce" in str(error)
        return
    model(torch.ones(2, 200)).sum().backward()
    assert_same(model.bias.grad, torch.full((200,), 4.0))
    assert_same(model.weight.grad, torch.full((200, 200), 4.0))


@distributed(2)
def test_set_between_forward_and_backward(ranks: Ranks) -> None:
    """Kept parameters are freed and backward gathers through the new collective, or it raises."""
    reference = nn.Linear(3, 3)
    model = fully_shard(copy.deepcopy(reference))
    loss = model(torch.ones(2, 3)).square().sum()
    reference(torch.ones(2, 3)).square().sum().backward()
    try:
        use(model)
    except RuntimeError:
        return
    loss.backward()
    assert_same_params(model, reference)


@distributed(2)
def test_it_replaces_the_one_before(ranks: Ranks) -> None:
    """The last one set is the one that is called."""
    model = fully_shard(nn.Linear(3, 3))
    [first], _ = use(model)
    [second], _ = use(model)
    model(torch.ones(2, 3)).sum().backward()
    assert (len(first.calls), len(second.calls)) == (0, 1)


@distributed(2)
def test_it_is_one_groups_own(ranks: Ranks) -> None:
    """Setting it on the root does not reach the blocks."""
    model = shard_blocks(Net())
    gather = OurGather()
    model.set_custom_all_gather(gather)
    with fsdp2.trace(model) as events:
        next_token_loss(model, token_batches(2, 1)[0][ranks.rank]).backward()
    assert sum(event.name == "gather" for event in events.events) == 5
    assert len(gather.calls) == 1


@distributed(4)
def test_on_a_mesh_with_replicas(ranks: Ranks) -> None:
    """The collectives get the shard group; sums over replicas stay ours."""
    mesh = ranks.mesh(2, 2, names=HYBRID)
    model = Net()
    ours = shard_blocks(copy.deepcopy(model), mesh=mesh)
    shard_blocks(model, mesh=mesh)
    gathers, scatters = use(model)
    for batch in token_batches(4, 2):
        for each in (model, ours):
            next_token_loss(each, batch[ranks.rank]).backward()
        assert_same_params(model, ours)
    for notes in gathers + scatters:
        assert all(call["group"] is mesh.get_group("shard") for call in notes.calls)
        assert notes.calls
    assert_idle(model)


@distributed(4)
def test_backward_over_fewer_ranks(ranks: Ranks) -> None:
    """With ``reshard_after_forward=2`` the gather in backward is the user's too, as in PyTorch."""
    reference = Net()
    sizes = []
    for shard, gather in ((torch_fully_shard, TorchGather()), (fully_shard, OurGather())):
        model = shard_blocks(copy.deepcopy(reference), shard, reshard_after_forward=2)
        model.blocks[0].set_custom_all_gather(gather)
        inputs = token_batches(4, 1)[0]
        next_token_loss(model, inputs[ranks.rank]).backward()
        sizes.append([call["group"].size() for call in gather.calls])
    data_parallel(reference, inputs)
    assert_same_params(model, reference)
    assert sizes == [[4, 2], [4, 2]], f"PyTorch's and ours: {sizes}"


@distributed(2, 3)
def test_dimensions_other_than_the_first(ranks: Ranks) -> None:
    """Parameters that are split along columns travel in the same call."""
    reference = nn.Linear(5, 7)
    model = fully_shard(copy.deepcopy(reference), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    [gather], [scatter] = use(model)
    inputs = list(torch.randn(ranks.world_size, 2, 5, generator=torch.Generator().manual_seed(1)))

    def loss_of(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().sum()

    loss_of(model, inputs[ranks.rank]).backward()
    data_parallel(reference, inputs, loss_of)
    assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
    assert len(gather.calls) == 1
    assert len(scatter.calls) == 1


@distributed(1)
def test_nothing_to_call_on_one_rank(ranks: Ranks) -> None:
    """One rank communicates nothing, so that nothing is called."""
    model = fully_shard(nn.Linear(3, 3))
    [gather], [scatter] = use(model)
    model(torch.ones(2, 3)).sum().backward()
    assert not gather.calls and not scatter.calls
    assert_same(model.bias.grad, torch.full((3,), 2.0))


@distributed(2)
def test_fresh_memory_may_hold_anything(ranks: Ranks) -> None:
    """Padding and what other ranks do not read is never mixed into numbers."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes with NaN
    try:
        model = fully_shard(Mixed(), reshard_after_forward=False)
        use(model)
        for _ in range(2):
            model(torch.ones(2, 3)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert param.grad.to_local().isfinite().all(), name


@distributed(2)
def test_explain_says_so(ranks: Ranks) -> None:
    """The path of each parameter names the custom collective."""
    model = fully_shard(nn.Linear(3, 3))
    use(model)
    [group] = fsdp2.explain(model).groups
    assert all("custom" in param.reduction for param in group.params)
    assert "custom" in str(group)


@distributed(2)
@pytest.mark.parametrize("setter", ["set_custom_all_gather", "set_custom_reduce_scatter"])
@pytest.mark.parametrize("wrong", [None, print, OurGather], ids=["None", "function", "class"])
def test_what_is_no_collective_is_refused(ranks: Ranks, setter: str, wrong: Any) -> None:
    """A function lacks ``allocate``, and a class is not an object of it."""
    with pytest.raises(TypeError, match=r"allocate\(\) and __call__\(\)"):
        getattr(fully_shard(nn.Linear(3, 3)), setter)(wrong)


@distributed(2)
@pytest.mark.parametrize("setter", ["set_custom_all_gather", "set_custom_reduce_scatter"])
@pytest.mark.parametrize("field", ["all_gather_dtype", "exchange_dtype"])
def test_what_travels_quantised_is_not_carried(ranks: Ranks, setter: str, field: str) -> None:
    """A policy that quantises is not silently ignored; the group goes on without the custom
    collective."""
    policy = fsdp2.MixedPrecisionPolicy(**{field: torch.int8})
    model = fully_shard(nn.Linear(512, 512), mp_policy=policy)
    comm = OurGather() if setter == "set_custom_all_gather" else OurScatter()
    with pytest.raises(ValueError, match=f"'Linear': its MixedPrecisionPolicy has {field}"):
        getattr(model, setter)(comm)
    model(torch.ones(2, 512)).sum().backward()
    assert model.weight.grad is not None
    assert not comm.calls
