"""The snippets of docs/optimizers.md run as they are written."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdp2
from harness import Ranks, distributed
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches
from test_docs import snippets

SNIPPETS = snippets("docs/optimizers.md")


@distributed(2)
@pytest.mark.parametrize("index", range(3))
def test_snippets_of_the_page(ranks: Ranks, index: int) -> None:
    """Each snippet changes all parameters that it is about, and leaves the model idle."""
    model = shard_blocks(Net())
    before = [param.full_tensor().clone() for param in model.parameters()]
    scope = {
        "torch": torch,
        "fsdp2": fsdp2,
        "model": model,
        "batches": [batch[ranks.rank] for batch in token_batches(2, 2)],
        "loss_of": next_token_loss,
    }
    exec(SNIPPETS[index], scope)
    for param, old in zip(model.parameters(), before, strict=True):
        assert isinstance(param, DTensor)
        assert not torch.equal(param.full_tensor(), old)
    assert_idle(model)


def test_the_page_has_these_snippets() -> None:
    """None is left out above."""
    assert len(SNIPPETS) == 3
