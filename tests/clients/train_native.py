"""transformers' own sharding: a model is sharded on meta and loaded into its shards."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from side_by_side import Report, compare, fingerprint, options, sharded_by
from tiny_llama import SEQUENCE, Tokens, tiny_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig


def sharded(folder: Path) -> LlamaForCausalLM:
    replicas = 2 if chosen.hybrid else 1
    config = DistributedConfig(
        dp_replicate_size=replicas,
        fsdp_size=dist.get_world_size() // replicas,
        fsdp_mixed_precision=chosen.bf16,
    )
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=config)


def train(out: Path) -> Report:
    model = sharded(chosen.out / "start")
    arguments = TrainingArguments(
        str(out),
        use_cpu=True,
        max_steps=3,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens(32))
    trainer.train()
    report: Report = {"sharded by": sharded_by(model)}
    report["losses"] = [
        [entry["loss"], entry["grad_norm"]]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    report["shards"] = fingerprint(model.parameters())

    tokens = torch.arange(SEQUENCE).view(1, -1)
    with torch.no_grad():
        report["went on"] = fingerprint([model(tokens).logits])
        model.save_pretrained(out / "whole")
        model.save_pretrained(out / "shards", distributed_checkpoint=True)
        resumed = {fingerprint([sharded(out / k)(tokens).logits]) for k in ("whole", "shards")}
    (report["resumed"],) = resumed
    return report


if __name__ == "__main__":
    chosen = options("bf16", "hybrid")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tiny_llama(tied=False).save_pretrained(chosen.out / "start")
    dist.barrier()
    compare(train, chosen.out)
