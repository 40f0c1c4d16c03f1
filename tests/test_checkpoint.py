"""Checkpoints of training: resumed on any number of ranks, bit by bit."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import UsageError, checkpoint, fully_shard
from fsdp2.checkpoint import CheckpointError, folders, saving, storage
from harness import Ranks, distributed, run
from models import (
    Block,
    Net,
    assert_idle,
    assert_same,
    next_token_loss,
    shard_blocks,
    token_batches,
    whole,
)

LAYOUTS = ["1", "2", "3", "4", "hsdp", "tp"]


def ranks_of(layout: str) -> int:
    return int(layout) if layout.isdigit() else 4


def net(ranks: Ranks, layout: str, seed: int) -> Any:
    """A net on the mesh of this layout; ``plain`` is not sharded."""
    torch.manual_seed(seed)
    model: Any = Net()
    model.blocks = nn.ModuleList(Block(8, 14) for _ in range(2))  # 7 rows for each of 2 TP ranks
    if layout == "plain":
        return model
    if layout == "tp":
        mesh = ranks.mesh(2, 2, names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        return shard_blocks(model, mesh=mesh["dp"])
    if layout == "hsdp":
        return shard_blocks(model, mesh=ranks.mesh(2, 2, names=("replicate", "shard")))
    return shard_blocks(model, mesh=ranks.mesh())


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    """Steps on one batch, the same on every rank."""
    for [batch] in token_batches(1, steps):
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def full_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and the optimizer's states, whole, under names."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name} {key}"] = whole(value)
    return {name: value.clone() for name, value in found.items()}


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_same(found[name], value, name)


# ---- From any layout to any other


def save_layout(ranks: Ranks, layout: str, folder: str) -> dict[str, Tensor]:
    model = net(ranks, layout, seed=1)
    optimizer = adamw(model)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.03
    checkpoint.save(folder, model, optimizer, step=2, extra={"rank": ranks.rank})
    state = full_state(model, optimizer)
    assert_idle(model)
    return state


def load_layout(ranks: Ranks, layout: str, folder: str) -> dict[str, Tensor]:
    model = net(ranks, layout, seed=2)
    optimizer = adamw(model)
    restored = checkpoint.load(folder, model, optimizer)
    assert restored.step == 2
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    state = full_state(model, optimizer)
    train(model, optimizer, 1)  # what was loaded is what trains
    if layout != "plain":
        assert_idle(model)
    return state


@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_to_any_other(saved: str, tmp_path: Path) -> None:
    """Values and optimizer states of 1, 2, 3, 4 ranks, HSDP and TP are those of all others."""
    expected = run(save_layout, ranks_of(saved), saved, str(tmp_path))[0]
    for layout in [*LAYOUTS, "plain"]:
        size = 1 if layout == "plain" else ranks_of(layout)
        for state in run(load_layout, size, layout, str(tmp_path)):
            assert_same_state(state, expected)


# ---- Folders


@distributed(2)
def test_latest_and_keep(ranks: Ranks, tmp_path: Path) -> None:
    """The latest is what was finished last, not the highest step; the oldest are removed."""
    model = net(ranks, "2", seed=1)
    for step in (5, 6, 7, 3):
        checkpoint.save(tmp_path, model, step=step, keep=3)
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{step:06d}"
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000003",
        "step-000006",
        "step-000007",
    ]
    with pytest.raises(UsageError, match="keep is 1 or more"):
        checkpoint.save(tmp_path, model, step=8, keep=0)
    assert_idle(model)


@distributed(2)
def test_same_step_again(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint of the same step is replaced, and is the latest."""
    models = [net(ranks, "2", seed) for seed in (1, 2)]
    checkpoint.save(tmp_path, models[0], step=1)
    checkpoint.save(tmp_path, models[0], step=2)
    checkpoint.save(tmp_path, models[1], step=1, keep=2)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    restored = checkpoint.load(tmp_path, models[0])
    assert restored.step == 1
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same(found, expected)
    assert_idle(models[0])


@distributed(2)
def test_crash_at_any_point(ranks: Ranks, tmp_path: Path) -> None:
    """What a crash leaves is never the latest, and the next save clears it away."""
    model = net(ranks, "2", seed=1)
    checkpoint.save(tmp_path, model, step=1)
    dist.barrier()
    if ranks.rank == 0:
        whole_one = tmp_path / "step-000001"
        for name in ("step-000002.unfinished", "step-000000.removed"):
            shutil.copytree(whole_one, tmp_path / name)
        (tmp_path / "step-000009").mkdir()  # of another program
    dist.barrier()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    checkpoint.save(tmp_path, model, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000001",
        "step-000002",
        "step-000009",
    ]
    assert_idle(model)


