"""Checkpoints on disk: folders of steps, their manifests and checksums. No torch."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp2.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_PIECE = 1 << 24
_UNFINISHED = ".unfinished"
_REMOVED = ".removed"
_REPLACED = ".replaced"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def latest(folder: str | os.PathLike[str]) -> Path:
    """The complete checkpoint in ``folder`` that was finished last.

    Not the highest step: a folder may hold the later steps of a run that was taken back. What
    a crash left unfinished is not seen.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: One was finished and its manifest is damaged, so nothing says whether
            it is the latest. Others can be loaded by their own paths.
    """
    found = complete(Path(folder))
    if not found:
        raise FileNotFoundError(f"no complete checkpoint in {folder}")
    for path in _finished(Path(folder)):
        if path not in found:
            read_manifest(path)
    return found[-1]


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints that can be read, in the order in which they were finished."""
    numbered = sorted((read_sequence(path), path) for path in _finished(folder))
    return [path for sequence, path in numbered if sequence]


def _finished(folder: Path) -> list[Path]:
    found = [path.parent for path in folder.glob(f"step-*/{MANIFEST}")]
    return [path for path in found if not path.suffix or _is_all_that_is_left(path)]


def _is_all_that_is_left(path: Path) -> bool:
    """Of a step whose checkpoint was about to be replaced when the process ended."""
    return path.suffix == _REPLACED and not path.with_suffix("").exists()


# Writing


def start(folder: Path, step: int) -> Path:
    """Remove what earlier saves left unfinished, and return the folder to write into."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in (_UNFINISHED, _REMOVED, _REPLACED):
        for path in folder.glob(f"step-*{suffix}"):
            if not _is_all_that_is_left(path):
                shutil.rmtree(path, ignore_errors=True)
    unfinished = unfinished_folder(folder, step)
    unfinished.mkdir()
    return unfinished


def unfinished_folder(folder: Path, step: int) -> Path:
    return step_folder(folder, step).with_suffix(_UNFINISHED)


def give_up(folder: Path, step: int) -> None:
    shutil.rmtree(unfinished_folder(folder, step), ignore_errors=True)


def finish(folder: Path, step: int, manifest: Mapping[str, Any], keep: int | None) -> Path:
    """Give what was written its name, at once and for good; then remove the oldest beyond ``keep``.

    A crash at any point leaves the former checkpoint or this one complete; one that this
    replaces goes by another name for a moment, under which it is found.
    """
    unfinished, path = unfinished_folder(folder, step), step_folder(folder, step)
    former = path.with_suffix(_REPLACED)
    found = complete(folder)
    before = [each for each in found if each not in (path, former)]
    last = max(map(read_sequence, found), default=0)
    _write_manifest(unfinished, {**manifest, "sequence": last + 1})
    if path.exists():
        shutil.rmtree(former, ignore_errors=True)
        path.rename(former)
    unfinished.rename(path)
    _sync(folder)
    shutil.rmtree(former, ignore_errors=True)
    for old in before[: max(0, len(before) + 1 - keep)] if keep is not None else ():
        _remove(old)
    return path


def _remove(path: Path) -> None:
    """It loses its name first, so that half of it is never taken for a checkpoint."""
    doomed = path.with_suffix(_REMOVED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Written and on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    content = {"format": _FORMAT, **manifest}
    content["checksum"] = _checksum_of(content)
    write_file(path / MANIFEST, json.dumps(content, indent=1).encode())
    _sync(path)


def _sync(folder: Path) -> None:
    """A name is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def read_manifest(path: Path) -> dict[str, Any]:
    """What the checkpoint says of itself.

    Raises:
        CheckpointError: It is missing, damaged or of a format that this release cannot read.
    """
    file = path / MANIFEST
    try:
        content = json.loads(file.read_bytes())
        checksum = content.pop("checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if checksum != _checksum_of(content):
        raise CheckpointError(f"{file} is damaged: its checksum is another")
    if content["format"] != _FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}, and this release reads {_FORMAT}; "
            "load it with the release of fsdp2 that wrote it"
        )
    return content


def read_sequence(path: Path) -> int:
    """The place among all that were finished in its folder, from 1; 0 where nothing says it."""
    try:
        return int(read_manifest(path)["sequence"])
    except CheckpointError:
        return 0


def _checksum_of(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum, for the manifest."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return {"nbytes": path.stat().st_size, "crc32": f"{checksum:08x}"}


def check_files(path: Path, files: Mapping[str, dict[str, Any]], names: Sequence[str]) -> None:
    """Compare ``names`` with what the manifest says of them.

    Raises:
        CheckpointError: With the first that is missing, or of another size or checksum.
    """
    for name in names:
        file, wanted = path / name, files[name]
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        found = describe_file(file)
        if found["nbytes"] != wanted["nbytes"]:
            raise CheckpointError(
                f"{file} has {found['nbytes']:,} bytes and was written with {wanted['nbytes']:,}; "
                "it was cut off or overwritten"
            )
        if found != wanted:
            raise CheckpointError(
                f"{file} is damaged: its checksum is {found['crc32']} and was {wanted['crc32']}"
            )
