"""A Llama of two layers with random weights, and tokens for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
SEQUENCE = 16


def tiny_llama(tied: bool, seed: int = 0) -> LlamaForCausalLM:
    """``tied``: the head's weight is the embedding's. The vocabulary divides by no 2 ranks."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def batch(seed: int) -> Tensor:
    """Two sequences of tokens, alike wherever it is called."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=generator)


class Tokens(Dataset[dict[str, Tensor]]):
    """What a language model's trainer reads: tokens that are their own labels."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}
