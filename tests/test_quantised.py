"""Parameters and gradients that travel as bytes with scales: ours, asked for by policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard, pairwise
from fsdp2.quantising import WIRE_DTYPES, WireFormat, gradient_format, parameter_format
from harness import Ranks, distributed
from models import assert_idle, assert_same, by_messages

FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16

# ---- The format


def relative_step(dtype: torch.dtype) -> float:
    """Half a unit in the last place of a float, relative to the number."""
    return torch.finfo(dtype).eps / 2


def coded_and_back(format: WireFormat, values: Tensor) -> Tensor:
    coded = torch.empty(values.shape[0], format.nbytes(values.shape[1]), dtype=torch.uint8)
    coded.fill_(0xFF)  # what nobody wrote must not be read
    format.encode(values, coded)
    read = torch.full_like(values, torch.nan)
    format.decode(coded, read)
    return read


@given(
    rows=st.integers(1, 3),
    numel=st.integers(1, 70),
    block=st.integers(1, 40),
    dtype=st.sampled_from(WIRE_DTYPES),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=200, deadline=None)
def test_what_is_read_back_is_near(
    rows: int, numel: int, block: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    """Within half a step of the byte, for every length, block and magnitude."""
    values = torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed))
    values *= 2.0**exponent
    read = coded_and_back(WireFormat(dtype, block), values)
    for first in range(0, numel, block):
        exact, near = values[:, first : first + block], read[:, first : first + block]
        scale = exact.abs().amax(1, keepdim=True) / (
            torch.finfo(dtype).max if dtype.is_floating_point else 127
        )
        if dtype is INT8:
            bound = scale.expand_as(exact) * 0.5
        else:
            smallest = torch.finfo(dtype).smallest_normal
            bound = torch.maximum(exact.abs(), scale * smallest) * relative_step(dtype)
        assert ((exact - near).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """A block of zeros has no scale to divide by."""
    assert_same(coded_and_back(WireFormat(dtype, 4), torch.zeros(2, 10)), torch.zeros(2, 10))


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_become_a_number(dtype: torch.dtype, bad: float) -> None:
    """Its whole block is lost, visibly; the others are not touched."""
    values = torch.ones(1, 12)
    values[0, 5] = bad
    read = coded_and_back(WireFormat(dtype, 4), values)
    assert not read[0, 4:8].isfinite().any()
    assert_same(read[0, :4], torch.ones(4))
    assert_same(read[0, 8:], torch.ones(4))


def test_scales_belong_to_rows() -> None:
    """Of the last dimension, unless that is short; int8 and gradients have blocks."""
    assert parameter_format(FP8, (64, 300)) == WireFormat(FP8, 300)
    assert parameter_format(FP8, (8, 64, 300)) == WireFormat(FP8, 300)
    assert parameter_format(FP8, (64, 16, 3, 3)) == WireFormat(FP8, 144)
    assert parameter_format(INT8, (64, 300)) == WireFormat(INT8, 128)
    assert gradient_format(FP8) == WireFormat(FP8, 128)


# ---- Gathers


class Recorded(nn.Module):
    """A linear layer that notes the weight it computed with."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.bias = nn.Parameter(torch.randn(rows))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone())
        assert_same(self.bias.detach().float(), self.exact_bias.to(self.bias.dtype).float())
        return x @ self.weight.t() + self.bias


def make(rows: int = 301, columns: int = 600) -> Recorded:
    torch.manual_seed(0)
    model = Recorded(rows, columns)
    model.exact_bias = model.bias.detach().clone()
    return model


