"""Models built without memory hold what the plain constructor gives, bit by bit, on every mesh."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import fully_shard
from fsdp2.recording import _FILL_OF, _PIECE, draw_in_pieces
from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    assert_same,
    data_parallel,
    next_token_loss,
    shard_blocks,
    token_batches,
)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers that are saved or not, and plain tensor attributes, tied ones too."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in (module._parameters | module._buffers | module.__dict__).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}"] = value
    return found


def deferred(build: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with fsdp2.deferred_init():
        return build()


def plain(build: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build()


def assert_same_tensors(model: nn.Module, reference: nn.Module) -> None:
    expected = tensors_of(reference)
    found = tensors_of(model)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert_same(tensor, expected[name], name)
        assert tensor.device.type == "cpu", name
        assert tensor.requires_grad == expected[name].requires_grad, name


# ---- One process: what constructors do


class Attention(nn.Module):
    """What large models do: scaled draws, tables, and a rate for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)
        nn.init.normal_(self.out.weight, std=0.02)
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("mask", torch.triu(torch.ones(5, 5), 1).bool())
        self.table = torch.outer(torch.arange(6), inverse)
        self.pair = [self.table.cos(), {"sin": self.table.sin()}]


class Rates(nn.Module):
    """Values that constructors read."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.order = torch.randperm(7).tolist()
        self.weight = nn.Parameter(torch.randn(len(self.order), 3))
        if self.weight.sum() > 0 and bool((self.weight > -9).all()):
            self.weight.data.neg_()
        as_numpy = self.weight.detach().numpy()
        self.bias = nn.Parameter(torch.from_numpy(as_numpy.sum(0) * np.float32(2)))
        self.norm = self.weight.detach().norm().item()


class Dependent(nn.Module):
    """Weights that are made of others, in place, transposed, by parts and by data assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 9)
        self.b = nn.Linear(9, 7)
        self.b.weight.data = self.a.weight.data.t() * 2
        self.a.bias.data = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 9])
        self.c = nn.Parameter(self.a.weight[2:5].detach().clone())
        with torch.no_grad():
            self.a.weight[0].fill_(3)
            self.a.weight[self.a.weight > 0.2] = 0.5
            self.a.weight[[1, 3], 2] = 7
            self.a.bias.copy_(torch.arange(9))
            self.c.mul_(self.b.weight[:3, :7]).add_(1)


class Draws(nn.Module):
    """Every way to draw, seeds set on the way, and generators of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.empty(15).normal_())
        self.odd = nn.Parameter(torch.empty(17).normal_())
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(300, 7), std=0.02))
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 3)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(9, 4), 0.3))
        self.precise = nn.Parameter(torch.rand(33, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(33, dtype=torch.bfloat16))
        self.uneven = nn.Parameter(torch.empty(8, 6).t().normal_())
        self.given = nn.Parameter(torch.normal(torch.zeros(20), torch.ones(20)))
        self.coins = nn.Parameter(torch.empty(33).bernoulli_(0.3))
        self.waits = nn.Parameter(torch.empty(33).exponential_())
        self.kept = nn.Parameter(nn.functional.dropout(torch.ones(50)))
        self.picks = torch.multinomial(torch.ones(9), 4)
        self.like = torch.rand_like(self.small)
        self.whole = torch.randint(0, 9, (5,))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.forked = nn.Parameter(torch.randn(40))
        generator = torch.Generator().manual_seed(9)
        self.own = nn.Parameter(torch.empty(30).normal_(generator=generator))
        self.own_again = nn.Parameter(torch.randn(30, generator=generator))
        self.last = nn.Parameter(torch.randn(3))


class Library(nn.Module):
    """Modules of PyTorch, copies among them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn = nn.LSTM(4, 5, num_layers=2)
        self.embedding = nn.Embedding(11, 5, padding_idx=2)
        self.copied = copy.deepcopy(self.embedding)
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU())
        self.conv.apply(reset)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Moved(nn.Module):
    """Devices asked for by name and by example, and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4, device=torch.device("cpu"))
        self.b = nn.Parameter(torch.ones(4, device=self.a.weight.device))
        assert self.a.weight.device.type == "cpu" and not self.a.weight.is_meta
        self.a.weight.data.cpu().mul_(2)
        self.a.weight.data.to("cpu").add_(self.b.to(self.a.weight).sum())
        self.c = nn.Linear(3, 4).to(torch.bfloat16).to("cpu", torch.float32)
        self.d = nn.Parameter(torch.tensor([1, 2]).type_as(self.b) * self.b[:2].detach())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.inner[1].weight = self.inner[0].weight
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)


CONSTRUCTORS = [Attention, Rates, Dependent, Draws, Library, Moved, Tied]


@pytest.mark.parametrize("build", CONSTRUCTORS)
def test_plain(build: type[nn.Module]) -> None:
    """Unsharded: the plain constructor's tensors, types, ties and generator state."""
    reference = plain(build)
    state = torch.get_rng_state()
    model = deferred(build)
    assert_same(torch.get_rng_state(), state)
    assert all(param.device.type == "meta" for param in model.parameters())
    assert fsdp2.materialize(model) is model
    assert_same(torch.get_rng_state(), state)
    assert_same_tensors(model, reference)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]


