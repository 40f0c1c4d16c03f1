"""The peak memory of this process since a chosen moment."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MAPS = Path("/proc/self/smaps")


@contextmanager
def goes_back_when_freed() -> Iterator[None]:
    """Make glibc of the processes started here map each large block by itself.

    By default it raises that limit as blocks are freed and then keeps freed
    memory, and the resident size says little about what an engine holds.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def resident_nbytes(device: str) -> int:
    """Bytes that this process holds now: on the device, or resident in memory on CPU."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    if _STATUS.exists():
        return _status_nbytes("VmRSS") - _counted_elsewhere_nbytes()
    return peak_nbytes(device)


def peak_nbytes(device: str) -> int:
    """The most bytes held since `reset_peak`, or since the start where that cannot reset."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if _STATUS.exists():
        return _status_nbytes("VmHWM") - _counted_elsewhere_nbytes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: str) -> None:
    """Forget the peak so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # Linux: makes VmHWM the present VmRSS


def segment_nbytes() -> int:
    """This rank's part of the pages that ranks of this machine share to pass data on.

    Each page is divided by the number of ranks that map it.
    """
    return _mapped_nbytes("Pss")


def _counted_elsewhere_nbytes() -> int:
    """Of the pages that ranks of this machine share: each rank counts its part of them.

    As of now, which for segments of shared memory that are used again is as of the peak.
    """
    return _mapped_nbytes("Rss") - _mapped_nbytes("Pss")


def _mapped_nbytes(field: str) -> int:
    """Over all mappings of shared memory, the named line of ``smaps``."""
    found = 0
    is_shared = False
    for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
        name, _, value = line.partition(":")
        if "-" in name:  # the line of a mapping, with its file
            is_shared = "memfd:" in line
        elif is_shared and name == field:
            found += int(value.split()[0]) * 1024
    return found


def _status_nbytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # the kernel counts in KiB
    raise LookupError(f"{_STATUS} has no field {field!r}")
