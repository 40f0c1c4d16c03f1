"""The parameters of one group that share a mesh: their buffers, their gather, their reduction.

A group has one portion for each mesh that its parameters are dealt over, as a rule one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from fsdp2 import _torch
from fsdp2.buffers import Filling, FullBuffer, ShardBuffer, Staging, own_storage
from fsdp2.collectives import GatherPlan, Replicas, Transport
from fsdp2.custom import Custom, CustomComms
from fsdp2.gathers import Gathers
from fsdp2.gradients import ReductionPlan
from fsdp2.layout import GroupLayout, ParamSpec, Path, Section, Slot, plan_group
from fsdp2.mesh import Axis, ShardMesh, group_of
from fsdp2.part import Part, make_part, part_layout
from fsdp2.policies import CPUOffloadPolicy, OffloadPolicy, Switches
from fsdp2.quantised_exchange import QuantisedExchange
from fsdp2.quantising import may_be_coded, parameter_format
from fsdp2.reduction import Ending, PartialSums, Reduction
from fsdp2.sharded_param import ShardedParam
from fsdp2.side_gather import CodedGather, CodedParam, SideGather
from fsdp2.specs import spec_of
from fsdp2.streams import Streams
from fsdp2.subclasses import SubclassGather
from fsdp2.transports import choose_transport

new_layout_number = count().__next__
"""Numbers the layouts of this process, one behind the other."""


class Portion:
    """Parameters of one group over one mesh."""

    def __init__(
        self,
        params: list[ShardedParam],
        mesh: ShardMesh,
        policy: _torch.MixedPrecisionPolicy,
        offload: OffloadPolicy,
        part: Axis | None,
        custom: CustomComms,
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.policy = policy
        self.part_axis = part
        self._offload = offload
        self._custom = custom
        self._reduces_apart = False
        self.transport: Transport | None = self._choose_transport()
        self.replicas = Replicas(mesh.replicas.group) if mesh.replicas.group is not None else None
        self.partial = PartialSums()
        """Sums of this replica that wait for the others'."""
        self._full: FullBuffer | None = None
        self._on_device: ShardBuffer | None = None
        """A copy of shards that live on the host, while a gather reads it."""
        self._sides: list[SideGather] = []
        """What travels in another form, beside the full buffer."""
        self._part: Part | None = None
        self.gather_plan: GatherPlan | None = None
        self.gathers = Gathers()
        self._plans: dict[tuple[int, ...], ReductionPlan] = {}

    # Buffers

    def _choose_transport(self) -> Transport | None:
        group = self.mesh.shard.group
        if group is None:
            return None
        transport = self._transport_over(Axis.of(group))
        transport.reduce_over(self._reduction_group(group))
        return transport

    def _reduction_group(self, group: ProcessGroup) -> ProcessGroup:
        if not self._reduces_apart:
            return group
        return group_of(tuple(get_process_group_ranks(group)), "reductions")

    def _transport_over(self, axis: Axis) -> Transport:
        assert axis.group is not None
        transport = choose_transport(axis.group, axis.rank, self.mesh.device)
        if self._custom.is_set:
            return Custom(transport, axis.group, self._custom)
        exchanged = getattr(self.policy, "exchange_dtype", None)
        return transport if exchanged is None else QuantisedExchange(transport, exchanged)

    def use(self, custom: CustomComms) -> None:
        """Communicate through the user's collectives, which take flat tensors: lay out anew."""
        self._custom = custom
        self.transport = self._choose_transport()
        self.lay_out()

    def separate_reductions(self, is_separate: bool) -> None:
        """Reduce over a process group of their own, so that gathers do not wait behind them."""
        self._reduces_apart = is_separate
        group = self.mesh.shard.group
        if self.transport is not None and group is not None:
            self.transport.reduce_over(self._reduction_group(group))

    @property
    def is_offloaded(self) -> bool:
        """Whether the shards live on the host of an accelerator."""
        return isinstance(self._offload, CPUOffloadPolicy) and self.mesh.device.type != "cpu"

    @property
    def home(self) -> torch.device:
        """Where its shards live."""
        return torch.device("cpu") if self.is_offloaded else self.mesh.device

    @property
    def _pins(self) -> bool:
        return self.is_offloaded and bool(getattr(self._offload, "pin_memory", False))

    def _shard_device(self) -> torch.device:
        """Where parameters are now, or the host if that is where they belong."""
        device = self.params[0].local.device if self.params else self.mesh.device
        return self.home if self.is_offloaded and device.type != "meta" else device

    @torch.no_grad()
    def lay_out(self) -> None:
        """Compute the layout and move all shards into one shard buffer."""
        part_size = self.part_axis.size if self.part_axis else None
        specs = [spec_of(param, self.policy, bool(part_size)) for param in self.params]
        self.layout_number = new_layout_number()
        self.layout: GroupLayout = plan_group(specs, self.mesh.world_size, self._path_of, part_size)
        self.aliases_shards = self._aliases_shards()
        """With unsplit shards and no cast the full parameters are the shards."""
        device = self._shard_device()
        is_pinned = device.type == "cpu" and self._pins
        with torch.inference_mode(False):
            self.shards = ShardBuffer(self.layout, self.mesh.rank, device, is_pinned)
            for _, section, slot in self._slots():
                param = self.params[slot.index]
                if slot.path is Path.SUBCLASS:
                    param.stay(device)
                else:
                    param.bind(own_storage(self.shards.local(section, slot)))
        self._full = None
        for param in self.params:
            param.full = None
        self._plans.clear()

    @property
    def is_laid_out(self) -> bool:
        """Whether the layout still fits: a shard may have been given a form of its own."""
        return all(
            param.has_own_form == (slot.path is Path.SUBCLASS)
            for param, slot in zip(self.params, self.layout.slots)
        )

    def _path_of(self, spec: ParamSpec) -> Path:
        """Large parameters are gathered where they live, small ones share a staging block."""
        if self.transport is None:
            return Path.DIRECT
        full_nbytes = torch.Size(spec.shape).numel() * spec.compute_itemsize
        shard_nbytes = full_nbytes / self.mesh.world_size
        if shard_nbytes < self.transport.pack_below_nbytes:
            return Path.PACKED
        assert isinstance(spec.compute, torch.dtype)
        is_coded = self.wire_dtype is not None and may_be_coded(spec.compute, len(spec.shape))
        return Path.CODED if is_coded else Path.DIRECT

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What large parameters are quantised to for their gather."""
        return getattr(self.policy, "all_gather_dtype", None)

    def _slots(self) -> list[tuple[int, Section, Slot]]:
        sections = enumerate(self.layout.sections)
        return [(index, section, slot) for index, section in sections for slot in section.slots]

    def _aliases_shards(self) -> bool:
        is_cast = any(s.storage != s.compute for s in self.layout.sections)
        has_own_form = any(slot.path is Path.SUBCLASS for slot in self.layout.slots)
        return self.transport is None and not (is_cast or self.is_offloaded or has_own_form)

    @property
    def full_nbytes(self) -> int:
        """What this portion adds to memory while it is in flight."""
        beside = sum(side.nbytes for side in self._sides)
        staging = self.gather_plan.staging_nbytes if self.gather_plan is not None else 0
        return 0 if self.aliases_shards else self.layout.full_nbytes + staging + beside

    @property
    def held_nbytes(self) -> int:
        """What this portion holds now beside its shards."""
        each = (*self._buffers(), *self._sides)
        return self.gathers.staging_nbytes + sum(one.held_nbytes for one in each)

    def _buffers(self) -> list[FullBuffer | ShardBuffer]:
        buffers = self._full, self._on_device, self._part and self._part.shards
        return [buffer for buffer in buffers if buffer is not None]

    @property
    def part_nbytes(self) -> int:
        """What it adds between forward and backward, where a part is kept."""
        if self.part_axis is None:
            return 0
        return part_layout(self.layout, self.part_axis.size).shard_nbytes

    @torch.no_grad()
    def make_full(self, hooks: dict[ShardedParam, Callable[[Tensor], None]], channel: int) -> None:
        """Make the full parameters: once, at the first gather after each layout."""
        with torch.inference_mode(False):
            self._make_buffers()
            buffer = self._full
            for index, section, slot in self._slots():
                param = self.params[slot.index]
                if slot.path is Path.SUBCLASS:
                    view = self._gather_subclass(param, section, channel)
                elif buffer is None:
                    view = self.shards.local(section, slot).data
                else:
                    view = buffer.full(index, slot)
                full = param.make_full(view)
                if full.requires_grad:
                    full.register_post_accumulate_grad_hook(hooks[param])
            self._part = self._make_part()
        for each in self._buffers():
            each.free()

    def _make_buffers(self) -> None:
        """The full buffer and what fills it."""
        self._on_device, self._full, self.gather_plan = None, None, None
        self._sides = []
        if self.aliases_shards:
            return
        self._full = FullBuffer(self.layout, self.mesh.device)
        if self.is_offloaded:
            # One copy of all shards crosses the bus; casts are then made on the device.
            self._on_device = ShardBuffer(self.layout, self.mesh.rank, self.mesh.device)
        self._filling = Filling(self._full, self._on_device or self.shards)
        if self.transport is not None and self._filling.blocks:
            own = () if self.is_offloaded else self._filling.lendable
            self.gather_plan = self.transport.plan_gather(self._filling.blocks, own)
        coded = [self._coded(*place) for place in self._slots() if place[2].path is Path.CODED]
        if coded:
            assert self.transport is not None
            self._sides.append(CodedGather(coded, self.mesh.rank, self.transport))

    def _coded(self, index: int, section: Section, slot: Slot) -> CodedParam:
        assert self._full is not None and self.wire_dtype is not None
        shard = (self._on_device or self.shards).padded(section, slot)
        ranks = self.mesh.world_size
        block = self._full.at(index, slot.full_offset, ranks, slot.rows.chunk_numel)
        return CodedParam(shard, block, parameter_format(self.wire_dtype, slot.rows.shape))

    def _gather_subclass(self, param: ShardedParam, section: Section, channel: int) -> Tensor:
        assert isinstance(section.compute, torch.dtype)
        brings = self.mesh.device if self.is_offloaded else None
        side = SubclassGather(
            param, self.mesh, self.transport, self.policy, section.compute, brings
        )
        self._sides.append(side)
        return side.make_full(channel)

    # Gather

    def start_gather(self, streams: Streams, channel: int, from_part: bool) -> None:
        """Issue the gather, in the stream scope of gathers: of the shards, or of the kept parts."""
        if self._full is None:
            return
        self._full.allocate()
        part = self._part if from_part else None
        if part is not None:
            part.filling.copy_own()
            part.shards.free()
            self.gathers.start(part.gather, channel)
        else:
            self._copy_own()
            for side in self._sides:
                side.start(channel)
            self.gathers.start(self.gather_plan, channel)
        self._filled_by = self._filling if part is None else part.filling
        if streams.runs_ahead:
            self.complete()

    def _copy_own(self) -> None:
        if self._on_device is not None:
            self._on_device.allocate()
            self._on_device.memory.copy_(self.shards.memory, non_blocking=True)
        self._filling.copy_own()
        for side in self._sides:
            side.fill()
        if self._on_device is not None:
            self._on_device.free()

    def complete(self) -> None:
        """Wait for the gather and copy out what does not lie in its place yet."""
        if self._full is not None:
            self.gathers.wait()
            self._filled_by.copy_out()
            if self._filled_by is self._filling:
                for side in self._sides:
                    side.complete()

    def free(self) -> None:
        """Give the memory of the full parameters back, and of parts that were kept."""
        self.gathers.end()
        if self._full is not None:
            self._full.free()
            if self._part is not None:
                self._part.shards.free()
        for side in self._sides:
            side.free()

    # Parts

    def _make_part(self) -> Part | None:
        axis, full = self.part_axis, self._full
        if axis is None or full is None or axis.group is None:
            return None
        return make_part(self.layout, axis, full, self._transport_over(axis), self.mesh.device)

    @_torch.no_grad
    def keep_part(self) -> None:
        """Keep this rank's part of the full parameters and free the rest."""
        self.gathers.take_back()
        if self._full is None:
            return
        if self._part is not None:
            self._part.keep()
        self._full.free()

    # Gradients

    @property
    def trainable(self) -> tuple[int, ...]:
        return tuple(i for i, param in enumerate(self.params) if param.shard.requires_grad)

    def keep_gradients(self, trainable: tuple[int, ...]) -> None:
        """Accumulate without communication, in the reduce dtype."""
        self.reduction_plan(trainable).accumulate()

    def start_reduce(
        self,
        streams: Streams,
        staging: Staging,
        channel: int,
        trainable: tuple[int, ...],
        is_accumulating: bool,
        may_lend: bool,
        switches: Switches,
    ) -> Reduction:
        """Take the gradients of the full parameters and issue their reduction."""
        if self.partial.sums and self.partial.trainable != trainable:
            names = [self.params[i].name for i in set(self.partial.trainable) ^ set(trainable)]
            raise RuntimeError(
                f"parameter '{names[0]}' was frozen or thawed while sums of gradients wait for "
                "the other replicas (set_requires_all_reduce(False)); finish the step first"
            )
        ending = Ending(
            replicas=self.replicas,
            partial=self.partial,
            trainable=trainable,
            is_put_off=not switches.all_reduces and self.replicas is not None,
            divisor=switches.divide_factor or float(self.mesh.num_ranks),
            fills_unused=switches.fills_unused,
            hook=switches.all_reduce_hook,
            hook_stream=switches.all_reduce_stream,
            to_host=self._to_host if self.is_offloaded else None,
        )
        plan = self.reduction_plan(trainable)
        return plan.start(streams, staging, channel, is_accumulating, may_lend, ending)

    def _to_host(self, buffer: Tensor) -> Tensor:
        host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=self._pins)
        return host.copy_(buffer, non_blocking=True)

    def reduction_plan(self, trainable: tuple[int, ...]) -> ReductionPlan:
        plan = self._plans.get(trainable)
        if plan is None:
            plan = self._plans[trainable] = ReductionPlan(
                self.layout,
                self.params,
                trainable,
                self.mesh,
                self.policy,
                self.transport,
                self.replicas,
            )
        return plan
