"""`use_in_torch`: where it puts our functions, and that it leaves everything as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fsdp2
from fsdp2.interop import use_in_torch
from harness import Ranks, distributed
from models import assert_idle

NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
THEIRS = {name: getattr(torch_fsdp, name) for name in NAMES}
"""In a dict, since what a module has under a name of its own is exchanged."""

CLIENT = """
import torch.distributed.fsdp
from torch.distributed._composable.fsdp import FSDPModule, fully_shard as shard
from torch.distributed.fsdp import MixedPrecisionPolicy, UnshardHandle
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import fully_shard as private
from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard as inner
from fsdp2 import fully_shard as ours
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module that takes what it needs from PyTorch, as libraries do."""

    def run(name: str) -> ModuleType:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(CLIENT, vars(module))
        return module

    return run


def bindings() -> dict[tuple[str, str], str]:
    """Every name in a loaded module that is bound to one of PyTorch's functions."""
    known = {id(function): name for name, function in THEIRS.items()}
    return {
        (place, name): known[id(value)]
        for place, module in sys.modules.items()
        if isinstance(module, ModuleType)
        for name, value in vars(module).items()
        if id(value) in known
    }


def is_theirs(module: ModuleType) -> bool:
    """Whether all functions of the client are PyTorch's; either all or none are."""
    names = ("shard", "fully_shard", "private", "inner")
    found = {getattr(module, name) is THEIRS["fully_shard"] for name in names}
    found.add(torch_fsdp.fully_shard is THEIRS["fully_shard"])
    name = "register_fsdp_forward_method"
    found.add(getattr(module, name) is THEIRS[name])
    (answer,) = found
    return answer


def test_context_exchanges_and_restores_exactly(load: Callable[[str], ModuleType]) -> None:
    """Every name that was PyTorch's is ours in the block and PyTorch's behind it, in modules
    that were loaded before and in modules that were loaded inside."""
    early = load("early_client")
    before = bindings()
    with use_in_torch():
        assert bindings() == {}
        late = load("late_client")
        assert not is_theirs(early)
        assert not is_theirs(late)
    after = bindings()
    assert {place: name for place, name in after.items() if place[0] != "late_client"} == before
    assert is_theirs(early)
    assert is_theirs(late)


def test_types_stay_and_so_does_what_is_ours(load: Callable[[str], ModuleType]) -> None:
    """Clients test with PyTorch's types; who imports from fsdp2 has fsdp2's all the time."""
    types = [torch_fsdp.FSDPModule, torch_fsdp.UnshardHandle, torch_fsdp.MixedPrecisionPolicy]
    with use_in_torch():
        client = load("client")
        assert [client.FSDPModule, client.UnshardHandle, client.MixedPrecisionPolicy] == types
        assert client.ours is fsdp2.fully_shard
    assert client.ours is fsdp2.fully_shard


def test_call_stays_on_until_undone(load: Callable[[str], ModuleType]) -> None:
    """A plain call lasts; a block inside does not end it, and undoing twice counts once."""
    client = load("client")
    call = use_in_torch()
    try:
        with use_in_torch():
            assert not is_theirs(client)
        assert not is_theirs(client)
        with use_in_torch() as block:
            block.undo()
            block.undo()
        assert not is_theirs(client)
    finally:
        call.undo()
    assert is_theirs(client)


def test_exception_ends_the_block(load: Callable[[str], ModuleType]) -> None:
    """PyTorch's functions are back when the block raised."""
    client = load("client")
    with pytest.raises(KeyError), use_in_torch():
        raise KeyError
    assert is_theirs(client)


def test_stand_in_has_our_signature() -> None:
    """Clients read the signature to learn which arguments there are."""
    from inspect import signature

    with use_in_torch():
        assert signature(torch_fsdp.fully_shard) == signature(fsdp2.fully_shard)


