"""``CPUOffloadPolicy``: on a CPU mesh nothing changes; elsewhere shards live on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp2.portion import Portion
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

BF16, FP32 = torch.bfloat16, torch.float32
HYBRID = ("replicate", "shard")

OFFLOADS = {
    "pinned": CPUOffloadPolicy(),
    "not pinned": CPUOffloadPolicy(pin_memory=False),
    "PyTorch's": TorchOffload(),
    "none": OffloadPolicy(),
}


def train(ranks: Ranks, model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Losses of some steps of AdamW with clipping; gradients of the last one stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for i, inputs in enumerate(token_batches(ranks.world_size, steps)):
        loss = next_token_loss(model, inputs[ranks.rank])
        loss.backward()
        if i < steps - 1:
            fsdp2.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# ---- On a CPU mesh


@distributed(1, 2, 3)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_cpu_mesh_changes_no_number(
    ranks: Ranks, offload: str, policy: MixedPrecisionPolicy, reshard: bool | None
) -> None:
    """Losses, gradients and parameters are those without offload, bit by bit."""
    plain = Net()
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    usual = shard_blocks(copy.deepcopy(plain), **options)
    model = shard_blocks(plain, offload_policy=OFFLOADS[offload], **options)
    for found, expected in zip(train(ranks, model), train(ranks, usual), strict=True):
        assert_same(found, expected)
    assert_same_params(model, usual)


@distributed(2)
def test_a_cpu_mesh_costs_nothing(ranks: Ranks) -> None:
    """The same schedule, the same buffers, and nothing is called offloaded or pinned."""
    plain = Net()
    reports, traces = [], []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        model = shard_blocks(copy.deepcopy(plain), offload_policy=policy)
        with fsdp2.trace(model) as events:
            next_token_loss(model, token_batches(2, 1)[0][ranks.rank]).backward()
        traces.append(str(events))
        reports.append(fsdp2.explain(model))
        assert not any(p.to_local().is_pinned() for p in model.parameters())
        assert_idle(model)
    assert traces[0] == traces[1]
    assert reports[0] == reports[1]
    assert not any(group.is_offloaded for group in reports[1].groups)


@distributed(2)
def test_training_equals_pytorchs(ranks: Ranks) -> None:
    """PyTorch's offload on a CPU mesh, bit by bit. It pins memory only where asked."""
    plain = Net()
    ours = shard_blocks(copy.deepcopy(plain), offload_policy=CPUOffloadPolicy())
    theirs = shard_blocks(plain, torch_fully_shard, offload_policy=TorchOffload(pin_memory=False))
    for inputs in token_batches(2, 2):
        for model in (ours, theirs):
            next_token_loss(model, inputs[ranks.rank]).backward()
        assert_same_params(ours, theirs)


@distributed(2, 3)
def test_state_dicts(ranks: Ranks, tmp_path: Path) -> None:
    """Saved with offload and loaded without, and the other way round."""
    model = shard_blocks(Net(), offload_policy=CPUOffloadPolicy())
    train(ranks, model, 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    torch.manual_seed(1)
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        other = shard_blocks(Net(), offload_policy=policy)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state)
        for name, tensor in model.state_dict().items():
            assert tensor.device.type == "cpu"
            assert_same(other.state_dict()[name], tensor, name)


