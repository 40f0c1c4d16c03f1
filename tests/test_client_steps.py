"""The steps of torchtitan's and pytorch/examples' training scripts, with ours and PyTorch's.

What is compared is what those scripts do around the model: how they shard, load, prefetch, and
switch options between forward and backward.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from fsdp2 import FSDPModule
from fsdp2.interop import use_in_torch
from harness import Ranks, distributed
from models import Net, assert_idle, token_batches

STEPS = 3
CHUNKS = 5


class Decoder(Net):
    """`Net` whose head may be called apart, in the loss."""

    without_head = False

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.without_head:
            return super().forward(tokens)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def check_idle(model: nn.Module) -> None:
    if isinstance(model, FSDPModule):  # ours
        assert_idle(model)


def backward_in_chunks(model: Any, tokens: Tensor) -> float:
    """Forward and backward of the head for a part of the sequence at a time, then the rest's.

    The head's parameters stay full meanwhile and its gradients are reduced once.
    """
    hidden, head, total = model(tokens), model.head, 0.0
    chunks = [chunk.detach().contiguous().requires_grad_() for chunk in hidden.chunk(CHUNKS, 1)]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for i, (chunk, wanted) in enumerate(zip(chunks, tokens.chunk(CHUNKS, 1))):
        head.set_requires_gradient_sync(i == CHUNKS - 1, recurse=False)
        loss = loss_of(head(chunk), wanted)
        loss.backward()
        total += loss.item()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    hidden.backward(torch.cat([chunk.grad for chunk in chunks if chunk.grad is not None], 1))
    return total


def titan_steps(ranks: Ranks, tied: bool, chunked: bool, policy: Any) -> list[float]:
    torch.manual_seed(0)
    model: Any = Decoder(tied=tied)
    model.without_head = chunked
    options = {"mesh": ranks.mesh(), "mp_policy": policy}
    if tied:
        tail = [model.embedding, model.norm, model.head]
    else:
        fsdp.fully_shard(model.embedding, **options)
        tail = [model.norm, model.head]
    fsdp.fully_shard(tail, **options, reshard_after_forward=False)
    for block in model.blocks:
        fsdp.fully_shard(block, **options, reshard_after_forward=True)
    fsdp.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    seen = []
    for batch in token_batches(ranks.world_size, STEPS):
        tokens = batch[ranks.rank]
        if chunked:
            seen.append(backward_in_chunks(model, tokens))
        else:
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            seen.append(loss.item())
        seen.append(clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    check_idle(model)
    return seen


@distributed(2)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_torchtitan(ranks: Ranks, tied: bool, chunked: bool, dtype: torch.dtype | None) -> None:
    """torchtitan's groups, and its loss in chunks: losses and norms are PyTorch's, bit by bit."""
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    theirs = titan_steps(ranks, tied, chunked, policy)
    with use_in_torch():
        ours = titan_steps(ranks, tied, chunked, policy)
    assert ours == theirs


def load_by_hand(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Replace parameters on meta by shards of what is loaded."""
    described: dict[str, Any] = model.state_dict()
    shards = {
        name: nn.Parameter(
            distribute_tensor(tensor, described[name].device_mesh, described[name].placements)
        )
        for name, tensor in whole.items()
    }
    model.load_state_dict(shards, strict=False, assign=True)


def load_by_checkpoint(model: nn.Module, whole: dict[str, Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with warnings.catch_warnings():  # for parameters on meta, it looks for a device by guessing
        warnings.simplefilter("ignore", UserWarning)
        set_model_state_dict(model, whole, options=options)


def example_steps(ranks: Ranks, load: Any, policy: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    whole = Net(blocks=4).state_dict()
    with torch.device("meta"):
        model: Any = Net(blocks=4)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=ranks.mesh(), mp_policy=policy)
    fsdp.fully_shard(model, mesh=ranks.mesh(), mp_policy=policy)
    load(model, whole)
    assert isinstance(model, Net)
    assert isinstance(model, fsdp.FSDPModule)
    assert {param.placements for param in model.parameters()} == {(Shard(0),)}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[:i][-2:][::-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for batch in token_batches(ranks.world_size, STEPS):
        model.unshard()
        loss = model(batch[ranks.rank]).sum()
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    check_idle(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return seen, get_model_state_dict(model, options=options)


@distributed(2)
@pytest.mark.parametrize("load", [load_by_hand, load_by_checkpoint])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_pytorchs_example(ranks: Ranks, load: Any, dtype: torch.dtype | None) -> None:
    """Sharded on meta, loaded, prefetched as listed: losses and weights, bit by bit."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    theirs, their_weights = example_steps(ranks, load, policy)
    with use_in_torch():
        ours, our_weights = example_steps(ranks, load, policy)
    assert ours == theirs
    assert our_weights.keys() == their_weights.keys()
    assert all(torch.equal(our_weights[name], their_weights[name]) for name in our_weights)
