"""Marks of the suite, and the end of the worker pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness import close_pools


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "gpu: needs CUDA; skipped without it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="module", autouse=True)
def fresh_pools() -> Iterator[None]:
    """Every file has ranks of its own: the threads of its process groups end with it."""
    yield
    close_pools()
