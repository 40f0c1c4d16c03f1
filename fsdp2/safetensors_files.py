"""The files of a safetensors export: which tensor is where, and how they come to their names.

A file is the length of its header, the header as JSON, and the tensors' bytes. The header says
where each tensor lies, so a file is begun before any tensor is there, and filled in any order.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

Progress = Callable[[int, int], object]

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of the model: under its first name, with its other names where it is tied."""

    names: tuple[str, ...]
    tensor: Tensor
    dtype: torch.dtype
    """In the file."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


def dealt(entries: list[Entry], limit: int) -> list[list[Entry]]:
    """Which entries share a file, in the model's order."""
    files: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if files[-1] and nbytes + entry.nbytes > limit:
            files.append([])
            nbytes = 0
        files[-1].append(entry)
        nbytes += entry.nbytes
    return files


class Files:
    """The files of one export, under names of their own until they are complete.

    What goes wrong is kept in ``problem``, and nothing is done from then on: the rank that writes
    has to go on with the collectives that others wait in.
    """

    def __init__(
        self, folder: Path, dealt: list[list[Entry]], on_progress: Progress | None, rank: int
    ) -> None:
        self.problem: Exception | None = None
        self._folder = folder
        self._dealt = dealt
        self._on_progress = on_progress
        self._rank = rank
        count = len(dealt)
        numbered = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        self._names = numbered if count > 1 else [SINGLE]
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._open = ExitStack()
        self._total = sum(entry.nbytes for file in dealt for entry in file)
        self._done = 0

    def begin(self) -> None:
        """Write what comes before the data."""
        with self._noting_problems():
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, entries in zip(self._names, self._dealt):
                file = self._open.enter_context(self._unfinished(name).open("wb"))
                header, starts = _header(entries)
                file.write(header)
                for entry, start in zip(entries, starts):
                    self._places[entry.name] = file, len(header) + start

    def write(self, entry: Entry, full: Tensor) -> None:
        """Put one full tensor in its place; in any order."""
        if self.problem is not None:
            return
        with self._noting_problems():
            file, start = self._places[entry.name]
            file.seek(start)
            flat = full.to("cpu", entry.dtype).contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
            self._done += entry.nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

    def end(self) -> None:
        """Give the files their names, or remove them if there was a problem."""
        with self._noting_problems():
            files = {file for file, _ in self._places.values()}
            with self._open:
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            if self.problem is None:
                self._finish()
        if self.problem is not None:
            for name in (*self._names, INDEX):
                self._unfinished(name).unlink(missing_ok=True)

    def _unfinished(self, name: str) -> Path:
        # Repetitions of the model that know nothing of each other may export to one folder.
        return self._folder / f".{name}.{self._rank}.unfinished"

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.problem = self.problem or error

    def _finish(self) -> None:
        """The index gets its name last, then an earlier export goes."""
        names = set(self._names)
        for name in self._names:
            self._unfinished(name).replace(self._folder / name)
        if len(self._names) > 1:
            where = {e.name: n for n, entries in zip(self._names, self._dealt) for e in entries}
            index = {"metadata": {"total_size": self._total}, "weight_map": where}
            self._unfinished(INDEX).write_text(json.dumps(index, indent=2) + "\n")
            self._unfinished(INDEX).replace(self._folder / INDEX)
            names.add(INDEX)
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in names:
                path.unlink()


def _header(entries: list[Entry]) -> tuple[bytes, list[int]]:
    """What a file begins with, and where each tensor starts behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in sorted(entries, key=lambda e: -e.dtype.itemsize):  # so that each is aligned
        header[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    starts = [header[entry.name]["data_offsets"][0] for entry in entries]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts
