"""`local_step`: the numbers, state and state dict of an ordinary step, on few flat tensors."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

import fsdp2
from fsdp2 import fully_shard, local_step
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

Make = Callable[[Iterable[Any]], Optimizer]

O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: O.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw foreach": lambda p: O.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: O.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw tensor lr": lambda p: O.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
    "adam maximize": lambda p: O.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True, foreach=True),
    "sgd": lambda p: O.SGD(p, lr=0.1, foreach=True),
    "sgd momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: O.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: O.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "adadelta": lambda p: O.Adadelta(p, lr=1.0),
    "adamax": lambda p: O.Adamax(p, lr=1e-2),
    "asgd": lambda p: O.ASGD(p, lr=1e-2),
    "nadam": lambda p: O.NAdam(p, lr=1e-2),
    "radam": lambda p: O.RAdam(p, lr=1e-2),
}
REFUSED_BY_DTENSOR: dict[str, Make] = {
    "sgd fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda p: O.Adagrad(p, lr=0.1, fused=True),
    "rprop": lambda p: O.Rprop(p, lr=1e-2),
}


def spans_of(optimizer: Optimizer) -> list[int]:
    """How many parameters each tensor stands for that the optimizer stepped on last."""
    return [len(span.members) for span in stepper_of(optimizer).spans]


def stepper_of(optimizer: Optimizer) -> Any:
    wrapped = optimizer.step.__func__.__wrapped__  # type: ignore[attr-defined]
    cells = [cell.cell_contents for cell in wrapped.__closure__]
    return next(each for each in cells if hasattr(each, "spans"))


def pair(make: Make, net: Callable[[], nn.Module] = Net) -> list[tuple[Any, Optimizer]]:
    """The same sharded model twice: stepped on as DTensors, and by ``local_step``."""
    first = net()
    models = [shard_blocks(copy.deepcopy(first)) for _ in range(2)]
    ordinary, local = (make(model.parameters()) for model in models)
    return [(models[0], ordinary), (models[1], local_step(local))]


def train(ranks: Ranks, pairs: list[tuple[Any, Optimizer]], steps: int, skip: int = 0) -> None:
    for batch in token_batches(ranks.world_size, skip + steps)[skip:]:
        for model, optimizer in pairs:
            next_token_loss(model, batch[ranks.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_same_state(found: Optimizer, expected: Optimizer) -> None:
    """Type, layout and every bit of all that the optimizers keep."""
    assert len(found.param_groups) == len(expected.param_groups)
    pairs = [
        pair
        for ours, theirs in zip(found.param_groups, expected.param_groups)
        for pair in zip(ours["params"], theirs["params"], strict=True)
    ]
    for mine, other in pairs:
        assert_same(mine, other)
        ours, theirs = found.state.get(mine, {}), expected.state.get(other, {})
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert type(ours[key]) is type(value), key
            if isinstance(value, DTensor):
                assert ours[key].placements == value.placements
                assert ours[key].to_local().shape == value.to_local().shape
            if isinstance(value, Tensor):
                assert_same(ours[key], value, key)
            else:
                assert ours[key] == value


@distributed(2, 4)
@pytest.mark.parametrize("name", ["adamw foreach", "sgd momentum"])
def test_same_bits_where_rows_divide(ranks: Ranks, name: str) -> None:
    """Parameters and state of 4 steps, on numbers of ranks that divide most rows."""
    (model, ordinary), (own, local) = pairs = pair(OPTIMIZERS[name])
    train(ranks, pairs, 4)
    assert_same_params(own, model)
    assert_same_state(local, ordinary)


@distributed(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_as_an_ordinary_step(ranks: Ranks, name: str) -> None:
    """Every per-element optimizer of torch.optim: parameters and state after 3 steps are equal
    bit by bit, with rows that do not divide and ranks without any."""
    (model, ordinary), (own, local) = pairs = pair(OPTIMIZERS[name])
    train(ranks, pairs, 3)
    assert_same_params(own, model)
    assert_same_state(local, ordinary)
    assert_idle(own)


@distributed(2, 4)
def test_one_tensor_for_the_small_parameters_of_a_group(ranks: Ranks) -> None:
    """AdamW steps on one tensor for each param group of the model, here three for 16
    parameters, and with weight decay for matrices only on two for each."""
    for count, groups in ((1, lambda m: m.parameters()), (2, decayed)):
        model = shard_blocks(Net())
        optimizer = local_step(O.AdamW(groups(model), lr=1e-2))
        train(ranks, [(model, optimizer)], 2)
        spans = spans_of(optimizer)
        assert sum(spans) == len(list(model.parameters())) == 16
        assert len(spans) == 3 * count


@distributed(3)
@pytest.mark.parametrize("name", REFUSED_BY_DTENSOR)
def test_optimizers_that_dtensor_refuses(ranks: Ranks, name: str) -> None:
    """Kernels without a sharding rule run on the shards as on plain tensors, bit by bit."""
    model = shard_blocks(Net())
    copies = [param.to_local().detach().clone() for param in model.parameters()]
    optimizer = local_step(REFUSED_BY_DTENSOR[name](model.parameters()))
    reference = REFUSED_BY_DTENSOR[name]([each.requires_grad_() for each in copies])
    for batch in token_batches(ranks.world_size, 4):
        next_token_loss(model, batch[ranks.rank]).backward()
        for own, param in zip(copies, model.parameters(), strict=True):
            own.grad = param.grad.to_local().clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    for own, param in zip(copies, model.parameters(), strict=True):
        assert_same(param.to_local(), own)
        for key, value in reference.state[own].items():
            found = optimizer.state[param][key]
            assert_same(found.to_local() if isinstance(found, DTensor) else found, value, key)


def in_groups(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


@distributed(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["adamw foreach", "sgd momentum", "rmsprop", "asgd"])
def test_same_bits_in_other_dtypes(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """Where a CPU's vector instructions round bfloat16 in another way, parameters stay alone."""
    (model, ordinary), (own, local) = pairs = pair(OPTIMIZERS[name], lambda: Net().to(dtype))
    train(ranks, pairs, 4)
    assert_same_params(own, model)
    assert_same_state(local, ordinary)


