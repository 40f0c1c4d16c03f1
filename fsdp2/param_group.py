"""One param group: gathered together, reduced together.

=============  ==================================  =====================================
state          memory held                         left by
=============  ==================================  =====================================
``SHARDED``    the shard buffers                   ``start_gather``
``ARRIVING``   and the full buffers, in part       ``finish_gather``, ``free``
``FULL``       and the full buffers                ``free``, ``keep_part``
``PART``       and a part of the full parameters,  ``start_gather``, ``free``
               for a gather over fewer ranks
=============  ==================================  =====================================

A reduction is independent of it: ``start_reduce`` takes the gradients away from the full
parameters, and what it returns gives them to the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from weakref import ref

import torch
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.attributes import Attributes
from fsdp2.buffers import Staging
from fsdp2.calls import Step
from fsdp2.compiling import untraced
from fsdp2.custom import CustomComms
from fsdp2.errors import UsageError
from fsdp2.marks import Marks, Seen
from fsdp2.mesh import Axis, ShardMesh, part_group
from fsdp2.policies import OffloadPolicy, Switches, input_dtype
from fsdp2.portion import Portion
from fsdp2.reduction import Reduction
from fsdp2.sharded_param import ShardedParam
from fsdp2.streams import Streams


class GroupState(Enum):
    """Where the full parameters are; the table above says what each state holds."""

    SHARDED = "sharded"
    ARRIVING = "arriving"
    FULL = "full"
    PART = "kept in part"


class ParamGroup:
    """The parameters of one ``fully_shard`` call."""

    def __init__(
        self,
        modules: list[nn.Module],
        params: list[ShardedParam],
        mesh: ShardMesh,
        policy: _torch.MixedPrecisionPolicy,
        offload: OffloadPolicy,
        switches: Switches,
        part_size: int | None = None,
    ) -> None:
        self.name = type(modules[0]).__name__
        """Full name of its modules from the root, known from the first forward on."""
        self.modules = modules
        for param in params:
            param.group_name = self.name
            param.guard()
        self.mesh = mesh
        """The call's mesh; single parameters may be dealt over others."""
        self.policy = policy
        self.offload = offload
        self.part_size = part_size
        """Ranks that backward gathers over, if fewer than the shard mesh has."""
        self.channel = 0
        """A number of its own under its root: keeps the messages of groups apart."""
        self.state = GroupState.SHARDED
        self.switches = switches
        self.step = Step()
        self.is_accumulating = False
        """Whether gradients were kept back since the last reduction."""
        self.may_lend = False
        """Whether ranks have found that they use groups in one order: peers can be waited for."""
        self.waiting: set[int] = set()
        """Trainable parameters that have no gradient yet in this backward."""
        self.on_gradients_complete: Callable[[ParamGroup], None] = _nothing_to_do
        self.trainable: tuple[int, ...] = ()
        """As of the last gather."""
        self._trainable: list[tuple[int, ...]] = []
        """The same per portion, by places in it."""
        self._arrived: torch.Event | None = None
        self.custom = CustomComms()
        self.reduces_apart = False
        self._deal(params)

    def _deal(self, params: list[ShardedParam]) -> None:
        """Sort the parameters into portions, one for each mesh."""
        meshes: dict[ShardMesh, list[ShardedParam]] = {}
        for param in params:
            meshes.setdefault(param.mesh, []).append(param)
        self.portions = [
            Portion(members, mesh, self.policy, self.offload, self._part_axis(mesh), self.custom)
            for mesh, members in (meshes or {self.mesh: []}).items()
        ]
        self.separate_reductions(self.reduces_apart)
        self.params = [param for portion in self.portions for param in portion.params]
        self.attributes = Attributes(self.params)
        self._lay_out()

    def _part_axis(self, mesh: ShardMesh) -> Axis | None:
        size = self.part_size
        if size is None or mesh.world_size % size or not 1 < size < mesh.world_size:
            return None
        return part_group(mesh, size)

    # Parameters

    def _lay_out(self) -> None:
        for portion in self.portions:
            portion.lay_out()
        self._note_layout()

    def _note_layout(self) -> None:
        self._marks = Marks(self.params)
        self.attributes.remember()
        self.aliases_shards = all(portion.aliases_shards for portion in self.portions)
        """Whether the full parameters take no memory beside the shards."""
        self.input_dtype = input_dtype(self.policy, self._elements())
        """What floating-point inputs are cast to."""

    def _elements(self) -> dict[torch.dtype, int]:
        """Elements of the full parameters per compute dtype."""
        counts: dict[torch.dtype, int] = {}
        for portion in self.portions:
            for section in portion.layout.sections:
                assert isinstance(section.compute, torch.dtype)
                numel = sum(slot.rows.numel for slot in section.slots)
                counts[section.compute] = counts.get(section.compute, 0) + numel
        return counts

    def take(self, param: ShardedParam, previous: ParamGroup) -> None:
        """Move a parameter that modules of both groups share from the other group here."""
        previous.drop(param)
        self.free()
        self._deal([*self.params, param])

    def drop(self, param: ShardedParam) -> None:
        """Own it no longer."""
        self.free()
        self._deal([p for p in self.params if p is not param])

    def use(self, custom: CustomComms) -> None:
        """Communicate through the user's collectives. The full parameters are made anew.

        Raises:
            UsageError: The policy quantises what travels, which these collectives do not.
            RuntimeError: Something under way still needs the present ones.
        """
        self._check_not_quantised(custom)
        if self.step.ran or self.is_accumulating or self.has_partial_sums:
            raise RuntimeError(
                f"'{self.name}': its collectives are exchanged while a forward waits for its "
                "backward, or while gradients are kept back by set_requires_gradient_sync(False) "
                "or set_requires_all_reduce(False); set them between steps, or call "
                "reset_iter_state() first"
            )
        self.free()
        self.custom = custom
        for portion in self.portions:
            portion.use(custom)
        self._note_layout()

    def _check_not_quantised(self, custom: CustomComms) -> None:
        for field in ("all_gather_dtype", "exchange_dtype"):
            dtype = getattr(self.policy, field, None)
            if custom.is_set and dtype is not None:
                raise UsageError(
                    f"'{self.name}': its MixedPrecisionPolicy has {field}={dtype}, but custom "
                    f"collectives carry everything unquantised; leave {field} out, or the custom "
                    "collective"
                )

    def separate_reductions(self, is_separate: bool) -> None:
        """Reduce over process groups of their own."""
        self.reduces_apart = is_separate
        for portion in self.portions:
            portion.separate_reductions(is_separate)

    @property
    def full_nbytes(self) -> int:
        """What this group adds to memory while it is in flight."""
        return sum(portion.full_nbytes for portion in self.portions)

    def refresh(self) -> None:
        """Adopt what users put in the place of our parameters since the last gather."""
        if not self.attributes.are_ours():
            self._adopt_moved()

    def _adopt_moved(self) -> None:
        if self.is_accumulating or self.has_partial_sums:
            raise RuntimeError(
                f"'{self.name}': its parameters were replaced or moved while gradients are kept "
                "back by set_requires_gradient_sync(False) or set_requires_all_reduce(False); "
                "reduce them first, or call reset_iter_state() to drop them"
            )
        self.free()
        for param in self.params:
            if param.has_moved:
                param.adopt()
        self._lay_out()

    @_torch.untransformed
    @torch.no_grad()
    def _make_full(self) -> None:
        """Make the full parameters: once, at the first gather after each layout."""
        if not all(portion.is_laid_out for portion in self.portions):
            self._lay_out()
        hooks = {param: _gradient_hook(self, i) for i, param in enumerate(self.params)}
        for portion in self.portions:
            portion.make_full(hooks, self.channel)
        self.attributes.remember_full()
        self._marks.begin()

    # Gather

    @property
    def needs_gather(self) -> bool:
        return self.state is GroupState.SHARDED or self.state is GroupState.PART

    @_torch.no_grad
    def start_gather(self, streams: Streams, is_backward: bool = False) -> None:
        """Issue the gather of the full parameters: from ``SHARDED`` or ``PART`` to ``ARRIVING``.

        Backward reads what forward read: parameters that were replaced since wait for the next
        forward, and the replaced ones get the gradients, as in any module.
        """
        assert self.needs_gather, self.name
        from_part = self.state is GroupState.PART
        if not (from_part or is_backward):
            self.refresh()
        self.state = GroupState.ARRIVING
        if not self.params:
            return
        if self.params[0].full is None:
            self._make_full()
        self._follow(self._marks.look(), is_gathered=not from_part)
        if self.aliases_shards:
            return
        self._fill(streams, from_part)

    @_torch.untransformed
    def _fill(self, streams: Streams, from_part: bool) -> None:
        with streams.gathering():
            for portion in self.portions:
                portion.start_gather(streams, self.channel, from_part)
            if streams.runs_ahead:
                self._arrived = streams.event()

    @_torch.no_grad
    def finish_gather(self, streams: Streams) -> None:
        """Wait until the full parameters can be read: from ``ARRIVING`` to ``FULL``."""
        assert self.state is GroupState.ARRIVING, self.name
        if not streams.runs_ahead:
            self._complete()
        streams.compute_waits(self._arrived)
        self._arrived = None
        self.state = GroupState.FULL
        self.attributes.attach()

    @_torch.untransformed
    def _complete(self) -> None:
        for portion in self.portions:
            portion.complete()

    def _follow(self, seen: Seen, is_gathered: bool) -> None:
        """A shard that was written to, frozen or thawed makes its full parameter so."""
        if self._marks.follow(seen, is_gathered):
            self.trainable = self._marks.trainable
            self._trainable = [portion.trainable for portion in self.portions]

    def renew(self) -> bool:
        """Whether what was kept since an earlier forward may be used: no shard has changed.

        If so the full parameters follow those that were frozen or thawed.
        """
        seen = self._marks.look()
        if self._marks.were_written(seen) or not self.attributes.are_ours():
            return False
        self._follow(seen, is_gathered=False)
        return True

    def free(self) -> None:
        """Give the full parameters' memory back: to ``SHARDED``, from any state."""
        if self.state is GroupState.FULL:
            self.attributes.detach()
        if self.state is not GroupState.SHARDED:
            for portion in self.portions:
                portion.free()
        self._arrived = None
        self.state = GroupState.SHARDED

    def take_back(self) -> None:
        """Return when the shards may be written to: all peers have read what was lent to them."""
        for portion in self.portions:
            portion.gathers.take_back()

    def keep_part(self, streams: Streams) -> None:
        """Free all but this rank's part of the smaller group's: from ``FULL`` to ``PART``."""
        assert self.state is GroupState.FULL, self.name
        self.attributes.detach()
        with streams.gathering():
            for portion in self.portions:
                portion.keep_part()
        self.state = GroupState.PART

    # Gradients

    def expect_gradients(self) -> None:
        self.waiting.clear()
        self.waiting.update(self.trainable)

    def on_gradient(self, index: int) -> None:
        """Autograd has accumulated the gradient of one full parameter."""
        if not self.waiting:
            self.expect_gradients()
        self.waiting.discard(index)
        if not self.waiting:
            self.on_gradients_complete(self)

    @property
    def has_new_gradients(self) -> bool:
        """Whether autograd left gradients that were neither reduced nor kept."""
        return 0 < len(self.waiting) < len(self.trainable)

    @property
    def has_partial_sums(self) -> bool:
        """Whether sums of this replica wait for those of the others."""
        return any(portion.partial.sums for portion in self.portions)

    def keep_gradients(self) -> None:
        """Accumulate without communication, in the reduce dtype."""
        for portion, trainable in zip(self.portions, self._trainable):
            portion.keep_gradients(trainable)
        self.is_accumulating = True

    def start_reduce(self, streams: Streams, staging: Staging) -> list[Reduction]:
        """Take the gradients of the full parameters and issue their reductions."""
        how = self.is_accumulating, self.may_lend, self.switches
        reductions = [
            portion.start_reduce(streams, staging, self.channel, trainable, *how)
            for portion, trainable in zip(self.portions, self._trainable)
            if trainable
        ]
        self.is_accumulating = False
        return reductions

    def drop_gradients(self) -> None:
        """Forget what an interrupted backward left behind."""
        for param in self.params:
            param.accumulated = None
            if param.full is not None:
                param.full.grad = None
        for portion in self.portions:
            portion.partial.sums = []
        self.is_accumulating = False
        self.waiting.clear()


def _gradient_hook(group: ParamGroup, index: int) -> Callable[[Tensor], None]:
    """A hook on a full parameter. Python cannot collect a cycle that runs through a hook."""
    reference, waiting = ref(group), group.waiting

    @untraced
    def hook(full: Tensor) -> None:
        if len(waiting) > 1:  # called for each parameter: the group is asked when it matters
            waiting.discard(index)
        elif (group := reference()) is not None:
            group.on_gradient(index)

    return hook


def _nothing_to_do(group: ParamGroup) -> None:
    """Before the first forward no schedule listens."""