@distributed(4)
def test_manifest(ranks: Ranks, tmp_path: Path) -> None:
    """A JSON file says what was saved: by which torch, on which mesh, in which groups and files."""
    model = net(ranks, "hsdp", seed=1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    path = checkpoint.save(tmp_path, model, optimizer, step=4).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert manifest["ranks"] == 4
    assert manifest["torch"] == torch.__version__
    assert manifest["groups"][-1]["mesh"] == [2, 2]
    assert manifest["groups"][-1]["mesh_dim_names"] == ["replicate", "shard"]
    assert "blocks.1.up.weight" in manifest["groups"][-1]["params"]
    assert manifest["model"]["head.weight"] == {
        "shape": [17, 8],
        "dtype": "float32",
        "mesh": [2, 2],
        "placements": ["replicate", "shard 0"],
    }
    assert manifest["optimizer"]["head.weight"]["step"] == {"shape": [], "dtype": "float32"}
    files = {file.name for file in path.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files
    assert_idle(model)


# ---- Asynchronous


@distributed(2)
def test_asynchronous(ranks: Ranks, tmp_path: Path) -> None:
    """Training goes on while the values of the call are written; the next save waits for them."""
    model = net(ranks, "2", seed=1)
    optimizer = adamw(model)
    train(model, optimizer)
    expected = full_state(model, optimizer)
    may_write = threading.Event()
    write = storage.Writer.write

    def wait_and_write(self: Any) -> Any:
        may_write.wait(30)
        return write(self)

    storage.Writer.write = wait_and_write  # type: ignore[method-assign]
    try:
        first = checkpoint.save(tmp_path, model, optimizer, step=2, asynchronous=True)
        train(model, optimizer)
        assert not first.is_done
        assert not first.path.exists()
        threading.Timer(0.2, may_write.set).start()
        second = checkpoint.save(tmp_path, model, optimizer, step=4, asynchronous=True)
        assert first.is_done
        assert first.path.exists()
    finally:
        storage.Writer.write = write  # type: ignore[method-assign]
    assert checkpoint.load(tmp_path, model, optimizer).step == 4  # it waits too
    assert second.is_done
    checkpoint.load(first.path, model, optimizer)
    assert_same_state(full_state(model, optimizer), expected)
    assert_idle(model)


@distributed(2)
def test_asynchronous_memory_is_bounded(ranks: Ranks, tmp_path: Path) -> None:
    """Of twenty asynchronous saves, at most one copy of the shards is held at any time."""
    model = fully_shard(nn.Linear(512, 512, bias=False), mesh=ranks.mesh())
    copies: list[Any] = []
    most = 0
    on_host = saving._on_host

    def remember(value: Any) -> Any:
        nonlocal most
        copied = on_host(value)
        if isinstance(copied, DTensor):
            copies.append(weakref.ref(copied.to_local().untyped_storage()))
            most = max(most, sum(each() is not None for each in copies))
        return copied

    saving._on_host = remember
    try:
        resident = []
        for step in range(20):
            checkpoint.save(tmp_path, model, step=step, keep=1, asynchronous=True)
            resident.append(resident_bytes())
        checkpoint.wait_for_saves()
    finally:
        saving._on_host = on_host
    assert len(copies) == 20
    assert most == 1
    assert max(resident[5:]) - max(resident[:5]) < 4 << 20
    assert_idle(model)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---- What else is saved


@distributed(2)
def test_random_states(ranks: Ranks, tmp_path: Path) -> None:
    """Random numbers continue, each rank's own, from where the save was."""
    model = net(ranks, "2", seed=1)
    torch.manual_seed(ranks.rank)
    random.seed(ranks.rank)

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), numpy.random.rand()]

    draw()
    loader = {"epoch": 3, "order": torch.arange(4)}
    extra = {"rng": checkpoint.rng_state(), "loader": loader}
    checkpoint.save(tmp_path, model, step=1, extra=extra)
    expected = draw()
    draw()
    restored = checkpoint.load(tmp_path, model)
    checkpoint.set_rng_state(restored.extra["rng"])
    assert draw() == expected
    assert restored.extra["loader"]["epoch"] == 3
    assert_same(restored.extra["loader"]["order"], torch.arange(4))
    assert_idle(model)


def load_extra(ranks: Ranks, folder: str) -> None:
    restored = checkpoint.load(folder, net(ranks, "3", seed=1))
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks and is loaded by 3.*extra_of"):
        restored.extra  # noqa: B018
    assert [restored.extra_of(rank)["rank"] for rank in range(2)] == [0, 1]
    with pytest.raises(CheckpointError, match="no extra of rank 2"):
        restored.extra_of(2)


def test_extra_on_other_ranks(tmp_path: Path) -> None:
    """Another number of ranks says whose extra it takes."""
    run(save_layout, 2, "2", str(tmp_path))
    run(load_extra, 3, str(tmp_path))


@distributed(2)
def test_unsafe_extra(ranks: Ranks, tmp_path: Path) -> None:
    """An object that a file could only bring back by running code is refused, on all ranks."""
    model = net(ranks, "2", seed=1)
    extra = {"fine": 1, "model": nn.Linear(1, 1) if ranks.rank == 1 else 0}
    with pytest.raises(CheckpointError, match=r"rank 1: extra\['model'\] is a Linear"):
        checkpoint.save(tmp_path, model, step=1, extra=extra)
    assert_idle(model)


