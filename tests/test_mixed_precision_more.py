"""Mixed precision per parameter, per argument and per buffer; several dtypes; loss scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
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

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HYBRID = ("replicate", "shard")


def gathered_bytes(model: Any) -> int:
    """What this rank receives in all gathers of one forward of ``model``'s own group."""
    group = fully_shard.state(model).group  # type: ignore[attr-defined]
    nbytes = 0
    for portion in group.portions:
        for block in portion._filling.blocks:
            rows, numel = block.shape
            nbytes += (rows - 1) * numel * block.element_size()
    return nbytes


# ---- One dtype per parameter


def norms_in_fp32(name: str, param: nn.Parameter) -> torch.dtype | None:
    return None if "norm" in name or "gate" in name else BF16


class Gated(nn.Module):
    """A norm and a gate that want float32 beside two layers that do not."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, 5)
        self.up = nn.Linear(dim, 5)
        self.down = nn.Linear(5, dim)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.dtype for name, p in own_attributes(self)}
        self.seen["x"] = x.dtype
        y = self.norm(x.to(self.norm.weight.dtype))
        gate = torch.sigmoid(self.gate(y.to(self.gate.weight.dtype)))
        low = y.to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(low)) * gate.to(low.dtype))


def own_attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What forward sees under the parameters' names."""
    return [
        (f"{name}.{attribute}", getattr(child, attribute))
        for name, child in module.named_children()
        for attribute in ("weight", "bias")
    ]


@distributed(1, 2, 3)
@pytest.mark.parametrize("reduced", [FP32, None])
def test_a_callable_decides_for_each_parameter(ranks: Ranks, reduced: torch.dtype | None) -> None:
    """Forward sees the dtypes asked for; gradients are those of a model cast like this by hand."""
    plain = Gated()
    policy = MixedPrecisionPolicy(norms_in_fp32, reduced)
    model = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    inputs = list(torch.randn(ranks.world_size, 3, 8, generator=torch.Generator().manual_seed(1)))
    loss = model(inputs[ranks.rank]).float().square().sum()
    loss.backward()
    expected = {
        name: FP32 if "norm" in name or "gate" in name else BF16
        for name, _ in own_attributes(plain)
    }
    assert {n: d for n, d in model.seen.items() if n != "x"} == expected
    sums: dict[str, Tensor] = {}
    for rank, x in enumerate(inputs):
        cast = copy.deepcopy(plain)
        cast.up.to(BF16)
        cast.down.to(BF16)
        by_hand = cast(x.to(model.seen["x"])).float().square().sum()
        by_hand.backward()
        if rank == ranks.rank:
            assert_same(loss, by_hand)
        for name, param in cast.named_parameters():
            gradient = param.grad.to(reduced or param.dtype)
            sums[name] = sums[name].add_(gradient) if name in sums else gradient
    for name, param in model.named_parameters():
        assert param.dtype == FP32
        assert_same(param.grad, sums[name].div_(ranks.world_size).float(), name)
    assert_idle(model)


@distributed(2)
def test_inputs_take_the_dtype_of_most_elements(ranks: Ranks) -> None:
    """85 elements compute in bf16 and 61 in fp32; with more gates it is the other way round."""
    for dtype, fn in [
        (BF16, norms_in_fp32),
        (FP32, lambda name, p: BF16 if "norm" in name else None),
    ]:
        model = fully_shard(Gated(), mp_policy=MixedPrecisionPolicy(fn))
        model(torch.ones(2, 8))
        assert model.seen["x"] == dtype


@distributed(2)
def test_names_are_full_below_the_call(ranks: Ranks) -> None:
    """The callable gets every parameter, by its name from the module that is sharded."""
    names: dict[str, torch.Size] = {}

    def note(name: str, param: nn.Parameter) -> None:
        names[name] = param.shape

    model = nn.Sequential(Gated(), Gated())
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(note))
    assert names == {name: p.shape for name, p in Gated().named_parameters()}
    names.clear()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(note))
    assert names == {f"0.{name}": p.shape for name, p in Gated().named_parameters()}
    model(torch.ones(2, 8)).sum().backward()


