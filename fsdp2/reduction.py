"""The gradients of one portion on their way to the shards.

::

    start      every rank sends the others what they own of its gradients
    advance    the sums are made; replicas start to add theirs
    finish     divided, cast and handed to the shards

One flag per parameter rides along and counts the ranks that had a gradient: a parameter
that no rank used keeps ``grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp2 import _torch
from fsdp2.buffers import Staging, StagingBlock
from fsdp2.collectives import Lent, Pending, Replicas, Source, Sums
from fsdp2.gradient_layout import GradientSection
from fsdp2.runs import Run
from fsdp2.sharded_param import ShardedParam, set_gradients
from fsdp2.streams import Streams


class Reduction(Protocol):
    """A reduction under way, which ends in one of two ways."""

    has_second_stage: bool
    """Whether something remains under way after ``advance``."""
    is_lent: bool
    """Whether peers read this rank's gradients where they lie."""

    def tensors(self) -> Iterator[Tensor | None]:
        """What it holds."""
        ...

    def advance(self) -> None:
        """Sum what has arrived, and let the replicas start. More than one call does no harm."""
        ...

    def finish(self) -> None:
        """Hand the gradients to the shards."""
        ...

    def drop(self) -> None:
        """Let the messages arrive, which peers have sent already, and forget them."""
        ...


@dataclass(frozen=True)
class GradientView:
    """Where the gradient of this rank's rows of one parameter lies in the gradient buffer."""

    index: int
    param: ShardedParam
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dim: int
    """The dimension that is split; the buffer has it in front."""

    def of(self, buffer: Tensor) -> Tensor:
        """In the order of the parameter's own dimensions."""
        view = torch.as_strided(buffer, self.shape, self.stride, self.offset)
        return view.movedim(0, self.dim) if self.dim else view


@dataclass(frozen=True)
class GradientRun:
    """Gradients of one shape at equal distances in the gradient buffer, reached by one view."""

    views: list[GradientView]
    shape: tuple[int, ...]
    """Of the view: how many there are, then that of each, rows in front; or all rows."""
    stride: tuple[int, ...]
    offset: int
    sizes: list[int] | None
    """How many rows each has, where the rows of all lie side by side."""
    is_moved: bool
    """Whether some are split along another dimension than the first."""

    @classmethod
    def over(cls, views: list[GradientView], run: Run) -> GradientRun:
        members = views[run.first : run.first + run.length]
        first = members[0]
        shape, stride = (run.length, *first.shape), (*run.steps, *first.stride)
        sizes = None
        if first.shape and run.steps == (prod(first.shape),):
            sizes = run.length * [first.shape[0]]
            shape, stride = (sum(sizes), *first.shape[1:]), first.stride
        is_moved = any(view.dim for view in members)
        return cls(members, shape, stride, first.offset, sizes, is_moved)

    def of(self, buffer: Tensor) -> Iterable[Tensor]:
        """Contiguous, in the order of each parameter's own dimensions; copied one by one."""
        block = torch.as_strided(buffer, self.shape, self.stride, self.offset)
        if self.sizes is None:
            found = block.unbind()
        else:  # half as long, since no gradient has to remember what it is a view of
            found = torch.unsafe_split_with_sizes(block, self.sizes)
        if not self.is_moved:
            return found
        return (g.movedim(0, view.dim).contiguous() for view, g in zip(self.views, found))


class SectionPlan(NamedTuple):
    """One section of a reduction, with everything that can be known beforehand."""

    gradients: GradientSection
    storage: torch.dtype
    compute: torch.dtype
    reduced: torch.dtype
    wire: torch.dtype
    """The narrower of gradient and reduce dtype: a sum in a wider one loses nothing by it."""
    params: list[ShardedParam]
    """Those with a gradient, in the order of the section's columns."""
    direct: list[int]
    """Places among ``params`` of those whose gradients are sent from where they lie."""
    packed: list[int]
    has_scalars: bool
    views: list[GradientView]
    runs: list[GradientRun]
    """All of ``views``, in their order."""
    coded: frozenset[int]
    """Parameters whose gradients may travel quantised, if they travel by themselves."""


