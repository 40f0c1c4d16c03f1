"""Memory of the other processes of this host, read where it lies, without their help.

Linux copies from one process to another in one system call, ``process_vm_readv(2)``, where the
reader might also attach a debugger: the same user, and the same or no container.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from functools import cache

from torch import Tensor

_SET_PTRACER = 0x59616D61
_ANYONE = ctypes.c_ulong(-1)

_MOST_SPANS = 1024
"""Of one call; the kernel's ``IOV_MAX``."""


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def let_peers_read() -> bool:
    """Allow the processes of this user to read this one. False where no system call does that.

    Ubuntu and others restrict this to ancestors unless a process allows more, as MPI libraries
    do for the same purpose; where there is no such restriction the call changes nothing.
    """
    try:
        libc = _libc()
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        libc.prctl(_SET_PTRACER, _ANYONE, 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return False
    return True


def read_all(targets: Sequence[Tensor], process: int, addresses: Sequence[int]) -> None:
    """Fill ``targets``, each contiguous, with what lies at ``addresses`` in another process.

    Raises:
        OSError: It has ended, does not permit it, or has nothing there.
    """
    spans = [(t.data_ptr(), address, t.nbytes) for t, address in zip(targets, addresses)]
    for start in range(0, len(spans), _MOST_SPANS):
        _read(spans[start : start + _MOST_SPANS], process)


def _read(spans: list[tuple[int, int, int]], process: int) -> None:
    """Each span is a place here, a place there and a number of bytes."""
    while spans:
        spread = _Span * len(spans)
        here = spread(*(_Span(start, nbytes) for start, _, nbytes in spans))
        there = spread(*(_Span(address, nbytes) for _, address, nbytes in spans))
        copied = _libc().process_vm_readv(process, here, len(spans), there, len(spans), 0)
        if copied <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"memory of process {process}: {os.strerror(error)}")
        spans = list(_rest(spans, copied))


def _rest(spans: list[tuple[int, int, int]], copied: int) -> Iterator[tuple[int, int, int]]:
    """The kernel copies at most some 2 GB a call."""
    for start, address, nbytes in spans:
        done = min(copied, nbytes)
        copied -= done
        if done < nbytes:
            yield start + done, address + done, nbytes - done
