"""The smallest budget that an error tells is one that training holds, wherever kernels need most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from demo_training import start_peak
from internals.stores import offload_from
from peaks import smallest_budget
from torch import Tensor, nn

import actckpt


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans offload tensors of toy models, and set windows by themselves."""
    offload_from(monkeypatch, 16 << 10)
    actckpt.configure(max_inflight="auto")


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Patches(nn.Module):
    """A convolution whose kernels need more inside of them than blocks do, before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 32, 32)
        self.blocks = nn.ModuleList(_Block(32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class _Narrowing(nn.Module):
    """The same, between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.blocks = nn.ModuleList(_Block(16) for _ in range(2))
        self.narrow = nn.Conv2d(16, 16, 32, 2, padding=14)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.blocks[1](self.narrow(x).permute(0, 2, 3, 1))


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(nn.functional.silu(norm(h)))
        return x + h


class UNet(nn.Module):
    """Two scales; what the first one makes is read past the second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.middle, self.up = (
            nn.Sequential(*(ConvBlock(width) for _ in range(2))) for width in (16, 32, 16)
        )
        self.narrow, self.widen = nn.Conv2d(16, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(self.stem(x))
        return self.head(self.up(self.widen(self.middle(self.narrow(skip))) + skip))


class _Training:
    def __init__(self, model: nn.Module, *shape: int) -> None:
        torch.manual_seed(0)
        self.model, self.images = model.to("sim"), torch.randn(shape).to("sim")
        self.blocks = [name for name, each in model.named_modules() if isinstance(each, (_Block, ConvBlock))]

    def peak(self) -> int:
        self.model.zero_grad()
        start_peak()
        self.model(self.images).square().mean().backward()
        return torch.accelerator.max_memory_allocated()

    def smallest(self) -> int:
        actckpt.apply(self.model, budget=1 << 20, blocks=self.blocks, on_infeasible="raise")
        found = smallest_budget(lambda: [self.peak() for _ in range(2)])
        actckpt.remove(self.model)
        self.model.zero_grad()
        return found


_MODELS: dict[str, Callable[[], _Training]] = {
    "before the blocks": lambda: _Training(_Patches(), 32, 3, 128, 128),
    "between blocks": lambda: _Training(_Narrowing(), 32, 3, 12, 12),
    "in blocks": lambda: _Training(UNet(), 2, 3, 48, 48),
}


@pytest.mark.parametrize("place", _MODELS)
def test_the_smallest_budget_holds_wherever_kernels_need_most(place: str) -> None:
    training = _MODELS[place]()
    training.peak()  # first kernels leave something behind
    budget = training.smallest()
    actckpt.apply(training.model, budget=budget, blocks=training.blocks, race=False)
    for _ in range(5):  # the meter of the first cycles starts the peak again
        training.peak()
    peaks = [training.peak() for _ in range(3)]  # a warning would be an error
    assert 0.85 * budget < max(peaks) <= budget


def test_the_smallest_budget_is_the_same_where_the_store_has_been_used() -> None:
    training = _MODELS["in blocks"]()
    assert training.smallest() == pytest.approx(training.smallest(), rel=0.01)