class Whole(nn.Module):
    """Buffers, integers, a tied weight, an extra state, a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("table", torch.randint(9, (3,)))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@distributed(2)
@pytest.mark.parametrize("on_meta", [False, True])
def test_all_kinds_of_values(ranks: Ranks, tmp_path: Path, on_meta: bool) -> None:
    """Everything in a state dict comes back, into a model on the meta device too."""
    torch.manual_seed(1)
    model = fully_shard(Whole(), mesh=ranks.mesh())
    model.note = "old"
    checkpoint.save(tmp_path, model, step=1)
    torch.manual_seed(2)
    with torch.device("meta" if on_meta else "cpu"):
        other = Whole()
    fully_shard(other, mesh=ranks.mesh())
    params = list(other.parameters())
    checkpoint.load(tmp_path, other)
    assert all(a is b for a, b in zip(other.parameters(), params, strict=True))
    assert other.note == "old"
    assert other.head.weight is other.embedding.weight
    expected = model.state_dict()
    for name, value in other.state_dict().items():
        if isinstance(value, Tensor):
            assert_same(value, expected[name], name)
    assert all(param.requires_grad for param in other.parameters())
    assert_idle(other)


@distributed(2)
def test_wrapped_modules(ranks: Ranks, tmp_path: Path) -> None:
    """Names are the plain model's, also below wrappers that add to them."""
    plain = net(ranks, "2", seed=1)
    checkpoint.save(tmp_path, plain, adamw(plain), step=1)
    torch.manual_seed(2)
    model = Net()
    model.blocks = nn.ModuleList(checkpoint_wrapper(Block(8, 14)) for _ in range(2))
    fully_shard(model, mesh=ranks.mesh())
    checkpoint.load(tmp_path, model, adamw(model))
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(found, expected)
    assert_idle(model)


@distributed(2)
def test_read_by_pytorch(ranks: Ranks, tmp_path: Path) -> None:
    """PyTorch's own functions read what is written here."""
    model = net(ranks, "2", seed=1)
    optimizer = adamw(model)
    train(model, optimizer)
    path = checkpoint.save(tmp_path, model, optimizer, step=2).path
    other = net(ranks, "2", seed=2)
    other_optimizer = adamw(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's checkpoints warn of their own deprecations
        values, states = get_state_dict(other, other_optimizer)
        dcp.load({"model": values, "optimizer": states}, checkpoint_id=path)
        set_state_dict(other, other_optimizer, model_state_dict=values, optim_state_dict=states)
    assert_same_state(full_state(other, other_optimizer), full_state(model, optimizer))
    assert_idle(other)


@distributed(2)
def test_progress(ranks: Ranks, tmp_path: Path) -> None:
    """The callback sees the bytes of this rank grow up to their total, at save and at load."""
    model = net(ranks, "2", seed=1)
    own = sum(param.to_local().nbytes for param in model.parameters())
    for act in (
        lambda seen: checkpoint.save(tmp_path, model, step=1, progress=seen),
        lambda seen: checkpoint.load(tmp_path, model, progress=seen),
    ):
        calls: list[tuple[int, int]] = []
        act(lambda done, total, calls=calls: calls.append((done, total)))
        assert calls == sorted(calls)
        assert calls[-1] == (own, own)
    checkpoint.save(tmp_path, model, step=2, progress=checkpoint.bar("saving"))
    assert_idle(model)


def test_one_process_without_a_group(tmp_path: Path) -> None:
    """A plain model in one process, without a process group."""
    torch.manual_seed(1)
    model, other = Net(), Net()
    optimizer, other_optimizer = adamw(model, fused=True), adamw(other, fused=True)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    checkpoint.load(tmp_path, other, other_optimizer)
    assert_same_state(full_state(other, other_optimizer), full_state(model, optimizer))


def test_core_does_not_import_it() -> None:
    """`import fsdp2` and `fully_shard` leave `torch.distributed.checkpoint` unloaded."""
    script = (
        "import sys; from fsdp2 import fully_shard; import fsdp2; "
        "names = [n for n in sys.modules if n.startswith('torch.distributed.checkpoint')]; "
        "assert 'fsdp2.checkpoint' not in sys.modules; print(names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_replaced_step_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended between the two renames of a replacement, the former checkpoint is still the latest."""
    folders.start(tmp_path, 1)
    first = folders.finish(tmp_path, 1, {"which": "first"}, keep=None)
    rename = Path.rename

    def ends(self: Path, target: Path) -> Path:
        if self.suffix == ".unfinished":
            raise KeyboardInterrupt
        return rename(self, target)

    folders.start(tmp_path, 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", ends)
        folders.finish(tmp_path, 1, {"which": "second"}, keep=None)
    assert not first.exists()
    assert folders.read_manifest(checkpoint.latest(tmp_path))["which"] == "first"
    folders.start(tmp_path, 1)
    assert folders.read_manifest(checkpoint.latest(tmp_path))["which"] == "first"
    assert folders.finish(tmp_path, 1, {"which": "third"}, keep=1) == first
    assert folders.read_manifest(checkpoint.latest(tmp_path))["which"] == "third"
    assert list(tmp_path.iterdir()) == [first]
