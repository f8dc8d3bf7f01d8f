"""The smallest budget that an error names is one: steps run in it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from torch import Tensor, nn
from torch.nn import functional

import actckpt


class Encoder(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, dim=-1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Residual(nn.Module):
    """A block of a residual network, that may halve the size of the image."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * stride
        self.first = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wide) for _ in range(2))
        self.skip = nn.Conv2d(channels, wide, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.skip(x)).relu()


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, 128, 8, 8), nn.Parameter(torch.randn(1, 64, 128))
        self.blocks, self.head = nn.ModuleList(Encoder() for _ in range(4)), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 7, 2, 3), nn.Linear(128, 10)
        self.blocks = nn.ModuleList(Residual(*each) for each in [(32, 1), (32, 2), (64, 1), (64, 2), (128, 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _step(model: nn.Module, images: Tensor, *, total: bool, to_none: bool) -> tuple[list[Tensor], int]:
    model.zero_grad(set_to_none=to_none)
    gradients = [] if not total else [p.grad for p in model.parameters() if p.grad is not None]
    with counted(model, total=total, held=[*model.parameters(), *model.buffers(), *gradients]) as found:
        model(images).square().mean().backward()
    return [p.grad.to("cpu", copy=True) for p in model.parameters()], found.peak_bytes


@pytest.mark.parametrize("kind", [Vit, Resnet])
@pytest.mark.parametrize("keyword", ["budget", "activation_budget"])
@pytest.mark.parametrize("to_none", [True, False])
def test_steps_run_in_the_smallest_budget_that_is_named(kind: type[nn.Module], keyword: str, to_none: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    def trained(model: nn.Module, **options: Any) -> list[tuple[list[Tensor], int]]:
        if options:
            actckpt.apply(model, blocks=(Encoder, Residual), race=False, on_infeasible="raise", **options)
        images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        return [_step(model, images, total=keyword == "budget", to_none=to_none) for _ in range(4)]

    expected = trained(made())
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        trained(made(), **{keyword: 2**20 if keyword == "budget" else 1})
    smallest_bytes = raised.value.smallest_bytes
    del raised  # its frames have a model, whose bytes count on a device
    gc.collect()
    assert smallest_bytes is not None and smallest_bytes < max(peak for _, peak in expected)
    found = trained(made(), **{keyword: smallest_bytes})
    for (gradients, _), (others, _) in zip(found, expected, strict=True):
        assert_equal(gradients, others)
    assert max(peak for _, peak in found[1:]) <= smallest_bytes
