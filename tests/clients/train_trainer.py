"""transformers' Trainer with FSDP version 2: train, evaluate, generate, save and go on."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_on_cpu import shard_on_cpu
from side_by_side import Report, compare, fingerprint, options, sharded_by
from tiny_llama import SEQUENCE, Tokens, tiny_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 4
SAVED = 2


class TrainerOnCPU(Trainer):
    """The Trainer, whose accelerator shards on CPU ranks too."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        shard_on_cpu(self.accelerator, plugin)
        self.is_fsdp_enabled = True


def trainer(out: Path, seed: int) -> TrainerOnCPU:
    arguments = TrainingArguments(
        str(out),
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        bf16=chosen.bf16,
        max_steps=STEPS,
        save_steps=SAVED,
        eval_strategy="steps",
        eval_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
    )
    model = tiny_llama(chosen.tied, seed)
    return TrainerOnCPU(model, arguments, train_dataset=Tokens(32), eval_dataset=Tokens(8))


def history(of: Trainer) -> list[list[float]]:
    """Losses and norms in order, without what depends on the clock."""
    kept = ("step", "loss", "grad_norm", "eval_loss")
    return [[entry[key] for key in kept if key in entry] for entry in of.state.log_history]


def train(out: Path) -> Report:
    first = trainer(out, seed=0)
    first.train()
    report: Report = {"sharded by": sharded_by(first.model), "went on": history(first)}
    report["shards"] = fingerprint(first.model.parameters())
    prompt = torch.arange(SEQUENCE // 2).view(1, -1)
    report["text"] = first.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
    first.save_model(str(out / "whole"))
    dist.barrier()
    whole = LlamaForCausalLM.from_pretrained(out / "whole")
    report["whole"] = fingerprint(whole.parameters())

    second = trainer(out, seed=1)
    second.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED}"))
    report["resumed"] = history(second)
    return report


if __name__ == "__main__":
    chosen = options("tied", "bf16")
    compare(train, chosen.out)
