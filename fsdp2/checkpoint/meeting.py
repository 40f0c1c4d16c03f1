"""How ranks agree on a checkpoint: through a store, and with an eye on who is still alive.

No collective is used. A collective that one rank never enters leaves the others waiting for
half an hour, and one in a thread of its own would mix with those of training.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.errors import CheckpointError

Found = TypeVar("Found")
Answer = TypeVar("Answer")

PATIENCE = 10.0
"""Seconds without a sign of life after which a rank counts as gone."""

ARRIVAL = 600.0
"""Seconds that ranks wait for one which has not come to the meeting yet."""

_BEAT = 0.5
_POLL = 0.005
_LONGEST_POLL = 0.1

_numbers: dict[tuple[int, ...], count[int]] = {}
"""How many meetings these ranks have had: all of them count alike."""


@dataclass(frozen=True)
class _Failed:
    reason: str


class Meeting:
    """One save or load, from the first word of its ranks to the last.

    Make it on all ranks in the same order, in the thread that trains; the work may be done in
    another. Without a process group, this process meets itself.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ranks: Sequence[int] = [0]
        self.rank = 0
        self._store: dist.Store | None = None
        if dist.is_initialized():
            self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.rank = dist.get_rank(group)
            key = tuple(self.ranks)
            number = next(_numbers.setdefault(key, count()))
            name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            store = _torch.default_store()
            self._store = dist.PrefixStore(f"fsdp2/checkpoint/{name}/{number}", store)
        self._beats = _Beats(self._store, self.rank, self.ranks)
        self._steps = count()
        self._beats.start()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Give no more signs of life. Every meeting must be closed."""
        self._beats.stop()

    def agree(
        self,
        what: str,
        find: Callable[[], Found],
        decide: Callable[[list[Found]], Sequence[Answer]],
    ) -> Answer:
        """Run ``find`` on every rank, then ``decide`` on the first with what all found.

        ``decide`` gets it in rank order, and returns an answer for each rank.

        Raises:
            CheckpointError: On all ranks, when ``find`` raised on one of them, ``decide`` did
                on the first, or a rank is gone.
        """
        found: Found | _Failed
        try:
            found = find()
        except Exception as error:
            cause: Exception | None = error
            found = _Failed(f"rank {self.ranks[self.rank]}: {_described(error)}")
        else:
            cause = None
        try:
            answer = self._exchange(found, decide)
        except dist.DistError as error:
            raise CheckpointError(
                f"{what}: the store in which the ranks meet does not answer, so the process that "
                f"holds it (rank 0, or torchrun) is gone: {error}"
            ) from error
        if isinstance(answer, _Failed):
            raise CheckpointError(f"{what}: {answer.reason}") from cause
        return answer

    def _exchange(self, found: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        if self._store is None or self.size == 1:
            return self._decided([found], decide)[0]
        step = next(self._steps)
        if not self.is_first:
            self._put(f"{step}/found/{self.rank}", found)
            key = f"{step}/answer/{self.rank}"
            gone = self._wait({0: key})
            return _Failed(self._beats.describe(gone)) if gone else self._take(key)
        others = {rank: f"{step}/found/{rank}" for rank in range(1, self.size)}
        gone = self._wait(others)
        if gone:
            answers: Sequence[Any] = [_Failed(self._beats.describe(gone))] * self.size
        else:
            answers = self._decided([found, *map(self._take, others.values())], decide)
        answered = {r: f"{step}/answer/{r}" for r in others if r not in gone}
        for rank, key in answered.items():
            self._put(key, answers[rank])
        # What this process may hold is the store itself: it must not end before all have read.
        self._wait(answered, until_taken=True)
        return answers[0]

    def _decided(
        self, found: list[Any], decide: Callable[[list[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        failures = [each.reason for each in found if isinstance(each, _Failed)]
        if not failures:
            try:
                return decide(found)
            except Exception as error:
                failures = [_described(error)]
        return [_Failed("; ".join(dict.fromkeys(failures)))] * len(found)

    def _put(self, key: str, value: Any) -> None:
        store: Any = self._store  # it takes bytes too, unlike its type hints
        store.set(key, pickle.dumps(value))

    def _take(self, key: str) -> Any:
        assert self._store is not None
        content = pickle.loads(self._store.get(key))
        self._store.delete_key(key)
        return content

    def _wait(self, keys: Mapping[int, str], until_taken: bool = False) -> list[int]:
        """Return when all keys, by the rank that writes or takes each, are there, or are taken.

        Returns the ranks that are gone instead, as soon as there are any.
        """
        assert self._store is not None
        waiting, pause = set(keys), _POLL
        while True:
            waiting = {r for r in waiting if self._store.check([keys[r]]) == until_taken}
            gone = self._beats.gone(waiting) if waiting else []
            if gone or not waiting:
                return gone
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)


class _Beats:
    """Signs of life: a number in the store that each rank counts up."""

    def __init__(self, store: dist.Store | None, rank: int, ranks: Sequence[int]) -> None:
        self._store = store if len(ranks) > 1 else None
        self._rank = rank
        self._ranks = ranks
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = 0.0

    def start(self) -> None:
        if self._store is not None:
            self._thread = threading.Thread(target=self._beat, name="fsdp2-alive", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            assert self._store is not None
            with suppress(dist.DistError):
                self._store.delete_key(f"alive/{self._rank}")

    def _beat(self) -> None:
        assert self._store is not None
        with suppress(dist.DistError):  # the store is gone: who asks it next will say so
            while True:
                self._store.add(f"alive/{self._rank}", 1)
                if self._done.wait(_BEAT):
                    return

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have been silent for too long. It looks every half second."""
        now = time.monotonic()
        if now - self._looked < _BEAT:
            return []
        self._looked = now
        assert self._store is not None
        found = []
        for rank in sorted(ranks):
            beat = self._store.add(f"alive/{rank}", 0)  # 0 before the first; a get would block
            last, since = self._seen.setdefault(rank, (beat, now))
            if beat != last:
                self._seen[rank] = beat, now
            elif now - since > (PATIENCE if beat else ARRIVAL):
                found.append(rank)
        return found

    def describe(self, gone: Sequence[int]) -> str:
        names = ", ".join(str(self._ranks[rank]) for rank in gone)
        subject = f"rank {names} is" if len(gone) == 1 else f"ranks {names} are"
        if all(self._seen[rank][0] for rank in gone):
            return f"{subject} gone: no sign of life for {PATIENCE:g} s"
        return f"{subject} gone, or did not come within {ARRIVAL:g} s"


def _described(error: Exception) -> str:
    text = str(error) or "no reason given"
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
