"""Shared memory between the ranks of one host.

A segment is an anonymous file that one rank writes and its peers map through ``/proc``. It has
no name that could be left behind: the kernel frees it when the last process that maps it ends,
however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2 import _torch
from fsdp2.collectives import gather_values
from fsdp2.notes import Door, Notes
from fsdp2.peer_memory import let_peers_read, read_all

SMALLEST_NBYTES = 1 << 16

WRITTEN = 0
READ = 1 << 62
"""The two notes of an exchange: its number is added to make their tags."""


class Segment:
    """Memory that this rank writes and its peers read."""

    def __init__(self, serial: int, nbytes: int) -> None:
        self._file = os.memfd_create("fsdp2")
        os.ftruncate(self._file, nbytes)
        self.memory = _map(os.getpid(), self._file, nbytes)
        self.address = [serial, os.getpid(), self._file, nbytes]
        """What peers need to find it."""
        self.used_nbytes = 0
        """Pages behind these were never touched."""
        self.is_in_use = False
        """Whether the exchange that it serves is under way on this rank."""
        self.answers: list[tuple[int, int]] = []
        """By peer and tag: they come when all have read what this rank wrote."""

    def __del__(self) -> None:
        os.close(self._file)


class Segments:
    """The segments of this rank in one process group, and those of its peers that are mapped.

    Pages that nobody has touched take no memory, so sizes are rounded up freely.
    """

    def __init__(self, rank: int, processes: list[int], notes: Notes, reads_peers: bool) -> None:
        self.rank = rank
        self.processes = processes
        """By rank."""
        self.notes = notes
        self.peers = [peer for peer in range(len(processes)) if peer != rank]
        self.reads_peers = reads_peers
        """Whether ranks may read any memory of each other, not only segments."""
        self._serials = count()
        self._own: list[Segment] = []
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self._exchanges: dict[int, int] = {}
        """By channel, how many there were."""

    def take(self, nbytes: int) -> Segment:
        """One whose exchange is over.

        A segment that is in use here is never waited for: its peers may need this rank to go
        on before they can read it.
        """
        fits = [s for s in self._own if s.memory.numel() >= nbytes and not s.is_in_use]
        if fits:
            segment = min(fits, key=lambda segment: segment.memory.numel())
            self._wait_until_read(segment)
        else:
            size = max(SMALLEST_NBYTES, 1 << (nbytes - 1).bit_length())
            segment = Segment(next(self._serials), size)
            self._own.append(segment)
        segment.is_in_use = True
        segment.used_nbytes = max(segment.used_nbytes, nbytes)
        return segment

    def _wait_until_read(self, segment: Segment) -> None:
        """Not for long: peers do as we did, and we have ended the exchange."""
        answers, segment.answers = segment.answers, []
        for peer, tag in answers:
            self.notes.receive(peer, tag)

    @property
    def held_nbytes(self) -> int:
        """Of this rank's own segments."""
        return sum(segment.used_nbytes for segment in self._own)

    def number(self, channel: int) -> int:
        """Of the next exchange of a channel, alike on all ranks.

        One that an exception left behind has notes that nobody takes: they must not be taken
        for those of the next one.
        """
        found = self._exchanges.get(channel, 0)
        self._exchanges[channel] = found + 1
        return (channel + 1 << 40) + found

    def read(self, peer: int, targets: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Fill ``targets``, each contiguous, with what a peer has at ``addresses``.

        Raises:
            RuntimeError: The peer has ended, or has given its memory back in spite of a loan.
        """
        try:
            read_all(targets, self.processes[peer], addresses)
        except OSError as error:
            raise RuntimeError(
                f"rank {self.rank} of {len(self.processes)} could not read what rank {peer} has "
                f"lent: {error.strerror}; that rank has probably ended, and its own output says why"
            ) from error

    def of_peer(self, peer: int, address: Sequence[int]) -> Tensor:
        """What a peer has announced, as bytes."""
        serial, process, file, nbytes = address
        found = self._mapped.get((peer, serial))
        if found is None:
            found = self._mapped[peer, serial] = _map(process, file, nbytes)
        return found


_met: WeakKeyDictionary[dist.ProcessGroup, Segments | None] = WeakKeyDictionary()


def meet(group: dist.ProcessGroup) -> Segments | None:
    """Segments between the ranks of ``group``; None unless all can map each other's memory.

    The first call for a group communicates: all of its ranks make it.
    """
    if group not in _met:
        _met[group] = _meet(group)
    return _met[group]


def known(group: dist.ProcessGroup) -> Segments | None:
    """What ``meet`` has found, if it was called already."""
    return _met.get(group)


def held_nbytes(group: dist.ProcessGroup) -> int:
    """Of this rank's segments for ``group``."""
    met = _met.get(group)
    return 0 if met is None else met.held_nbytes


class _Card(NamedTuple):
    """What each rank tells the others."""

    host: int
    process: int
    file: int
    nbytes: int
    """Of its first segment; 0 if it can have none."""
    address: int
    """Of a private number; 0 if it cannot be read."""
    door: int
    """Where notes come in; 0 if it has none."""


def _meet(group: dist.ProcessGroup) -> Segments | None:
    cpu = torch.device("cpu")
    rank = group.rank()
    segment = Segment(0, SMALLEST_NBYTES) if _can_share() else None
    private = torch.tensor([rank])
    file, nbytes = 0, 0
    if segment is not None:
        segment.memory[0] = rank
        _, _, file, nbytes = segment.address
    address = private.data_ptr() if let_peers_read() else 0
    door = _open_door() if segment is not None else None
    card = _Card(_host(), os.getpid(), file, nbytes, address, door.number if door else 0)
    values = gather_values(card, [group], cpu)
    size = len(card)
    cards = [_Card(*values[i : i + size]) for i in range(0, len(values), size)]
    is_one_host = all(each.host == card.host for each in cards)
    maps = is_one_host and all(each.nbytes and _can_map(r, each) for r, each in enumerate(cards))
    reads = is_one_host and all(each.address and _can_read(r, each) for r, each in enumerate(cards))
    notes = _connect(door, group, cards) if is_one_host else None
    # Everyone has read before the segment goes, and all decide alike.
    answers = gather_values([int(maps and notes is not None), int(reads)], [group], cpu)
    if notes is None or not all(answers[0::2]):
        return None
    return Segments(rank, [each.process for each in cards], notes, all(answers[1::2]))


def _open_door() -> Door | None:
    try:
        return Door()
    except (AttributeError, OSError, ValueError):  # no such sockets, or none without a name
        return None


def _connect(door: Door | None, group: dist.ProcessGroup, cards: list[_Card]) -> Notes | None:
    if door is None or not all(card.door for card in cards):
        return None
    timeout_s = _torch.timeout_s_of(group, torch.device("cpu"))
    processes, doors = [card.process for card in cards], [card.door for card in cards]
    try:
        return door.meet(group.rank(), processes, doors, timeout_s)
    except OSError:
        return None


def _can_map(rank: int, card: _Card) -> bool:
    try:
        return int(_map(card.process, card.file, card.nbytes)[0]) == rank % 256
    except (OSError, RuntimeError):
        return False


def _can_read(rank: int, card: _Card) -> bool:
    found = torch.tensor([-1])
    try:
        read_all([found], card.process, [card.address])
    except OSError:
        return False
    return int(found) == rank


def _can_share() -> bool:
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


def _host() -> int:
    """The same number on ranks that see each other's processes and use the same network."""
    facts = [str(os.getuid())] if hasattr(os, "getuid") else []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net"):
        place = Path(path)
        if place.is_symlink():
            facts.append(os.readlink(place))
        elif place.exists():
            facts.append(place.read_text())
    return int.from_bytes(blake2b("".join(facts).encode(), digest_size=7).digest(), "big")


def _map(process: int, file: int, nbytes: int) -> Tensor:
    path = f"/proc/{process}/fd/{file}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
