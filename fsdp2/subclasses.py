"""Tensor subclasses that say themselves what travels: PyTorch's all-gather protocol.

The local tensor of such a parameter has two methods, which torchao's low-precision weights
bring along::

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        -> (tensors to gather, metadata); or with ``mesh`` as the only argument
    fsdp_post_all_gather(gathered, metadata, param_dtype)
        -> (full tensor, tensors whose memory is freed with it)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=full)
        the same into the full tensor of an earlier call
"""

from __future__ import annotations

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.collectives import Transport
from fsdp2.errors import UsageError
from fsdp2.mesh import ShardMesh
from fsdp2.sharded_param import POST, PRE, ShardedParam
from fsdp2.side_gather import SideBlocks


class SubclassGather:
    """The gather of one such parameter."""

    def __init__(
        self,
        param: ShardedParam,
        mesh: ShardMesh,
        transport: Transport | None,
        policy: _torch.MixedPrecisionPolicy,
        compute: torch.dtype,
        brings: torch.device | None,
    ) -> None:
        self.param = param
        self._mesh = mesh
        self._shard_mesh = _shard_dim_of(mesh)
        self._transport = transport
        self._policy = policy
        self._compute = compute
        self._brings = brings
        """Where the shard goes first, if it lives on the host of an accelerator."""
        self._side: SideBlocks | None = None
        self._shapes: list[torch.Size] = []
        """Of what one rank contributes."""
        self._gathered: tuple[Tensor, ...] = ()
        self._metadata: Any = None
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        """Memory of the full tensor that is not the gathered one, with its bytes."""
        self._is_ahead = False
        """The gather that made the full tensor serves as the next one."""

    @property
    def nbytes(self) -> int:
        """Known from the first gather on."""
        gathered = self._side.nbytes if self._side is not None else 0
        return gathered + sum(nbytes for _, nbytes in self._inner)

    @property
    def held_nbytes(self) -> int:
        gathered = self._side.storage.nbytes() if self._side is not None else 0
        return gathered + sum(storage.nbytes() for storage, _ in self._inner)

    def make_full(self, channel: int) -> Tensor:
        """Gather once to learn what the full tensor is."""
        self.fill()
        self.start(channel)
        assert self._side is not None
        self._side.wait()
        local = self._local()
        full, inner = local.fsdp_post_all_gather(self._gathered, self._metadata, self._compute)
        if full.shape != self.param.shape:
            raise UsageError(
                f"parameter '{self.param.name}': {POST} of {type(local).__name__} returned a "
                f"tensor of shape {tuple(full.shape)}; the full parameter has {self.param.shape}"
            )
        ours = self._side.storage.data_ptr()
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in inner)}
        self._inner = [(s, s.nbytes()) for address, s in storages.items() if address != ours]
        self._is_ahead = True
        return cast(Tensor, full.data if type(full) is Tensor else full)

    def fill(self) -> None:
        if self._is_ahead:
            return
        inputs, self._metadata = self._ask()
        if self._side is None:
            self._lay_out(inputs)
        assert self._side is not None
        self._side.allocate()
        for own, tensor, shape in zip(self._side.own, inputs, self._shapes):
            nbytes = tensor.numel() * tensor.itemsize
            own[:nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            if tensor.shape != shape:
                own[nbytes:].zero_()

    def start(self, channel: int) -> None:
        if not self._is_ahead and self._side is not None:
            self._side.start(channel)

    def complete(self) -> None:
        if self._is_ahead:
            self._is_ahead = False
            return
        assert self._side is not None
        self._side.wait()
        for storage, nbytes in self._inner:
            storage.resize_(nbytes)
        full = self.param.full
        self._local().fsdp_post_all_gather(self._gathered, self._metadata, self._compute, out=full)
        self._metadata = None

    def free(self) -> None:
        self._is_ahead = False
        if self._side is not None:
            self._side.free()
        for storage, _ in self._inner:
            storage.resize_(0)

    def _local(self) -> Any:
        return self.param.local

    def _ask(self) -> tuple[tuple[Tensor, ...], Any]:
        local = self._local()
        if self._brings is not None:
            local = local.to(self._brings, non_blocking=True)
        pre = local.fsdp_pre_all_gather
        wanted = len(signature(pre).parameters)
        if wanted not in (1, 5):
            raise UsageError(
                f"parameter '{self.param.name}': {PRE} of {type(local).__name__} takes {wanted} "
                "arguments; it takes (mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        arguments: tuple[Any, ...] = (self._shard_mesh,)
        if wanted == 5:
            size = torch.Size(self.param.shape)
            stride = torch.empty(size, device="meta").stride()
            module = self.param.places[0].module
            arguments = (self._shard_mesh, size, stride, module, self._policy)
        inputs, metadata = pre(*arguments)
        return tuple(inputs), metadata

    def _lay_out(self, inputs: tuple[Tensor, ...]) -> None:
        self._shapes = [self._padded_shape(tensor) for tensor in inputs]
        ranks = self._mesh.world_size
        each = [shape.numel() * t.itemsize for shape, t in zip(self._shapes, inputs)]
        device = self._mesh.device
        self._side = SideBlocks(each, ranks, self._mesh.rank, self._transport, device)
        gathered: list[Tensor] = []
        for block, tensor, shape in zip(self._side.blocks, inputs, self._shapes):
            whole = block.view(-1).view(tensor.dtype)
            if not shape:
                gathered.append(whole)
                continue
            rows = whole.view(ranks * shape[0], *shape[1:])
            is_padded = not self.param.rows.divides and shape[0] == self.param.rows.per_rank
            gathered.append(rows[: self.param.rows.count] if is_padded else rows)
        self._gathered = tuple(gathered)

    def _padded_shape(self, tensor: Tensor) -> torch.Size:
        """What every rank contributes, as all ranks conclude alike."""
        rows = self.param.rows
        if rows.divides:
            return tensor.shape
        local = rows.local_shape(self._mesh.rank)[0]
        if not tensor.shape or tensor.shape[0] not in (local, rows.per_rank):
            raise UsageError(
                f"parameter '{self.param.name}' has {rows.count} rows, which "
                f"{self._mesh.world_size} ranks do not share evenly: what {PRE} of "
                f"{type(self._local()).__name__} returns must have {local} rows, as this rank's "
                f"shard, or {rows.per_rank} with padding; got shape {tuple(tensor.shape)}"
            )
        return torch.Size((rows.per_rank, *tensor.shape[1:]))


def _shard_dim_of(mesh: ShardMesh) -> DeviceMesh:
    """The one-dimensional mesh of the ranks that split the parameter."""
    names = mesh.mesh.mesh_dim_names
    if mesh.mesh.ndim == 1 or mesh.shard_dim is None or names is None:
        return mesh.mesh
    return mesh.mesh[names[mesh.shard_dim]]
