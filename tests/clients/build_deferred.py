"""transformers' models, built under `deferred_init` and sharded: the plain constructor's values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import fsdp2

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NAMES_OF_GPT2: dict[str, Any] = {"vocab_size": 101, "n_embd": 16, "n_layer": 2, "n_head": 2}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8}
STAGES: dict[str, Any] = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**NAMES_OF_GPT2, **SPECIAL)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "tied llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES)),
    "t5": lambda: hf.T5Model(
        hf.T5Config(vocab_size=101, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    ),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**{**SIZES, "vocab_size": 0}, **IMAGES)),
    "swin": lambda: hf.SwinModel(hf.SwinConfig(image_size=32, patch_size=4, **STAGES)),
    "mamba": lambda: hf.MambaModel(
        hf.MambaConfig(vocab_size=101, hidden_size=16, num_hidden_layers=2)
    ),
    "resnet": lambda: hf.ResNetModel(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ),
}


def difference(build: Callable[[], nn.Module]) -> str:
    """The first tensor that differs, or nothing."""
    torch.manual_seed(0)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with fsdp2.deferred_init():
        model = build()
    if not torch.equal(torch.get_rng_state(), state):
        return "the generator's state"
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fsdp2.fully_shard(layer)
    fsdp2.materialize(fsdp2.fully_shard(model))
    for (name, expected), (found_name, found) in zip(
        [*plain.named_parameters(), *plain.named_buffers()],
        [*model.named_parameters(), *model.named_buffers()],
        strict=True,
    ):
        whole = (
            found.full_tensor() if isinstance(found, torch.distributed.tensor.DTensor) else found
        )
        if name != found_name or not torch.equal(whole, expected):
            return name
    return ""


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    report = {name: difference(build) for name, build in MODELS.items()}
    out = Path(sys.argv[1]) / f"rank{dist.get_rank()}.json"
    out.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
