"""Operators of constructors, run on the meta device and written down.

Two worlds live side by side. What operators make is recorded: it has no memory. What is made of
Python or NumPy data, or was there before, is real, and what is computed from real tensors alone
is computed. Where a value of a recorded tensor is asked for, what leads to it is replayed.

Operators that draw advance the generator at once, by drawing into scratch memory. So seeds that
constructors set or save, and the state in the end, are those of a plain constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.drawing import FILLS
from fsdp2.tape import Blank, Cell, Entry, Fixed, Region, Warm, leaves, map_leaves, replay

_aten = torch.ops.aten

_UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

_OVERWRITES = {
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
    *FILLS,
}
"""They do not read what they write to."""

_READS_SHAPE = {
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
"""They read nothing but shape and dtype."""

_FILL_OF: dict[object, Callable[..., Tensor]] = {
    _aten.uniform_.default: _aten.uniform_.default,
    _aten.rand.default: _aten.uniform_.default,
    _aten.normal_.default: _aten.normal_.default,
    _aten.randn.default: _aten.normal_.default,
}
"""Draws that leave the generator alike whether a tensor is drawn at once or in pieces."""

_PIECE = 1 << 18
"""Elements; a multiple of the 16 that normal numbers are drawn by."""


class CannotRecord(Exception):
    """Why an operator cannot be recorded; the caller knows where."""


class Recorder:
    """What was recorded so far."""

    def __init__(self) -> None:
        self._cells: dict[int, Cell] = {}
        """By storage; a cell keeps its storage, so that no other takes its place."""
        self._count = 0
        self._warm = Warm()
        self._is_paused = False
        """While values are computed."""

    def region_of(self, tensor: Tensor) -> Region | None:
        """None for a real tensor, and for one that was put on the meta device on purpose."""
        if tensor.device.type != "meta" or not is_plain(tensor):
            return None
        cell = self._cells.get(_torch.storage_key(tensor))
        return None if cell is None else Region.of(tensor, cell)

    def value_of(self, tensor: Tensor) -> Tensor:
        """A recorded tensor with its values; a real one itself."""
        region = self.region_of(tensor)
        if region is None:
            return tensor
        self._is_paused = True
        try:
            [(_, storage)] = replay([region.cell], self._warm)
            return region.over(storage).clone()
        finally:
            self._is_paused = False

    def finish(self) -> None:
        """No value will be asked for any more."""
        self._warm = Warm()

    def lift(self, tensor: Tensor) -> Tensor:
        """A recorded tensor with the values of a real one."""
        if tensor.device.type == "meta":
            raise CannotRecord("it reads a tensor on the meta device that was not made in here")
        made = torch.empty_like(tensor, device="meta")
        self._add_cell(made)
        self._note(_aten.copy_.default, (made, tensor.detach()), {})
        return made

    def run(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator: recorded, for real, or with the values of what was recorded.

        Raises:
            CannotRecord: It would have to be recorded, and cannot.
        """
        if self._is_paused:
            return op(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        is_recorded = any(self.region_of(tensor) is not None for tensor in tensors)
        is_factory = not tensors and "device" in _torch.argument_names(op)
        device = torch.device(kwargs.get("device") or "cpu")
        if not is_recorded and (device.type == "meta" or not is_factory):
            return self._run_unrecorded(op, args, kwargs)
        if device.type not in ("cpu", "meta"):
            raise CannotRecord(
                f"it asks for device {device}: what is recorded is what a CPU process would "
                "compute; leave the device to materialize(model, device=...)"
            )
        if any(t.device.type == "meta" and self.region_of(t) is None for t in tensors):
            raise CannotRecord("it reads a tensor on the meta device that was not made in here")
        written = self._written(op, args, kwargs)
        if any(self.region_of(tensor) is None for tensor in written):
            return self._run_with_values(op, args, kwargs)
        try:
            result = op(*_on_meta(args), **_on_meta(kwargs | _meta_device(op, kwargs, is_factory)))
        except Exception as error:
            if written:
                raise CannotRecord(f"it does not run on the meta device: {error}") from error
            return self._run_with_values(op, args, kwargs)
        self._record(op, args, kwargs, result)
        return result

    def _run_unrecorded(self, op: _torch.OpOverload, args: Any, kwargs: Any) -> Any:
        try:
            return op(*args, **kwargs)
        except NotImplementedError as error:
            if any(tensor.device.type == "meta" for tensor in _tensors_in((args, kwargs))):
                raise CannotRecord(str(error)) from error
            raise

    def _run_with_values(self, op: _torch.OpOverload, args: Any, kwargs: Any) -> Any:
        return op(*self._values_of(args), **self._values_of(kwargs))

    def _values_of(self, arguments: Any) -> Any:
        def real(value: Any) -> Any:
            return self.value_of(value) if isinstance(value, Tensor) else value

        return map_leaves(real, arguments)

    def _written(self, op: _torch.OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
        names = _torch.written_by(op)
        given = dict(zip(_torch.argument_names(op), args)) | kwargs
        return _tensors_in([value for name, value in given.items() if name in names])

    def _record(self, op: _torch.OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that ran on the meta device, and advance the generator it draws from."""
        results = [t for t in _torch.flatten(result)[0] if isinstance(t, Tensor)]
        made = [self._add_cell(t) if self.region_of(t) is None else None for t in results]
        is_view = not any(made) and not _torch.written_by(op)
        if is_view or op in _UNINITIALISED or torch.Tag.inplace_view in op.tags:
            return
        state = None
        if torch.Tag.nondeterministic_seeded in op.tags:
            generator = kwargs.get("generator") or torch.default_generator
            state = generator.get_state()
            self._draw(op, args, kwargs, results[0])
            kwargs = {name: None if name == "generator" else v for name, v in kwargs.items()}
        self._note(op, args, kwargs, made, state)

    def _draw(self, op: _torch.OpOverload, args: Any, kwargs: Any, result: Tensor) -> None:
        """Advance the generator as the operator does."""
        fill = _FILL_OF.get(op)
        if fill is not None and result.is_contiguous() and result.is_floating_point():
            draw_in_pieces(fill, result.numel(), result.dtype, kwargs.get("generator"))
            return
        blind = op in _OVERWRITES or op in _READS_SHAPE

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor) or self.region_of(value) is None:
                return value
            return torch.empty_like(value, device="cpu") if blind else self.value_of(value)

        op(*map_leaves(real, args), **map_leaves(real, kwargs))

    def _note(
        self,
        op: _torch.OpOverload,
        args: Any,
        kwargs: Any,
        made: list[Region | None] | None = None,
        state: Tensor | None = None,
    ) -> None:
        """Add the entry, behind those that last wrote to what it reads."""
        written = [self.region_of(t) for t in self._written(op, args, kwargs)]
        made = made or []

        def noted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if op in _READS_SHAPE:
                return Blank(value.dtype, tuple(value.shape), value.stride())
            return self.region_of(value) or Fixed(value)

        args, kwargs = map_leaves(noted, args), map_leaves(noted, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        regions = [v for v in leaves((args, kwargs)) if isinstance(v, Region)]
        writes = dict.fromkeys(r.cell for r in [*written, *made] if r is not None)
        reads = dict.fromkeys(r.cell for r in regions)
        if op in _OVERWRITES and regions[0].is_whole:
            reads = dict.fromkeys(r.cell for r in regions[1:])
        before = tuple(cell.last for cell in reads if cell.last is not None)
        self._count += 1
        entry = Entry(
            self._count, op, args, kwargs, tuple(reads), tuple(writes), tuple(made), state, before
        )
        for cell in writes:
            cell.last = entry

    def _add_cell(self, tensor: Tensor) -> Region:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise CannotRecord(f"its result has layout {tensor.layout} or is a lazy conjugate")
        cell = self._cells[_torch.storage_key(tensor)] = Cell(tensor.untyped_storage())
        return Region.of(tensor, cell)


def draw_in_pieces(
    fill: Callable[..., Tensor], numel: int, dtype: torch.dtype, generator: torch.Generator | None
) -> None:
    """Advance the generator as ``fill`` of ``numel`` elements in a row does."""
    scratch = torch.empty(min(numel, _PIECE + 16), dtype=dtype, device="cpu")
    while numel:
        # The last piece has 16 elements at least: fewer are drawn in another way.
        count = numel if numel < _PIECE + 16 else _PIECE
        fill(scratch[:count], generator=generator)
        numel -= count


def is_plain(tensor: Tensor) -> bool:
    """Whether it is what it seems: a storage and nothing else."""
    is_lazy = isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy


def _meta_device(op: _torch.OpOverload, kwargs: dict[str, Any], is_factory: bool) -> dict[str, Any]:
    """Arguments that send what the operator makes to the meta device."""
    names = _torch.argument_names(op)
    is_asked = kwargs.get("device") is not None
    sent = {"device": torch.device("meta")} if is_factory or is_asked else {}
    return sent | ({"pin_memory": False} if "pin_memory" in names else {})


def _on_meta(arguments: Any) -> Any:
    def moved(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    return map_leaves(moved, arguments)


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