@distributed(2, 3)
def test_bytes_of_each_dtype(ranks: Ranks) -> None:
    """One gather moves what is asked for and no more: two bytes where bf16, four where fp32."""
    model = fully_shard(Gated(600), mp_policy=MixedPrecisionPolicy(norms_in_fp32))
    with fsdp2.trace(model) as events:
        model(torch.ones(2, 600))
    assert sum(event.name == "gather" for event in events.events) == 1
    n = ranks.world_size
    numel = {
        BF16: [(5, 600), (5, 1), (600, 5), (600, 1)],
        FP32: [(5, 600), (5, 1), (600, 1), (600, 1)],
    }
    expected = sum(
        dtype.itemsize * -(-rows // n) * columns * (n - 1)
        for dtype, shapes in numel.items()
        for rows, columns in shapes
    )
    assert gathered_bytes(model) == expected


@distributed(4)
@pytest.mark.parametrize(
    "options", [{"mesh": (2, 2)}, {"mesh": (4, 1)}, {"reshard_after_forward": 2}], ids=str
)
def test_callables_compose(ranks: Ranks, options: Any) -> None:
    """With replicas and with parts: gradients as on one dimension, to rounding of the sums."""
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = ranks.mesh(*options["mesh"], names=HYBRID)
    plain = Gated()
    policy = MixedPrecisionPolicy(norms_in_fp32, FP32)
    pair = []
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))[ranks.rank]
    for further in ({}, options):
        model = nn.Sequential(copy.deepcopy(plain))
        fully_shard(model[0], mp_policy=policy, **further)
        fully_shard(model, mp_policy=policy, **further)
        model(x).float().square().sum().backward()
        assert_idle(model)
        pair.append(model)
    assert_same_params(*pair, rtol=1e-5, atol=1e-6)


@distributed(2)
def test_a_callable_that_answers_nonsense(ranks: Ranks) -> None:
    """What is no dtype is an error that names the parameter."""
    wrong: Any = lambda name, param: "bfloat16"  # noqa: E731
    with pytest.raises((TypeError, ValueError), match="weight"):
        fully_shard(nn.Linear(3, 3), mp_policy=MixedPrecisionPolicy(wrong))


# ---- Several storage dtypes in a group


