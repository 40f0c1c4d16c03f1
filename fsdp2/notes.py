"""Short messages between the ranks of one host: an announcement, an answer.

They cross a Unix socket for each pair of ranks. The kernel keeps a note until it is asked for and
wakes who waits for it, with no thread in between as a message of gloo's has; and it tells at once
that a peer has ended.
"""

from __future__ import annotations

import select
import socket
import struct
from array import array
from collections.abc import Sequence

_MOST_NBYTES = 1 << 18
"""Of one note; the kernel's own limit for a socket's buffer is smaller as a rule."""

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: process, user and group of who is at the other end."""

_TIME = struct.Struct("2l")
"""``struct timeval``: seconds and microseconds."""

_MEETING_S = 30.0
"""Ranks come to the door together."""


class Door:
    """Where peers of this host come to be known; their processes say which rank they are."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("")  # the kernel picks a name that is in no folder
        self._socket.listen(socket.SOMAXCONN)
        self.number = int(self._socket.getsockname()[1:], 16)
        """What peers need to find it."""

    def meet(
        self, rank: int, processes: Sequence[int], doors: Sequence[int], timeout_s: float
    ) -> Notes:
        """Connect all pairs of ranks; each of them calls this. ``timeout_s`` is that of notes.

        Raises:
            OSError: A peer cannot be reached, or did not come in time.
        """
        sockets: dict[int, socket.socket] = {}
        for peer in range(rank):
            sockets[peer] = own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own.settimeout(_MEETING_S)
            own.connect(b"\0%05x" % doors[peer])
        self._socket.settimeout(_MEETING_S)
        while len(sockets) < len(processes) - 1:
            found, _ = self._socket.accept()
            size = _CREDENTIALS.size
            who = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            process, _, _ = _CREDENTIALS.unpack(who)
            if process in processes:
                sockets[processes.index(process)] = found
            else:
                found.close()
        return Notes(rank, sockets, timeout_s)

    def __del__(self) -> None:
        self._socket.close()


class Notes:
    """To and from every peer. They are found by their tags, in whatever order they come."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._unread: dict[tuple[int, int], list[int]] = {}
        self._ended: set[int] = set()
        self._room = bytearray(_MOST_NBYTES)
        for each in sockets.values():
            each.settimeout(None)
            until = _TIME.pack(*divmod(int(timeout_s * 1e6), 10**6))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, until)

    def send(self, peer: int, tag: int, numbers: Sequence[int] = ()) -> None:
        """Returns at once. A peer that has ended is not an error before it is waited for."""
        note = array("q", (tag, *numbers))
        while True:
            try:
                self._sockets[peer].send(note, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._make_way(peer)
            except (BrokenPipeError, ConnectionResetError):
                return

    def _make_way(self, peer: int) -> None:
        """A peer that does not read our notes may be waiting for us to read its own."""
        poll = select.poll()
        readers = {
            each.fileno(): other
            for other, each in self._sockets.items()
            if other not in self._ended or other == peer
        }
        for fileno, other in readers.items():
            poll.register(fileno, select.POLLIN | (select.POLLOUT if other == peer else 0))
        found = poll.poll(self._timeout_s * 1000)
        if not found:
            raise RuntimeError(self._waited_for(peer))
        for fileno, event in found:
            if event & select.POLLIN:
                self._take(readers[fileno], socket.MSG_DONTWAIT)

    def receive(self, peer: int, tag: int) -> list[int]:
        """Wait for what a peer has sent with ``tag``.

        Raises:
            RuntimeError: The peer has ended, or sent nothing within the timeout.
        """
        while (peer, tag) not in self._unread:
            try:
                self._take(peer)
            except BlockingIOError:
                raise RuntimeError(self._waited_for(peer)) from None
            if peer in self._ended:
                raise RuntimeError(
                    f"rank {peer} of {len(self._sockets) + 1} has ended while rank {self._rank} "
                    "waited for it; its own output says why"
                )
        return self._unread.pop((peer, tag))

    def _take(self, peer: int, flags: int = 0) -> None:
        """Keep the next note of a peer, or that it has ended."""
        try:
            nbytes = self._sockets[peer].recv_into(self._room, 0, flags)
        except ConnectionError:
            nbytes = 0
        if nbytes:
            tag, *numbers = memoryview(self._room)[:nbytes].cast("q").tolist()
            self._unread[peer, tag] = numbers
        else:
            self._ended.add(peer)

    def _waited_for(self, peer: int) -> str:
        return (
            f"rank {self._rank} has waited for rank {peer} of {len(self._sockets) + 1} for "
            f"{self._timeout_s:.0f} s, the timeout of their process group"
        )

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()

    __del__ = close
