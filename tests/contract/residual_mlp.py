"""The smallest block with a residual: nothing but two linear layers."""

from __future__ import annotations

from torch import Tensor, nn


class Mlp(nn.Module):
    """Adds to its input what two linear layers make of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))
