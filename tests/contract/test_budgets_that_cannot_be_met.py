"""A budget that no plan fits: the plan that needs least runs with one warning, or an error is raised."""

from __future__ import annotations

import ast
import copy
import re
import warnings
from typing import Any

import pytest
import torch
from budget_programs import Residual
from oracle import assert_equal
from peaks import measured
from torch import Tensor, nn

import actckpt


class ResNet(nn.Module):
    """Its stem is no module of its own, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(32, 10)
        self.layer1 = nn.Sequential(Residual(32), Residual(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer1(x).mean((2, 3)))  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second)
        self.blocks = nn.Sequential(*(Residual(32) for _ in range(3)))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def _made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _step(model: nn.Module, images: int = 8) -> tuple[list[Tensor], int]:
    x = torch.randn(images, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return measured(model, lambda: model(x).square().mean().backward())


def _warned(model: nn.Module, num_steps: int, images: int = 8) -> tuple[list[str], int]:
    """Return the warnings of some steps, and the peak of the last one; gradients are those of plain training."""
    expected, _ = _step(_made(type(model)), images)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            gradients, peak = _step(model, images)
            assert_equal(gradients, expected)
    return [str(each.message) for each in told], peak


def _smallest(text: str) -> int:
    return int(re.search(r"\((\d+) bytes\)", text)[1])  # type: ignore[index]


@pytest.mark.parametrize("budget", [1, "30%"])
@pytest.mark.parametrize("kind", [ResNet, ConvNet])
def test_the_plan_that_needs_least_runs_with_one_warning(kind: type[nn.Module], budget: int | str) -> None:
    model = _made(kind)
    actckpt.apply(model, activation_budget=budget)
    ((text,), peak) = _warned(model, 4)
    assert text.startswith("apply: No plan fits into ") and (budget == 1 or "(activation_budget='30%')" in text)
    assert "are made outside of the blocks, by " in text and "blocks=[" in text and "(held)" not in text
    smallest = _smallest(text)
    found = actckpt.report(model)
    assert found.plan is not None and found.plan.peak_bytes <= smallest and "exceeds the budget" in str(found)
    assert peak <= 1.02 * smallest < _step(_made(kind))[1]


def test_the_blocks_that_the_warning_names_make_a_smaller_budget_fit() -> None:
    model = _made(ConvNet)
    actckpt.apply(model, activation_budget="20%", race=False)
    ((text,), before) = _warned(model, 3)
    budget = int(0.9 * _smallest(text))
    blocks = ast.literal_eval(re.search(r"by stem .*?: add .*? with blocks=(\[.*?\])", text)[1])  # type: ignore[index]
    actckpt.remove(model)
    assert actckpt.apply(model, activation_budget=budget, blocks=blocks, race=False)[0] == "stem"
    told, peak = _warned(model, 3)
    assert not told and peak <= budget < before


def _of_modules(channels: int) -> nn.Module:
    conv, norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
    return nn.Sequential(conv, norm, nn.GELU(), *copy.deepcopy((conv, norm)), nn.GELU())


@pytest.mark.parametrize(("kind", "named"), [(Residual, "[Residual]"), (_of_modules, "['*.*']")])
def test_the_smaller_blocks_that_the_warning_names_need_less(kind: Any, named: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 1), *(nn.Sequential(*(kind(32) for _ in range(4))) for _ in range(2)))
    texts = []
    for blocks in (["1", "2"], eval(named)):
        actckpt.apply(model, activation_budget=1, blocks=blocks, race=False)
        with pytest.warns(actckpt.ActckptWarning) as told:
            for _ in range(3):
                _step(model)
        texts.append(str(told[0].message))
        actckpt.remove(model)
    assert f"Smaller blocks may need less: blocks={named}. " in texts[0] and "Smaller blocks" not in texts[1]
    assert _smallest(texts[1]) < _smallest(texts[0])


def test_a_larger_batch_that_does_not_fit_runs_and_warns_once() -> None:
    model = _made(ConvNet)
    plain = _step(_made(ConvNet), 4)[1]
    actckpt.apply(model, activation_budget=plain, race=False)
    assert _warned(model, 3, images=4)[0] == []
    told, peak = _warned(model, 4, images=16)
    assert len(told) == 1 and "No plan fits into" in told[0] and "made outside of the blocks, by stem" in told[0]
    assert peak < _step(_made(ConvNet), 16)[1]
    assert _warned(model, 2, images=4)[0] == []


def test_raise_raises_and_plan_always_does() -> None:
    model = _made(ConvNet)
    actckpt.apply(model, activation_budget="30%", on_infeasible="raise")
    _step(model)
    message = r"made outside of the blocks, by stem .*blocks=\['stem'"
    with pytest.raises(actckpt.errors.PlanInfeasibleError, match=message):
        _step(model)
    actckpt.remove(model)
    with pytest.raises(actckpt.errors.PlanInfeasibleError, match=message):
        actckpt.plan(lambda: model(torch.randn(8, 3, 16, 16)).sum().backward(), model=model, activation_budget="30%")


@pytest.mark.parametrize("wrong", ["ignore", "Raise", None, True])
def test_other_values_of_on_infeasible_are_refused(wrong: Any) -> None:
    model = _made(ConvNet)
    with pytest.raises(ValueError, match=rf"^apply: on_infeasible={wrong!r}\. Pass 'warn' or 'raise'\."):
        actckpt.apply(model, activation_budget="50%", on_infeasible=wrong)
    with pytest.raises(ValueError, match="on_infeasible"):
        actckpt.apply(model, "recompute", on_infeasible="raise")
