"""Run a test's body on several gloo ranks, in worker processes that live for a file of tests.

    from harness import Ranks, distributed, run

    @distributed(2, 3)                       # one pytest case for each world size
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sum(ranks: Ranks, dtype: torch.dtype) -> None:
        total = torch.ones(1, dtype=dtype)
        dist.all_reduce(total)
        assert total.item() == ranks.world_size

    class TestSchedule(expecttest.TestCase):
        def test_order(self) -> None:        # golden text is compared, and accepted, in the parent
            self.assertExpectedInline(run(trace_of_one_step, 2)[0], \"\"\"...\"\"\")

A body is a function at the top level of its module: workers import it by name. Its arguments and
its result travel by pickle. Each world size has its own pool for each test file, started when
first needed and replaced after a failure: a process group never changes under the objects that
cached it.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

# Workers inherit it; it must be set before they import torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = 120.0
GROUP_TIMEOUT = timedelta(seconds=60)
GRACE = 5.0  # what the other ranks get once one has failed: they may wait for it in a collective

# A server that has imported torch once and forks workers from then on starts a pool in 0.1 s,
# where spawning four takes 3 s. Forking it is safe: it has one thread and no CUDA context. The
# first operation on a DTensor imports the compiler: more than a second for each worker otherwise.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch._dynamo", "pytest", "fsdp2.api"]
)


@dataclass(frozen=True)
class Ranks:
    """Where a body runs: this process's rank, among `world_size`."""

    rank: int
    world_size: int

    @functools.cache  # noqa: B019 -- every further mesh would keep more threads until the end
    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """The CPU mesh of this shape (default: one dim of all ranks), the same object each time."""
        return init_device_mesh("cpu", shape or (self.world_size,), mesh_dim_names=names)


