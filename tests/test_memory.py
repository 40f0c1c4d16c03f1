"""What memory is held, measured on the storages themselves and not on the engine's own account."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import buffers, fully_shard
from harness import Ranks, distributed
from models import Block, assert_idle, shard_blocks


class Chain(nn.Module):
    """Five blocks and a projection that is the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def group_of(module: nn.Module):
    return fully_shard.state(module).group


def full_storages(module: nn.Module) -> set[torch.UntypedStorage]:
    """The storages behind the full parameters of one group."""
    return {param.full.untyped_storage() for param in group_of(module).params}


def full_nbytes(module: nn.Module) -> int:
    return sum({s._cdata: s.nbytes() for s in full_storages(module)}.values())


def shard_nbytes(*modules: nn.Module) -> int:
    """What the shard buffers of these groups hold on this rank."""
    portions = [portion for module in modules for portion in group_of(module).portions]
    return sum(portion.shards.memory.nbytes for portion in portions)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()


class Census:
    """Counts the full buffers that have memory, each time that one gets or loses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ignored: list[nn.Module]) -> None:
        self.held: set[int] = set()
        self.most = 0
        ignored_storages = {s._cdata for m in ignored for s in full_storages(m)}
        for name in ("allocate", "free"):
            monkeypatch.setattr(buffers.FullBuffer, name, self._around(name, ignored_storages))

    def _around(self, name: str, ignored: set[int]):
        original = getattr(buffers.FullBuffer, name)

        def changed(buffer: buffers.FullBuffer) -> None:
            original(buffer)
            storage = buffer._storage
            if storage._cdata in ignored:
                return
            (self.held.add if storage.nbytes() else self.held.discard)(storage._cdata)
            self.most = max(self.most, len(self.held))

        return changed


@distributed(2, 3)
def test_one_storage_for_each_group(ranks: Ranks) -> None:
    """All full parameters of a group lie in one storage, and groups share none."""
    model = shard_blocks(Chain())
    step(model)
    storages = [full_storages(module) for module in (model, *model.blocks)]
    assert [len({s._cdata for s in each}) for each in storages] == [1] * 6
    assert len({s._cdata for each in storages for s in each}) == 6
    assert_idle(model)


@distributed(2, 3)
def test_freed_after_forward_and_after_backward(ranks: Ranks) -> None:
    """Behind a block's forward and behind its backward its full storage has 0 bytes."""
    model = shard_blocks(Chain())
    step(model)
    sizes: list[tuple[str, int, int]] = []

    def behind(i: int, when: str):
        # Registered after fully_shard's own hook, so it runs behind it.
        def hook(*_: object) -> None:
            others = [b for k, b in enumerate(model.blocks) if (k < i) == (when == "forward")]
            freed = [b for b in others if b is not model.blocks[i]]
            sizes.append((when, full_nbytes(model.blocks[i]), sum(map(full_nbytes, freed))))

        return hook

    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(behind(i, "before"))
        block.register_forward_hook(behind(i, "forward"))
        if i:  # the first block's input needs no gradient
            block.register_full_backward_pre_hook(behind(i, "in backward"))
    step(model)
    forward = [(own, others) for when, own, others in sizes if when == "forward"]
    assert forward == [(0, 0)] * 5
    assert all(own > 0 for when, own, _ in sizes if when == "before")
    in_backward = [(own > 0, others) for when, own, others in sizes if when == "in backward"]
    assert in_backward == [(True, 0)] * 4, "those above are freed when a block's backward begins"
    assert [full_nbytes(module) for module in (model, *model.blocks)] == [0] * 6
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_limit_holds(ranks: Ranks, limit: int) -> None:
    """As many full buffers have memory at once as the limit says, the root's apart."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, limit)
    with torch.no_grad():
        model(torch.ones(2, 8))
    with pytest.MonkeyPatch.context() as monkeypatch:
        census = Census(monkeypatch, ignored=[model])
        for _ in range(3):
            step(model)
    assert census.most == min(limit, 5)
    assert not census.held
    assert_idle(model)


@distributed(2)
@pytest.mark.parametrize("limit", [1, 2])
def test_limit_holds_where_the_order_changes(ranks: Ranks, limit: int) -> None:
    """Wrong predictions do not add up: what was gathered in vain is freed before more arrives."""
    model = shard_blocks(Chain())
    fsdp2.set_inflight_limit(model, limit)
    blocks = list(model.blocks)
    step(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        census = Census(monkeypatch, ignored=[model])
        for shift in (2, 3, 1, 4):
            order = blocks[shift:] + blocks[:shift]
            model.blocks._modules.update({str(i): block for i, block in enumerate(order)})
            step(model)
    assert census.most == limit
    assert_idle(model)


@distributed(2)
def test_what_backward_reads_is_what_forward_saved(ranks: Ranks) -> None:
    """Between forward and backward a saved weight has no memory; in backward it has its values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    expected = model[1].weight.detach().clone()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    seen: list[bool] = []

    def unpack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage() in full_storages(model[1]):
            values = tensor if tensor.shape == expected.shape else tensor.view(expected.shape)
            seen.append(torch.equal(values, expected) or torch.equal(values, expected.t()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(torch.ones(2, 4)).sum()
    freed = [t for t in saved if t.untyped_storage() in full_storages(model[1])]
    assert freed
    assert all(t.untyped_storage().nbytes() == 0 for t in freed)
    loss.backward()
    assert seen
    assert all(seen)
    assert_idle(model)


@distributed(2, 3, 4)
@pytest.mark.parametrize("shape", [(12, 8), (13, 8), (2, 8), (24,)])
def test_shards_and_gradients_are_a_share(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """Each rank holds ceil(rows / N) rows of a parameter and of its gradient, plus alignment."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

        def forward(self) -> Tensor:
            return self.weight.sum()

    model = fully_shard(One())
    model().backward()
    rows = -(-shape[0] // ranks.world_size)
    padded = rows * torch.Size(shape[1:]).numel() * 4
    alignment = 64
    gradients = model.weight.grad.to_local().untyped_storage().nbytes()
    for tensor, nbytes in ((model.weight, shard_nbytes(model)), (model.weight.grad, gradients)):
        assert isinstance(tensor, DTensor)
        local = tensor.to_local()
        assert local.shape[0] == max(0, min(rows, shape[0] - rows * ranks.rank))
        # One count of ranks that had a gradient rides behind the gradients.
        assert padded <= nbytes <= padded + alignment + 4
    assert_idle(model)


@distributed(2, 3)
def test_share_of_a_whole_model(ranks: Ranks) -> None:
    """All shards together are 1/N of the model but for the padding that ``explain`` reports."""
    model = Chain()
    whole = sum(param.numel() * 4 for param in model.parameters())
    shard_blocks(model)
    step(model)
    report = fsdp2.explain(model)
    gradients = [param.grad.to_local() for param in model.parameters()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gradients}
    for nbytes in (shard_nbytes(model, *model.blocks), sum(storages.values())):
        padding = sum(group.padding_nbytes for group in report.groups)
        alignment = (16 + 4) * len(gradients) * ranks.world_size
        assert whole <= nbytes * ranks.world_size <= whole + padding + alignment
    assert_idle(model)


@distributed(1)
def test_one_rank_needs_no_second_copy(ranks: Ranks) -> None:
    """With one rank and no cast the full parameter is the shard: one storage, always allocated."""
    model = shard_blocks(Chain())
    step(model)
    for module in (model, *model.blocks):
        for param in group_of(module).params:
            local = param.shard.to_local()
            assert param.full.data_ptr() == local.data_ptr()
    assert_idle(model)


@distributed(2)
def test_nothing_outlives_the_model(ranks: Ranks) -> None:
    """A model that is deleted after a step gives all its storages back."""
    import gc
    import weakref

    model = shard_blocks(Chain())
    step(model)
    watched = [weakref.ref(p.full) for m in (model, *model.blocks) for p in group_of(m).params]
    assert_idle(model)
    del model
    gc.collect()
    assert not [reference for reference in watched if reference() is not None]
