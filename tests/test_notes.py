"""Short messages between the ranks of one host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fsdp2.notes import Door, Notes
from harness import start_ranks
from models import Net, shard_blocks


@pytest.fixture
def pair() -> Iterator[tuple[Notes, Notes]]:
    """Two ranks in one process, which wait for one second."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield Notes(0, {1: ours}, 1.0), Notes(1, {0: theirs}, 1.0)


def test_found_by_tag(pair: tuple[Notes, Notes]) -> None:
    """In whatever order they come; those of one tag in theirs."""
    ours, theirs = pair
    for tag, numbers in ((7, [1, 2]), (5, []), (1 << 62, [-1, 1 << 47])):
        ours.send(1, tag, numbers)
    theirs.send(0, 5, [3])
    assert theirs.receive(0, 1 << 62) == [-1, 1 << 47]
    assert theirs.receive(0, 5) == []
    assert theirs.receive(0, 7) == [1, 2]
    assert ours.receive(1, 5) == [3]


def test_a_peer_that_says_nothing(pair: tuple[Notes, Notes]) -> None:
    """Who waits is told for whom and how long, not left to hang."""
    ours, theirs = pair
    theirs.send(0, 1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 has waited for rank 1 of 2 for 1 s"):
        ours.receive(1, 2)
    assert 0.9 < time.monotonic() - start < 10
    assert ours.receive(1, 1) == []


def test_a_peer_that_has_ended(pair: tuple[Notes, Notes]) -> None:
    """What it said before is still there; only who waits for more learns of it."""
    ours, theirs = pair
    theirs.send(0, 1, [4])
    theirs.close()
    ours.send(1, 9)
    assert ours.receive(1, 1) == [4]
    with pytest.raises(RuntimeError, match="rank 1 of 2 has ended while rank 0 waited for it"):
        ours.receive(1, 2)


def test_more_than_the_kernel_keeps(pair: tuple[Notes, Notes]) -> None:
    """Two ranks that both send more than fits make way for each other."""
    count, numbers = 3000, list(range(20))
    failures: list[BaseException] = []

    def send_and_receive(notes: Notes, peer: int) -> None:
        try:
            for tag in range(count):
                notes.send(peer, tag, numbers)
            for tag in reversed(range(count)):
                assert notes.receive(peer, tag) == numbers
        except BaseException as failure:
            failures.append(failure)

    threads = [
        threading.Thread(target=send_and_receive, args=(notes, 1 - rank))
        for rank, notes in enumerate(pair)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures and not any(thread.is_alive() for thread in threads)


KNOCK = """
import socket, sys
sys.stdin.readline()
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.connect(b"\\0%05x" % int(sys.argv[1]))
print(door.recv(100))
"""


def test_strangers_are_turned_away() -> None:
    """A process that is none of the ranks gets no further than the door."""
    door = Door()

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KNOCK, str(door.number)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **pipes)

    stranger, peer = start(), start()
    found: list[Notes] = []
    processes = [os.getpid(), peer.pid]
    meeting = threading.Thread(
        target=lambda: found.append(door.meet(0, processes, [door.number, 0], 1.0))
    )
    meeting.start()
    assert stranger.communicate("\n")[0].strip() == "b''"
    assert peer.stdin is not None
    peer.stdin.write("\n")
    peer.stdin.flush()
    meeting.join(30)
    found[0].send(1, 6)
    assert peer.communicate()[0].strip() == repr((6).to_bytes(8, sys.byteorder))


def rank_that_may_die() -> None:
    """Two steps; rank 1 dies in the forward of the second. Prints what rank 0 sees."""
    dist.init_process_group("gloo")
    model = shard_blocks(Net())
    loss = model(torch.tensor([[1, 2, 3]])).sum()
    loss.backward()
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    try:
        model(torch.tensor([[1, 2, 3]])).sum().backward()
        error = "none"
    except RuntimeError as failure:
        error = str(failure)
    print(json.dumps({"seconds": time.monotonic() - started, "error": error}), flush=True)
    os._exit(0)  # the process group is broken: nothing to leave in order


def test_killed_rank() -> None:
    """Who waits for it says so at once, and does not wait for the timeout."""
    ranks = start_ranks(2, "from test_notes import *; rank_that_may_die()")
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 0, outputs[0][1]
    assert ranks[1].returncode == -signal.SIGKILL
    seen = json.loads(outputs[0][0])
    assert "rank 1 of 2 has ended while rank 0 waited for it" in seen["error"], seen
    assert seen["seconds"] < 10
