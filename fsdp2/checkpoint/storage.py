"""Tensors in and out of files, in the format of ``torch.distributed.checkpoint``.

Its planners, writer and reader do the work; who does what is agreed in a :class:`Meeting`, and
not by its collectives. ``dcp.load`` reads what is written here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from fsdp2.checkpoint import folders
from fsdp2.checkpoint.meeting import Meeting

METADATA = ".metadata"

Progress = Callable[[int, int], None]
"""Called with the bytes that this rank has written or read so far, and with their total."""


class Written:
    """What one rank has written: what the first needs to finish the checkpoint."""

    def __init__(self, results: list[Any], files: dict[str, dict[str, Any]]) -> None:
        self.results = results
        self.files = files


class Writer:
    """One rank's part of a save: ``plan`` on all ranks, ``write`` on all, ``finish`` on the first.

    Args:
        state: Nested; DTensors and plain tensors that are all in memory until ``write`` returns.
    """

    def __init__(
        self, path: Path, state: dict[str, Any], meeting: Meeting, progress: Progress | None
    ) -> None:
        self._path = path
        self._writer = FileSystemWriter(path)
        self._planner = _CountingSavePlanner(progress)
        self._state = state
        self._meeting = meeting
        self._metadata: Metadata | None = None
        self._plan: SavePlan | None = None

    def plan(self) -> None:
        """Deal what several ranks have, such as replicas, to one of them."""
        self._plan = self._meeting.agree(
            f"checkpoint {self._path}: planning", self._local_plan, self._global_plan
        )

    def _local_plan(self) -> SavePlan:
        is_first = self._meeting.is_first
        self._planner.set_up_planner(self._state, self._writer.storage_meta(), is_first)
        self._writer.set_up_storage_writer(is_first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def write(self) -> Written:
        """Write this rank's part to the disk, and let go of the tensors."""
        assert self._plan is not None
        done = self._writer.write_data(self._planner.finish_plan(self._plan), self._planner)
        results = done.wait()
        names = sorted({result.storage_data.relative_path for result in results})
        self._state = {}
        return Written(results, {name: folders.describe_file(self._path / name) for name in names})

    def finish(self, written: list[Written]) -> dict[str, dict[str, Any]]:
        """Write the index; returns the files of all ranks, with size and checksum."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, [each.results for each in written])
        files = {name: about for each in written for name, about in each.files.items()}
        return files | {METADATA: folders.describe_file(self._path / METADATA)}


class Reader:
    """One rank's part of a load. Nothing is communicated."""

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self.keys = frozenset(self._metadata.state_dict_metadata)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The tensor's, and None for what is no tensor."""
        size = getattr(self._metadata.state_dict_metadata[key], "size", None)
        return None if size is None else tuple(size)

    def dtype(self, key: str) -> torch.dtype:
        return self._metadata.state_dict_metadata[key].properties.dtype  # type: ignore[union-attr]

    def read(self, targets: dict[str, Any], progress: Progress | None) -> None:
        """Fill the tensors of ``targets`` in place, and replace its other values."""
        planner = _CountingLoadPlanner(progress)
        planner.set_up_planner(targets, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        [plan] = planner.create_global_plan([plan])
        [plan] = self._reader.prepare_global_plan([plan])
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


class _CountingSavePlanner(DefaultSavePlanner):
    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress
        self._nbytes: Mapping[MetadataIndex, int] = {}
        self._done = 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._nbytes = {item.index: _nbytes_to_write(item) for item in plan.items}
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self._progress is not None:
            self._done += self._nbytes[write_item.index]
            self._progress(self._done, sum(self._nbytes.values()))
        return super().resolve_data(write_item)


class _CountingLoadPlanner(DefaultLoadPlanner):
    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress
        self._total = self._done = 0

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        self._total = sum(
            _nbytes(self.lookup_tensor(item.dest_index), item)
            for item in plan.items
            if item.type.name == "TENSOR"
        )
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        if self._progress is not None:
            self._done += _nbytes(tensor, read_item)
            self._progress(self._done, self._total)


def _nbytes(tensor: torch.Tensor, item: ReadItem) -> int:
    return item.lengths.numel() * tensor.element_size()


def _nbytes_to_write(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
