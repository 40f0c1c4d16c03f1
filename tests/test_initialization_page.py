"""Every snippet of docs/initialization.md runs as it is written, in order."""

from __future__ import annotations

import copy

import torch

import fsdp2
from harness import Ranks, distributed
from models import Net, assert_idle
from test_docs import snippets


@distributed(2)
def test_page(ranks: Ranks) -> None:
    """One after the other, in the scene that the page describes; each leaves a sharded model."""
    names = {"torch": torch, "fsdp2": fsdp2, "copy": copy, "GPT": Net}
    for number, code in enumerate(snippets("docs/initialization.md")):
        exec(compile(code, f"docs/initialization.md: {number}", "exec"), names)
        model = names["model"]
        model(torch.ones(1, 3, dtype=torch.int64)).sum().backward()
        assert_idle(model)
        model.zero_grad()
    assert names["teacher"] is not model
