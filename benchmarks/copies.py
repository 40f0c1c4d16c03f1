"""How many copy kernels ran on the GPU, and for how long."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

COPYING = frozenset(
    {
        "aten::copy_",
        "aten::_foreach_copy_",
        "aten::cat",
        "aten::split_with_sizes_copy",
        "aten::_chunk_cat",
    }
)
"""Operators whose kernels only move numbers, or cast them on the way. What ``contiguous``,
``clone``, ``to`` and ``stack`` launch is launched by one of these inside."""


class Copies(NamedTuple):
    """Per step."""

    kernels: float
    seconds: float


def count_copies(step: Callable[[], object], steps: int) -> Copies | None:
    """Profile ``steps`` calls; None where the profiler saw no kernels at all."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
    found = copies_among(profiler.events() or ())
    return None if found is None else Copies(found.kernels / steps, found.seconds / steps)


def copies_among(events: Iterable[Any]) -> Copies | None:
    """All copies in a profile.

    The names of copy kernels are those of generic templates, so the operator decides: the
    profiler links each kernel to the innermost operator that was running on the host when it
    was launched. It is a copy if that operator is in ``COPYING``, or if it is none of
    PyTorch's kernels but a copy of the driver's ("Memcpy").
    """
    launched = [(event.name, kernel) for event in events for kernel in event.kernels]
    if not launched:
        return None
    copies = [k for name, k in launched if name in COPYING or k.name.startswith("Memcpy")]
    return Copies(len(copies), sum(kernel.duration for kernel in copies) / 1e6)
