"""Mixed precision: the dtypes of computation, reduction, inputs, outputs, shards and gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    next_token_loss,
    shard_blocks,
    token_batches,
    whole,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

POLICIES = {
    "bf16_fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16_bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "fp16": MixedPrecisionPolicy(param_dtype=FP16),
    "fp16_fp32": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32),
    "fp32_bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "fp16_bf16": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=BF16),
    "nothing": MixedPrecisionPolicy(),
}
NARROWING = ("fp32_bf16", "fp16_bf16")
"""The reduce dtype cannot hold every gradient: they are rounded before they are added."""


# ---- Numbers


@distributed(2)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in NARROWING])
def test_training_equals_pytorchs_bit_by_bit(ranks: Ranks, policy: str) -> None:
    """Losses, gradients and parameters of 5 steps are those of PyTorch's FSDP2."""
    assert_equals_pytorchs(ranks, POLICIES[policy])


def assert_equals_pytorchs(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    plain = Net()
    ours = shard_blocks(copy.deepcopy(plain), mp_policy=policy)
    theirs = shard_blocks(plain, torch_fully_shard, mp_policy=policy)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for inputs in token_batches(2, 5):
        losses = [next_token_loss(model, inputs[ranks.rank]) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        assert_same(*losses, "loss")
        assert_same_params(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(ours, theirs)
    assert_idle(ours)


def cast_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in another dtype, as the full parameters of forward and backward are."""
    return copy.deepcopy(model).to(dtype)


@distributed(1, 2, 3)
@pytest.mark.parametrize("reduced", [FP32, BF16, None])
def test_gradients_are_summed_in_the_reduce_dtype(
    ranks: Ranks, reduced: torch.dtype | None
) -> None:
    """bf16 gradients are added in rank order in the reduce dtype, divided there, then stored.

    None means the gradients' own dtype.
    """
    plain = Net()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduced)
    model = shard_blocks(copy.deepcopy(plain), mp_policy=policy)
    dtype = reduced or BF16
    for inputs in token_batches(ranks.world_size, 2):
        gradients = []
        for tokens in inputs:
            replica = cast_copy(plain, BF16)
            expected = next_token_loss(replica, tokens)
            expected.backward()
            gradients.append({n: p.grad.to(dtype) for n, p in replica.named_parameters()})
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        for name, param in model.named_parameters():
            total = gradients[0][name].clone()
            for other in gradients[1:]:
                total.add_(other[name])
            assert_same(param.grad, total.div_(ranks.world_size).float(), name)
        model.zero_grad()
    assert_idle(model)


@distributed(2, 3)
def test_training_stays_near_fp32(ranks: Ranks) -> None:
    """With bf16 parameters and fp32 sums the losses stay within 2 % of an fp32 model's.

    A bf16 number has 8 bits: each of about ten operations in a row rounds by up to 0.4 %.
    """
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference), mp_policy=POLICIES["bf16_fp32"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    different = False
    for inputs in token_batches(ranks.world_size, 6):
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        losses = [next_token_loss(reference, tokens) for tokens in inputs]
        torch.stack(losses).mean().backward()
        torch.testing.assert_close(loss, losses[ranks.rank], rtol=0.02, atol=0)
        different |= loss.item() != losses[ranks.rank].item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert different, "nothing was computed in bf16"
    assert_idle(model)


class Ones(nn.Module):
    """A weight whose gradient is one everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@distributed(1, 2, 3)
@pytest.mark.parametrize(("reduced", "expected"), [(FP32, 300.0), (BF16, 256.0)])
def test_accumulation_in_the_reduce_dtype(
    ranks: Ranks, reduced: torch.dtype, expected: float
) -> None:
    """300 bf16 gradients of one, kept back and added in fp32, give 300; bf16 stops at 256."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduced)
    model = fully_shard(Ones(), mp_policy=policy)
    x = torch.ones(())
    model.set_requires_gradient_sync(False)
    for _ in range(299):
        model(x).backward()
        assert model.weight.grad is None
    model.set_requires_gradient_sync(True)
    model(x).backward()
    assert_same(model.weight.grad, torch.full((5, 3), expected))
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("policy", ["bf16_fp32", "bf16", "fp16_fp32", "nothing"])
def test_accumulation_equals_pytorchs_bit_by_bit(ranks: Ranks, policy: str) -> None:
    """Three batches without communication and one with it: PyTorch's numbers."""
    plain = Net()
    ours = shard_blocks(copy.deepcopy(plain), mp_policy=POLICIES[policy])
    theirs = shard_blocks(plain, torch_fully_shard, mp_policy=POLICIES[policy])
    batches = token_batches(2, 8)
    for step in range(2):
        for i, inputs in enumerate(batches[4 * step : 4 * step + 4]):
            for model in (ours, theirs):
                model.set_requires_gradient_sync(i == 3)
                next_token_loss(model, inputs[ranks.rank]).backward()
        assert_same_params(ours, theirs)
        for model in (ours, theirs):
            model.zero_grad()
    assert_idle(ours)


@distributed(2, 4)
def test_fp16_sums_do_not_overflow(ranks: Ranks) -> None:
    """Gradients of 40000 in fp16: their sum is beyond the range, their mean is not."""
    model = fully_shard(Ones(), mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
    model(torch.tensor(40000.0)).backward()
    expected = torch.tensor(40000.0, dtype=FP16).float()
    assert_same(model.weight.grad, expected.expand(5, 3).clone())
    assert_idle(model)


# ---- Dtypes


class Looks(nn.Module):
    """Remembers the dtypes of what forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, index: Tensor, *, scale: Tensor) -> Tensor:
        self.seen = {
            "x": x.dtype,
            "index": index.dtype,
            "scale": scale.dtype,
            "weight": self.linear.weight.dtype,
        }
        return self.linear(x.to(self.linear.weight.dtype))[index] * scale.to(x.dtype)


def looks_arguments() -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    return (torch.randn(3, 4), torch.tensor([0, 2])), {"scale": torch.ones(6)}


@distributed(1, 2)
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16, None])
def test_inputs_are_cast_if_asked(ranks: Ranks, dtype: torch.dtype | None, cast: bool) -> None:
    """Floating-point inputs, by position or name, get the parameters' dtype; integers do not."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=cast)
    model = fully_shard(Looks(), mp_policy=policy)
    args, kwargs = looks_arguments()
    model(*args, **kwargs).sum().backward()
    expected = dtype or FP32
    inputs = expected if cast else FP32
    assert model.seen == {
        "x": inputs,
        "index": torch.int64,
        "scale": inputs,
        "weight": expected,
    }
    assert args[0].dtype == FP32  # the caller's tensor is left alone
    assert_idle(model)


@distributed(1, 2)
@pytest.mark.parametrize("policy", POLICIES)
def test_shards_and_gradients_keep_the_storage_dtype(ranks: Ranks, policy: str) -> None:
    """Whatever is computed and reduced, parameters and gradients stay in fp32."""
    model = shard_blocks(Net(), mp_policy=POLICIES[policy])
    next_token_loss(model, token_batches(2, 1)[0][ranks.rank]).backward()
    for name, param in model.named_parameters():
        for tensor in (param, param.to_local(), param.grad, param.grad.to_local()):
            assert tensor.dtype == FP32, name
    chosen = POLICIES[policy]
    compute = chosen.param_dtype or FP32
    for group in fsdp2.explain(model).groups:
        for param in group.params:
            assert param.storage_dtype == str(FP32)
            assert param.compute_dtype == str(compute)
            assert param.reduce_dtype == str(chosen.reduce_dtype or compute)
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize(
    ("output", "expected"), [(None, BF16), (FP32, FP32), (torch.float64, torch.float64)]
)
def test_the_output_dtype(ranks: Ranks, output: torch.dtype | None, expected: torch.dtype) -> None:
    """`output_dtype` casts floating-point outputs and no others; without it they stay."""

    class Two(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.argmax(-1)

    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output)
    model = fully_shard(Two(4, 4), mp_policy=policy)
    y, index = model(torch.randn(3, 4))
    assert (y.dtype, index.dtype) == (expected, torch.int64)
    y.sum().backward()
    assert model.weight.grad.dtype == FP32
    assert_idle(model)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.linear(x)


@distributed(2)
def test_each_group_has_its_own_policy(ranks: Ranks) -> None:
    """A half-precision module in an fp32 model takes fp16 and gives fp32, as PyTorch's does."""
    plain = nn.Sequential(Inner(), Inner(), Inner())
    half = MixedPrecisionPolicy(param_dtype=FP16, output_dtype=FP32)
    pair = []
    for shard, model in ((fully_shard, copy.deepcopy(plain)), (torch_fully_shard, plain)):
        shard(model[1], mp_policy=half)
        shard(model)
        pair.append(model)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(ranks.rank))
    outputs = [model(x) for model in pair]
    for output in outputs:
        output.square().sum().backward()
    assert_same(*outputs, "output")
    assert_same_params(*pair)
    assert [inner.seen for inner in pair[0]] == [[FP32], [FP16], [FP32]]
    assert_idle(pair[0])


@distributed(1, 2)
def test_integer_parameters_are_not_cast(ranks: Ranks) -> None:
    """Integers beside bf16 parameters keep their dtype and every bit of their values."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))
            self.table = nn.Parameter(torch.arange(5) * 1_000_003, requires_grad=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.weight, self.table.clone()

    model = fully_shard(Table(), mp_policy=POLICIES["bf16_fp32"])
    y, table = model(torch.randn(2, 5))
    assert (y.dtype, table.dtype) == (BF16, torch.int64)
    assert_same(table, torch.arange(5) * 1_000_003)
    y.sum().backward()
    assert model.table.grad is None
    assert model.weight.grad is not None
    assert_idle(model)


# ---- Structured inputs and outputs


@dataclasses.dataclass
class Activations:
    hidden: Tensor
    mask: Tensor
    name: str = "activations"


@dataclasses.dataclass(frozen=True)
class Nested:
    inner: Activations
    extra: list[Tensor]


class Pair(NamedTuple):
    hidden: Tensor
    mask: Tensor


def hidden_of(value: Any) -> Tensor:
    if isinstance(value, Nested):
        return value.inner.hidden
    return value["hidden"] if isinstance(value, dict) else value.hidden


def mask_of(value: Any) -> Tensor:
    if isinstance(value, Nested):
        return value.inner.mask
    return value["mask"] if isinstance(value, dict) else value.mask


def build(kind: str, hidden: Tensor, mask: Tensor) -> Any:
    if kind == "dataclass":
        return Activations(hidden, mask, "mine")
    if kind == "nested":
        return Nested(Activations(hidden, mask, "mine"), [hidden * 2])
    if kind == "namedtuple":
        return Pair(hidden, mask)
    return (OrderedDict if kind == "ordered" else dict)(hidden=hidden, mask=mask)


class Structured(nn.Module):
    """Takes and returns one structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind
        self.took: tuple[type, torch.dtype, torch.dtype] | None = None

    def forward(self, value: Any) -> Any:
        self.took = (type(value), hidden_of(value).dtype, mask_of(value).dtype)
        hidden = torch.tanh(self.linear(hidden_of(value).to(self.linear.weight.dtype)))
        return build(self.kind, hidden, mask_of(value))


KINDS = ["dataclass", "nested", "namedtuple", "dict", "ordered"]


@distributed(2)
@pytest.mark.parametrize("kind", KINDS)
def test_structures_keep_their_types(ranks: Ranks, kind: str) -> None:
    """Floating-point tensors inside are cast on the way in and out; nothing else changes.

    Backward finds its way through them: gradients equal those of an unwrapped model in bf16.
    """
    plain = nn.Sequential(Structured(kind), Structured(kind))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    reference = cast_copy(plain, BF16)
    hidden, mask = torch.randn(3, 4), torch.tensor([True, False, True])
    given = build(kind, hidden, mask)
    output = model(given)
    expected_type = type(given)
    assert type(output) is expected_type
    for layer in model:
        assert layer.took == (expected_type, BF16, torch.bool)
    assert hidden_of(given) is hidden
    assert (hidden_of(output).dtype, mask_of(output).dtype) == (FP32, torch.bool)
    if kind == "nested":
        assert output.extra[0].dtype == FP32
        assert output.inner.name == "mine"
    expected = reference(build(kind, hidden.bfloat16(), mask))
    assert_same(hidden_of(output), hidden_of(expected).float())
    hidden_of(output).sum().backward()
    hidden_of(expected).float().sum().backward()
    for name, param in model.named_parameters():
        # All ranks have the same input: the mean of equal gradients is exact.
        assert_same(param.grad, reference.get_parameter(name).grad.float(), name)
    assert_idle(model)


# ---- Changing the model's dtype after fully_shard


@distributed(1, 2, 3)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_to_float64_after_sharding(ranks: Ranks, steps_before: int) -> None:
    """`model.to(torch.float64)`, before or after some steps: everything is float64 from then on."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    batches = token_batches(ranks.world_size, steps_before + 2)
    for i, inputs in enumerate(batches):
        if i == steps_before:
            model.to(torch.float64)
            reference.to(torch.float64)
        next_token_loss(model, inputs[ranks.rank]).backward()
        torch.stack([next_token_loss(reference, each) for each in inputs]).mean().backward()
        for each in (model, reference):
            with torch.no_grad():
                for param in each.parameters():
                    param.sub_(param.grad, alpha=0.1)
                    param.grad = None
    for name, param in model.named_parameters():
        assert param.dtype == param.to_local().dtype == torch.float64, name
    # Additions are in another order, before the cast and in the loss in fp32: a few roundings.
    assert_same_params(model, reference, rtol=1e-4, atol=1e-6)
    next_token_loss(model, batches[0][ranks.rank]).backward()
    for name, param in model.named_parameters():
        assert param.grad.dtype == param.grad.to_local().dtype == torch.float64, name
    assert whole(model.head.weight).dtype == torch.float64
    assert_idle(model)


@distributed(2)
def test_the_reduce_dtype_outlives_a_cast(ranks: Ranks) -> None:
    """A bf16 reduction asked for at first stays one when the model is cast to fp32 later."""
    plain = Net().to(BF16)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    ours = shard_blocks(copy.deepcopy(plain), mp_policy=policy)
    theirs = shard_blocks(plain, torch_fully_shard, mp_policy=policy)
    for model in (ours, theirs):
        model.to(FP32)
    for inputs in token_batches(2, 3):
        losses = [next_token_loss(model, inputs[ranks.rank]) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        assert_same(*losses, "loss")
        assert_same_params(ours, theirs)
        for model in (ours, theirs):
            model.zero_grad()
    assert all(param.dtype == FP32 for param in ours.parameters())
    assert {p.reduce_dtype for g in fsdp2.explain(ours).groups for p in g.params} == {str(BF16)}
    assert_idle(ours)


class Experts(nn.Module):
    """Two layers beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [expert(x) for expert in self.experts]


@distributed(2)
@pytest.mark.parametrize("policy", NARROWING)
def test_narrowing_reductions_equal_pytorchs_bit_by_bit(ranks: Ranks, policy: str) -> None:
    """Where the reduce dtype holds less than the gradients, numbers are PyTorch's too."""
    assert_equals_pytorchs(ranks, POLICIES[policy])


@distributed(2, timeout=30)
def test_ranks_that_keep_back_different_gradients(ranks: Ranks) -> None:
    """Without communication each rank has gradients in another group; the next step adds all."""
    plain = Experts()
    model = copy.deepcopy(plain)
    for expert in model.experts:
        fully_shard(expert, mp_policy=POLICIES["bf16_fp32"], reshard_after_forward=False)
    fully_shard(model, mp_policy=POLICIES["bf16_fp32"], reshard_after_forward=False)
    x = torch.randn(3, 4)
    model.set_requires_gradient_sync(False)
    model(x)[ranks.rank].sum().backward()
    model.set_requires_gradient_sync(True)
    torch.stack(model(x)).sum().backward()
    reference = cast_copy(plain, BF16)
    torch.stack(reference(x.bfloat16())).sum().backward()
    for name, param in model.named_parameters():
        # One rank has the gradient twice and the other once: their mean is one and a half.
        assert_same(param.grad, reference.get_parameter(name).grad.float() * 1.5, name)
    assert_idle(model)
