"""One param group: gathered together, reduced together.

=============  ==============================  ====================================
state          memory held                     left by
=============  ==============================  ====================================
``SHARDED``    the shard buffer                ``start_gather``
``ARRIVING``   and the full buffer, in part    ``finish_gather``, ``free``
``FULL``       and the full buffer             ``free``
=============  ==============================  ====================================

A reduction is independent of it: ``start_reduce`` takes the gradients away from the full
parameters, ``finish_reduce`` gives them to the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from weakref import ref

import torch
from torch import Tensor, nn

from fsdp2.attributes import Attributes
from fsdp2.buffers import FullBuffer, ShardBuffer, Staging
from fsdp2.collectives import Pending, Transport, choose_transport
from fsdp2.layout import GroupLayout, ParamSpec, Path, Section, Slot, plan_group
from fsdp2.mesh import ShardMesh
from fsdp2.policies import MixedPrecisionPolicy, Switches, compute_dtype
from fsdp2.reduction import Reduction, ReductionPlan
from fsdp2.sharded_param import ShardedParam
from fsdp2.streams import Streams


class GroupState(Enum):
    """Where the full parameters are; the table above says what each state holds."""

    SHARDED = "sharded"
    ARRIVING = "arriving"
    FULL = "full"


@dataclass
class Step:
    """What happened to a group since the last backward ended. The schedule's notes."""

    running: int = 0
    """Forward calls of its modules under way."""
    ran: bool = False
    """A forward with gradients has used it: all ranks will reduce it."""
    open_calls: int = 0
    """Forward calls whose backward has not left the group's modules yet."""
    in_backward: bool = False
    """Its backward has begun and its full parameters were not freed since."""
    is_settled: bool = False
    """Its gradients were handed in once in this backward."""

    def end_backward(self, is_last: bool) -> None:
        """``is_last`` is false while more backwards of the same step are to come."""
        self.in_backward = self.is_settled = False
        if is_last:
            self.ran = False
            self.open_calls = 0


