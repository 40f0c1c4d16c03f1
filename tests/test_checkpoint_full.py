"""A full state dict of rank 0, dealt to all ranks within one tensor of memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import CheckpointError
from harness import Ranks, distributed
from models import Net, assert_idle, assert_same, assert_same_params, shard_blocks
from test_checkpoint import Whole, net


class LiveBytes(TorchDispatchMode):
    """The most bytes of memory made inside that were alive at the same time.

    ``known`` are tensors that were there before; what operators return may be views of them.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.peak = 0
        self.tensors: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, list | tuple) else [result]:
            if isinstance(made, Tensor) and not isinstance(made, DTensor):
                self.tensors.append(weakref.ref(made))
        alive = [tensor for ref in self.tensors if (tensor := ref()) is not None]
        self.tensors = [weakref.ref(tensor) for tensor in alive]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        live = sum(nbytes for where, nbytes in storages.items() if where not in self.known)
        self.peak = max(self.peak, live)
        return result


class FromFile(Mapping[str, Tensor]):
    """A state dict whose tensors are made when they are asked for, as a file's are."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        return torch.full(self.shapes[name], float(len(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@distributed(2, 3)
@pytest.mark.parametrize("layers", [1, 12])
def test_holds_one_tensor(ranks: Ranks, layers: int) -> None:
    """Beside the shards no rank holds more bytes than the largest tensor, however many there are.

    Counted with every tensor that operators make, on each rank: rank 0 holds the largest tensor
    cut into rows, the others their own rows of it.
    """
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers)))
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    sharded = fully_shard(model, mesh=ranks.mesh())
    known = [*state.values(), *(param.to_local() for param in sharded.parameters())]
    with LiveBytes(known) as live:
        checkpoint.load_full(sharded, state if ranks.rank == 0 else None)
    largest, size = 128 * 128 * 4, ranks.world_size
    padding = 2048 + 128 * 4 * size  # rows that do not divide, and the agreement's numbers
    held = largest if ranks.rank == 0 else largest // size
    assert 0 < live.peak <= held + padding, live.peak
    for name, value in state.items():
        found = sharded.get_parameter(name).full_tensor()
        if ranks.rank == 0:
            assert torch.equal(found, value)
    assert_idle(sharded)


@distributed(1, 2, 3)
@pytest.mark.parametrize("on_meta", [False, True])
def test_everything_from_rank_0(ranks: Ranks, on_meta: bool) -> None:
    """Parameters, buffers and extra states of rank 0 reach all, onto the meta device too."""
    torch.manual_seed(1)
    full = Whole()
    full.note = "from rank 0"
    torch.manual_seed(2 + ranks.rank)
    with torch.device("meta" if on_meta else "cpu"):
        model = Whole()
    fully_shard(model, mesh=ranks.mesh())
    params = list(model.parameters())
    checkpoint.load_full(model, full.state_dict() if ranks.rank == 0 else None)
    assert model.note == "from rank 0"
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert model.head.weight is model.embedding.weight
    expected = full.state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            assert_same(value, expected[name], name)
    assert_idle(model)


@distributed(4)
@pytest.mark.parametrize("layout", ["hsdp", "tp"])
def test_two_mesh_dims(ranks: Ranks, layout: str) -> None:
    """Replicas, and what is split twice."""
    model = net(ranks, layout, seed=2)
    plain = net(ranks, "plain", seed=1)
    checkpoint.load_full(model, plain.state_dict() if ranks.rank == 0 else None)
    assert_same_params(model, plain)
    assert_idle(model)


@distributed(2)
def test_values_are_asked_for_one_at_a_time(ranks: Ranks) -> None:
    """A mapping that reads from a file, in another dtype than the model's, is enough."""
    model = shard_blocks(Net()).to(torch.bfloat16)
    shapes = {name: value.shape for name, value in Net().state_dict().items()}
    checkpoint.load_full(model, FromFile(shapes) if ranks.rank == 0 else None)
    for name, param in model.named_parameters():
        assert_same(param, torch.full(param.shape, float(len(name)), dtype=torch.bfloat16))
    assert_idle(model)


@distributed(2)
def test_differences_are_named(ranks: Ranks) -> None:
    """A name or shape that does not fit raises on all ranks, and nothing has changed."""
    model, plain = net(ranks, "2", seed=1), net(ranks, "plain", seed=1)

    def load(state: dict[str, Tensor], **options: Any) -> None:
        checkpoint.load_full(model, state if ranks.rank == 0 else None, **options)

    state = {name: value + 1 for name, value in plain.state_dict().items()}
    with pytest.raises(CheckpointError, match="the state dict lacks 'head.weight'"):
        load({name: value for name, value in state.items() if name != "head.weight"})
    with pytest.raises(CheckpointError, match="the model has no 'other'"):
        load({**state, "other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"'head.weight' is \(3,\) in the state dict"):
        load({**state, "head.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="the first rank has no state dict"):
        checkpoint.load_full(model, None)
    assert_same_params(model, plain)
    load({"head.weight": state["head.weight"], "other": torch.zeros(1)}, strict=False)
    assert_same(model.head.weight, state["head.weight"])
    assert_same(model.norm.weight, plain.norm.weight)
    assert_idle(model)
