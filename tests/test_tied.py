"""Tied weights that several calls reach are joined into the outermost owner."""

from __future__ import annotations

import copy

import pytest
import torch

import fsdp2
from fsdp2 import fully_shard
from harness import Ranks, distributed
from models import (
    Net,
    assert_idle,
    assert_same,
    assert_same_params,
    data_parallel,
    next_token_loss,
    token_batches,
)

CALLS = {
    "embedding": ["embedding"],
    "head": ["head"],
    "both": ["embedding", "head"],
    "head first": ["head", "embedding"],
}


@distributed(2, 3)
@pytest.mark.parametrize("calls", CALLS)
def test_joined_weights_train_like_one_process(ranks: Ranks, calls: str) -> None:
    """Whichever of the two modules has a call of its own, the root owns the weight they share."""
    model = Net(tied=True)
    reference = copy.deepcopy(model)
    for name in CALLS[calls]:
        fully_shard(model.get_submodule(name))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert model.head.weight is model.embedding.weight
    owner = fully_shard.state(model).group  # type: ignore[attr-defined]
    assert any(param.shard is model.head.weight for param in owner.params)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for batch in token_batches(ranks.world_size, 3):
        loss = next_token_loss(model, batch[ranks.rank])
        loss.backward()
        assert_same(loss, data_parallel(reference, batch)[ranks.rank])
        assert_same_params(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_idle(model)
    assert set(model.state_dict()) == set(reference.state_dict())


@distributed(2)
def test_explain_says_who_owns_them(ranks: Ranks) -> None:
    """One line, with both names."""
    model = Net(tied=True)
    for module in (model.embedding, model.head, model):
        fully_shard(module)
    text = str(fsdp2.explain(model))
    assert "tied: embedding.weight = head.weight, owned by this group" in text


@distributed(2)
def test_without_a_call_around_both_the_first_forward_raises(ranks: Ranks) -> None:
    """It names both places and the two remedies."""
    model = Net(tied=True)
    fully_shard(model.embedding)
    fully_shard(model.head)
    with pytest.raises(ValueError, match="'weight'.*already managed by another.*fully_shard"):
        model.head(torch.ones(1, 8))


@distributed(2)
def test_two_meshes_are_an_error_of_the_outer_call(ranks: Ranks) -> None:
    """What cannot be joined is refused when the call around both is made, naming both places."""
    model = Net(tied=True)
    fully_shard(model.head, mesh=ranks.mesh(2, names=("one",)))
    with pytest.raises(ValueError, match=r"already managed.*embedding\.weight.*one mesh"):
        fully_shard(model, mesh=ranks.mesh(2, 1, names=("replicate", "shard")))


@distributed(2)
def test_tied_after_sharding(ranks: Ranks) -> None:
    """Libraries tie again behind loading: the root owns the weight, accumulation included."""
    model = Net(tied=True)
    reference = copy.deepcopy(model)
    model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())
    fully_shard(model.embedding)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.head.weight = model.embedding.weight
    for batch in token_batches(2, 2):
        model.set_requires_gradient_sync(False)
        next_token_loss(model, batch[ranks.rank]).backward()
        model.set_requires_gradient_sync(True)
        next_token_loss(model, batch[ranks.rank]).backward()
        data_parallel(reference, batch)
        data_parallel(reference, batch)
        assert_same_params(model, reference, rtol=1e-5, atol=1e-6)
        assert model.head.weight is model.embedding.weight
        assert_idle(model)