class ReducedSection(NamedTuple):
    """The gradient buffer of one section, summed once its communication has been waited for."""

    plan: SectionPlan
    sums: Sums
    missing: list[int]
    """Parameters without a gradient on this rank."""
    held: list[Tensor]
    """The full gradients: their memory must not be reused before all has been read."""
    packed: StagingBlock | None

    @property
    def buffer(self) -> Tensor:
        return self.sums.buffer

    @property
    def kind(self) -> Hashable:
        """Blocks of one kind have the same shape, and their flags in the same place."""
        assert self.packed is not None
        return kind_of(self.plan, self.packed.rows.dtype)


def kind_of(plan: SectionPlan, wire: torch.dtype) -> Hashable:
    gradients = plan.gradients
    return gradients.packed_numel, len(gradients.columns), gradients.packed_ranks, wire


@dataclass
class PartialSums:
    """What one replica has summed while the sum over all replicas was put off, in float32."""

    sums: list[Tensor] = field(default_factory=list)
    trainable: tuple[int, ...] = ()

    def add(self, buffers: list[Tensor], trainable: tuple[int, ...]) -> None:
        if self.sums:
            for total, buffer in zip(self.sums, buffers):
                total.add_(buffer)
        else:
            self.sums = [b.to(torch.promote_types(b.dtype, torch.float32)) for b in buffers]
            self.trainable = trainable

    def add_to(self, buffers: list[Tensor]) -> None:
        """Complete the sums of the last micro-batch, rounding once."""
        for total, buffer in zip(self.sums, buffers):
            buffer.copy_(total.add_(buffer))
        self.sums = []


class Ending(NamedTuple):
    """What happens to the sums of one replica."""

    replicas: Replicas | None
    partial: PartialSums
    trainable: tuple[int, ...]
    is_put_off: bool
    """Only add them to ``partial``."""
    divisor: float
    fills_unused: bool
    hook: Callable[[Tensor], None] | None
    hook_stream: torch.Stream | None
    to_host: Callable[[Tensor], Tensor] | None
    """Where the shards live on the host: brings a gradient buffer there."""


class LocalReduction:
    """With one rank there is nothing to wait for and nothing to copy."""

    has_second_stage = False
    is_lent = False

    def __init__(self, results: list[tuple[ShardedParam, Tensor]]) -> None:
        self._results = results

    def tensors(self) -> Iterator[Tensor | None]:
        yield from (gradient for _, gradient in self._results)

    def advance(self) -> None:
        pass

    @_torch.no_grad
    def finish(self) -> None:
        set_gradients([p for p, _ in self._results], [g for _, g in self._results])
        self._results = []

    def drop(self) -> None:
        self._results = []


