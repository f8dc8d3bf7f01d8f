"""A small Llama-style language model over bytes.

Shapes: B batch, S sequence, D width, H query heads, K key and value heads, E width of a head, V byte values.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "LanguageModel"]

BYTE_VALUES = 256
_ROPE_BASE = 10_000.0


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share one key and value head."""

    def __init__(self, dim: int, *, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Attend from every position to itself and the ones before.

        Args:
            x: (B, S, D).
            rotation: (2, S, E / 2), cosines and sines.

        Returns:
            (B, S, D).
        """
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(
            _rotate(q, rotation), _rotate(k, rotation), v, is_causal=True, enable_gqa=True
        )
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """The gated feed-forward layer, with about as many parameters as an ungated one four times as wide."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = max(8, dim * 8 // 3 // 8 * 8)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D)."""
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One transformer block: the unit that methods checkpoint or offload."""

    def __init__(self, dim: int, *, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads=heads, kv_heads=kv_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = SwiGLU(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D); `rotation` as in `Attention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        y: torch.Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class LanguageModel(nn.Module):
    """Predicts the next byte. The global generator decides its initialisation.

    Args:
        layers: number of blocks.
        dim: D, a multiple of `2 * heads`.
        heads: H.
        kv_heads: K, a divisor of `heads`.
        seq: largest S.
        dropout: probability on both residual branches of each block.
    """

    rotation: torch.Tensor

    def __init__(self, *, layers: int, dim: int, heads: int, kv_heads: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=heads, kv_heads=kv_heads, dropout=dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTE_VALUES, bias=False)
        self.register_buffer("rotation", _rotation_table(seq, dim // heads), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map byte values (B, S) to logits (B, S, V)."""
        rotation = self.rotation[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _rotation_table(seq: int, head_dim: int) -> torch.Tensor:
    """Cosines and sines of every position's angles, (2, S, E / 2)."""
    frequencies = _ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair of values (i, i + E / 2) of x (B, H, S, E) by its position's angle; keeps the dtype."""
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
