"""What constructors did to tensors that never had memory, and how it is done for real.

``Cell``    a storage without memory, on the meta device
``Region``  a tensor: a strided part of a cell
``Entry``   one operator that wrote to cells, with what it read
``Fixed``   a real tensor that an operator read

Views need no entries: they are regions. An entry knows the entries that must run before it,
those that last wrote to what it reads. A cell that is overwritten as a whole forgets what was
done to it earlier, so that weights which a library draws again are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.errors import UsageError

_SMALL_NBYTES = 1 << 16
"""Real tensors up to this size are copied when they are read, larger ones only watched."""


@dataclass(eq=False)
class Cell:
    """A storage without memory."""

    storage: torch.UntypedStorage
    last: Entry | None = None
    """What wrote to it last; None while it is uninitialised."""


class Region(NamedTuple):
    """A tensor: which elements of a cell it has."""

    cell: Cell
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, cell: Cell) -> Region:
        shape = tuple(tensor.shape)
        return cls(cell, tensor.dtype, shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def is_whole(self) -> bool:
        """Whether it covers its cell, in order."""
        on_meta = torch.empty(self.shape, dtype=self.dtype, device="meta")
        is_contiguous = self.stride == on_meta.stride() and self.offset == 0
        return is_contiguous and on_meta.nbytes == self.cell.storage.nbytes()

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, over real memory of its cell."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class Blank(NamedTuple):
    """A tensor of which an operator read shape and dtype only."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


class Fixed:
    """A real tensor that an operator read, with the values that it had then."""

    def __init__(self, tensor: Tensor) -> None:
        # Itself and not an alias: below autograd, where this runs, an alias has its own version.
        self._tensor = tensor.clone() if tensor.nbytes <= _SMALL_NBYTES else tensor
        self._version = self._tensor._version

    def read(self) -> Tensor:
        if self._tensor._version != self._version:
            raise UsageError(
                f"a real tensor of shape {tuple(self._tensor.shape)} that a constructor read "
                "inside deferred_init was changed afterwards, before materialize; pass it a "
                "copy: tensor.clone()"
            )
        return self._tensor


@dataclass(eq=False)
class Entry:
    """One operator and what it did."""

    number: int
    op: _torch.OpOverload
    args: tuple[Any, ...]
    """With a ``Region``, a ``Blank`` or a ``Fixed`` in the place of every tensor."""
    kwargs: dict[str, Any]
    reads: tuple[Cell, ...]
    writes: tuple[Cell, ...]
    made: tuple[Region | None, ...]
    """For each result what it became, if it is not a view of something older."""
    random_state: Tensor | None
    """Of the generator, before it drew."""
    before: tuple[Entry, ...] = field(repr=False, default=())

    def run(self, storages: dict[Cell, torch.UntypedStorage]) -> None:
        """Do it for real; ``storages`` has the memory of cells."""

        def real(value: Any) -> Any:
            if isinstance(value, Region):
                if value.cell not in storages:
                    storages[value.cell] = _allocate(value.cell)
                return value.over(storages[value.cell])
            if isinstance(value, Blank):
                return value.make()
            return value.read() if isinstance(value, Fixed) else value

        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
        args, kwargs = map_leaves(real, self.args), map_leaves(real, self.kwargs)
        results, _ = _torch.flatten(self.op(*args, **kwargs))
        for result, region in zip(results, self.made):
            if region is not None:
                storages[region.cell] = _storage_of(result, region)


def _allocate(cell: Cell) -> torch.UntypedStorage:
    """Zeros where a constructor would leave what it found: alike on all ranks."""
    return torch.zeros(cell.storage.nbytes(), dtype=torch.uint8).untyped_storage()


def _storage_of(result: Tensor, region: Region) -> torch.UntypedStorage:
    """The memory of a result; copied where its layout is not the one that was recorded."""
    if result.stride() == region.stride and result.storage_offset() == region.offset:
        return result.untyped_storage()
    storage = _allocate(region.cell)
    region.over(storage).copy_(result)
    return storage


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf of its tuples, lists and dicts replaced; regions are leaves."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (Region, Blank, torch.Size)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {key: map_leaves(function, each) for key, each in value.items()}
    return function(value)


def leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


class Warm:
    """Memory of cells after some entry, kept from one reading of values to the next.

    Constructors that draw until all values fit read after each draw: none is repeated then.
    """

    def __init__(self) -> None:
        self.storages: dict[Cell, torch.UntypedStorage] = {}
        self.versions: dict[Cell, Entry] = {}

    def has(self, entry: Entry) -> bool:
        return bool(entry.writes) and all(self.versions.get(c) is entry for c in entry.writes)

    def fits(self, entries: list[Entry]) -> bool:
        """Whether none of ``entries`` needs older values than there are."""
        return not any(
            cell in self.versions and entry.number < self.versions[cell].number
            for entry in entries
            for cell in (*entry.reads, *entry.writes)
        )


def _needed(cells: Collection[Cell], warm: Warm) -> list[Entry]:
    """The entries that lead to what ``cells`` hold now, in the order in which they were made."""
    found: set[Entry] = set()
    remaining = [cell.last for cell in cells if cell.last is not None]
    while remaining:
        entry = remaining.pop()
        if entry not in found and not warm.has(entry):
            found.add(entry)
            remaining += entry.before
    return sorted(found, key=lambda entry: entry.number)


@contextmanager
def _own_generator(entry: Entry) -> Iterator[None]:
    """Leave the default generator as it was."""
    if entry.random_state is None:
        yield
        return
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


@torch.no_grad()
def replay(
    wanted: Collection[Cell], warm: Warm | None = None
) -> Iterator[tuple[Cell, torch.UntypedStorage]]:
    """Give every wanted cell memory with what constructors left there, one after the other.

    A cell is handed over as soon as nothing else needs it, and its memory is forgotten here;
    with ``warm`` everything is kept there instead. The default generator is left as it was.
    """
    start = warm or Warm()
    entries = _needed(wanted, start)
    if not start.fits(entries):
        start.storages, start.versions = {}, {}
        entries = _needed(wanted, start)
    last_use = {cell: e for e in entries for cell in (*e.reads, *e.writes)}
    storages = dict(start.storages)
    for cell in wanted:
        if cell not in last_use:
            yield cell, storages.get(cell) or _allocate(cell)
    for entry in entries:
        with _own_generator(entry):
            entry.run(storages)
        if warm is not None:
            continue
        for cell in dict.fromkeys((*entry.reads, *entry.writes)):
            if last_use[cell] is entry:
                storage = storages.pop(cell)
                if cell in wanted:
                    yield cell, storage
                del storage
    if warm is not None and entries:
        warm.storages = {cell: storages[cell] for cell in last_use}
        warm.versions = {c: warm.versions[c] for c in last_use if c in warm.versions}
        warm.versions |= {cell: entry for entry in entries for cell in entry.writes}
        yield from ((cell, storages[cell]) for cell in wanted if cell in last_use)
