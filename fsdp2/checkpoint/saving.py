"""One call that writes a checkpoint, here and now or while training goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp2 import _torch
from fsdp2.checkpoint import extra as extras
from fsdp2.checkpoint import folders, model_state, optimizer_state
from fsdp2.checkpoint.meeting import Meeting
from fsdp2.checkpoint.storage import Progress, Writer, Written
from fsdp2.errors import UsageError
from fsdp2.hooks import states_below

_under_way: Saving | None = None
"""The asynchronous save that was started last."""


class Saving:
    """A save that is done, or under way in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Where the checkpoint is once it is complete."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._was_raised = False

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return when the checkpoint is complete on all ranks.

        Raises:
            CheckpointError: It was not written; the former checkpoint is still the latest.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self.path

    def _start(self, job: _Job) -> None:
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=self._run, args=(job,), name="fsdp2-save")
        self._thread.start()

    def _run(self, job: _Job) -> None:
        try:
            job.finish()
        except BaseException as error:
            self._error = error


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Write the checkpoint ``folder/step-<step>``. Every rank calls it, between steps.

    Each rank writes its own shards; nothing is gathered. The folder gets its name when all of it
    is on the disk, so :func:`latest` never sees half a checkpoint. A checkpoint of the same step
    is replaced. What :func:`load` needs is inside: any number of ranks can load it.

    Args:
        folder: Seen by all ranks, on one file system. Only one run writes there at a time.
        optimizer: One, several, or none. What they have no state for yet is left out.
        step: Names the checkpoint.
        extra: This rank's own, of tensors, numbers, strings, lists, tuples, sets and dicts; for
            example ``{"rng": rng_state(), "loader": loader.state_dict()}``.
        keep: Remove all but so many complete checkpoints, the oldest first, once this one is
            complete. None keeps all.
        asynchronous: Return once the shards are copied to host memory, one copy of this rank's
            own. A save that is still under way is waited for first, so there are never two.
        progress: Called with the bytes written so far by this rank and their total.
        process_group: The ranks that train this model; None for all.

    Raises:
        CheckpointError: On all ranks, with what happened on which rank: a full disk, a rank that
            is gone, a state that cannot be written. With ``asynchronous``, what happens after
            this call returns is raised by :meth:`Saving.wait`, or by the next save or load.

    Usage::

        saving = checkpoint.save("checkpoints", model, optimizer, step=step, keep=3)
    """
    global _under_way
    if keep is not None and keep < 1:
        raise UsageError(f"checkpoint.save: keep is 1 or more, or None to keep all; got {keep}")
    wait_for_saves()
    optimizers = as_list(optimizer)
    job = _Job(Path(folder), step, Meeting(process_group), keep, progress)
    job.prepare(model, optimizers, extra, asynchronous)
    saving = Saving(job.path)
    if asynchronous:
        _under_way = saving
        saving._start(job)
    else:
        job.finish()
    return saving


def wait_for_saves() -> None:
    """Return when no save is under way on this rank.

    Raises:
        CheckpointError: The last one failed, and :meth:`Saving.wait` has not said so.
    """
    global _under_way
    saving, _under_way = _under_way, None
    if saving is not None and not saving._was_raised:
        saving.wait()


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@dataclass
class _Job:
    """One save: ``prepare`` in the thread that trains, ``finish`` in any."""

    folder: Path
    step: int
    meeting: Meeting
    keep: int | None
    progress: Progress | None
    _state: dict[str, Any] = field(init=False)
    _extra: bytes = field(init=False)
    _manifest: dict[str, Any] = field(init=False)
    """On the first rank."""

    @property
    def path(self) -> Path:
        return folders.step_folder(self.folder, self.step)

    def prepare(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        extra: Mapping[str, Any] | None,
        to_host: bool,
    ) -> None:
        """Collect what is written, and make the folder for it."""

        def collect() -> optimizer_state.Layout:
            self._state: dict[str, Any] = {"model": model_state.collect(model)}
            state, layout = optimizer_state.collect(model, optimizers, self.meeting.rank)
            if optimizers:
                self._state["optimizer"] = state
            self._extra = extras.packed(extra or {})
            if to_host:
                self._state = _on_host(self._state)
            return layout

        def begin(layouts: list[optimizer_state.Layout]) -> list[None]:
            self._manifest = _manifest(
                model, self.step, self.meeting.size, optimizer_state.merged(layouts)
            )
            folders.start(self.folder, self.step)
            return [None] * len(layouts)

        try:
            self.meeting.agree(f"checkpoint {self.path}", collect, begin)
        except BaseException:
            self.meeting.close()
            raise

    def finish(self) -> None:
        """Write, and give the checkpoint its name."""
        unfinished = folders.unfinished_folder(self.folder, self.step)
        writer = Writer(unfinished, self._state, self.meeting, self.progress)
        self._state = {}

        def write() -> Written:
            written = writer.write()
            written.files |= extras.write(unfinished, self.meeting.rank, self._extra)
            return written

        def complete(written: list[Written]) -> list[None]:
            manifest = {**self._manifest, "files": writer.finish(written)}
            folders.finish(self.folder, self.step, manifest, self.keep)
            return [None] * len(written)

        try:
            writer.plan()
            self.meeting.agree(f"checkpoint {self.path} was not written", write, complete)
        except BaseException:
            if self.meeting.is_first:
                folders.give_up(self.folder, self.step)
            raise
        finally:
            self.meeting.close()


def _on_host(value: Any) -> Any:
    """A copy that training does not change."""
    if isinstance(value, _torch.DTensor):
        local = _torch.local_of(value).to("cpu", copy=True)
        return _torch.dtensor(local, _torch.spec_of(value))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(each) for each in value)
    return value


def _manifest(
    model: nn.Module, step: int, ranks: int, layout: optimizer_state.Layout
) -> dict[str, Any]:
    return {
        "step": step,
        "ranks": ranks,
        "torch": torch.__version__,
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "groups": [
            {
                "name": state.group.name,
                "mesh": list(state.group.mesh.mesh.mesh.shape),
                "mesh_dim_names": list(state.group.mesh.mesh.mesh_dim_names or []),
                "params": [param.name for param in state.group.params],
            }
            for state in states_below(model)
        ],
        "model": {
            entry.name: model_state.describe(entry.value)
            for entry in model_state.entries(model)
            if model_state.is_tensor(entry)
        },
        "optimizer": layout,
    }
