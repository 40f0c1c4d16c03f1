"""Every private or version-dependent PyTorch symbol, and the public types we derive from.

Each entry says why it is needed and which releases have it. Nothing of PyTorch's own
FSDP engine runs: what comes from ``torch.distributed.fsdp`` are the types that other
libraries test with ``isinstance``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload

# Where PyTorch's composable functions leave their states on a module. Since 2.0.
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.fsdp import fully_shard as _their_fully_shard
from torch.distributed.tensor import DTensor

# The module is private; the two classes are what a DTensor is built from without the
# 50 microseconds of `DTensor.from_local`. Since 2.5.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard

# Rows dealt over a mesh dimension that comes before one which cut them earlier. Since 2.3.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# The base of all batch norms; private, since 0.2.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Container types that users registered with PyTorch's pytrees. Since 2.0.
from torch.utils import _pytree

# What sees every operator that runs inside it. Documented, in a private module; since 1.13.
from torch.utils._python_dispatch import TorchDispatchMode

try:  # public, since 2.12
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # 2.11 has no such argument

    @dataclass(frozen=True)
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Names of the mesh dimensions that split parameters and of those that repeat them."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None


__all__ = [
    "BatchNorm",
    "CPUOffloadPolicy",
    "DTensor",
    "DTensorSpec",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OpOverload",
    "Shard",
    "StridedShard",
    "TorchDispatchMode",
    "UnshardHandle",
]

_NO_TASK = -1
_SUM = dist.ReduceScatterOptions()

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MIXED_TENSORS = "mixed torch.Tensor and DTensor"
"""How DTensor refuses plain tensors beside it; it has no exception of its own. Since 2.0."""

PIECES_AND_CASTS = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.split_with_sizes.default,
        torch.ops.aten.unbind.int,
    }
)
"""Operators whose results are pieces or casts of their one input, beside those with ``is_view``.

The first is private; it is what ``.to(dtype)`` and autocast call. Since 1.12.
"""


def default_store() -> dist.Store:
    """Where the ranks of the default process group met. The function is private; since 1.9."""
    return dist.distributed_c10d._get_default_store()


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The description of a contiguous DTensor of ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local shard without communication.

    The constructor is internal; since 2.5. Its ``__init__`` does nothing, at 3 microseconds.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def dtensors(shards: Iterable[Tensor], specs: Iterable[DTensorSpec]) -> list[DTensor]:
    """``dtensor`` of many."""
    new = DTensor.__new__
    return [new(DTensor, local, spec, requires_grad=False) for local, spec in zip(shards, specs)]


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The attribute is private; since 2.0."""
    return tensor._spec


def local_of(tensor: Tensor) -> Tensor:
    """The shard inside a DTensor, itself and not the autograd view of ``to_local``. Since 2.0."""
    return cast(Tensor, tensor._local_tensor)  # type: ignore[attr-defined]


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor._local_tensor for tensor in tensors]  # type: ignore[attr-defined]


def plain_attributes() -> AbstractContextManager[object]:
    """Inside, what tensors have is read and set as on plain ones.

    Each attribute of a subclass otherwise costs half a microsecond more, to find out that a DTensor
    has no ``__torch_function__``. Documented, in a private module; since 2.0.
    """
    return torch._C.DisableTorchFunctionSubclass()


def marks_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
    """How often each was written to, by a counter that is private, since 0.4; what is trainable."""
    with plain_attributes():
        return [t._version for t in tensors], [t.requires_grad for t in tensors]


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Make ``local`` the shard of an existing DTensor, which keeps its identity. Since 2.0."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def shard_of(dim: int, split_factor: int) -> Shard:
    """The placement of what others cut into ``split_factor`` pieces along ``dim`` already."""
    if split_factor == 1:
        return Shard(dim)
    return cast(Shard, StridedShard(dim, split_factor=split_factor))


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The dimensions ``names`` as one, named like all of them. The method is private; since 2.4."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Meshes cut from one, side by side. Private; since 2.9."""
    return DeviceMesh._concatenate(meshes)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was cut from. Private; since 2.9."""
    return mesh._get_root_mesh()


def is_root_mesh(mesh: DeviceMesh) -> bool:
    """Whether a mesh was made for itself and not cut from another. Private; since 2.9."""
    return mesh._get_root_mesh() is mesh


def leave_state(module: nn.Module, state: object) -> None:
    """Let PyTorch's own ``fully_shard.state(module)`` find ``state``, as its pipelines do.

    The function itself is a key here and never called; ``__wrapped__`` is private, since 2.3.
    """
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[cast(Any, _their_fully_shard).__wrapped__] = state


def no_grad(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``torch.no_grad()`` around every call, for 0.5 microseconds and not 4. Private; since 0.4."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return call


def untransformed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Tensors that ``function`` makes and writes are plain ones, also under ``torch.func``.

    Both are private; since 2.0.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call


def skip_in_compilers(function: Any, reason: str) -> None:
    """Neither inline ``function`` into a graph nor compile it, nor what it calls.

    ``torch.compiler.disable`` does the same by a wrapper, which costs each call 1 to 3
    microseconds and the first one the import of the compiler. What it leaves on functions, and
    the mark on code that is run as it is, are private; since 2.7.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def in_backward() -> bool:
    """Whether the autograd engine is running this thread's code. Since 1.13."""
    return torch._C._current_graph_task_id() != _NO_TASK


