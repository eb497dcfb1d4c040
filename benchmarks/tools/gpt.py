"""A GPT of plain layers, cut at any of its blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A causal Transformer layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.queries(self.norm(x)).view(rows, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
        made: Tensor = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return made


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        made: Tensor = self.tokens(tokens) + self.positions(places)
        return made


def gpt(*, vocabulary: int, width: int, length: int, num_layers: int) -> nn.Sequential:
    """Return a GPT of so many layers, with one block more at each end."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    layers = (Layer(width) for _ in range(num_layers))
    return nn.Sequential(Embedding(vocabulary, width, length), *layers, head)


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
