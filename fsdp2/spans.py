"""Parameters that lie behind each other in memory, and one flat tensor in their place.

An optimizer that treats every element alike does not care where a parameter ends. The shards of
a group lie in one shard buffer and their gradients, after a reduction, in one gradient buffer in
the same order: a *span* of parameters is a flat tensor over both, and what the optimizer keeps
for it is as flat. Every parameter's own state is a view of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.buffers import ShardBuffer, own_storage, typed_view

States = Mapping[Tensor, dict[str, Any]]

_NOTHING = object()


class Piece(NamedTuple):
    """One parameter with a gradient: this rank's part of both, whole where it is not sharded."""

    param: Tensor
    local: Tensor
    grad: Tensor

    @classmethod
    def of(cls, param: Tensor) -> Piece:
        assert param.grad is not None
        if isinstance(param, _torch.DTensor):
            return cls(param, _torch.local_of(param), _torch.local_of(param.grad))
        return cls(param, param, param.grad)


class Member(NamedTuple):
    """One parameter of a span."""

    param: Tensor
    local: Tensor
    start: int
    """In elements of the span."""
    entry: dict[str, Any]
    """``optimizer.state[param]``."""

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()


class Span:
    """What the optimizer steps on in the place of one or several parameters.

    ``tensor`` is the local tensor of a single parameter, or a flat view of the shard buffer.
    ``state`` is what the optimizer keeps for it. Pieces come in the order of their memory, those
    without elements last.
    """

    def __init__(self, pieces: Sequence[Piece], buffer: ShardBuffer | None, states: States) -> None:
        local = pieces[0].local
        origin = local.data_ptr()
        self.stands_in = pieces[0].param is not local
        """Whether ``tensor`` is another one than the parameter itself."""
        # One element in one dimension tells an optimizer's state from its counters.
        self.is_flat = self.stands_in and (len(pieces) > 1 or not local.ndim)
        self.members = []
        for param, own, _ in pieces:
            start = (own.data_ptr() - origin) // own.itemsize if own.numel() else 0
            self.members.append(Member(param, own, start, states[param]))
        self.numel = max(member.stop for member in self.members)
        self.tensor = local.view(-1) if self.is_flat else local
        if self.is_flat and buffer is not None:
            start = origin - buffer.memory.data_ptr()
            self.tensor = typed_view(buffer.memory, start, self.numel, local.dtype)
        self._params = [member.param for member in self.members]
        self._locals = [member.local for member in self.members]
        self._entries = [member.entry for member in self.members]
        self._distances = [m.start * local.itemsize for m in self.members if m.local.numel()]
        """In bytes, of the gradients from the first one."""
        self._padding = self._find_padding()
        self.state: dict[str, Any] = {} if self.stands_in else self.members[0].entry
        self._published: dict[str, Any] = {}
        self._copies: dict[str, Tensor] = {}
        """Of each 0-dim tensor in ``state`` one for each member."""
        self._versions: dict[str, int] = {}
        """Theirs after the last step: another one was written to in between."""
        self._kept: list[Any] = []
        """The values of all members' entries."""
        if self.stands_in:
            self._adopt()

    def _find_padding(self) -> list[tuple[int, int]]:
        """Start and number of the elements between parameters that belong to none."""
        filled = [member for member in self.members if member.local.numel()]
        pairs = zip(filled, filled[1:])
        return [(m.stop, after.start - m.stop) for m, after in pairs if after.start > m.stop]

    # Before the step

    def has_entries_of(self, states: States) -> bool:
        """Whether those of the parameters are still the ones in ``optimizer.state``."""
        return all(map(is_, map(states.get, self._params), self._entries))

    def is_current(self) -> bool:
        """Whether all lies as it did in the last step; gives ``tensor`` its gradient if so."""
        if not self.stands_in:
            return self.tensor.grad is not None
        return self._keeps_state() and self._take_gradient()

    def _keeps_state(self) -> bool:
        """Whether nobody else has put something into the parameters' entries."""
        values = self._values()
        if len(values) != len(self._kept) or not all(map(is_, values, self._kept)):
            return False
        return all(copies._version == self._versions[key] for key, copies in self._copies.items())

    def _take_gradient(self) -> bool:
        found = [param.grad for param in self._params]
        grads = _torch.locals_of([grad for grad in found if grad is not None])
        if len(grads) < len(found):
            return False
        if not all(map(is_, _torch.locals_of(self._params), self._locals)):
            return False
        if not self.is_flat:
            self.tensor.grad = grads[0]
            return True
        flat = self._flat_gradient(grads)
        if flat is None:
            return False
        if self._padding:  # nobody wrote there, and the padding of the shards stays zero
            torch._foreach_zero_([flat.narrow(0, *each) for each in self._padding])
        self.tensor.grad = flat
        return True

    def _flat_gradient(self, grads: Sequence[Tensor]) -> Tensor | None:
        """One tensor over all gradients, if they lie as the parameters do."""
        first = grads[0]
        address = first.data_ptr()
        filled = grads[: len(self._distances)]
        if [grad.data_ptr() for grad in filled] != [address + each for each in self._distances]:
            return None
        if not all(map(Tensor.is_contiguous, filled)) or not holds(first, self.numel):
            return None
        return first.as_strided((self.numel,), (1,), first.storage_offset())

    # After it

    def let_go(self) -> None:
        """Of the gradient, whose memory is freed when the parameters drop theirs."""
        if self.stands_in:
            self.tensor.grad = None

    def publish(self, state: dict[str, Any]) -> None:
        """Let ``optimizer.state`` of the parameters show what the optimizer keeps here now."""
        if state is not self.state:
            self.state.update(state)
        if self.stands_in:
            self._publish()

    # State

    def _adopt(self) -> None:
        """Make one state of what the parameters have; the values stay the same."""
        for key, value in self.members[0].entry.items():
            if not isinstance(value, _torch.DTensor):
                is_shared = isinstance(value, Tensor) and len(self.members) > 1
                self.state[key] = value.clone() if is_shared else value
            elif self.is_flat:
                values = [member.entry[key] for member in self.members]
                self.state[key] = self._published[key] = self._join_elements(values)
            else:
                self.state[key] = self._published[key] = _torch.local_of(value)
        self._publish()
        self._keep()

    def _join_elements(self, values: Sequence[Tensor]) -> Tensor:
        """Move state into one flat tensor; the parameters' DTensors stay the same objects."""
        flat = self.tensor.new_zeros(self.numel, dtype=values[0].dtype)
        for member, value in zip(self.members, values):
            part = self._part(flat, member)
            part.copy_(_torch.local_of(value))
            _torch.set_local(value, part)
        return flat

    def _publish(self) -> None:
        changed = [k for k, v in self.state.items() if self._published.get(k, _NOTHING) is not v]
        for key in changed:
            self._show(key, self.state[key])
            self._published[key] = self.state[key]
        for key, copies in self._copies.items():
            copies.fill_(self.state[key])
            self._versions[key] = copies._version
        if changed:
            self._keep()

    def _keep(self) -> None:
        self._kept = self._values()

    def _values(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._entries))]

    def _show(self, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            for member in self.members:
                member.entry[key] = value
        elif value.ndim:
            for member in self.members:
                member.entry[key] = self._as_dtensor(key, value, member)
        elif len(self.members) == 1:
            self.members[0].entry[key] = value
        else:
            self._copies[key] = value.new_empty(len(self.members))
            for member, copy in zip(self.members, self._copies[key].unbind()):
                member.entry[key] = copy

    def _as_dtensor(self, key: str, value: Tensor, member: Member) -> Tensor:
        """State with a value per element or per row, laid out as its parameter."""
        param = member.param
        assert isinstance(param, _torch.DTensor)
        if value.shape[:1] != self.tensor.shape[:1]:
            raise TypeError(
                f"the optimizer's state '{key}' has shape {tuple(value.shape)} for a parameter "
                f"with local shape {tuple(member.local.shape)}: it is neither one number nor one "
                "for each row, so the ranks' parts of it cannot be put together; step without "
                "local_step"
            )
        part = self._part(value, member) if self.is_flat else value
        shape = param.shape if self.is_flat else (*param.shape[:1], *value.shape[1:])
        if part.shape == member.local.shape:
            shape = param.shape
        spec = _torch.spec_of(param)
        return _torch.dtensor(
            part,
            _torch.dtensor_spec(spec.mesh, spec.placements, tuple(shape), value.dtype),
        )

    def _part(self, flat: Tensor, member: Member) -> Tensor:
        return own_storage(flat[member.start : member.stop].view(member.local.shape))


def holds(first: Tensor, numel: int) -> bool:
    """Whether ``numel`` elements from the start of ``first`` lie in one allocation."""
    available = first.untyped_storage().nbytes() // first.itemsize
    return first.storage_offset() + numel <= available
