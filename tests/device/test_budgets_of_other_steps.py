"""Budgets hold where gradients stay between forwards, and where kernels, skips and losses need what no tensor shows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from demo_training import Training, start_peak
from internals.stores import offload_from
from oracle import assert_equal
from peaks import smallest_budget
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt

_LAYERS = 4
#: docs/cycles.md: where the first step of a plan exceeds the budget, the one after it is the last under that plan.
_SETTLING = 3


def _accumulated(micro_steps: int, budget: int | None, *, with_optimizer: bool) -> list[tuple[int, list[Tensor]]]:
    """Train four steps of so many micro-batches each; return peak and gradients of each micro-batch."""
    training = Training(layers=_LAYERS)
    optimizer = torch.optim.AdamW(training.model.parameters()) if with_optimizer else None
    if budget is not None:
        actckpt.apply(training.model, budget=budget, optimizer=optimizer, race=False)
    found = []
    for number in range(4 * micro_steps):
        if number % micro_steps == 0:
            training.model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        start_peak()
        training.step()
        gradients = [p.grad.cpu() for p in training.model.parameters() if p.grad is not None]
        found.append((torch.accelerator.max_memory_allocated(), gradients))
        if optimizer is not None and (number + 1) % micro_steps == 0:
            optimizer.step()
    return found


@pytest.mark.parametrize(
    ("micro_steps", "share", "with_optimizer"), [(3, 0.48, False), (2, 0.69, True), (4, 0.52, True), (4, 0.69, True)]
)
def test_gradients_that_stay_between_forwards(micro_steps: int, share: float, with_optimizer: bool) -> None:
    plainly = _accumulated(micro_steps, None, with_optimizer=with_optimizer)
    budget = int(share * max(peak for peak, _ in plainly))
    found = _accumulated(micro_steps, budget, with_optimizer=with_optimizer)
    for (_, gradients), (_, expected) in zip(found, plainly, strict=True):
        assert_equal(gradients, expected)
    peaks = [peak for peak, _ in found]
    assert max(peaks[_SETTLING:]) <= budget, f"budget {budget}, peaks {peaks}"
    assert max(peaks[_SETTLING:]) >= 0.9 * budget, f"budget {budget}, peaks {peaks}"


class _Patches(nn.Module):
    """A convolution whose kernels need more inside of them than blocks do, before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 32, 32)
        self.blocks = nn.ModuleList(Mlp(32) for _ in range(3))
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
        self.blocks = nn.ModuleList(Mlp(16) for _ in range(2))
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


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "before the blocks": (_Patches, (32, 3, 128, 128), torch.float32),
    "between blocks": (_Narrowing, (32, 3, 12, 12), torch.float32),
    "in blocks": (UNet, (2, 3, 48, 48), torch.float32),
    "in blocks, bfloat16": (UNet, (2, 3, 48, 48), torch.bfloat16),
}


class _Images:
    def __init__(self, name: str) -> None:
        make, shape, dtype = _MODELS[name]
        torch.manual_seed(0)
        self.model, self.images = make().to("sim", dtype), torch.randn(shape).to("sim", dtype)
        self.blocks = [name for name, each in self.model.named_modules() if isinstance(each, (Mlp, ConvBlock))]

    def peak(self) -> int:
        self.model.zero_grad()
        start_peak()
        self.model(self.images).square().mean().backward()
        return torch.accelerator.max_memory_allocated()

    def gradients(self) -> list[Tensor]:
        self.peak()
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]

    def smallest(self) -> int:
        actckpt.apply(self.model, budget=1 << 20, blocks=self.blocks, on_infeasible="raise")
        found = smallest_budget(lambda: [self.peak() for _ in range(2)])
        actckpt.remove(self.model)
        self.model.zero_grad()
        return found


@pytest.fixture
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans offload tensors of toy models, and set windows by themselves."""
    offload_from(monkeypatch, 16 << 10)
    actckpt.configure(max_inflight="auto")


@pytest.mark.usefixtures("_small_tensors")
@pytest.mark.parametrize("more", [0.0, 0.5])
@pytest.mark.parametrize("name", _MODELS)
def test_budgets_hold_wherever_kernels_need_most(name: str, more: float) -> None:
    plain, expected = _Images(name).peak(), _Images(name).gradients()
    training = _Images(name)
    training.peak()  # first kernels leave something behind
    smallest = training.smallest()
    if name.startswith("in blocks"):
        assert smallest < 0.75 * plain
        assert training.smallest() == pytest.approx(smallest, rel=0.01), "the store has been used"
    budget = int(smallest + more * (plain - smallest))
    actckpt.configure(audit="off")  # whose checksums need memory for a moment, which budgets do not count
    actckpt.apply(training.model, budget=budget, blocks=training.blocks, race=False)
    peaks = [training.peak() for _ in range(8)]  # a warning would be an error
    assert peaks[1] <= 1.02 * budget and max(peaks[_SETTLING:]) <= budget, f"budget {budget}, peaks {peaks}"
    assert more or max(peaks[5:]) > 0.85 * budget, "the meter of the first cycles starts the peak again"
    assert_equal(training.gradients(), expected)


@pytest.mark.parametrize(("num_operators", "share", "used", "num_above"), [(12, 0.83, 0.9, 1), (0, 0.7, 0.95, 0)])
def test_what_follows_the_blocks_is_planned_for_as_soon_as_it_was_seen(
    num_operators: int, share: float, used: float, num_above: int
) -> None:
    """A loss that needs much has room from the second step on; one that needs little gives room back."""
    training = Training(layers=_LAYERS)
    training.outputs = lambda logits: functools.reduce(lambda found, _: found.sin(), range(num_operators), logits)
    expected = training.gradients()
    budget = int(share * training.peak())
    actckpt.apply(training.model, budget=budget, race=False)
    peaks = [training.peak() for _ in range(7)]
    assert max(peaks[num_above:]) <= budget and peaks[-1] >= used * budget, f"budget {budget}, peaks {peaks}"
    assert_equal(training.gradients(), expected)
