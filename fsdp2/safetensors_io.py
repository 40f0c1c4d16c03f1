"""Weights of a sharded model in Hugging Face's safetensors files, out and in.

Out, one rank writes what all gather for it a bucket at a time, straight to its place in the
file: the format puts sizes before data, and sizes are known. In, every rank reads its own rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch
from fsdp2.calls import Phase
from fsdp2.collectives import gather_values
from fsdp2.errors import UsageError
from fsdp2.gathering import gather, is_first
from fsdp2.hooks import states_below
from fsdp2.safetensors_files import CODES, INDEX, SINGLE, Entry, Files, Progress, dealt


def save_safetensors(
    folder: str | os.PathLike[str],
    model: nn.Module,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5 * 10**9,
    on_progress: Progress | None = None,
) -> None:
    """Write the full weights as ``from_pretrained`` reads them. Every rank calls it, between steps.

    One file ``model.safetensors``, or numbered ones with an index if they would be larger than
    ``max_file_nbytes``. They get their names when all are complete, the index last, and then an
    earlier export in ``folder`` is removed. Tied weights are written once, under the first of
    their names. The rank that is first in all the parameters' meshes writes and holds a bucket of
    at most 64 MiB, or one tensor that is larger; the others hold their part of a bucket.

    Args:
        folder: Made if it is not there.
        model: A module with ``fully_shard``, or one around such modules.
        dtype: Of floating-point weights and buffers in the files; as they are stored if None.
        max_file_nbytes: Of tensors in one file. A larger tensor has a file to itself.
        on_progress: Called on the writing rank with the bytes written so far and in all.

    Raises:
        UsageError: Inside forward or backward; a tensor on the meta device, or of a dtype that
            the format does not have.
        OSError: The files could not be written: what went wrong on the rank that writes, and
            that it did on the others. What was in ``folder`` is still there.
    """
    _check_ready(model, "save_safetensors")
    entries = _entries(model, dtype)
    meshes = _meshes(entries)
    is_writer = all(is_first(mesh) for mesh in meshes)
    files = Files(Path(folder), dealt(entries, max_file_nbytes), on_progress, dist.get_rank())
    if is_writer:
        files.begin()
    for entry, full in _full(entries):
        if is_writer and full is not None:
            files.write(entry, full)
    if is_writer:
        files.end()
    _agree(files.problem, meshes, folder)


def load_safetensors(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Read weights that :func:`save_safetensors` or ``save_pretrained`` wrote into the shards.

    Every rank reads its own rows from the files, and no more. Values are cast to the dtype of
    the parameters. Call it on all ranks, between steps, after parameters on the meta device got
    memory. Needs ``pip install fsdp2[safetensors]``.

    Raises:
        UsageError: A tensor is missing, unexpected, of another shape, or on the meta device.
            Then nothing was loaded.
    """
    _check_ready(model, "load_safetensors")
    entries = _entries(model, None)
    with ExitStack() as stack:
        found = _opened(Path(folder), stack)
        sources = {entry.name: _source(entry, found) for entry in entries}
        known = {name for entry in entries for name in entry.names}
        _refuse_keys(folder, entries, sources, sorted(found.keys() - known))
        for entry in entries:
            _check(entry, found[sources[entry.name] or ""], sources[entry.name] or "")
        with torch.no_grad():
            for entry in entries:
                _read(entry, found[sources[entry.name] or ""], sources[entry.name] or "")
    torch.autograd.graph.increment_version([entry.tensor for entry in entries])


# What a model has


def _entries(model: nn.Module, dtype: torch.dtype | None) -> list[Entry]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise UsageError(f"'{name}' is a {kind}; safetensors files hold tensors alone")
        names.setdefault(id(tensor), []).append(name.replace("_orig_mod.", ""))
        tensors[id(tensor)] = tensor
    found = []
    for key, tensor in tensors.items():
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if wanted not in CODES:
            raise UsageError(f"'{names[key][0]}' is {wanted}, which safetensors files cannot hold")
        found.append(Entry(tuple(names[key]), tensor, wanted))
    return found