class TwoDtypes(nn.Module):
    """A bf16 weight and an fp32 bias, both trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).to(BF16))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(BF16) @ self.weight.t()).float() + self.bias


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


@distributed(1, 2, 3)
def test_trainable_storage_dtypes_train_together(ranks: Ranks) -> None:
    """Each keeps its dtype for parameter and gradient; numbers of one process, bit by bit."""
    reference = TwoDtypes()
    model = fully_shard(copy.deepcopy(reference))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = list(torch.randn(ranks.world_size, 2, 3, generator=generator))
        loss = square_loss(model, inputs[ranks.rank])
        assert_same(loss, data_parallel(reference, inputs, square_loss)[ranks.rank])
        loss.backward()
        assert (model.weight.grad.dtype, model.bias.grad.dtype) == (BF16, FP32)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_storage_dtypes_with_replicas(ranks: Ranks, shape: tuple[int, int]) -> None:
    """Small whole numbers, exact in bf16: the mean over all ranks in both dtypes."""
    model = fully_shard(TwoDtypes(), mesh=ranks.mesh(*shape, names=HYBRID))
    model(torch.full((1, 3), float(ranks.rank + 1))).sum().backward()
    assert_same(model.weight.grad, torch.full((5, 3), 2.5, dtype=BF16))
    assert_same(model.bias.grad, torch.ones(5))
    assert_idle(model)


@distributed(2, 3)
@pytest.mark.parametrize("reduced", [FP32, None])
def test_storage_dtypes_under_one_policy(ranks: Ranks, reduced: torch.dtype | None) -> None:
    """A bf16 policy over bf16 and fp32 storage computes alike in both, and warns of the former."""
    model: Any = fully_shard(TwoDtypes(), mp_policy=MixedPrecisionPolicy(BF16, reduced))
    with pytest.warns(UserWarning, match="'weight' is stored in torch.bfloat16"):
        output = model(torch.ones(2, 3))
    output.sum().backward()
    assert (model.weight.dtype, model.bias.dtype) == (BF16, FP32)
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (BF16, FP32)
    assert_same(model.bias.grad, torch.full((5,), 2.0))
    assert_idle(model)


@distributed(2)
def test_integers_and_bools_are_left_alone(ranks: Ranks) -> None:
    """Parameters and buffers that are not floating point are neither cast nor reduced."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))
            self.index = nn.Parameter(torch.arange(3) * 1_000_003, requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
            self.register_buffer("count", torch.tensor([2**40 + 1]))
            self.seen: tuple[torch.dtype, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            self.seen = (self.weight.dtype, self.index.dtype, self.mask.dtype, self.count.dtype)
            assert self.index.tolist() == [0, 1_000_003, 2_000_006]
            assert self.mask.tolist() == [True, False, True]
            return (x @ self.weight.t())[..., self.mask.repeat(2)[:5]]

    policy = MixedPrecisionPolicy(BF16, FP32, buffer_dtype=BF16)
    model = fully_shard(Tables(), mp_policy=policy)
    model(torch.ones(2, 3)).sum().backward()
    assert model.seen == (BF16, torch.int64, torch.bool, torch.int64)
    assert model.count.item() == 2**40 + 1
    assert model.index.grad is None and model.mask.grad is None
    assert_idle(model)


# ---- Buffers and inputs


class Rotary(nn.Module):
    """A float32 table as a buffer, and another one as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0) / 7)
        self.register_buffer("cached", torch.arange(4.0) / 3, persistent=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, table: Tensor, *rest: Tensor, scale: Any = None) -> Tensor:
        self.seen = {
            "x": x.dtype,
            "table": table.dtype,
            "frequencies": self.frequencies.dtype,
            "cached": self.cached.dtype,
        }
        if rest:
            self.seen["rest"] = rest[0].dtype
        if scale is not None:
            self.seen["scale"] = scale["a"].dtype
        return self.linear(x) * table.to(x.dtype)


@distributed(2)
@pytest.mark.parametrize("buffer_dtype", [None, BF16, torch.float64])
def test_buffers_are_cast_only_on_request(ranks: Ranks, buffer_dtype: torch.dtype | None) -> None:
    """Persistent or not; without a request they keep every bit."""
    plain = Rotary()
    policy = MixedPrecisionPolicy(BF16, buffer_dtype=buffer_dtype)
    model = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    model(torch.ones(2, 4), torch.ones(4))
    expected = buffer_dtype or FP32
    assert model.seen["frequencies"] == model.seen["cached"] == expected
    assert_same(model.frequencies, plain.frequencies.to(expected))
    assert "cached" not in model.state_dict()


@distributed(2)
def test_buffers_of_inner_calls_are_theirs(ranks: Ranks) -> None:
    """``buffer_dtype`` reaches what the call shards, not what an earlier call did."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    fully_shard(model[0])
    fully_shard(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.float64))
    assert model[0].running_mean.dtype == FP32
    assert model[1].running_mean.dtype == torch.float64
    assert model[1].num_batches_tracked.dtype == torch.int64


@distributed(2)
def test_a_buffer_that_two_modules_share_stays_shared(ranks: Ranks) -> None:
    """One table for all layers is one table afterwards."""
    model = nn.Sequential(Rotary(), Rotary())
    model[1].frequencies = model[0].frequencies
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, buffer_dtype=BF16))
    assert model[0].frequencies.dtype == BF16
    assert model[1].frequencies is model[0].frequencies