def base_of(tensor: Tensor) -> Tensor | None:
    """What a view is a view of. Since 0.4."""
    return tensor._base


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current backward ends. Private; DDP has used it since 1.0."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def post_accumulate_hooks(param: Tensor) -> Sequence[Callable[[Tensor], None]]:
    """The user's post-accumulate hooks, which nothing public can read. Since 2.1."""
    hooks = param._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


def may_be_given(params: Sequence[Tensor]) -> bool:
    """Whether none of ``params`` has a gradient, or such a hook, so that setting one is all."""
    with plain_attributes():
        return not [p for p in params if p.grad is not None or p._post_accumulate_grad_hooks]


def take_gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each, which it has no more afterwards."""
    with plain_attributes():
        found = [param.grad for param in params]
        for param in params:
            param.grad = None
    return found


def add_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """``tensor.register_hook`` without its handle, at a third of the cost for the first hook.

    Later ones get handles' numbers in the same dict, from 0 on. Both names are private; since 0.2.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not Tensor:
        tensor.register_hook(hook)
    else:
        tensor._backward_hooks = OrderedDict({-1: hook})
        node._register_hook_dict(tensor)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """The ``step`` of an optimizer's class below the wrapper that runs the users' step hooks.

    PyTorch marks the wrapper with ``hooked`` when the first optimizer of a class is made; the mark
    is undocumented. Since 2.0.
    """
    step: Any = type(optimizer).step
    return cast(Callable[..., object], step.__wrapped__ if hasattr(step, "hooked") else step)


def with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` in such a wrapper; it is a static method without documentation. Since 2.0."""
    return torch.optim.Optimizer.profile_hook_step(step)


def chunk_cat(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> None:
    """Fill ``out`` of shape ``(num_chunks, n)`` with chunk r of every tensor in row r. Since 2.3.

    Rows that are missing in the last chunks are zero. Casts where the dtypes differ.
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=num_chunks, out=out)


def is_registered_container(value: object) -> bool:
    """Whether PyTorch's pytrees open this type. The table is private; since 2.0."""
    return type(value) in _pytree.SUPPORTED_NODES


def flatten(value: object) -> tuple[list[Any], Any]:
    """Private module, public behaviour: the leaves of a nested value and what rebuilds it."""
    return _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    return _pytree.tree_unflatten(leaves, structure)


def allocator_of(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor] | None:
    """The allocator of a group's backend, where it has one. ``_get_backend`` is private; 2.6."""
    backend: Any = group._get_backend(device)
    return backend.allocate_tensor if backend.supports_tensor_alloc(device) else None


def timeout_s_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a group waits for a peer, in seconds. Private; gloo's and NCCL's since 2.6."""
    backend: Any = group._get_backend(device)
    return float(backend.options._timeout.total_seconds())


# These are public but were renamed in 2.12: the old names are all that 2.11 has.


def _either(group: dist.ProcessGroup, new: str, old: str) -> Callable[..., dist.Work]:
    found: Callable[..., dist.Work] = getattr(group, new, None) or getattr(group, old)
    return found


def all_gather_into(group: dist.ProcessGroup, out: Tensor, own: Tensor) -> dist.Work:
    return _either(group, "all_gather_single", "_allgather_base")(out, own)


def all_gather_grouped(
    group: dist.ProcessGroup, outs: list[Tensor], owns: list[Tensor]
) -> dist.Work:
    """One call for several gathers, which NCCL launches as one kernel."""
    call = _either(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return call(outs, owns)


def reduce_scatter_into(group: dist.ProcessGroup, out: Tensor, source: Tensor) -> dist.Work:
    return _either(group, "reduce_scatter_single", "_reduce_scatter_base")(out, source, _SUM)


def reduce_scatter_grouped(
    group: dist.ProcessGroup, outs: list[Tensor], sources: list[Tensor]
) -> dist.Work:
    """One call for several sums."""
    call = _either(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return call(outs, sources)


def all_to_all_into(group: dist.ProcessGroup, out: Tensor, source: Tensor) -> dist.Work:
    return _either(group, "all_to_all_single", "alltoall_base")(out, source, [], [])


@cache
def written_by(op: OpOverload) -> frozenset[str]:
    """The arguments that an operator writes to. ``_schema`` is private; since 1.13."""
    return frozenset(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, positional ones first. As above."""
    return tuple(argument.name for argument in op._schema.arguments)


def storage_key(tensor: Tensor) -> int:
    """What tells storages apart that have no memory. ``_cdata`` is private; since 2.0."""
    return cast(int, tensor.untyped_storage()._cdata)
