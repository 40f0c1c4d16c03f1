"""What goes wrong with a checkpoint ends in one clear error on all ranks, and costs no other."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import checkpoint
from fsdp2.checkpoint import CheckpointError, meeting, storage
from harness import Ranks, distributed, run, start_ranks
from models import Net, assert_idle, assert_same_params, shard_blocks
from test_checkpoint import adamw, train


def saved_twice(folder: str) -> tuple[Any, Any]:
    """A model and its optimizer, saved as steps 1 and 2."""
    torch.manual_seed(1)
    model = shard_blocks(Net())
    optimizer = adamw(model)
    for step in (1, 2):
        train(model, optimizer, 1)
        checkpoint.save(folder, model, optimizer, step=step, extra={"step": step})
    return model, optimizer


def fresh() -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = shard_blocks(Net())
    return model, adamw(model)


def assert_loads(path: str, step: int) -> None:
    model, optimizer = fresh()
    assert checkpoint.load(path, model, optimizer).step == step
    assert_idle(model)


# ---- Files


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut": ("__1_0.distcp", cut, "was cut off or overwritten"),
    "flipped": ("__0_0.distcp", flip, "is damaged: its checksum"),
    "missing": ("__1_0.distcp", Path.unlink, "is missing"),
    "index flipped": (".metadata", flip, "is damaged: its checksum"),
    "index missing": (".metadata", Path.unlink, "is missing"),
    "extra flipped": ("extra-1.pt", flip, "is damaged: its checksum"),
    "manifest flipped": ("manifest.json", flip, "is damaged"),
    "manifest cut": ("manifest.json", cut, "is damaged"),
}


@distributed(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    """All ranks name the file; nothing of the model has changed; the checkpoint before loads."""
    saved_twice(str(tmp_path))
    name, do, what = DAMAGES[damage]
    dist.barrier()
    if ranks.rank == 0:
        do(tmp_path / "step-000002" / name)
    dist.barrier()
    model, optimizer = fresh()
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"step-000002/{name} .*{what}"):
        checkpoint.load(tmp_path, model, optimizer)
    assert time.monotonic() - started < 10
    assert_same_params(model, fresh()[0])
    assert optimizer.state == {}
    assert_loads(str(tmp_path / "step-000001"), 1)


@distributed(2)
def test_other_model(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint of another model is refused with the first names that differ."""
    saved_twice(str(tmp_path))
    deeper = shard_blocks(Net(blocks=3))
    with pytest.raises(CheckpointError, match=r"another model: it lacks 'blocks.2.norm.weight'"):
        checkpoint.load(tmp_path, deeper)
    flatter = shard_blocks(Net(blocks=1))
    with pytest.raises(CheckpointError, match=r"the model has no 'blocks.1.*strict=False"):
        checkpoint.load(tmp_path, flatter)
    wider = shard_blocks(Net(vocab=18))
    with pytest.raises(
        CheckpointError, match=r"'embedding.weight' \(18, 8\) is a tensor \(17, 8\)"
    ):
        checkpoint.load(tmp_path, wider)
    restored = checkpoint.load(tmp_path, deeper, strict=False)
    assert restored.missing[0] == "blocks.2.norm.weight"
    assert_idle(deeper)


@distributed(2)
def test_nothing_there(ranks: Ranks, tmp_path: Path) -> None:
    """A folder without checkpoints says so."""
    model, _ = fresh()
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint: it has no manifest"):
        checkpoint.load(tmp_path, model)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        checkpoint.latest(tmp_path)
    assert_idle(model)


# ---- The disk


@distributed(2, 3)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_on_one_rank(ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    """A rank that cannot write is named on all; the former checkpoint loads; the next is saved."""
    model, optimizer = saved_twice(str(tmp_path))

    def fail(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = storage.Writer.write
    if ranks.rank == 1:
        storage.Writer.write = fail  # type: ignore[method-assign,assignment]
    what = "step-000003 was not written: rank 1: OSError"
    try:
        if asynchronous:
            saving = checkpoint.save(tmp_path, model, optimizer, step=3, asynchronous=True)
            with pytest.raises(CheckpointError, match=what):
                checkpoint.wait_for_saves()
            for _ in range(2):
                with pytest.raises(CheckpointError, match=what):
                    saving.wait()
        else:
            with pytest.raises(CheckpointError, match=what):
                checkpoint.save(tmp_path, model, optimizer, step=3)
    finally:
        storage.Writer.write = write  # type: ignore[method-assign]
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    assert_loads(str(tmp_path), 2)
    checkpoint.save(tmp_path, model, optimizer, step=3)
    assert_loads(str(tmp_path), 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@distributed(2)
def test_full_disk(ranks: Ranks, small_disk: Path) -> None:
    """On a disk that is really full the former checkpoint stays, and what was written goes."""
    saved_twice(str(small_disk))
    large = shard_blocks(Net(vocab=40000))
    with pytest.raises(CheckpointError, match=r"step-000003 was not written: rank \d: "):
        checkpoint.save(small_disk, large, step=3)
    dist.barrier()
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-000001", "step-000002"]
    assert_loads(str(small_disk), 2)
    assert_idle(large)


# ---- A rank that is killed


def rank_that_may_die(folder: str, victim: int, asynchronous: bool) -> None:
    """Two saves; the victim dies while it writes the second. Prints what the others see."""
    meeting.PATIENCE = 2.0
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model: Any = shard_blocks(Net())
    optimizer = adamw(model)
    train(model, optimizer, 1)
    checkpoint.save(folder, model, optimizer, step=1)
    if dist.get_rank() == victim:
        storage.Writer.write = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    started = time.monotonic()
    try:
        checkpoint.save(folder, model, optimizer, step=2, asynchronous=asynchronous).wait()
        error = "none"
    except CheckpointError as failure:
        error = str(failure)
    print(json.dumps({"seconds": time.monotonic() - started, "error": error}), flush=True)
    os._exit(0)  # the process group is broken: nothing to leave in order


def load_first(ranks: Ranks, folder: str) -> None:
    assert_loads(folder, 1)


@pytest.mark.parametrize(
    ("victim", "asynchronous"), [(1, False), (2, True), (0, False)], ids=["1", "2-async", "0"]
)
def test_killed_rank(tmp_path: Path, victim: int, asynchronous: bool) -> None:
    """The survivors raise within seconds and name the rank; the former checkpoint loads.

    Rank 0 holds the store here, and is named as its holder.
    """
    call = f"rank_that_may_die({str(tmp_path)!r}, {victim}, {asynchronous})"
    ranks = start_ranks(3, f"from test_checkpoint_faults import *; {call}")
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[victim].returncode == -signal.SIGKILL
    for index, (out, err) in enumerate(outputs):
        if index == victim:
            continue
        assert ranks[index].returncode == 0, err
        seen = json.loads(out)
        named = rf"rank {victim} is gone" if victim else "rank 0, or torchrun"
        assert "step-000002" in seen["error"]
        assert named in seen["error"], seen
        assert seen["seconds"] < 10
    run(load_first, 2, str(tmp_path))
