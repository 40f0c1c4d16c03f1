"""Real text that every machine has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Two flat uint8 tensors, from different files."""

    train: Tensor
    validation: Tensor


def load_corpus(max_bytes: int = 8_000_000) -> Corpus:
    """Read the top-level modules in alphabetical order, every tenth file held out.

    Another Python release has other files, so losses compare within one release only.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        source = path.read_bytes()
        total += len(source)
        if total > max_bytes:
            break
        parts[index % 10 == 9].append(source)
    train, validation = (b"".join(part) for part in parts)
    if not validation:
        raise FileNotFoundError(f"{folder} holds too few .py files to train on; is it a zip?")
    return Corpus(_as_tensor(train), _as_tensor(validation))


def _as_tensor(source: bytes) -> Tensor:
    # A bytearray, because a tensor may not share memory that cannot be written.
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


def random_windows(data: Tensor, count: int, length: int, seed: int, step: int) -> Tensor:
    """(count, length) of int64, cut at random: a function of seed and step alone.

    Nothing has to be saved to continue an interrupted run with the data it would have seen.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(_last_start(data, length) + 1, (count,), generator=generator)
    return _windows(data, starts, length)


def spread_windows(data: Tensor, count: int, length: int) -> Tensor:
    """(count, length) of int64, cut at equal distances from the first byte to the last."""
    starts = torch.linspace(0, _last_start(data, length), count, dtype=torch.float64).long()
    return _windows(data, starts, length)


def _last_start(data: Tensor, length: int) -> int:
    if data.numel() < length:
        raise ValueError(f"{data.numel()} bytes hold no window of {length}; shorten --sequence")
    return data.numel() - length


def _windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    return data[starts[:, None] + torch.arange(length)].long()