def distributed(
    *world_sizes: int, timeout: float = TIMEOUT
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a pytest test of `body(ranks, ...)`, run on every rank, for each of the world sizes.

    Further parameters come from `pytest.mark.parametrize` or fixtures, if they can be pickled.
    """
    if not world_sizes:
        raise ValueError("name at least one world size, as in @distributed(2)")

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world_size: int, **arguments: Any) -> None:
            try:
                _run(_Call(body.__module__, body.__qualname__, (), arguments), world_size, timeout)
            except AssertionError as failure:  # the ranks' tracebacks say it all
                raise pytest.fail.Exception(str(failure), pytrace=False) from None

        ranks, *others = inspect.signature(body).parameters.values()
        parameters = [ranks.replace(name="world_size", annotation=int), *others]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.distributed_body = body  # type: ignore[attr-defined]
        for_each_size = pytest.mark.parametrize("world_size", world_sizes, ids="{}ranks".format)
        return cast(Callable[..., None], for_each_size(test))

    return decorate


def run(
    body: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT, **kwargs: Any
) -> list[Any]:
    """Call `body(ranks, *args, **kwargs)` on every rank; return the results in rank order.

    Raises AssertionError with the traceback of every rank that failed, first failure first, and
    the stacks of those that had not finished after `timeout` seconds, or 5 s after a failure.
    """
    __tracebackhide__ = True
    return _run(_Call(body.__module__, body.__qualname__, args, kwargs), world_size, timeout)


def close_pools() -> None:
    """End all workers."""
    while _pools:
        _pools.popitem()[1].close()


# ---- The parent's side


class _Call(NamedTuple):
    """A body, by name since the decorated test hides it from pickle, and its arguments."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Reply(NamedTuple):
    kind: Literal["returned", "skipped", "failed"]
    content: Any  # the result, the reason, or the traceback's text


def _run(call: _Call, world_size: int, timeout: float) -> list[Any]:
    __tracebackhide__ = True
    if "<locals>" in call.qualname:
        raise ValueError(
            f"{call.qualname}: move the body to the top level of {call.module}, "
            "where workers can import it"
        )
    payload = pickle.dumps(call)
    pool = _pools.pop(world_size, None) or _Pool(world_size)
    try:
        replies = pool.call(payload, timeout)
    except BaseException:
        pool.close()  # its ranks may be anywhere in the body
        raise
    _pools[world_size] = pool
    for reply in replies:
        if reply.kind == "skipped":
            pytest.skip(reply.content)
    return [reply.content for reply in replies]


class _Pool:
    """Workers that share one default process group, one for each rank."""

    def __init__(self, world_size: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        directory = Path(self.directory.name)
        self.stacks = [directory / f"stacks-{rank}" for rank in range(world_size)]
        self.processes = []
        self.connections: list[Connection] = []
        for rank, stacks in enumerate(self.stacks):
            stacks.touch()
            ours, theirs = _processes.Pipe()
            arguments = (Ranks(rank, world_size), directory / "store", stacks, theirs)
            process = _processes.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a worker's death ends the pipe
            self.processes.append(process)
            self.connections.append(ours)

    def call(self, payload: bytes, timeout: float) -> list[_Reply]:
        __tracebackhide__ = True
        for connection in self.connections:
            with suppress(BrokenPipeError):  # a dead worker is reported when its reply is read
                connection.send_bytes(payload)
        replies: dict[int, _Reply] = {}
        waiting: dict[Any, int] = {c: rank for rank, c in enumerate(self.connections)}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for answered in ready:
                rank = waiting.pop(answered)
                replies[rank] = self._reply(rank)
                if replies[rank].kind != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting:
            replies |= self._unfinished(sorted(waiting.values()), timeout)
        failed = {rank: reply.content for rank, reply in replies.items() if reply.kind == "failed"}
        if failed:
            texts = [f"rank {rank} {text}" for rank, text in failed.items()]
            raise AssertionError(
                "\n\n".join([f"failed on {len(failed)} of {len(replies)} ranks", *texts])
            )
        return [replies[rank] for rank in sorted(replies)]

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.directory.cleanup()

    def _reply(self, rank: int) -> _Reply:
        try:
            return cast(_Reply, pickle.loads(self.connections[rank].recv_bytes()))
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            return _Reply("failed", f"died with exit code {code}\n{self.stacks[rank].read_text()}")

    def _unfinished(self, ranks: list[int], timeout: float) -> dict[int, _Reply]:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(cast(int, self.processes[rank].pid), signal.SIGUSR1)
        time.sleep(0.5)  # the stacks are written by the signal's handler, which cannot answer
        text = f"had not finished (the limit is {timeout:g} s, or {GRACE:g} s after a failure)"
        return {
            rank: _Reply("failed", f"{text}\n{self.stacks[rank].read_text()}") for rank in ranks
        }


_pools: dict[int, _Pool] = {}


# ---- The worker's side


def _work(ranks: Ranks, store: Path, stacks: Path, connection: Connection) -> None:
    """Join the group, then answer calls until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    stacks_file = stacks.open("w")
    faulthandler.enable(stacks_file)
    faulthandler.register(signal.SIGUSR1, stacks_file)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=GROUP_TIMEOUT,
    )
    gc.freeze()  # collecting after each body would otherwise walk all that torch imported
    with suppress(EOFError):
        while True:
            connection.send_bytes(_answer(ranks, connection.recv_bytes()))


def _answer(ranks: Ranks, payload: bytes) -> bytes:
    try:
        call: _Call = pickle.loads(payload)
        found: Any = importlib.import_module(call.module)
        for name in call.qualname.split("."):
            found = getattr(found, name)
        body = getattr(found, "distributed_body", found)
        torch.manual_seed(0)
        before = _global_state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = body(ranks, *call.args, **call.kwargs)
            gc.collect()
            gc.freeze()  # what the body has imported: dynamo alone is a second of every walk
        if (after := _global_state()) != before:
            changed = {name: value for name, value in after.items() if value != before[name]}
            raise AssertionError(f"the body left global state changed: {changed}")
        return pickle.dumps(_Reply("returned", result))
    except pytest.skip.Exception as skip:
        return pickle.dumps(_Reply("skipped", str(skip)))
    except (Exception, pytest.fail.Exception):
        return pickle.dumps(_Reply("failed", f"raised\n{traceback.format_exc()}"))


def _global_state() -> dict[str, object]:
    """What a body must leave as it found it, for the tests that follow in the same process."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "process group": dist.group.WORLD,
    }


def start_ranks(size: int, code: str) -> list[subprocess.Popen[str]]:
    """Processes of their own that run ``code``; rank 0 holds the store, as without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    shared |= {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
