"""A chain of Llama blocks without embeddings and head: what a large model repeats."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 500_000.0


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of one block."""

    width: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SHAPES = {
    "llama8b": LlamaShape(width=4096, heads=32, kv_heads=8, hidden=14336),
    "tiny": LlamaShape(width=128, heads=4, kv_heads=2, hidden=448),
}


class Rotary:
    """The cosines and sines of all positions, ``(tokens, head_width / 2)`` each."""

    def __init__(self, shape: LlamaShape, tokens: int, dtype: torch.dtype, device: str) -> None:
        half = torch.arange(shape.head_width // 2, device=device) / (shape.head_width // 2)
        angles = torch.outer(torch.arange(tokens, device=device), ROTARY_BASE**-half)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def turn(self, x: Tensor) -> Tensor:
        """``x`` of shape ``(batch, heads, tokens, head_width)``, its two halves as pairs."""
        first, second = x.chunk(2, dim=-1)
        turned = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return torch.cat(turned, dim=-1)


class Attention(nn.Module):
    """Causal self-attention whose keys and values several heads share."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        kv_width = shape.kv_heads * shape.head_width
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv_width, bias=False)
        self.v = nn.Linear(shape.width, kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = rotary.turn(q), rotary.turn(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind an RMS norm and added to its input."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Chain(nn.Module):
    """Blocks one behind the other, and the last norm, so that the root has a group of its own."""

    def __init__(self, shape: LlamaShape, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        for block in self.blocks:
            x = block(x, rotary)
        return self.norm(x)