@distributed(1, 2)
@pytest.mark.parametrize("uncast", [("table",), (1,), ("table", 0), (), ("rest",), (2,)])
@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_that_keep_their_dtype(
    ranks: Ranks, uncast: tuple[str | int, ...], by_name: bool
) -> None:
    """By name or by position, however the caller passes them; the rest is cast."""
    policy = MixedPrecisionPolicy(BF16, uncast_inputs=uncast)
    model = fully_shard(Rotary(), mp_policy=policy)
    x, table = torch.ones(2, 4), torch.ones(4)
    if 0 in uncast:
        x = x.to(BF16)
    if by_name:
        model(x=x, table=table)
    else:
        model(x, table, torch.ones(1))
        assert model.seen["rest"] == (FP32 if set(uncast) & {"rest", 2} else BF16)
    assert model.seen["table"] == (FP32 if set(uncast) & {"table", 1} else BF16)
    assert model.seen["x"] == BF16


@distributed(2)
def test_a_position_that_no_argument_has(ranks: Ranks) -> None:
    """Counting from the end is refused: it would cast the table after all."""
    with pytest.raises(ValueError, match="-1"):
        fully_shard(Rotary(), mp_policy=MixedPrecisionPolicy(BF16, uncast_inputs=(-1,)))


@distributed(2)
def test_structures_keep_their_dtype_as_a_whole(ranks: Ranks) -> None:
    """An uncast argument that is a dict is passed on as it is."""
    policy = MixedPrecisionPolicy(BF16, uncast_inputs=("scale",))
    model = fully_shard(Rotary(), mp_policy=policy)
    model(torch.ones(2, 4), torch.ones(4), scale={"a": torch.ones(1)})
    assert model.seen["scale"] == FP32
    assert model.seen["table"] == BF16


@distributed(2)
def test_a_table_keeps_every_bit_through_blocks(ranks: Ranks) -> None:
    """The root and each block have the policy: an fp32 table arrives inside unrounded.

    Gradients reach the table as well.
    """

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Rotary() for _ in range(2))

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, table)
            return x

    policy = MixedPrecisionPolicy(BF16, FP32, uncast_inputs=("table",))
    model = shard_blocks(Decoder(), mp_policy=policy)
    table = (torch.arange(4.0) / 7).requires_grad_()
    model(torch.ones(2, 4), table).float().sum().backward()
    assert [block.seen["table"] for block in model.blocks] == [FP32, FP32]
    assert [block.seen["x"] for block in model.blocks] == [BF16, BF16]
    assert table.grad is not None and table.grad.dtype == FP32
    assert_idle(model)


# ---- Batch norm


@distributed(1, 2)
@pytest.mark.parametrize("wraps", ["one group", "its own group"])
def test_batch_norm_under_bf16(ranks: Ranks, wraps: str) -> None:
    """Its weight stays fp32 beside its statistics; the layers around it compute in bf16.

    Numbers are those of a model cast like this by hand.
    """
    policy = MixedPrecisionPolicy(BF16, FP32)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model = copy.deepcopy(plain)
    if wraps == "its own group":
        fully_shard(model[1], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    x = torch.randn(8, 4)
    model(x).float().square().sum().backward()
    reference = copy.deepcopy(plain)
    reference[0].to(BF16)
    reference[2].to(BF16)
    reference(x.to(BF16)).float().square().sum().backward()
    assert_same(model[1].running_mean, reference[1].running_mean)
    for name, param in model.named_parameters():
        assert_same(param.grad, reference.get_parameter(name).grad.float(), name)
    model.eval()
    assert model(x).dtype == BF16
    assert_idle_after_eval(model)


def assert_idle_after_eval(model: Any) -> None:
    model.reshard()
    assert_idle(model)


@distributed(2)
def test_a_callable_may_cast_batch_norm(ranks: Ranks) -> None:
    """Who asks for it by name gets it."""
    model = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(lambda name, param: BF16))
    assert model(torch.ones(2, 6)).dtype == BF16


# ---- Outputs


