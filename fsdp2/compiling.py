"""What a compiler leaves out of its graphs.

Gathering, freeing and reducing have their effects behind the tensors that a graph sees, so
they run between graphs, as plain Python. ``docs/compile.md`` says where graphs end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fsdp2 import _torch

Hook = TypeVar("Hook", bound=Callable[..., object])

_REASON = "fsdp2 gathers and frees parameters between graphs: compile the modules in between"
"""Part of the error under ``torch.compile(fullgraph=True)``."""


def untraced(hook: Hook) -> Hook:
    """Let ``torch.compile`` call ``hook`` as it is: it is not traced, nor what it calls."""
    _torch.skip_in_compilers(hook, _REASON)
    return hook