def expected_weight(weight: Tensor, wire: torch.dtype, compute: torch.dtype, ranks: int) -> Tensor:
    """Each rank's rows, coded by themselves."""
    format = parameter_format(wire, tuple(weight.shape))
    chunk = -(-weight.shape[0] // ranks)
    padded = torch.cat([weight, weight.new_zeros(chunk * ranks - len(weight), weight.shape[1])])
    flat = padded.view(ranks, -1)
    coded = torch.empty(ranks, format.nbytes(flat.shape[1]), dtype=torch.uint8)
    format.encode(flat, coded)
    read = torch.empty(flat.shape, dtype=compute)
    format.decode(coded, read)
    return read.view(-1, weight.shape[1])[: len(weight)]


@distributed(2, 3, 4)
@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("compute", [torch.float32, BF16])
def test_every_rank_computes_with_the_decoded_rows(
    ranks: Ranks, wire: torch.dtype, compute: torch.dtype
) -> None:
    """The own rows too; rows that do not divide; small parameters exactly; shards untouched."""
    model = make()
    whole = model.weight.detach().clone()
    policy = MixedPrecisionPolicy(param_dtype=compute, all_gather_dtype=wire)
    fully_shard(model, mesh=ranks.mesh(), mp_policy=policy, reshard_after_forward=True)
    expected = expected_weight(whole, wire, compute, ranks.world_size)
    for _ in range(2):
        model(torch.randn(3, 600)).float().square().mean().backward()
    for seen in model.seen:
        assert_same(seen, expected)
    assert_same(model.weight.full_tensor(), whole)
    assert f"quantised: {wire}" in str(fsdp2.explain(model))
    assert_idle(model)


@distributed(4)
def test_a_rank_without_rows(ranks: Ranks) -> None:
    """Five long rows on four ranks: two, two, one and none."""
    model = make(rows=5, columns=80_000)
    whole = model.weight.detach().clone()
    policy = MixedPrecisionPolicy(all_gather_dtype=FP8)
    fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
    model(torch.randn(1, 80_000)).sum().backward()
    assert_same(model.seen[0], expected_weight(whole, FP8, torch.float32, 4))
    assert "quantised" in str(fsdp2.explain(model))
    assert_idle(model)


@distributed(2)
def test_bytes_on_the_wire(ranks: Ranks) -> None:
    """A quarter of float32, and a scale for each row of 600."""
    counted: list[int] = []

    class Counted(pairwise.PairwiseGather):
        def __init__(self, transport: Any, blocks: Any) -> None:
            counted.append(sum(block[0].numel() * block.itemsize for block in blocks))
            super().__init__(transport, blocks)

    before = pairwise.PairwiseGather
    pairwise.PairwiseGather = Counted  # type: ignore[misc]
    try:
        model = make(rows=302)
        policy = MixedPrecisionPolicy(all_gather_dtype=FP8)
        with by_messages():
            fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
        model(torch.randn(1, 600))
    finally:
        pairwise.PairwiseGather = before  # type: ignore[misc]
    packed, coded = sorted(counted)
    assert packed == 151 * 4, "the bias as it is"
    assert 151 * 600 + 151 * 4 <= coded <= 151 * 600 + 151 * 4 + 32
    model.reshard()


@distributed(4)
def test_kept_parts_are_decoded_already(ranks: Ranks) -> None:
    """Backward over two ranks gathers what forward computed with."""
    grads = []
    for options in ({"reshard_after_forward": 2}, {"reshard_after_forward": True}):
        model = nn.Sequential(make(), nn.Linear(301, 4))
        policy = MixedPrecisionPolicy(all_gather_dtype=INT8)
        fully_shard(model[0], mesh=ranks.mesh(), mp_policy=policy, **options)
        fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
        torch.manual_seed(ranks.rank)
        x = torch.randn(3, 600, requires_grad=True)
        model(x).square().mean().backward()
        grads.append([x.grad, *(p.grad.full_tensor() for p in model[0].parameters())])
        assert_idle(model)
    for one, other in zip(*grads):
        assert_same(one, other)


# ---- Gradients


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        found[name] = param.grad.full_tensor()
    return found


@distributed(2, 3, 4)
@pytest.mark.parametrize("wire", [INT8, FP8])
@pytest.mark.parametrize("compute", [torch.float32, BF16])
def test_gradients_are_off_by_half_a_step(
    ranks: Ranks, wire: torch.dtype, compute: torch.dtype
) -> None:
    """Of the largest of 128 neighbours, from each rank but the owner; the bias is exact."""
    found = []
    for exchange in (None, wire):
        model = make()
        policy = MixedPrecisionPolicy(compute, torch.float32, exchange_dtype=exchange)
        fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
        torch.manual_seed(ranks.rank)
        model(torch.randn(3, 600)).float().square().sum().backward()
        found.append(grads_of(model))
        assert ("exchanged quantised" in str(fsdp2.explain(model))) == (exchange is not None)
        assert_idle(model)
    exact, near = found
    assert_same(exact["bias"], near["bias"])
    largest = torch.tensor(0.0)
    torch.manual_seed(ranks.rank)
    model = make().to(compute)
    torch.manual_seed(ranks.rank)
    x = torch.randn(3, 600).to(compute)
    model.exact_bias = model.exact_bias.to(compute)
    model(x).float().square().sum().backward()
    largest = model.weight.grad.abs().max().float()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    others = (ranks.world_size - 1) / ranks.world_size
    step = largest / 127 / 2 if wire is INT8 else largest * relative_step(FP8)
    error = (exact["weight"] - near["weight"]).abs().max()
    assert 0 < error <= step * others * 1.01


@distributed(4)
def test_replicas_and_accumulation(ranks: Ranks) -> None:
    """HSDP adds the replicas' sums as they are; gradients kept back travel quantised too."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    found = []
    for exchange in (None, INT8):
        model = make()
        policy = MixedPrecisionPolicy(exchange_dtype=exchange)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        torch.manual_seed(ranks.rank)
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.randn(3, 600)).square().sum().backward()
        found.append(grads_of(model))
        assert_idle(model)
    exact, near = found
    size = exact["weight"].abs().max()
    error = (exact["weight"] - near["weight"]).abs().max()
    assert 0 < error < size / 50
    assert_same(exact["bias"], near["bias"])


@distributed(2)
def test_training_stays_close(ranks: Ranks) -> None:
    """Forty steps of a regression: both forms end within 2 % of the exact loss."""
    torch.manual_seed(1)
    teacher = nn.Linear(300, 301)
    losses = {}
    for name, policy in {
        "exact": MixedPrecisionPolicy(),
        "float8": MixedPrecisionPolicy(all_gather_dtype=FP8, exchange_dtype=INT8),
        "int8": MixedPrecisionPolicy(all_gather_dtype=INT8, exchange_dtype=INT8),
    }.items():
        torch.manual_seed(0)
        model = nn.Linear(300, 301)
        fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        torch.manual_seed(2 + ranks.rank)
        for _ in range(40):
            x = torch.randn(64, 300)
            loss = (model(x) - teacher(x).detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = loss.item()
        assert_idle(model)
    assert losses["exact"] < 0.2
    for name in ("float8", "int8"):
        assert abs(losses[name] / losses["exact"] - 1) < 0.02, losses


@distributed(1)
def test_one_rank_has_no_wire(ranks: Ranks) -> None:
    """Nothing travels, nothing is rounded."""
    model = make()
    whole = copy.deepcopy(model.weight.data)
    policy = MixedPrecisionPolicy(all_gather_dtype=FP8, exchange_dtype=INT8)
    fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
    model(torch.randn(1, 600)).sum().backward()
    assert_same(model.seen[0], whole)


@distributed(1)
@pytest.mark.parametrize("field", ["all_gather_dtype", "exchange_dtype"])
def test_other_dtypes_are_refused(ranks: Ranks, field: str) -> None:
    """With what can be asked for."""
    policy = MixedPrecisionPolicy(**{field: torch.float16})
    with pytest.raises(fsdp2.UsageError, match=f"{field} is one of torch.float8_e4m3fn"):
        fully_shard(make(), mesh=ranks.mesh(), mp_policy=policy)