def test_nested_attributes() -> None:
    """Tensors in lists and dicts of a module, and what was read, are the plain constructor's."""
    model, reference = fsdp2.materialize(deferred(Attention)), plain(Attention)
    assert_same(model.pair[0], reference.pair[0])
    assert_same(model.pair[1]["sin"], reference.pair[1]["sin"])
    model, reference = deferred(Rates), plain(Rates)
    assert (model.order, model.norm) == (reference.order, reference.norm)
    assert [layer.p for layer in model.layers] == [layer.p for layer in reference.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", dict.fromkeys(_FILL_OF.values()))
def test_pieces_leave_the_same_state(fill: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Drawing in pieces advances the generator as drawing at once does, at every odd size."""
    sizes = [0, 1, 15, 16, 17, 31, *(_PIECE + d for d in (-1, 0, 1, 15, 16, 17)), 2 * _PIECE + 3]
    for size in sizes:
        torch.manual_seed(size)
        fill(torch.empty(size, dtype=dtype))
        expected = torch.get_rng_state()
        torch.manual_seed(size)
        draw_in_pieces(fill, size, dtype, None)
        assert_same(torch.get_rng_state(), expected, f"{size}")


def test_weights_drawn_again_are_drawn_once() -> None:
    """Of several fills of one parameter only the last is replayed."""
    model = deferred(lambda: nn.Linear(4, 4).apply(lambda m: nn.init.normal_(m.weight)))
    entry = fsdp2.deferred.recorded_in(model)["weight"].value.cell.last
    assert "normal_" in str(entry.op) and not entry.before


def test_casts_before_materialize_count() -> None:
    """`bfloat16()` behind `deferred_init` gives what it gives behind the constructor."""
    model = fsdp2.materialize(deferred(Attention).bfloat16())
    reference = plain(Attention).bfloat16()
    for name, value in reference.state_dict().items():
        assert_same(model.state_dict()[name], value, name)
    assert_same(model.inverse, reference.inverse)


def test_real_parameters_stay() -> None:
    """Weights from outside, loaded or of a finished module, keep their values."""
    weight, inner = torch.randn(5, 3), nn.Linear(3, 3)
    expected = copy.deepcopy(inner)

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False), inner)

    model = fsdp2.materialize(deferred(build))
    assert_same(model[0].weight, weight)
    assert_same(model[1].weight, expected.weight)


def test_uninitialised_are_named() -> None:
    """What a constructor leaves uninitialised is zero, with a warning that names it."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lost = nn.Parameter(torch.empty(3))

    with pytest.warns(UserWarning, match=r"\['0.lost'\] uninitialised"):
        model = fsdp2.materialize(deferred(lambda: nn.Sequential(Bare())))
    assert_same(model[0].lost, torch.zeros(3))


# ---- What is refused, by name


class OnDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="mps"))


class Address(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.address = torch.ones(3).data_ptr()


class Pickled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.saved = pickle.dumps(torch.ones(3))


class Placeholder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = torch.ones(3) + torch.ones(3, device="meta")


class ThroughNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.ones(3).numpy()[0] = 2


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (OnDevice, fsdp2.UsageError, r"aten.ones.default in OnDevice, .*asks for device mps"),
        (Address, fsdp2.UsageError, r"data_ptr in Address, .*needs the memory"),
        (Pickled, fsdp2.UsageError, r"in Pickled, .*Cannot copy out of meta"),
        (Placeholder, fsdp2.UsageError, r"aten.add.Tensor in Placeholder, .*not made in here"),
        (ThroughNumpy, ValueError, "read-only"),
    ],
)
def test_refused(build: type[nn.Module], error: type[Exception], message: str) -> None:
    """What cannot be recorded names the operator, the module and the line."""
    with pytest.raises(error, match=message):
        deferred(build)
    assert plain(lambda: nn.Linear(2, 2)).weight.device.type == "cpu"  # all modes are left


def test_misuse() -> None:
    """Entered twice; changed, or reshaped, in between; a constant that was written to."""
    with (
        pytest.raises(fsdp2.UsageError, match="active already"),
        fsdp2.deferred_init(),
        fsdp2.deferred_init(),
    ):
        pass
    model = deferred(lambda: nn.Linear(3, 3))
    nn.init.zeros_(model.weight)
    with pytest.raises(fsdp2.UsageError, match="'weight' was written to after deferred_init"):
        fsdp2.materialize(model)
    large = torch.ones(1 << 15)
    model = deferred(lambda: nn.ParameterList([nn.Parameter(torch.zeros(1 << 15).add_(large))]))
    large.zero_()
    with pytest.raises(fsdp2.UsageError, match=r"shape \(32768,\).*was changed afterwards"):
        fsdp2.materialize(model)


