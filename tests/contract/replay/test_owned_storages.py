"""What regions offload of the storages of buffers: those that an operator made move, others stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from internals.stores import flush, store_of_kind
from oracle import assert_equal, leaf
from torch import Tensor, nn

import actckpt


class _Reads(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 64 * 64).view(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp()


class _Writes(_Reads):
    """Changes its buffer in place first."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.5)
        return super().forward(x)


class _Replaces(_Reads):
    """Has what an operator made for its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.5
        return super().forward(x)


@pytest.mark.parametrize(("kind", "num_moved"), [(_Reads, 1), (_Writes, 1), (_Replaces, 2)])
def test_buffers_stay_unless_an_operator_made_them(kind: type[nn.Module], num_moved: int) -> None:
    x = leaf(64, 64)

    def gradients(**options: Any) -> list[Tensor]:
        block = kind()
        found = []
        for _ in range(3):
            y = actckpt.checkpoint(block, x, **options) if options else block(x)
            found += torch.autograd.grad(y.square().sum(), x)
        return found

    expected = gradients()
    with store_of_kind("memory"):
        actckpt.reset_stats()
        policy = actckpt.policies.PerOp({"aten.exp": "offload", "aten.mul": "offload"}, default="offload")
        assert_equal(gradients(policy=policy), expected)
        flush()
        moved = actckpt.stats()
    assert moved.offloaded_bytes == moved.reloaded_bytes == 3 * num_moved * 64 * 64 * 4