class ExchangedReduction:
    """Holds the full gradients until all ranks have read them."""

    def __init__(
        self,
        sections: list[ReducedSection],
        sources: list[Source],
        pending: Pending,
        ending: Ending,
        streams: Streams,
        staging: Staging,
    ) -> None:
        self._staging = staging
        self._sections = sections
        self._sources = sources
        self._pending: Pending | None = pending
        self._lent = pending if isinstance(pending, Lent) else None
        self.is_lent = self._lent is not None
        self._adding: Pending | None = None
        self._ending = ending
        self._streams = streams
        self.has_second_stage = ending.to_host is not None or (
            ending.replicas is not None and not ending.is_put_off
        )
        self._results: list[Tensor] = []
        self._exchanged: torch.Event | None = None
        self._reduced: torch.Event | None = None
        if streams.runs_ahead:
            self._sum()
            if self.has_second_stage:
                self._exchanged = streams.event()
                with streams.replicating(self._exchanged):
                    self._enqueue_rest()
            else:
                self._enqueue_rest()

    def tensors(self) -> Iterator[Tensor | None]:
        for section in self._sections:
            yield from (section.sums.held, *section.held)
            yield section.packed.rows if section.packed is not None else None
        yield from self._results

    def _enqueue_rest(self) -> None:
        self._add_replicas()
        self._results = self._complete()
        self._reduced = self._streams.event()

    # On an accelerator all of this is only enqueued

    def _sum(self) -> None:
        """The sums of this replica are in the gradient buffers."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _add_replicas(self) -> None:
        partial, ending = self._ending.partial, self._ending
        buffers = [section.buffer for section in self._sections]
        if ending.is_put_off:
            partial.add(buffers, ending.trainable)
            return
        if partial.sums:
            partial.add_to(buffers)
        if ending.replicas is not None:
            self._adding = ending.replicas.start(buffers)

    def _complete(self) -> list[Tensor]:
        """Per section the gradient buffer in the storage dtype."""
        if self._ending.is_put_off:
            return []
        if self._adding is not None:
            self._adding.wait()
            self._adding = None
        results = []
        for section in self._sections:
            if self._ending.divisor != 1.0:
                section.buffer.div_(self._ending.divisor)
            if self._ending.hook is not None:
                self._call_hook(section)
            result, storage = section.buffer, section.plan.storage
            result = result if result.dtype is storage else result.to(storage)
            results.append(self._ending.to_host(result) if self._ending.to_host else result)
        return results

    def _call_hook(self, section: ReducedSection) -> None:
        hook, stream = self._ending.hook, self._ending.hook_stream
        assert hook is not None
        gradients = section.buffer[: section.plan.gradients.flags_offset]
        if stream is None:
            hook(gradients)
            return
        with self._streams.on(stream):
            hook(gradients)

    @_torch.no_grad
    def advance(self) -> None:
        self._advance()

    def _advance(self) -> None:
        if not self._streams.runs_ahead and self._pending is not None:
            self._sum()
            self._add_replicas()
        if self.has_second_stage:
            # Behind this event the compute stream may reuse the memory of the full gradients.
            self._streams.compute_waits(self._exchanged)
            self._exchanged = None
            self._release()

    def _release(self) -> None:
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None
        self._sources = []
        for section in self._sections:
            section.held.clear()

    @_torch.no_grad
    def finish(self) -> None:
        """Wait, and hand the gradients to the shards."""
        self._advance()
        if not self._streams.runs_ahead:
            self._results = self._complete()
        self._streams.compute_waits(self._reduced)
        if self._ending.to_host is not None and self._reduced is not None:
            self._reduced.synchronize()  # the host reads what the copies have written
        self._release()
        sections, self._sections = self._sections, []
        for section, result in zip(sections, self._results):
            self._hand_over(section, result)
        for section in sections:
            # On an accelerator the caching allocator does better: blocks belong to streams.
            if not section.missing and section.packed is not None and not self._streams.runs_ahead:
                self._staging.give(section.kind, section.packed)

    def _hand_over(self, section: ReducedSection, result: Tensor) -> None:
        plan = section.plan
        gradients = chain.from_iterable(run.of(result) for run in plan.runs)
        unused = self._unused(section) if section.missing else None
        if not unused:
            set_gradients(plan.params, gradients)
            return
        is_used = [view.index not in unused for view in plan.views]
        set_gradients([*compress(plan.params, is_used)], compress(gradients, is_used))

    @torch.no_grad()
    def drop(self) -> None:
        if not self._streams.runs_ahead:
            self._sum()
            if self._adding is not None:
                self._adding.wait()
        self._streams.compute_waits(self._reduced)
        self._release()
        self._sections, self._results = [], []

    def _unused(self, section: ReducedSection) -> set[int]:
        """Parameters that no rank has a gradient for. Reading the flags makes the host wait."""
        if self._ending.fills_unused or self._ending.hook is not None:
            return set()
        plan = section.plan.gradients
        flags = section.buffer[plan.flags_offset :].tolist()
        return {c.slot.index for c, flag in zip(plan.columns, flags) if flag == 0}