class Speaker(nn.Module):
    """Has a method beside forward that computes with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.word(x)

    def speak(self, x: Tensor, *, loudly: bool = False) -> Tensor:
        return self(self.word(x)) * (2 if loudly else 1)


def both_sharded(ranks: Ranks) -> tuple[Speaker, Speaker, Speaker]:
    """One model three times: plain, sharded by PyTorch's and sharded by ours in its place."""
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(Speaker())
    plain, theirs, ours = models
    torch_fsdp.fully_shard(theirs, mesh=ranks.mesh())
    with use_in_torch():
        torch_fsdp.fully_shard(ours, mesh=ranks.mesh())
    return plain, theirs, ours


@distributed(2)
def test_state_is_that_of_the_implementation_in_use(ranks: Ranks) -> None:
    """`fully_shard.state` finds either state while ours is switched on, and None elsewhere."""
    plain, theirs, ours = both_sharded(ranks)
    with use_in_torch():
        assert isinstance(ours, torch_fsdp.FSDPModule)
        state: Callable[[nn.Module], Any] = torch_fsdp.fully_shard.state  # type: ignore[attr-defined]
        assert state(ours) is fsdp2.fully_shard.state(ours)  # type: ignore[attr-defined]
        assert type(state(theirs)).__module__.startswith("torch.")
        assert state(plain) is None


@distributed(2)
@pytest.mark.parametrize("switched_on", [True, False], ids=["ours", "theirs"])
def test_register_forward_method(ranks: Ranks, switched_on: bool) -> None:
    """PyTorch's function works on our modules, and what stands in for it on PyTorch's."""
    plain, theirs, ours = both_sharded(ranks)
    call = use_in_torch() if switched_on else None
    for model in (plain, theirs, ours):
        torch_fsdp.register_fsdp_forward_method(model, "speak")
    if call is not None:
        call.undo()
    x = torch.randn(3, 5, requires_grad=True)
    wanted = plain.speak(x, loudly=True)
    wanted.sum().backward()
    for model in (theirs, ours):
        got = model.speak(x, loudly=True)
        assert torch.equal(got, wanted)
        got.sum().backward()
        for param, reference in zip(model.parameters(), plain.parameters()):
            assert torch.equal(param.grad.full_tensor(), reference.grad)  # type: ignore[union-attr]
    assert_idle(ours)


@distributed(2)
def test_two_implementations_in_one_model_are_refused(ranks: Ranks) -> None:
    """The inner one is named; nothing was sharded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch_fsdp.fully_shard(model[1], mesh=ranks.mesh())
    with use_in_torch(), pytest.raises(fsdp2.UsageError, match=r"module '1' was sharded by PyT"):
        torch_fsdp.fully_shard(model, mesh=ranks.mesh())
    assert not isinstance(model, torch_fsdp.FSDPModule)


@distributed(2)
def test_share_comm_ctx(ranks: Ranks) -> None:
    """Each implementation shares among its own models of the list."""
    _, theirs, ours = both_sharded(ranks)
    _, also_theirs, also_ours = both_sharded(ranks)
    with use_in_torch():
        torch_fsdp.share_comm_ctx([theirs, ours, also_theirs, also_ours])  # type: ignore[list-item]
    state: Callable[[nn.Module], Any] = fsdp2.fully_shard.state  # type: ignore[attr-defined]
    assert state(ours).shared_streams is state(also_ours).shared_streams is not None
    x = torch.randn(3, 5)
    for model in (also_theirs, ours, also_ours):
        assert torch.equal(model(x), theirs(x))


@distributed(4)
def test_pipeline_stages(ranks: Ranks) -> None:
    """Two stages on two shards each: the gradients that PyTorch's pipeline asks to reduce
    after the last microbatch are those of PyTorch's fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    index = mesh["stage"].get_local_rank()

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        both = nn.Sequential(*(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)) for _ in range(4)))
        model = both[2 * index : 2 * index + 2]
        for block in model:
            torch_fsdp.fully_shard(block, mesh=mesh["shard"])
        torch_fsdp.fully_shard(model, mesh=mesh["shard"])
        stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(mesh["shard"].get_local_rank())
        x, target = torch.randn(2, 8, 6)
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        return [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]

    theirs = gradients()
    with use_in_torch():
        ours = gradients()
    assert len(ours) == 8
    assert all(map(torch.equal, ours, theirs))
