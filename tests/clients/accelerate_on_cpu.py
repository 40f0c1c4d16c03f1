"""accelerate shards on an accelerator only; let it do the same on CPU ranks."""

from __future__ import annotations

from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def shard_on_cpu(
    accelerator: Accelerator,
    plugin: FullyShardedDataParallelPlugin,
    parallelism: ParallelismConfig | None = None,
) -> None:
    """Set what ``Accelerator(fsdp_plugin=plugin, parallelism_config=parallelism)`` sets where
    the device is no CPU.

    On CPU it drops the plugin and would use DDP. Nothing behind these attributes asks for the
    device: wrapping, steps and checkpoints are the same code. Both states hold the
    type, and each is copied into the other when an Accelerator is made.
    """
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    if parallelism is not None:
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
