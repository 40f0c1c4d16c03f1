"""The examples of the other axes, small: they run on CPU ranks, and the loss falls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_example import environment

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {"train_tp": 4, "train_moe": 4, "train_pipeline": 4, "train_lora": 2}


@pytest.mark.parametrize("name", SCRIPTS)
def test_loss_falls(name: str) -> None:
    """25 steps take off a twentieth of a nat per byte at the least."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={SCRIPTS[name]}", str(EXAMPLES / f"{name}.py")]
    command += ["--steps=25", "--width=32", "--layers=2", "--batch=4"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4, done.stdout
    assert losses[-1] < losses[0] - 0.05, losses


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_short(name: str) -> None:
    """A user reads it in one sitting."""
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150
