"""Libraries that call PyTorch's fully_shard give the same numbers with ours in its place.

Each case runs a script of tests/clients on CPU ranks, as users of the library start theirs.
It trains once with PyTorch's and once under `use_in_torch`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "clients"
LIMIT = 120.0
"""Seconds for a case, which takes about 10 on two idle cores."""


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if find_spec(name) is None]
    reason = f"needs {', '.join(missing)}: pip install -c constraints.txt -e '.[clients]'"
    return pytest.mark.skipif(bool(missing), reason=reason)


def environment() -> dict[str, str]:
    """Ours, with the same fsdp2 to import, no GPU, and no hub to ask for models."""
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    ours = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | ours | {"HF_HUB_OFFLINE": "1"}


def run_on_ranks(ranks: int, script: str, out: Path, flags: str) -> None:
    """Start it with torchrun, and fail with what it wrote if it fails or takes too long."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, str(SCRIPTS / script), str(out), *flags.split()]
    process = subprocess.Popen(
        command,
        env=environment(),
        cwd=out,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        written, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers; a kill would leave them behind
        written, _ = process.communicate()
        pytest.fail(f"{script} {flags} had not finished after {LIMIT:g} s\n{written}")
    assert process.returncode == 0, written


def reports(script: str, out: Path, flags: str = "") -> list[dict[str, Any]]:
    """What the script has written, for each rank: of two, or of two replicas of two shards."""
    ranks = 4 if "--hybrid" in flags else 2
    run_on_ranks(ranks, script, out, flags)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def check_same(script: str, out: Path, flags: str) -> None:
    """All numbers are those of PyTorch's, bit by bit, and a resumed training goes on alike."""
    for found in reports(script, out, flags):
        theirs, ours = found["torch"], found["fsdp2"]
        assert (theirs.pop("sharded by"), ours.pop("sharded by")) == ("torch", "fsdp2")
        assert ours == theirs
        assert ours["resumed"] == ours["went on"]


@needs("accelerate", "transformers")
@pytest.mark.parametrize(
    "flags", ["", "--tied", "--tied --full --meta", "--tied --bf16 --checkpointing", "--hybrid"]
)
def test_accelerate(tmp_path: Path, flags: str) -> None:
    """Losses, norms, shards and whole weights of a Llama, and of one that resumed."""
    check_same("train_accelerate.py", tmp_path, flags)


@needs("accelerate", "transformers")
@pytest.mark.parametrize("flags", ["", "--tied --bf16"])
def test_trainer_of_transformers(tmp_path: Path, flags: str) -> None:
    """The Trainer's history, what it generates and saves, and the history after resuming."""
    check_same("train_trainer.py", tmp_path, flags)


@needs("accelerate", "transformers")
@pytest.mark.parametrize("flags", ["", "--bf16", "--hybrid"])
def test_model_that_transformers_shards(tmp_path: Path, flags: str) -> None:
    """Sharded on meta, loaded, trained, saved in both formats and loaded again."""
    check_same("train_native.py", tmp_path, flags)


@needs("accelerate", "transformers")
def test_tied_model_that_transformers_shards(tmp_path: Path) -> None:
    """Tied after it was sharded apart: the numbers of the unsharded model, bit by bit."""
    for found in reports("train_native_tied.py", tmp_path):
        assert found["fsdp2"] == found["unsharded"]
        assert "lm_head.weight" not in found["fsdp2"]["parameters"]  # the embedding's, once


@needs("lightning")
@pytest.mark.parametrize("flags", ["", "--full", "--meta"])
def test_fabric(tmp_path: Path, flags: str) -> None:
    """Losses, norms and shards, and those after resuming."""
    check_same("train_fabric.py", tmp_path, flags)


@needs("lightning")
@pytest.mark.parametrize("flags", ["", "--full"])
def test_trainer_of_lightning(tmp_path: Path, flags: str) -> None:
    """The loss of every batch, and of a fresh module that resumed."""
    check_same("train_lightning.py", tmp_path, flags)