@distributed(2)
@pytest.mark.parametrize("param_dtype", [BF16, norms_in_fp32])
def test_output_dtype(ranks: Ranks, param_dtype: Any) -> None:
    """``output_dtype`` holds for callables as well, and gradients flow through the cast."""
    policy = MixedPrecisionPolicy(param_dtype, FP32, output_dtype=torch.float64)
    model = fully_shard(Gated(), mp_policy=policy)
    y = model(torch.ones(2, 8))
    assert y.dtype == torch.float64
    y.sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert_idle(model)


# ---- Frozen bases


class Adapted(nn.Module):
    """A frozen bf16 base with fp32 adapters beside it."""

    def __init__(self, dim: int = 512, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim, bias=False).to(BF16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, dim) / 10)
        self.b = nn.Parameter(torch.randn(dim, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(self.a.dtype)
        return self.base(x.to(self.base.weight.dtype)).to(low.dtype) + low @ self.a.t() @ self.b.t()


@distributed(2, 4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
def test_a_frozen_base_costs_its_own_dtype(ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Stored in bf16, gathered in bf16 and never reduced; adapters are fp32 and reduced alone."""
    model = fully_shard(Adapted(), mp_policy=policy)
    n = ranks.world_size
    base, adapters = 512 * 512, 2 * 4 * 512
    [report] = fsdp2.explain(model).groups
    assert base * 2 // n + adapters * 4 // n <= report.shard_nbytes
    assert report.shard_nbytes <= base * 2 // n + adapters * 4 // n + 1024
    assert model.base.weight.to_local().dtype == BF16
    [x] = torch.randn(1, 3, 512)
    model(x).float().square().sum().backward()
    itemsize = 2 if policy.param_dtype else 4
    assert gathered_bytes(model) == (n - 1) * (base * 2 + adapters * itemsize) // n
    assert model.base.weight.grad is None
    assert model.a.grad.dtype == model.b.grad.dtype == FP32
    assert {p.name: p.reduce_dtype for p in fsdp2.explain(model).groups[0].params} == {
        "base.weight": None,
        "a": str(FP32),
        "b": str(FP32),
    }
    assert_idle(model)


@distributed(2, 3)
def test_adapters_train_like_one_process(ranks: Ranks) -> None:
    """Bit by bit; only adapters have optimizer state."""
    reference = nn.Sequential(Adapted(6, 2), nn.Tanh(), Adapted(6, 2))
    model = copy.deepcopy(reference)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = list(torch.randn(ranks.world_size, 2, 6, generator=generator))
        square_loss(model, inputs[ranks.rank]).backward()
        data_parallel(reference, inputs, square_loss)
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(optimizers[0].state) == 4
    assert_idle(model)


@distributed(2)
def test_small_updates_survive_in_fp32_storage(ranks: Ranks) -> None:
    """Computing in bf16 over fp32 shards keeps updates of 1e-4 that bf16 storage would lose."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(10):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight.full_tensor(), torch.full((4, 4), 1 - 1e-3))


# ---- Accumulation


@distributed(2, 3)
@pytest.mark.parametrize("reduced", [FP32, None])
def test_accumulation_per_dtype(ranks: Ranks, reduced: torch.dtype | None) -> None:
    """300 gradients of one, kept back: fp32 parts count to 300, bf16 sums only if reduced wider."""

    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.gate = (nn.Parameter(torch.zeros(5, 3)) for _ in range(2))

        def forward(self) -> Tensor:
            return self.low.sum().float() + self.gate.sum()

    model = fully_shard(Ones(), mp_policy=MixedPrecisionPolicy(norms_in_fp32, reduced))
    for i in range(300):
        model.set_requires_gradient_sync(i == 299)
        model().backward()
    assert_same(model.gate.grad, torch.full((5, 3), 300.0))
    assert_same(model.low.grad, torch.full((5, 3), 300.0 if reduced else 256.0))
    assert_idle(model)


@distributed(2)
def test_tokens_weigh_alike_with_a_sum(ranks: Ranks) -> None:
    """Ranks with unequal token counts: sums divided by all tokens are the mean over tokens."""
    reference = nn.Linear(4, 3)
    model = fully_shard(copy.deepcopy(reference))
    model.set_gradient_divide_factor(1.0)
    tokens = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    mine = tokens[:1] if ranks.rank == 0 else tokens[1:]
    count = torch.tensor(float(len(mine)))
    dist.all_reduce(count)
    (model(mine).square().sum() / count).backward()
    (reference(tokens).square().sum() / 5).backward()
    assert_same_params(model, reference, rtol=1e-5, atol=1e-6)


# ---- Loss scaling


def scaled_step(
    model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, x: Tensor
) -> None:
    scaler.scale(model(x).float().square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@distributed(1, 2, 3)
def test_all_ranks_skip_together(ranks: Ranks) -> None:
    """Infinity on one rank only: nobody steps, and every scale is halved; then all step alike."""
    check_scaler(ranks, {})


@distributed(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_all_ranks_skip_together_with_replicas(ranks: Ranks, shape: tuple[int, int]) -> None:
    """The same on two dimensions."""
    check_scaler(ranks, {"mesh": ranks.mesh(*shape, names=HYBRID)})


def check_scaler(ranks: Ranks, options: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(FP16, FP32)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model[0], mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    x = torch.ones(2, 4)
    for is_bad in (False, True, False):
        before = [p.full_tensor().clone() for p in model.parameters()]
        scale = scaler.get_scale()
        bad = x * float("inf") if is_bad and ranks.rank == ranks.world_size - 1 else x
        scaled_step(model, scaler, optimizer, bad)
        after = [p.full_tensor() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after)) == is_bad
        assert scaler.get_scale() == (scale / 2 if is_bad else scale)
        everyone = [torch.empty(1) for _ in range(ranks.world_size)]
        dist.all_gather(everyone, torch.tensor([scaler.get_scale()]))
        assert len({scale.item() for scale in everyone}) == 1
    assert_idle(model)


@distributed(3)
def test_infinity_in_rows_of_another_rank(ranks: Ranks) -> None:
    """Only rank 2 keeps the rows with infinity, and some ranks keep no row at all."""
    model = fully_shard(nn.Linear(4, 2, bias=False), mp_policy=MixedPrecisionPolicy(FP16, FP32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = model.weight.full_tensor().clone()
    y = model(torch.ones(1, 4)).float()
    factor = torch.tensor([1.0, float("inf")])
    scaler.scale((y * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_same(model.weight, before)


@distributed(2)
def test_scaled_training_equals_pytorchs(ranks: Ranks) -> None:
    """Parameters and scales of some steps, bit by bit."""
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    found = []
    for shard, policy in ((fully_shard, MixedPrecisionPolicy), (torch_fully_shard, TorchPolicy)):
        model = copy.deepcopy(plain)
        shard(model[0], mp_policy=policy(FP16, FP32))
        shard(model, mp_policy=policy(FP16, FP32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(12):
            x = torch.randn(2, 3, 4, generator=generator)[ranks.rank]
            scaled_step(model, scaler, optimizer, x)
        found.append((model, scaler.get_scale()))
    assert found[0][1] == found[1][1]
    assert found[0][1] < 2.0**24, "nothing was ever skipped"
    assert_same_params(found[0][0], found[1][0])


# ---- Whole models


@distributed(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_callable_that_says_one_dtype_is_that_dtype(ranks: Ranks, reshard: bool) -> None:
    """Losses and gradients of some steps equal those with the dtype itself, bit by bit."""
    plain = Net()
    everywhere: Callable[..., Any] = lambda name, param: BF16  # noqa: E731
    models = [
        shard_blocks(
            copy.deepcopy(plain),
            mp_policy=MixedPrecisionPolicy(dtype, FP32),
            reshard_after_forward=reshard,
        )
        for dtype in (BF16, everywhere)
    ]
    for inputs in token_batches(ranks.world_size, 3):
        losses = [next_token_loss(model, inputs[ranks.rank]) for model in models]
        assert_same(*losses)
        for loss in losses:
            loss.backward()
        assert_same_params(*models)
        with torch.no_grad():
            for model in models:
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