@distributed(2)
def test_from_meta(ranks: Ranks) -> None:
    """Materialised on the CPU after sharding, then loaded."""
    plain = Net()
    with torch.device("meta"):
        model = Net()
    shard_blocks(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.to_local().copy_(plain.get_parameter(name).detach().chunk(2)[ranks.rank])
    inputs = token_batches(2, 1)[0]
    assert_same(
        next_token_loss(model, inputs[ranks.rank]), next_token_loss(plain, inputs[ranks.rank])
    )


# ---- What an accelerator does, on the CPU


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Shards are taken to be on another device than the one that computes.

    All copies between the two are made then; only streams and pinned memory are missing.
    """
    with mock.patch.object(Portion, "is_offloaded", property(is_offload_asked_for)):
        yield


def is_offload_asked_for(portion: Portion) -> bool:
    return isinstance(portion._offload, CPUOffloadPolicy)


@distributed(1, 2, 3)
@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16)],
    ids=["fp32", "bf16 in fp32", "bf16"],
)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_copies_change_no_number(
    ranks: Ranks, policy: MixedPrecisionPolicy, reshard: bool | None
) -> None:
    """Copied over, gathered, reduced, copied back: the numbers are those without offload."""
    plain = Net()
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    usual = shard_blocks(copy.deepcopy(plain), **options)
    expected = train(ranks, usual)
    with as_on_an_accelerator():
        offload = CPUOffloadPolicy(pin_memory=False)
        model = shard_blocks(plain, offload_policy=offload, **options)
        assert all(group.is_offloaded for group in fsdp2.explain(model).groups)
        for found, loss in zip(train(ranks, model), expected, strict=True):
            assert_same(found, loss)
        assert_same_params(model, usual)
        if reshard is not False or ranks.world_size > 1:
            assert_idle(model)


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(-1)


@distributed(4)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": (2, 2)},
        {"mesh": (4, 1)},
        {"reshard_after_forward": 2},
        {"shard_placement_fn": last_dim},
    ],
    ids=["replicas", "replicas only", "a part", "columns"],
)
def test_copies_with_other_features(ranks: Ranks, options: Any) -> None:
    """The same bit by bit beside replicas, parts and other dimensions."""
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = ranks.mesh(*options["mesh"], names=HYBRID)
    plain = Net()
    usual = shard_blocks(copy.deepcopy(plain), **options)
    expected = train(ranks, usual)
    with as_on_an_accelerator():
        offload = CPUOffloadPolicy(pin_memory=False)
        model = shard_blocks(plain, offload_policy=offload, **options)
        for found, loss in zip(train(ranks, model), expected, strict=True):
            assert_same(found, loss)
        assert_same_params(model, usual)


@distributed(2)
@pytest.mark.parametrize("sync", ["kept full", "reduced"])
def test_copies_of_accumulated_gradients(ranks: Ranks, sync: str) -> None:
    """Gradients add up on the host, or are kept where they were computed until the last one."""
    plain = Net()
    usual = shard_blocks(copy.deepcopy(plain))
    batches = token_batches(2, 3)

    def accumulate(model: Any) -> None:
        for i, inputs in enumerate(batches):
            model.set_requires_gradient_sync(sync == "reduced" or i == 2)
            next_token_loss(model, inputs[ranks.rank]).backward()

    accumulate(usual)
    with as_on_an_accelerator():
        model = shard_blocks(plain, offload_policy=CPUOffloadPolicy(pin_memory=False))
        accumulate(model)
        assert_same_params(model, usual)
        assert_idle(model)


@distributed(2)
def test_the_copy_is_freed(ranks: Ranks) -> None:
    """Between steps, and between forward and backward, the device holds no shards."""
    with as_on_an_accelerator():
        model = shard_blocks(
            Net(), offload_policy=CPUOffloadPolicy(pin_memory=False), reshard_after_forward=True
        )
        loss = next_token_loss(model, token_batches(2, 1)[0][ranks.rank])
        for _ in range(2):
            for module in (model, *model.blocks):
                [portion] = fully_shard.state(module).group.portions
                assert portion._on_device._storage.nbytes() == 0
            loss.backward(retain_graph=True)
        assert_idle(model)


@distributed(2)
def test_frozen_parameters_have_no_gradient_buffers(ranks: Ranks) -> None:
    """Of a mostly frozen model only what trains comes back to the host."""
    copied: list[int] = []
    to_host = Portion._to_host

    def counted(portion: Portion, buffer: Tensor) -> Tensor:
        copied.append(buffer.numel())
        return to_host(portion, buffer)

    with as_on_an_accelerator(), mock.patch.object(Portion, "_to_host", counted):
        model = nn.Linear(100, 100)
        model.weight.requires_grad_(False)
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        model(torch.ones(2, 100)).sum().backward()
    assert sum(copied) == 50 + 1  # a bias, and the flag that travels with it
    assert_same(model.bias.grad, torch.full((100,), 2.0))


# ---- On a GPU


@pytest.fixture
def cuda_mesh() -> Iterator[Any]:
    """One rank with NCCL and gloo, in this process."""
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    torch.cuda.set_device(0)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


def train_on_cuda(model: nn.Module, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for [tokens] in token_batches(1, steps):
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("from_device", ["cpu", "cuda"])
def test_shards_gradients_and_states_are_on_the_host(
    cuda_mesh: Any, pin_memory: bool, from_device: str
) -> None:
    """Pinned if asked for; what forward computes with is on the device."""
    seen: list[str] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.device.type)
            return super().forward(x)

    model = nn.Sequential(Looks(8, 8)).to(from_device)
    fully_shard(model, mesh=cuda_mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    model.to("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.to_local().device.type == "cpu"
            assert param.to_local().is_pinned() == pin_memory
            assert param.grad.to_local().device.type == "cpu"  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert seen == ["cuda", "cuda"]
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)])
def test_losses_are_those_without_offload(cuda_mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """The optimizer runs on the host: its rounding may differ from the device's."""
    torch.manual_seed(0)
    plain = Net()
    usual = shard_blocks(copy.deepcopy(plain).cuda(), mesh=cuda_mesh, mp_policy=policy)
    model = shard_blocks(plain, mesh=cuda_mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    for found, expected in zip(train_on_cuda(model), train_on_cuda(usual), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert_idle(model)


@pytest.mark.gpu
def test_device_memory_holds_no_shards(cuda_mesh: Any) -> None:
    """Between steps the device holds nothing of the model but its buffers."""
    before = torch.cuda.memory_allocated()
    model = shard_blocks(Net(dim=256, blocks=4), mesh=cuda_mesh, offload_policy=CPUOffloadPolicy())
    train_on_cuda(model, 2)
    # Token batches and losses are small; a block alone has half a megabyte.
    assert torch.cuda.memory_allocated() - before < 100_000
    assert_idle(model)


@pytest.mark.gpu
def test_parameters_on_the_device_are_named(cuda_mesh: Any) -> None:
    """PyTorch's message: whoever loads onto the device instead of the host learns which."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model, mesh=cuda_mesh, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cuda")
    message = r"Found following parameters on non-CPU device: \[\('0.weight', device\(type='cuda'"
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 8))


@pytest.mark.gpu
def test_state_dict_after_a_step(cuda_mesh: Any, tmp_path: Path) -> None:
    """Shards come from the host; loading them back changes nothing, and training goes on."""
    torch.manual_seed(0)
    model = shard_blocks(Net(), mesh=cuda_mesh, offload_policy=CPUOffloadPolicy())
    train_on_cuda(model, 1)
    state = model.state_dict()
    assert all(value.device.type == "cpu" for value in state.values())
    dcp.save(state, checkpoint_id=tmp_path)
    expected = {name: value.full_tensor().clone() for name, value in state.items()}
    train_on_cuda(model, 1)
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert_same(value, expected[name], name)
    train_on_cuda(model, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_on_the_host(cuda_mesh: Any, max_norm: float) -> None:
    """The norm of gradients on the host is that of the plain model's."""
    torch.manual_seed(0)
    reference = Net()
    model = shard_blocks(
        copy.deepcopy(reference), mesh=cuda_mesh, offload_policy=CPUOffloadPolicy()
    )
    [[tokens]] = token_batches(1, 1)
    next_token_loss(model, tokens).backward()
    data_parallel(reference, [tokens])
    found = fsdp2.clip_grad_norm_(model.parameters(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=0)


@pytest.mark.gpu
def test_accumulation_on_the_host(cuda_mesh: Any) -> None:
    """A second backward adds to gradients that are on the host already."""
    torch.manual_seed(0)
    model = shard_blocks(Net(), mesh=cuda_mesh, offload_policy=CPUOffloadPolicy())
    [[tokens]] = token_batches(1, 1)
    next_token_loss(model, tokens).backward()
    once = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
    next_token_loss(model, tokens).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.to_local(), 2 * once[name], rtol=1e-4, atol=1e-6)
