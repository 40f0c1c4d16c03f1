"""What a rank wants to find again beside model and optimizer: random states, its data loader's."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint.folders import describe_file, write_file
from fsdp2.errors import CheckpointError


def file_of(rank: int) -> str:
    return f"extra-{rank}.pt"


def packed(extra: Mapping[str, Any]) -> bytes:
    """The bytes to write, checked to be readable without running anything they name.

    Raises:
        CheckpointError: With the key whose value is not made of tensors, numbers, strings, lists,
            tuples, sets and dicts.
    """
    for key, value in extra.items():
        try:
            _unpacked(_packed({key: value}))
        except Exception as error:
            raise CheckpointError(
                f"extra['{key}'] is a {type(value).__name__} that cannot be read back safely; give "
                "tensors, numbers, strings, and lists, tuples, sets and dicts of them, such as an "
                "object's state_dict()"
            ) from error
    return _packed(dict(extra))


def write(path: Path, rank: int, content: bytes) -> dict[str, dict[str, Any]]:
    file = path / file_of(rank)
    write_file(file, content)
    return {file.name: describe_file(file)}


def read(path: Path, rank: int) -> dict[str, Any]:
    return _unpacked((path / file_of(rank)).read_bytes())


def _packed(extra: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def rng_state() -> dict[str, Any]:
    """The random states of this rank: Python's, PyTorch's, its accelerator's, NumPy's if loaded.

    For ``extra``; :func:`set_rng_state` takes it.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        state[device.type] = torch.get_device_module(device.type).get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue the random numbers where :func:`rng_state` was called."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for kind, value in state.items():
        if kind == "numpy":
            _set_numpy(value)
        elif kind not in ("python", "torch"):
            torch.get_device_module(kind).set_rng_state(value)


def _set_numpy(state: tuple[Any, ...]) -> None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = state
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