@distributed(3)
def test_padding_stays_zero(ranks: Ranks) -> None:
    """Between the shards of uneven parameters nothing is written, whatever the gradient buffer
    holds there."""
    model = shard_blocks(Net())
    optimizer = local_step(O.AdamW(model.parameters(), lr=1e-2, foreach=True))
    for batch in token_batches(3, 2):
        next_token_loss(model, batch[ranks.rank]).backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        kept = [grad.clone() for grad in grads]
        for grad in grads:
            torch.empty(0).set_(grad.untyped_storage()).fill_(torch.nan)
        for grad, values in zip(grads, kept, strict=True):
            grad.copy_(values)
        optimizer.step()
        optimizer.zero_grad()
    for block in (model, *model.blocks):
        group = fully_shard.state(block).group
        for portion in group.portions:
            kept = portion.shards.memory.clone()
            for section in portion.layout.sections:
                for slot in section.slots:
                    portion.shards.local(section, slot).data.zero_()
            assert not portion.shards.memory.any(), "padding was written to"
            portion.shards.memory.copy_(kept)
    assert any(span._padding for span in stepper_of(optimizer).spans) or ranks.rank < 2


@distributed(2)
def test_parameters_without_a_gradient_keep_their_own_count(ranks: Ranks) -> None:
    """A block that is frozen for two steps, or unused by all ranks, is skipped, keeps its step
    count, and is stepped on apart from then on."""
    make = OPTIMIZERS["adamw foreach"]
    (model, ordinary), (own, local) = pairs = pair(make)
    train(ranks, pairs, 2)
    for net, _ in pairs:
        net.blocks[0].up.requires_grad_(False)
    train(ranks, pairs, 2, skip=2)
    for net, _ in pairs:
        net.blocks[0].up.requires_grad_(True)
    train(ranks, pairs, 2, skip=4)
    assert_same_state(local, ordinary)
    steps = {float(entry["step"]) for entry in local.state.values()}
    assert steps == {4.0, 6.0}
    for net, optimizer in pairs:
        next_token_loss(net, token_batches(2, 1)[0][ranks.rank]).backward()
        net.blocks[1].down.weight.grad = None
        optimizer.step()
    assert_same_state(local, ordinary)
    assert_idle(own)