class ParamGroup:
    """The parameters of one ``fully_shard`` call."""

    def __init__(
        self,
        modules: list[nn.Module],
        params: list[ShardedParam],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        switches: Switches,
    ) -> None:
        self.name = type(modules[0]).__name__
        """Full name of its modules from the root, known from the first forward on."""
        self.modules = modules
        self.params = params
        self.mesh = mesh
        self.policy = policy
        self.channel = 0
        """A number of its own under its root: keeps the messages of groups apart."""
        self.state = GroupState.SHARDED
        self.transport: Transport | None = (
            choose_transport(mesh.group, mesh.rank, mesh.device) if mesh.world_size > 1 else None
        )
        self.switches = switches
        self.step = Step()
        self.is_accumulating = False
        """Whether gradients were kept back since the last reduction."""
        self.waiting: set[int] = set()
        """Trainable parameters that have no gradient yet in this backward."""
        self.on_gradients_complete: Callable[[ParamGroup], None] = _nothing_to_do
        self.trainable: tuple[int, ...] = ()
        """As of the last gather."""
        self._are_trainable: list[bool] = []
        self.attributes = Attributes(params)
        self._full: FullBuffer | None = None
        self._gather: Pending | None = None
        self._arrived: torch.Event | None = None
        self._versions: list[int] = []
        self._plans: dict[tuple[int, ...], ReductionPlan] = {}
        self._lay_out()

    # Buffers

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Compute the layout and move all shards into one shard buffer."""
        specs = [self._spec(param) for param in self.params]
        self.layout: GroupLayout = plan_group(specs, self.mesh.world_size, self._path_of)
        device = self.params[0].local.device if self.params else self.mesh.device
        with torch.inference_mode(False):
            self.shards = ShardBuffer(self.layout, self.mesh.rank, device)
            for section, slot in self._slots():
                self.params[slot.index].bind(self.shards.local(section, slot))
        self._full = None
        for param in self.params:
            param.full = None
        self._plans.clear()

    def _spec(self, param: ShardedParam) -> ParamSpec:
        compute = compute_dtype(self.policy, param.dtype)
        return ParamSpec(
            param.rows.shape, param.dtype, param.dtype.itemsize, compute, compute.itemsize
        )

    def _path_of(self, spec: ParamSpec) -> Path:
        """Large parameters are gathered where they live, small ones share a staging block."""
        if self.transport is None:
            return Path.DIRECT
        numel = 1
        for size in spec.shape:
            numel *= size
        shard_nbytes = numel * spec.compute_itemsize / self.mesh.world_size
        return Path.PACKED if shard_nbytes < self.transport.pack_below_nbytes else Path.DIRECT

    def _slots(self) -> list[tuple[Section, Slot]]:
        return [(section, slot) for section in self.layout.sections for slot in section.slots]

    @property
    def aliases_shards(self) -> bool:
        """With one rank and no cast the full parameters are the shards."""
        return self.transport is None and all(s.storage == s.compute for s in self.layout.sections)

    @property
    def full_nbytes(self) -> int:
        """What this group adds to memory while it is in flight."""
        return 0 if self.aliases_shards else self.layout.full_nbytes

    def refresh(self) -> None:
        """Adopt what users put in the place of our parameters since the last gather."""
        if not self.attributes.are_ours():
            self._adopt_moved()

    def _adopt_moved(self) -> None:
        if self.is_accumulating:
            raise RuntimeError(
                f"'{self.name}': its parameters were replaced or moved while gradients are kept "
                "back by set_requires_gradient_sync(False); reduce them first, or call "
                "reset_iter_state() to drop them"
            )
        self.free()
        for param in self.params:
            if param.has_moved:
                param.adopt()
        self._lay_out()

    @torch.no_grad()
    def _make_full(self) -> FullBuffer | None:
        """Make the full parameters: once, at the first gather after each layout."""
        with torch.inference_mode(False):
            buffer = None
            if not self.aliases_shards:
                buffer = FullBuffer(self.layout, self.mesh.rank, self.shards)
                if self.transport is not None:
                    self._plan = self.transport.plan_gather(buffer.blocks)
            for section, slot in self._slots():
                view = (
                    self.shards.local(section, slot).data
                    if buffer is None
                    else buffer.full(section, slot)
                )
                full = self.params[slot.index].make_full(view)
                if view.is_floating_point() or view.is_complex():
                    full.requires_grad_(True)  # a frozen one may thaw; set right at the gather
                    full.register_post_accumulate_grad_hook(_gradient_hook(self, slot.index))
        if buffer is not None:
            buffer.free()
        self._versions = [param.shard._version for param in self.params]
        self._are_trainable = []
        return buffer

    # Gather

    @torch.no_grad()
    def start_gather(self, streams: Streams) -> None:
        """Issue the gather of the full parameters: from ``SHARDED`` to ``ARRIVING``."""
        assert self.state is GroupState.SHARDED, self.name
        self.refresh()
        self.state = GroupState.ARRIVING
        if not self.params:
            return
        if self.params[0].full is None:
            self._full = self._make_full()
        self._follow_versions()
        self.follow_trainable()
        buffer = self._full
        if buffer is None:
            return
        with streams.gathering():
            buffer.allocate()
            if buffer.own:
                torch._foreach_copy_(buffer.own, buffer.own_sources)
            if buffer.blocks and self.transport is not None:
                self._gather = self._plan.start(self.channel)
            if streams.runs_ahead:
                self._complete(buffer)
                self._arrived = streams.event()

    def _complete(self, buffer: FullBuffer) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            for packed in buffer.packed:
                packed.copy_out()

    @torch.no_grad()
    def finish_gather(self, streams: Streams) -> None:
        """Wait until the full parameters can be read: from ``ARRIVING`` to ``FULL``."""
        assert self.state is GroupState.ARRIVING, self.name
        if self._full is not None:
            if not streams.runs_ahead:
                self._complete(self._full)
            streams.compute_waits(self._arrived)
            self._arrived = None
        self.state = GroupState.FULL
        self.attributes.attach()

    def _follow_versions(self) -> None:
        """Note which shards changed since the last gather.

        A shard that was written to since the last gather counts as an in-place change of
        the full parameter, so that autograd refuses a backward through its old value.
        """
        versions = [param.shard._version for param in self.params]
        if versions != self._versions:
            changed = [
                param.full
                for param, now, before in zip(self.params, versions, self._versions)
                if now != before and param.full is not None
            ]
            torch.autograd.graph.increment_version(changed)
            self._versions = versions

    def follow_trainable(self) -> None:
        """A shard that was frozen or thawed makes its full parameter so."""
        flags = [param.shard.requires_grad for param in self.params]
        if flags != self._are_trainable:
            for param, flag in zip(self.params, flags):
                assert param.full is not None
                param.full.requires_grad_(flag)
            self._are_trainable = flags
            self.trainable = tuple(i for i, flag in enumerate(flags) if flag)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to or replaced after it had been gathered."""
        versions = [param.shard._version for param in self.params]
        return versions != self._versions or not self.attributes.are_ours()

    def free(self) -> None:
        """Give the full parameters' memory back: to ``SHARDED``, from any state."""
        if self.state is GroupState.ARRIVING and self._gather is not None:
            self._gather.wait()
            self._gather = None
        if self.state is GroupState.FULL:
            self.attributes.detach()
        self._arrived = None
        self.state = GroupState.SHARDED
        if self._full is not None:
            self._full.free()

    # Gradients

    def expect_gradients(self) -> None:
        self.waiting = set(self.trainable)

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

    def keep_gradients(self) -> None:
        """Accumulate without communication, in the reduce dtype."""
        plan = self.reduction_plan(self.trainable)
        plan.accumulate()
        self.is_accumulating = True

    def start_reduce(self, streams: Streams, staging: Staging) -> Reduction:
        """Take the gradients of the full parameters and issue their reduction."""
        plan = self.reduction_plan(self.trainable)
        reduction = plan.start(
            streams, staging, self.channel, self.is_accumulating, self.switches.divide_factor
        )
        self.is_accumulating = False
        return reduction

    def reduction_plan(self, trainable: tuple[int, ...]) -> ReductionPlan:
        plan = self._plans.get(trainable)
        if plan is None:
            plan = self._plans[trainable] = ReductionPlan(
                self.name,
                self.layout,
                self.params,
                trainable,
                self.mesh,
                self.policy,
                self.transport,
            )
        return plan

    def drop_gradients(self) -> None:
        """Forget what an interrupted backward left behind."""
        for param in self.params:
            param.accumulated = None
            if param.full is not None:
                param.full.grad = None
        self.is_accumulating = False
        self.waiting = set()


def _gradient_hook(group: ParamGroup, index: int) -> Callable[[Tensor], None]:
    """A hook on a full parameter. Python cannot collect a cycle that runs through a hook."""
    reference = ref(group)

    def hook(full: Tensor) -> None:
        group = reference()
        if group is not None:
            group.on_gradient(index)

    return hook


def _nothing_to_do(group: ParamGroup) -> None:
    """Before the first forward no schedule listens."""
