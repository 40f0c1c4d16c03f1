"""Every snippet of the documentation runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2

ROOT = Path(__file__).parent.parent

TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

PREAMBLE = """
import torch, fsdp2
from torch import distributed as dist, nn
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fsdp2.fully_shard(layer)
fsdp2.fully_shard(model)
x = torch.randn(2, 8)
model(x)
"""


def snippets(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_on_two_ranks(code: str, folder: Path) -> str:
    script = folder / "snippet.py"
    script.write_text(code)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TWO_RANKS, str(script)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A gloo thread may outlive the last collective by a moment, and must not meet the exit.
LEAVE = """
import time
time.sleep(0.3)
"""


def test_readme_ten_lines_train(tmp_path: Path) -> None:
    """README's first example trains on two ranks."""
    ten_lines = snippets("README.md")[0]
    shown = """
print(f"stepped {optimizer.state_dict()['state'][0]['step']:.0f}")
"""
    out = run_on_two_ranks(ten_lines + LEAVE + shown, tmp_path)
    assert out.count("stepped 1") == 2


def test_readme_inspection_prints(tmp_path: Path) -> None:
    """README's second example prints the layout and the events of a step."""
    out = run_on_two_ranks(PREAMBLE + snippets("README.md")[1] + LEAVE, tmp_path)
    assert "0: 2 parameters over 2 ranks" in out
    assert re.search(r"^reduce +1$", out, re.MULTILINE)


def test_contributing_test_passes(tmp_path: Path) -> None:
    """CONTRIBUTING's sample test passes under pytest."""
    file = tmp_path / "test_sample.py"
    file.write_text(snippets("CONTRIBUTING.md")[0])
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [n for n in fsdp2.__all__ if not n.startswith("__")])
def test_public_names_are_explained(name: str) -> None:
    """Every public name has a docstring of its own."""
    assert (getattr(fsdp2, name).__doc__ or "").strip()


def test_contributing_lists_all_rooms() -> None:
    """The map of the rooms names every file of the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for file in (ROOT / "fsdp2").glob("*.py"):
        assert f"`{file.stem}`" in text, file.name