@distributed(2)
def test_state_dict_is_the_same_and_can_be_exchanged(ranks: Ranks) -> None:
    """A state dict moves from an ordinary step to a local one and back, through `torch.save` too,
    by torch's and by DCP's functions; training goes on bit by bit."""
    make = OPTIMIZERS["adamw"]
    (model, ordinary), (own, local) = pairs = pair(make)
    train(ranks, pairs, 2)
    ours, theirs = (get_optimizer_state_dict(m, o) for m, o in pairs)
    assert list(ours["state"]) == list(theirs["state"])
    saved = io.BytesIO()
    torch.save(local.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    ordinary.load_state_dict(loaded)
    local.load_state_dict(copy.deepcopy(ordinary.state_dict()))
    train(ranks, pairs, 2, skip=2)
    assert_same_state(local, ordinary)
    set_optimizer_state_dict(own, local, copy.deepcopy(get_optimizer_state_dict(model, ordinary)))
    train(ranks, pairs, 2, skip=4)
    assert_same_state(local, ordinary)
    # Saving a part of a span does not save the whole.
    exp_avg = next(iter(local.state.values()))["exp_avg"].to_local()
    assert exp_avg.untyped_storage().nbytes() == exp_avg.nbytes


@distributed(2)
def test_state_that_users_change(ranks: Ranks) -> None:
    """Values written into the state, in place or as new tensors, count in the next step."""
    (model, ordinary), (own, local) = pairs = pair(OPTIMIZERS["adamw foreach"])
    train(ranks, pairs, 2)
    for net, optimizer in pairs:
        entry = optimizer.state[net.head.weight]
        entry["exp_avg"].zero_()
        entry["step"].fill_(7.0)
        other = optimizer.state[net.norm.weight]
        other["exp_avg_sq"] = other["exp_avg_sq"] * 2
        optimizer.state[net.norm.bias] = {}
    train(ranks, pairs, 2, skip=2)
    assert_same_state(local, ordinary)
    assert float(local.state[own.head.weight]["step"]) == 9.0


@distributed(2)
def test_param_groups_hooks_schedulers_and_closures(ranks: Ranks) -> None:
    """Groups that are added later step too; users' hooks see the sharded parameters; schedulers
    and closures work as before."""
    pairs = []
    seen: list[bool] = []
    for is_local in (False, True):
        torch.manual_seed(1)
        model = shard_blocks(Net())
        params = list(model.parameters())
        optimizer = O.AdamW(params[:-2], lr=1e-2)
        if is_local:
            local_step(optimizer)
            for register in (
                optimizer.register_step_pre_hook,
                optimizer.register_step_post_hook,
            ):
                register(
                    lambda opt, *_, first=params[0]: seen.append(
                        first is opt.param_groups[0]["params"][0]
                    )
                )
        schedule = O.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step, batch in enumerate(token_batches(2, 4)):

            def closure(model: Any = model, opt: Optimizer = optimizer, batch: Any = batch) -> Any:
                opt.zero_grad()
                loss = next_token_loss(model, batch[ranks.rank])
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss is not None and loss.requires_grad
            schedule.step()
            if step == 1:
                optimizer.add_param_group({"params": params[-2:], "lr": 1e-3})
                schedule = O.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        pairs.append((model, optimizer))
    assert_same_state(pairs[1][1], pairs[0][1])
    assert seen == [True] * 8


@distributed(4)
def test_parameters_of_several_meshes(ranks: Ranks) -> None:
    """Experts on a mesh of their own, the rest on another, one more parameter not sharded at
    all: one optimizer, which PyTorch's foreach kernels refuse for DTensors."""
    grid = ranks.mesh(2, 2, names=("efsdp", "ep"))
    model = Net()
    ignored = model.norm.weight
    twin = copy.deepcopy(model)
    for net in (model, twin):
        fully_shard(net.blocks[0], mesh=grid["efsdp"])
        fully_shard(net.blocks[1], mesh=ranks.mesh())
        fully_shard(net, mesh=ranks.mesh(), ignored_params={net.norm.weight})
    assert model.norm.weight is ignored
    ordinary = O.AdamW(twin.parameters(), lr=1e-2, foreach=False)
    local = local_step(O.AdamW(model.parameters(), lr=1e-2, foreach=True))
    for batch in token_batches(4, 3):
        for net, optimizer in ((twin, ordinary), (model, local)):
            next_token_loss(net, batch[ranks.rank]).backward()
            # The slow path sums an ignored parameter's gradients by hand.
            dist.all_reduce(net.norm.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, twin)
    assert_same_state(local, ordinary)
    mixed = O.AdamW(twin.parameters(), lr=1e-2, foreach=True)
    next_token_loss(twin, token_batches(4, 1)[0][ranks.rank]).backward()
    with pytest.raises(Exception, match="mesh|DTensor"):
        mixed.step()
    fsdp2.clip_grad_norm_(twin.parameters(), 1.0)


class RowMomentum(Optimizer):
    """A second moment per row, and no more is needed of a parameter than the row."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["square"] = param.new_zeros(param.shape[:1])
                    state["average"] = torch.zeros_like(param)
                rows = param.grad.flatten(1) if param.ndim > 1 else param.grad[:, None]
                state["step"] += 1
                state["average"].lerp_(param.grad, 0.1)
                state["square"].lerp_(rows.square().mean(1), 0.1)
                scale = state["square"].sqrt().add(1e-8).view(-1, *[1] * (param.ndim - 1))
                param.sub_(group["lr"] * state["average"] / scale)


@distributed(2, 3, 4)
def test_row_wise_computation_needs_no_communication(ranks: Ranks) -> None:
    """An optimizer with a second moment per row steps on the shards as on the whole model, bit by
    bit: each rank owns complete rows. Its state is sharded by rows too."""
    reference = Net()
    model = shard_blocks(copy.deepcopy(reference))
    optimizer = local_step(RowMomentum(model.parameters()), per="row")
    expected = RowMomentum(reference.parameters())
    for batch in token_batches(ranks.world_size, 4):
        next_token_loss(model, batch[ranks.rank]).backward()
        data_parallel(reference, batch)
        with CommDebugMode() as communication:
            optimizer.step()
        assert communication.get_total_counts() == 0
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    assert_same_params(model, reference)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        entry = optimizer.state[ours]
        assert entry["square"].placements == (Shard(0),)
        assert_same(entry["square"], expected.state[theirs]["square"])
    assert_idle(model)


@distributed(2)
def test_mistakes_are_named(ranks: Ranks) -> None:
    """What cannot be done right raises, with the class or the parameter's name."""
    model = shard_blocks(Net())
    matrices = [p for p in model.blocks[0].parameters() if p.ndim == 2]
    with pytest.raises(TypeError, match="Muon may need whole parameters.*fsdp2.Muon"):
        local_step(O.Muon(matrices))
    with pytest.raises(fsdp2.UsageError, match="differentiable=True"):
        local_step(O.SGD(model.parameters(), lr=0.1, differentiable=True))
    late = O.AdamW(model.parameters())
    O.lr_scheduler.StepLR(late, 1)
    with pytest.raises(fsdp2.UsageError, match="right after the optimizer is made"):
        local_step(late)
    optimizer = local_step(O.AdamW(model.parameters()))
    with pytest.raises(fsdp2.UsageError, match="call local_step once"):
        local_step(optimizer)
    full = torch.zeros(17, 8)
    model.head.weight.grad = distribute_tensor(full, ranks.mesh(), [Replicate()])
    with pytest.raises(fsdp2.UsageError, match="gradient of parameter 'head.weight'"):
        optimizer.step()
    assert not optimizer.state
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = model.head.weight.full_tensor()
    optimizer.step()
    assert not torch.equal(model.head.weight.full_tensor(), before)
    columns = fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    rows = local_step(RowMomentum(columns.parameters()), per="row")
    columns(torch.ones(1, 8)).sum().backward()
    with pytest.raises(fsdp2.UsageError, match="'weight' has placements.*cut its rows"):
        rows.step()


@distributed(2)
def test_old_optimizers_are_still_named(ranks: Ranks) -> None:
    """One that was built before `fully_shard` fails in its first step, as without `local_step`."""
    model = Net()
    optimizer = local_step(O.AdamW(model.parameters()))
    shard_blocks(model)
    with pytest.raises(fsdp2.UsageError, match="was built before fully_shard"):
        optimizer.step()


@distributed(2)
def test_a_written_shard_is_seen_by_autograd(ranks: Ranks) -> None:
    """A backward through the values before a step is refused, as after an ordinary step."""
    for wrap in (lambda optimizer: optimizer, local_step):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = fully_shard(layers, reshard_after_forward=True)
        optimizer = wrap(O.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 4)
        model(x).sum().backward()
        loss = model(x).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@distributed(4)
def test_hybrid_sharding_and_16_bit_gradients(ranks: Ranks) -> None:
    """On a 2-D mesh, with gradients that were reduced in bfloat16: the same bits."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    net = Net()
    pairs = []
    for is_local in (False, True):
        model = shard_blocks(copy.deepcopy(net), mesh=mesh, mp_policy=policy)
        optimizer = O.AdamW(model.parameters(), lr=1e-2, foreach=True)
        pairs.append((model, local_step(optimizer) if is_local else optimizer))
    train(ranks, pairs, 3)
    assert_same_state(pairs[1][1], pairs[0][1])
    assert_idle(pairs[1][0])


@distributed(2)
def test_memory_stays_flat(ranks: Ranks) -> None:
    """50 steps keep nothing: no object more than 10 steps, and no gradient."""
    model = shard_blocks(Net())
    optimizer = local_step(O.AdamW(model.parameters(), lr=1e-3, foreach=True))
    counts = []
    for steps in (10, 50):
        for batch in token_batches(2, steps):
            next_token_loss(model, batch[ranks.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        del batch
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 5, counts
    assert all(span.tensor.grad is None for span in stepper_of(optimizer).spans)


@distributed(2)
@pytest.mark.parametrize("name", ["adamw foreach", "adamw fused"])
def test_gradient_scaler(ranks: Ranks, name: str) -> None:
    """A scaled step equals an ordinary scaled one, and one with an inf is skipped."""
    pairs = pair(OPTIMIZERS[name])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in pairs]
    for step, batch in enumerate(token_batches(2, 3)):
        for (model, optimizer), scaler in zip(pairs, scalers):
            scaler.scale(next_token_loss(model, batch[ranks.rank])).backward()
            if step == 1:
                model.head.weight.grad.to_local().fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    assert_same_state(pairs[1][1], pairs[0][1])
