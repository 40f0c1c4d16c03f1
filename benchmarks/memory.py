"""The peak memory of this process since a chosen moment."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_nbytes(device: str) -> int:
    """Bytes that this process holds now: on the device, or resident in memory on CPU."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return _status_nbytes("VmRSS") if _STATUS.exists() else peak_nbytes(device)


def peak_nbytes(device: str) -> int:
    """The most bytes held since `reset_peak`, or since the start where that cannot reset."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if _STATUS.exists():
        return _status_nbytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: str) -> None:
    """Forget the peak so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # Linux: makes VmHWM the present VmRSS


def _status_nbytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # the kernel counts in KiB
    raise LookupError(f"{_STATUS} has no field {field!r}")
