"""A small GPT: pre-norm blocks, rotary or learned positions, tied embeddings by choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; ``width`` is split evenly over ``heads``."""

    layers: int
    width: int
    heads: int
    sequence: int
    positions: str = "rope"
    tied: bool = False
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.positions not in ("rope", "learned"):
            raise ValueError(f"positions={self.positions!r} is unknown; use 'rope' or 'learned'")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not split over {self.heads} heads; "
                f"choose a width that is a multiple of the heads"
            )
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ValueError(
                f"rotary positions turn pairs, and {self.width // self.heads} channels per head "
                f"are odd; choose another width or heads, or positions='learned'"
            )


class Rotary(nn.Module):
    """Turns each pair of channels by an angle that grows with the position (RoFormer, 2021)."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, channels: int, sequence: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(sequence), frequencies)
        # Recomputed at every start, so kept out of checkpoints.
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., positions, channels) to the same shape and dtype."""
        cosine, sine = self.cosine[: x.shape[-2]], self.sine[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        turned = (first * cosine - second * sine, first * sine + second * cosine)
        # The tables are float32, and so are the products where x is bfloat16.
        return torch.cat(turned, dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        is_rotary = config.positions == "rope"
        channels = config.width // config.heads
        self.rotary = Rotary(channels, config.sequence) if is_rotary else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        qkv = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, width))


class MLP(nn.Module):
    """Two linear layers around a squared ReLU, which costs a CPU far less than GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """One layer: attention, then the MLP, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """(batch, positions) of byte values to (batch, positions, vocabulary) of logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position: nn.Embedding | None = None
        if config.positions == "learned":
            self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                # A block starts as the identity, so that a high learning rate is safe early on.
                parameter.zero_()
            elif name == "head.weight":
                # The first guess is nearly uniform.
                parameter.normal_(std=0.02)
            elif parameter.ndim > 1:
                # What a matrix puts out then varies as much as what comes in.
                parameter.normal_(std=self.config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
