"""docs/checkpoints.md: every snippet runs as it is written, one after the other."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import Ranks, distributed
from models import Net, assert_idle, next_token_loss, shard_blocks, token_batches

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"


@distributed(2)
def test_snippets(ranks: Ranks, tmp_path: Path) -> None:
    """They save, resume and load, and end where the page says."""
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 5
    torch.manual_seed(1)
    plain = Net()
    model: Any = shard_blocks(Net())
    names: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [batch[ranks.rank] for batch in token_batches(2, 5)],
        "loss_of": next_token_loss,
    }
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        if ranks.rank == 0:
            torch.save(plain.state_dict(), "full.pt")
        for snippet in snippets:
            exec(snippet, names)
    finally:
        os.chdir(before)
    assert names["first"] == 5
    assert names["batches_seen"] == 4
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)
    assert_idle(model)