# ---- Sharded


def net() -> Net:
    return Net(tied=True)


@distributed(1, 2, 3, 4)
def test_sharded(ranks: Ranks) -> None:
    """Every constructor, on every number of ranks, whatever divides."""
    for build in (net, *CONSTRUCTORS):
        model = deferred(build)
        for child in model.children():
            if not isinstance(child, (nn.ModuleList, nn.Dropout)):
                fully_shard(child)
        fully_shard(model)
        assert all(param.device.type == "meta" for param in model.parameters())
        fsdp2.materialize(model)
        assert_same_tensors(model, plain(build))
        assert_idle(model)


@distributed(4)
def test_replicas(ranks: Ranks) -> None:
    """A replicate and a shard dimension: all replicas have the rows."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    model = fsdp2.materialize(shard_blocks(deferred(net), mesh=mesh))
    assert_same_tensors(model, plain(net))
    assert_idle(model)


def tall() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6))
    nn.init.trunc_normal_(model[1].weight)
    return model


@distributed(4)
@pytest.mark.parametrize("is_sharded", [True, False])
def test_tensor_parallel(ranks: Ranks, is_sharded: bool) -> None:
    """Laid out by `parallelize_module` without memory, sharded or not: all rows are right."""
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    model = deferred(tall)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if is_sharded:
        fully_shard(model, mesh=mesh["dp"])
    fsdp2.materialize(model)
    assert isinstance(model[1].weight, DTensor)
    assert_same_tensors(model, plain(tall))


@distributed(2)
def test_split_along_other_dimensions(ranks: Ranks) -> None:
    """`shard_placement_fn` is followed."""
    model = deferred(tall)
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fsdp2.materialize(model)
    assert model[0].weight.to_local().shape == (10, 3)
    assert_same_tensors(model, plain(tall))


@distributed(2, 3)
def test_trains(ranks: Ranks) -> None:
    """Three steps of AdamW, as the unsharded model takes them."""
    model = fsdp2.materialize(shard_blocks(deferred(net)))
    reference = plain(net)
    ours = torch.optim.AdamW(model.parameters(), foreach=False)
    theirs = torch.optim.AdamW(reference.parameters(), foreach=False)
    for batch in token_batches(ranks.world_size, 3):
        next_token_loss(model, batch[ranks.rank]).backward()
        data_parallel(reference, batch)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].full_tensor(), param)
    assert_idle(model)


@distributed(2)
def test_casts_and_tags(ranks: Ranks) -> None:
    """Casts behind `fully_shard` count, and what users have put on a parameter stays on it."""
    model = deferred(net)
    model.norm.weight.decays = False
    fsdp2.materialize(shard_blocks(model))
    assert model.norm.weight.decays is False
    model = fsdp2.materialize(shard_blocks(deferred(net)).bfloat16())
    assert_same_tensors(model, plain(net).bfloat16())


@distributed(2)
def test_different_seeds_are_refused(ranks: Ranks) -> None:
    """Ranks that were built under different seeds would keep rows of different models."""
    model = shard_blocks(deferred(net, seed=ranks.rank))
    with pytest.raises(fsdp2.UsageError, match="different states of the default generator"):
        fsdp2.materialize(model)


@distributed(2)
def test_ignored_parameters(ranks: Ranks) -> None:
    """What the call leaves alone is filled whole."""
    model = deferred(tall)
    fully_shard(model, ignored_params={model[0].weight})
    fsdp2.materialize(model)
    assert not isinstance(model[0].weight, DTensor)
    assert_same_tensors(model, plain(tall))


@distributed(2)
def test_written_to_as_shards_without_memory(ranks: Ranks) -> None:
    """Values given to a shard before it has memory are lost, and this is said."""
    model = fully_shard(deferred(tall))
    nn.init.ones_(model[2].weight)
    with pytest.raises(fsdp2.UsageError, match="'2.weight' was written to"):
        fsdp2.materialize(model)


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))


@distributed(2)
def test_memory_is_shards_and_one_parameter(ranks: Ranks) -> None:
    """Beside the shards never more than one group has memory, counted in live storages."""
    model = deferred(wide)
    gc.collect()
    assert live_nbytes() < 1 << 16
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    peak = 0
    original = torch.Tensor.copy_

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal peak
        peak = max(peak, live_nbytes())
        return original(self, *args, **kwargs)

    torch.Tensor.copy_ = counted  # type: ignore[method-assign]
    try:
        fsdp2.materialize(model)
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]
    group = 512 * 512 * 4
    shards = live_nbytes()
    assert 4 * group <= shards < 4.1 * group
    assert shards < peak <= shards + 1.1 * group


def live_nbytes() -> int:
    """Bytes of the large tensors that are alive on the CPU, each storage once."""
    storages = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for nbytes in storages.values() if nbytes > 1 << 14)
