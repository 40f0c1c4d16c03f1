"""The models that the benchmarks train: a small GPT, and a chain of tiny linear layers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 512  # small, so that nearly all parameters sit in the blocks


@dataclass(frozen=True)
class Shape:
    """Width, number of blocks and number of attention heads of a GPT, and what surrounds them."""

    width: int
    blocks: int
    heads: int
    vocabulary: int = VOCABULARY
    is_tied: bool = False  # whether the head's weight is that of the token embedding


SHAPES = {
    "tiny": Shape(width=128, blocks=4, heads=4),
    "14m": Shape(width=384, blocks=8, heads=6),
    "55m": Shape(width=704, blocks=9, heads=11),
    "large": Shape(width=1280, blocks=36, heads=20, vocabulary=50_257, is_tied=True),  # GPT-2 Large
}


class Attention(nn.Module):
    """Causal self-attention over ``(batch, sequence, width)``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with learned positions; ``forward`` returns the mean next-token loss."""

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TinyChain(nn.Module):
    """Blocks that compute next to nothing, so that a step shows what sharding them costs.

    Each block holds ``linears`` layers of 16 x 16 with bias, and ``inlet`` and
    ``outlet`` belong to no block, so that the root has a param group of its own.
    """

    def __init__(self, blocks: int, linears: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(linears))) for _ in range(blocks)
        )
        self.outlet = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x).sum()
