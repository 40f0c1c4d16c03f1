"""One call that reads a checkpoint back, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp2.checkpoint import extra as extras
from fsdp2.checkpoint import folders
from fsdp2.checkpoint.meeting import Meeting
from fsdp2.checkpoint.model_state import ModelTargets
from fsdp2.checkpoint.optimizer_state import Missing, OptimizerTargets
from fsdp2.checkpoint.saving import as_list, wait_for_saves
from fsdp2.checkpoint.storage import Progress, Reader
from fsdp2.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Restored:
    """What a load found."""

    path: Path
    step: int
    rank: int
    ranks: int
    """How many ranks load."""
    saved_by: int
    """How many ranks saved."""
    missing: tuple[str, ...]
    """Names of the model that the checkpoint lacks; they keep their values. ``strict=False``."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that the model has not. ``strict=False``."""
    without_state: tuple[str, ...]
    """Parameters for which the checkpoint has no optimizer state: they start with none."""
    unused_state: tuple[str, ...]
    """Parameters whose state is in the checkpoint and which the optimizer does not step."""

    @cached_property
    def extra(self) -> dict[str, Any]:
        """What this rank gave as ``extra``.

        Raises:
            CheckpointError: Another number of ranks saved. Which of theirs continues here is
                for the caller to say, with :meth:`extra_of`.
        """
        if self.ranks != self.saved_by:
            raise CheckpointError(
                f"{self.path} was saved by {self.saved_by} ranks and is loaded by {self.ranks}: "
                "no rank's extra is this one's; take what you need from restored.extra_of(rank)"
            )
        return self.extra_of(self.rank)

    def extra_of(self, rank: int) -> dict[str, Any]:
        """What ``rank`` of those that saved gave as ``extra``."""
        if not 0 <= rank < self.saved_by:
            raise CheckpointError(
                f"{self.path} was saved by ranks 0 to {self.saved_by - 1}; it has no extra of "
                f"rank {rank}"
            )
        return extras.read(self.path, rank)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    strict: bool = True,
    missing_state: Missing = "default",
    verify: bool = True,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Restored:
    """Fill ``model`` and ``optimizer`` from a checkpoint. Every rank calls it, between steps.

    The model may be sharded over other ranks than the one that was saved, over a 2-D mesh, or
    not at all: each rank reads what it needs. Parameters on the meta device are made where their
    mesh is. The optimizer may be new; its states are made here, in the dtypes of the saved ones.

    Args:
        path: A checkpoint, or a folder of them: then the latest.
        strict: The names of the model and of the checkpoint must be the same.
        missing_state: ``"default"`` lets parameters without saved state start with none, as
            before their first step, and leaves out state of parameters that are not stepped;
            ``"error"`` refuses both.
        verify: Compare all files with their checksums first, each rank its share of them.
        progress: Called with the bytes read so far by this rank and their total.
        process_group: The ranks that train this model; None for all.

    Raises:
        CheckpointError: On all ranks. Before the first value is read if a file is damaged or
            missing, or if the checkpoint is of another model. If it comes later, a disk that
            fails for one, model and optimizer hold values old and new: load another checkpoint.

    Usage::

        restored = checkpoint.load("checkpoints", model, optimizer)
        for step in range(restored.step + 1, steps): ...
    """
    if missing_state not in ("default", "error"):
        raise UsageError(
            f"checkpoint.load: missing_state is 'default' or 'error', got {missing_state!r}"
        )
    wait_for_saves()
    meeting = Meeting(process_group)
    try:
        loading = _Loading(Path(path), model, as_list(optimizer), meeting)
        loading.open(verify)
        loading.prepare(strict, missing_state)
        loading.read(progress)
    finally:
        meeting.close()
    return loading.restored()


@dataclass
class _Loading:
    path: Path
    model: nn.Module
    optimizers: list[Optimizer]
    meeting: Meeting
    _manifest: dict[str, Any] = field(init=False)
    _reader: Reader = field(init=False)
    _values: ModelTargets = field(init=False)
    _states: OptimizerTargets | None = None

    def open(self, verify: bool) -> None:
        """Choose one checkpoint for all ranks, and see that its files are whole."""

        def choose(paths: list[Path]) -> list[Path]:
            is_one = (self.path / folders.MANIFEST).exists() or not folders.complete(self.path)
            return [self.path if is_one else folders.latest(self.path)] * len(paths)

        self.path = self.meeting.agree(f"checkpoint {self.path}", lambda: self.path, choose)

        def check() -> None:
            self._manifest = folders.read_manifest(self.path)
            files = self._manifest["files"]
            if verify:
                share = sorted(files)[self.meeting.rank :: self.meeting.size]
                folders.check_files(self.path, files, share)

        self._agree(check)

    def prepare(self, strict: bool, missing_state: Missing) -> None:
        """Find a place for every value."""

        def prepare() -> None:
            self._reader = Reader(self.path)
            self._values = ModelTargets.of(self.model, self._reader, strict)
            if self.optimizers:
                self._states = OptimizerTargets(
                    self.model,
                    self.optimizers,
                    self._reader,
                    self._manifest["optimizer"],
                    self.meeting.rank,
                    missing_state,
                )

        self._agree(prepare)

    def read(self, progress: Progress | None) -> None:
        def read() -> None:
            wanted = self._values.wanted | (self._states.wanted if self._states else {})
            self._reader.read(wanted, progress)
            self._values.apply(wanted)
            if self._states:
                self._states.apply(wanted)

        self._agree(read)

    def _agree(self, do: Callable[[], None]) -> None:
        self.meeting.agree(f"checkpoint {self.path} cannot be loaded", do, lambda found: found)

    def restored(self) -> Restored:
        return Restored(
            self.path,
            self._manifest["step"],
            self.meeting.rank,
            self.meeting.size,
            self._manifest["ranks"],
            tuple(self._values.missing),
            tuple(self._values.unexpected),
            tuple(self._states.without if self._states else ()),
            tuple(self._states.unused if self._states else ()),
        )
