"""Small models, the reference for data-parallel training, and what holds after every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard, portion
from fsdp2.hooks import states_below
from fsdp2.pairwise import Pairwise
from fsdp2.param_group import GroupState


class Block(nn.Module):
    """Pre-norm and residual. A hidden size of 13 divides by no number of ranks in use here."""

    def __init__(self, dim: int = 8, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head: tokens in, logits out."""

    def __init__(self, vocab: int = 17, dim: int = 8, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard_blocks(model: Any, shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    """One group for each of ``model.blocks``, and one for the rest; ``shard`` may be PyTorch's."""
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def token_batches(world_size: int, steps: int, vocab: int = 17) -> list[list[Tensor]]:
    """For every step one batch of tokens for each rank, alike wherever it is called."""
    generator = torch.Generator().manual_seed(42)
    return [
        [torch.randint(0, vocab, (3, 5), generator=generator) for _ in range(world_size)]
        for _ in range(steps)
    ]


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def data_parallel(
    model: nn.Module,
    inputs: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Tensor] = next_token_loss,
) -> list[Tensor]:
    """What data parallelism means, in one process: ``.grad`` is the mean over ``inputs``.

    The gradients of the inputs, one for each rank, are added in rank order and then divided:
    what is computed like this is equal bit by bit. Adds to ``.grad``; returns the losses.
    """
    params = list(model.parameters())
    before = [param.grad for param in params]
    sums: list[Tensor | None] = [None] * len(params)
    losses = []
    for each in inputs:
        for param in params:
            param.grad = None
        loss = loss_of(model, each)
        loss.backward()
        losses.append(loss.detach())
        for i, param in enumerate(params):
            if param.grad is not None:
                sums[i] = param.grad if sums[i] is None else sums[i] + param.grad
    for param, total, old in zip(params, sums, before, strict=True):
        mean = None if total is None else total / len(inputs)
        param.grad = mean if old is None else old if mean is None else old + mean
    return losses


def whole(tensor: Tensor | None) -> Tensor | None:
    """A DTensor gathered, anything else itself; detached."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(found: Tensor | None, expected: Tensor | None, name: str = "") -> None:
    """Equal bit by bit, dtype included; NaN equals NaN. Either may be a DTensor or None."""
    torch.testing.assert_close(
        whole(found), whole(expected), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def assert_same_params(model: nn.Module, reference: nn.Module, **bound: float) -> None:
    """The same names, values and gradients: bit by bit, or within ``rtol`` and ``atol``."""
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    bound = bound or {"rtol": 0, "atol": 0}
    for name, param in found.items():
        for kind, ours, theirs in (
            ("value", param, expected[name]),
            ("gradient", param.grad, expected[name].grad),
        ):
            message = f"{kind} of {name}: "
            torch.testing.assert_close(
                whole(ours), whole(theirs), **bound, msg=lambda m, message=message: message + m
            )


@contextlib.contextmanager
def by_messages() -> Iterator[None]:
    """What is sharded inside sends messages on gloo, also where ranks could share memory."""
    choose = portion.choose_transport
    portion.choose_transport = lambda group, rank, device: Pairwise(group, rank)
    try:
        yield
    finally:
        portion.choose_transport = choose


def with_memory(tensor: Tensor) -> list[Tensor]:
    """What holds its numbers: itself, unless it is a subclass that wraps others."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names if getattr(tensor, name).ndim]


def assert_idle(model: nn.Module) -> None:
    """No step is under way: everything is sharded, freed and handed over."""
    states = states_below(model)
    assert states, "nothing here is sharded"
    for state in states:
        group = state.group
        assert group.state is GroupState.SHARDED, f"{group.name} is {group.state.value}"
        for param in group.params:
            for module, attribute, _ in param.places:
                registered = getattr(module, attribute)
                assert isinstance(registered, DTensor), f"{param.name} is shown full"
                assert registered is module._parameters[attribute]
            full = param.full
            if full is not None:
                full = full._local_tensor if isinstance(full, DTensor) else full
                assert full.grad is None, f"{param.name}: its full gradient was not taken"
                is_freed = all(
                    part.numel() == 0 or part.untyped_storage().nbytes() == 0
                    for part in with_memory(full)
                )
                assert is_freed or group.aliases_shards, f"{param.name}: full memory is held"
        if state.schedule is not None:
            assert state.schedule.phase.value == "idle", state.schedule.phase
