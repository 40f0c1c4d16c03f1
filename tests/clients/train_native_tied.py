"""transformers' own sharding of a model with tied weights, against the unsharded model.

transformers shards embedding and head apart and ties them after loading. PyTorch's fully_shard
then computes with an old copy of the head, so that here the reference is one process's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from side_by_side import Report, options, sharded_by
from tiny_llama import batch, tiny_llama
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from fsdp2.interop import use_in_torch


def train(model: LlamaForCausalLM) -> Report:
    """Steps with evaluations between them, on batches that all ranks share.

    The mean of equal gradients is what each rank has, so that all bits agree.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model(input_ids=tokens, labels=tokens).loss.item()]
    weight = model.lm_head.weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return {
        "losses": losses,
        "head": whole.tolist(),
        "parameters": [name for name, _ in model.named_parameters()],
    }


def main(out: Path) -> None:
    start = out / "start"
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tiny_llama(tied=True).save_pretrained(start)
    dist.barrier()
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    with use_in_torch():
        model = LlamaForCausalLM.from_pretrained(start, distributed_config=config)
        assert sharded_by(model) == "fsdp2"
    found = {
        "fsdp2": train(model),
        "unsharded": train(LlamaForCausalLM.from_pretrained(start)),
    }
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(options().out)
