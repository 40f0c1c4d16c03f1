"""Activation checkpointing by every door of PyTorch: policies, segments, nesting, wrappers.

In each case the numbers are those of the same model unsharded, and a group is not gathered
again once its gradients are on their way.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fsdp2
from harness import Ranks, distributed, run
from models import Block, assert_idle, shard_blocks
from test_checkpointing import batches, gathers, loss_of, train_like

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])

NAMES = [f"blocks.{i}" for i in range(4)]


class Deep(nn.Module):
    """Four blocks behind a layer of the root's; ``through`` runs them."""

    def __init__(self, through: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.blocks, self.first(x))


def one_by_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def assert_finished_once(events: fsdp2.Trace) -> None:
    """No group is gathered again when its gradients are complete."""
    done: set[str] = set()
    for event in events.events:
        if event.name == "reduce":
            assert event.group not in done, f"{event.group} is reduced twice\n{events}"
            done.add(event.group)
        assert event.name != "gather" or event.group not in done, f"{event}, for what?\n{events}"


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def save_nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def selectively(policy: Any, size: int, early: bool, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Regions of ``size`` blocks, of which ``policy`` says what is saved."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    for start in range(0, len(blocks), size):
        region = partial(one_by_one, blocks[start : start + size])
        with set_checkpoint_early_stop(early):
            x = checkpoint(region, x, use_reentrant=False, context_fn=contexts)
    return x


@distributed(2)
@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("policy", [save_products, save_nothing])
def test_selective_policies(ranks: Ranks, policy: Any, size: int, early: bool) -> None:
    """A policy that saves some results costs the gathers of one that saves none, and no more."""
    reference = Deep(partial(selectively, policy, size, early))
    model = shard_blocks(copy.deepcopy(reference))
    events = train_like(reference, model, ranks, loss_of)
    counts = gathers(events)
    # The last of a region stays for its backward; what is before it has to be gathered again.
    assert [counts[name] for name in NAMES] == ([2] * 4 if size == 1 else [3, 2, 3, 2])
    assert_finished_once(events)
    assert_idle(model)


def in_segments(reentrant: bool, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=reentrant)


@distributed(2, 3)
@REENTRANT
def test_sequential(ranks: Ranks, reentrant: bool) -> None:
    """`checkpoint_sequential` over sharded blocks; it does not checkpoint its last segment."""
    reference = Deep(partial(in_segments, reentrant))
    model = shard_blocks(copy.deepcopy(reference))
    events = train_like(reference, model, ranks, loss_of)
    counts = gathers(events)
    assert [counts[name] for name in NAMES] == [3, 2, 2, 2], str(events)
    assert_finished_once(events)
    assert_idle(model)


def nested(reentrant: bool, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """All blocks in one region, two in each region inside it, one in each inside those."""
    if len(blocks) == 1:
        return checkpoint(blocks[0], x, use_reentrant=reentrant)
    half = len(blocks) // 2
    for part in blocks[:half], blocks[half:]:
        x = checkpoint(partial(nested, reentrant, part), x, use_reentrant=reentrant)
    return x


@distributed(2)
@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@REENTRANT
def test_nested(ranks: Ranks, reentrant: bool, early: bool) -> None:
    """Regions inside regions run a block once more each: no block is gathered for nothing."""
    # An outer region of the reentrant form runs its inner ones without gradients.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    reference = Deep(partial(nested, reentrant))
    model = shard_blocks(copy.deepcopy(reference))
    with set_checkpoint_early_stop(early):
        events = train_like(reference, model, ranks, loss_of)
    ran = [sum(e.name == "forward" and e.group == name for e in events.events) for name in NAMES]
    counts = [gathers(events)[name] for name in NAMES]
    assert all(gathered <= times + 1 for gathered, times in zip(counts, ran)), (counts, ran)
    assert counts[3] == 2, (counts, ran, str(events))
    assert_finished_once(events)
    assert_idle(model)


def wrapper(reentrant: bool) -> Callable[[nn.Module], nn.Module]:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    return partial(checkpoint_wrapper, checkpoint_impl=kind)


def wrap_blocks(model: nn.Module, reentrant: bool) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper(reentrant),
        check_fn=lambda module: isinstance(module, Block),
    )


@distributed(2)
@pytest.mark.parametrize("order", ["wrapped first", "sharded first", "inside"])
@REENTRANT
def test_wrappers(ranks: Ranks, reentrant: bool, order: str) -> None:
    """`apply_activation_checkpointing` before or after sharding, or on what a block holds."""
    reference = Deep(one_by_one)
    model = copy.deepcopy(reference)
    if order == "inside":
        for block in model.blocks:
            block.up = wrapper(reentrant)(block.up)
            block.down = wrapper(reentrant)(block.down)
    if order == "wrapped first":
        wrap_blocks(model, reentrant)
    model = shard_blocks(model)
    if order == "sharded first":
        wrap_blocks(model, reentrant)
    events = train_like(_renamed(reference, model), model, ranks, loss_of)
    counts = gathers(events)
    assert sorted(counts.values()) == [1, 2, 2, 2, 2], str(events)
    assert_finished_once(events)
    assert_idle(model)


def _renamed(reference: nn.Module, like: nn.Module) -> nn.Module:
    """The reference wrapped in the same places, so that its parameters have the same names."""
    wrapped = type(wrapper(False)(nn.Linear(1, 1)))
    places = [name for name, module in like.named_modules() if isinstance(module, wrapped)]
    for place in places:
        owner, _, name = place.rpartition(".")
        module = reference.get_submodule(place)
        setattr(reference.get_submodule(owner), name, checkpoint_wrapper(module))
    return reference


class TestSchedules(expecttest.TestCase):
    """What happens in backward, and that it is all that happens."""

    def test_region_around_two_groups(self) -> None:
        """Forward runs again up to what backward needs first, which stays."""
        self.assertExpectedInline(
            run(backward_of_two, 2, False)[0],
            """\
gather   blocks.3 (on demand)
backward blocks.3
gather   blocks.2 (ahead)
backward root
forward  blocks.2
free     blocks.2
forward  blocks.3
reduce   blocks.3
free     blocks.3
gather   blocks.2 (ahead)
gather   blocks.1 (ahead)
backward blocks.2
reduce   blocks.2
free     blocks.2
gather   blocks.0 (ahead)
backward blocks.1
forward  blocks.0
free     blocks.0
forward  blocks.1
reduce   blocks.1
free     blocks.1
gather   blocks.0 (ahead)
backward blocks.0
reduce   blocks.0
free     blocks.0
reduce   root
free     root""",
        )

    def test_reentrant_root(self) -> None:
        """The whole forward again: its last block stays for the backward that follows."""
        self.assertExpectedInline(
            run(backward_of_root, 2)[0],
            """\
gather   blocks.0 (ahead)
gather   blocks.1 (ahead)
forward  root
forward  blocks.0
free     blocks.0
gather   blocks.2 (ahead)
forward  blocks.1
free     blocks.1
gather   blocks.3 (ahead)
forward  blocks.2
free     blocks.2
forward  blocks.3
backward blocks.3
gather   blocks.2 (ahead)
backward root
reduce   blocks.3
free     blocks.3
gather   blocks.1 (ahead)
backward blocks.2
reduce   blocks.2
free     blocks.2
gather   blocks.0 (ahead)
backward blocks.1
reduce   blocks.1
free     blocks.1
backward blocks.0
reduce   blocks.0
free     blocks.0
reduce   root
free     root""",
        )


def second_step(model: Any, loss: Callable[[Any, Tensor], Tensor], x: Tensor) -> str:
    """The events of backward, with the order of the first step known."""
    loss(model, x).backward()
    with fsdp2.trace(model) as events:
        value = loss(model, x)
        events.clear()
        value.backward()
    assert_idle(model)
    shown = ("gather", "forward", "backward", "free", "reduce")
    return "\n".join(str(event) for event in events.events if event.name in shown)


def in_pairs(reentrant: bool, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for start in range(0, len(blocks), 2):
        region = partial(one_by_one, blocks[start : start + 2])
        x = checkpoint(region, x, use_reentrant=reentrant)
    return x


def backward_of_two(ranks: Ranks, reentrant: bool) -> str:
    model = shard_blocks(Deep(partial(in_pairs, reentrant)))
    return second_step(model, loss_of, batches(ranks.world_size)[0][ranks.rank])


def around_root(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return checkpoint(model, x, use_reentrant=True).square().mean()


def backward_of_root(ranks: Ranks) -> str:
    model = shard_blocks(Deep(one_by_one))
    return second_step(model, around_root, batches(ranks.world_size)[0][ranks.rank])