def _check_ready(model: nn.Module, what: str) -> None:
    states = states_below(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.device.type == "meta":
            raise UsageError(
                f"{what}: '{name}' {tuple(tensor.shape)} is on the meta device; call "
                "model.to_empty(device=...) first"
            )
    if not states:
        raise UsageError(f"{what}: fully_shard was called on no module of {type(model).__name__}")
    for state in states:
        phase = Phase.IDLE if state.schedule is None else state.schedule.phase
        if phase is not Phase.IDLE:
            raise UsageError(
                f"{what}: '{state.group.name}' is in {phase.value}; call it between steps"
            )


def _meshes(entries: list[Entry]) -> list[DeviceMesh]:
    meshes = [e.tensor.device_mesh for e in entries if isinstance(e.tensor, _torch.DTensor)]
    return list(dict.fromkeys(meshes))


# Writing


def _full(entries: list[Entry]) -> Iterator[tuple[Entry, Tensor | None]]:
    """Each entry with its full tensor where this rank has it; sharded ones travel in buckets."""
    sharded = []
    for entry in entries:
        if isinstance(entry.tensor, _torch.DTensor):
            sharded.append(entry)
        else:
            yield entry, entry.tensor.detach()
    tensors: Any = [entry.tensor for entry in sharded]
    for index, full in gather(tensors, only_first=True):
        yield sharded[index], full


def _agree(problem: Exception | None, meshes: list[DeviceMesh], folder: object) -> None:
    """Return on all ranks when the files are there, or raise on all."""
    failed = int(problem is not None)
    for mesh in meshes:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        device = torch.device(mesh.device_type)
        failed = max(gather_values([failed], groups, device))
    if problem is not None:
        raise problem
    if failed:
        raise OSError(f"save_safetensors: the first rank could not write to '{folder}', see there")


# Reading


def _library() -> Any:
    """Writing does without it."""
    try:
        return import_module("safetensors")
    except ImportError:
        raise UsageError(
            "load_safetensors needs the library: pip install 'fsdp2[safetensors]'"
        ) from None


def _opened(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor that the folder has."""
    index = folder / INDEX
    if (folder / SINGLE).exists():
        names = [SINGLE]
    elif index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        raise UsageError(f"load_safetensors: '{folder}' has neither {SINGLE} nor {INDEX}")
    library = _library()
    files = [stack.enter_context(library.safe_open(folder / name, "pt")) for name in names]
    return {key: file for file in files for key in file.keys()}  # noqa: SIM118


def _source(entry: Entry, found: dict[str, Any]) -> str | None:
    """The name under which the files have it: any of a tied tensor's."""
    return next((name for name in entry.names if name in found), None)


def _refuse_keys(
    folder: object, entries: list[Entry], sources: dict[str, str | None], unexpected: list[str]
) -> None:
    missing = [entry.name for entry in entries if sources[entry.name] is None]
    if missing or unexpected:
        raise UsageError(
            f"load_safetensors: '{folder}' lacks {missing} and has {unexpected}, which the model "
            "does not know; nothing was loaded"
        )


def _check(entry: Entry, file: Any, name: str) -> None:
    shape = tuple(file.get_slice(name).get_shape())
    if shape != tuple(entry.tensor.shape):
        raise UsageError(
            f"load_safetensors: '{name}' is {shape} in the file and {tuple(entry.tensor.shape)} "
            "in the model; nothing was loaded"
        )


def _read(entry: Entry, file: Any, name: str) -> None:
    tensor = entry.tensor
    local = _torch.local_of(tensor) if isinstance(tensor, _torch.DTensor) else tensor
    if not tensor.shape:
        local.copy_(file.get_tensor(name))
    elif local.numel():
        local.copy_(file.get_slice(name)[_own_slices(tensor)])


def _own_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the full tensor this rank keeps, along each dimension."""
    if not isinstance(tensor, _torch.DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    slices = []
    mesh = tensor.device_mesh
    for dim, size in enumerate(tensor.shape):
        # Deal out the numbers of the rows as the rows were dealt.
        placements = [_along(placement, dim) for placement in tensor.placements]
        numbers = torch.arange(size, device=tensor.device)
        rows = _torch.local_of(distribute_tensor(numbers, mesh, placements, src_data_rank=None))
        slices.append(slice(int(rows[0]), int(rows[-1]) + 1))
    return tuple(slices)


def _along(placement: Placement, dim: int) -> Placement:
    """How a list of the rows along ``dim`` is dealt."""
    if not isinstance(placement, (Shard, _torch.StridedShard)) or placement.dim != dim:
        return Replicate()
    return _torch.shard_of(0, getattr(placement, "split_factor", 1))
