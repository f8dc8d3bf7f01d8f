"""A budget that no plan fits: the plan that needs least runs with one warning, or an error is raised."""

from __future__ import annotations

import ast
import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget_programs import Net, Residual, chain
from peaks import Step, Twins, apply_budget, measured
from torch import Tensor, nn

import actckpt


def _pooled(net: Any, x: Tensor) -> Tensor:
    """Its stem is no module of its own, as in torchvision."""
    return net.fc(chain(net, net.pool(torch.relu(net.bn1(net.conv1(x))))).mean((2, 3)))  # type: ignore[no-any-return]


def _resnet() -> nn.Module:
    others = {"conv1": nn.Conv2d(3, 32, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(32), "pool": nn.MaxPool2d(2)}
    return Net(_pooled, [Residual(32), Residual(32)], fc=nn.Linear(32, 10), **others)


def _convnet() -> nn.Module:
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
    stem = nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second)
    run = lambda net, x: net.fc(chain(net, net.stem(x)).mean((2, 3)))  # noqa: E731
    return Net(run, [Residual(32) for _ in range(3)], stem=stem, fc=nn.Linear(32, 10))


def _step(images: int = 8) -> Step:
    x = torch.randn(images, 3, 16, 16)
    return lambda model: model(x).square().mean().backward()


def _warned(twins: Twins, num_steps: int, images: int = 8) -> tuple[list[str], int]:
    """Return the warnings of some steps, and the peak of the last one."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        peak = twins.step(_step(images), num_steps)
    return [str(each.message) for each in told], peak


def _smallest(text: str) -> int:
    return int(re.search(r"\((\d+) bytes\)", text)[1])  # type: ignore[index]


@pytest.mark.parametrize("budget", [1, "30%"])
@pytest.mark.parametrize("kind", [_resnet, _convnet])
def test_the_plan_that_needs_least_runs_with_one_warning(kind: Callable[[], nn.Module], budget: int | str) -> None:
    twins = Twins(kind, budget, race=True, on_infeasible="warn")
    ((text,), peak) = _warned(twins, 4)
    assert text.startswith("apply: No plan fits into ") and (budget == 1 or "(activation_budget='30%')" in text)
    assert "are made outside of the blocks, by " in text and "blocks=[" in text and "(held)" not in text
    smallest = _smallest(text)
    found = actckpt.report(twins.model)
    assert found.plan is not None and found.plan.peak_bytes <= smallest and "exceeds the budget" in str(found)
    assert peak <= 1.02 * smallest < twins.plain_peak


def test_the_blocks_that_the_warning_names_make_a_smaller_budget_fit() -> None:
    twins = Twins(_convnet, "20%", on_infeasible="warn")
    ((text,), before) = _warned(twins, 3)
    budget = int(0.9 * _smallest(text))
    blocks = ast.literal_eval(re.search(r"by stem .*?: add .*? with blocks=(\[.*?\])", text)[1])  # type: ignore[index]
    actckpt.remove(twins.model)
    names = actckpt.apply(twins.model, activation_budget=budget, blocks=blocks, race=False)
    told, peak = _warned(twins, 3)
    assert "stem" in names and not told and peak <= budget < before


def _of_modules(channels: int) -> nn.Module:
    conv, norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
    return nn.Sequential(conv, norm, nn.GELU(), *copy.deepcopy((conv, norm)), nn.GELU())


@pytest.mark.parametrize(("kind", "named"), [(Residual, "[Residual]"), (_of_modules, "['*.*']")])
def test_the_smaller_blocks_that_the_warning_names_need_less(kind: Any, named: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 1), *(nn.Sequential(*(kind(32) for _ in range(4))) for _ in range(2)))
    step, texts = _step(), []
    for blocks in (["1", "2"], eval(named)):
        actckpt.apply(model, activation_budget=1, blocks=blocks, race=False)
        with pytest.warns(actckpt.ActckptWarning) as told:
            for _ in range(3):
                measured(model, lambda: step(model))
        texts.append(str(told[0].message))
        actckpt.remove(model)
    assert f"Smaller blocks may need less: blocks={named}. " in texts[0] and "Smaller blocks" not in texts[1]
    assert _smallest(texts[1]) < _smallest(texts[0])


def test_a_larger_batch_that_does_not_fit_runs_and_warns_once() -> None:
    twins = Twins(_convnet)
    twins.step(_step(images=4))
    apply_budget(twins.model, twins.plain_peak, on_infeasible="warn")
    assert _warned(twins, 3, images=4)[0] == []
    told, peak = _warned(twins, 4, images=16)
    assert len(told) == 1 and "No plan fits into" in told[0] and "made outside of the blocks, by stem" in told[0]
    assert peak < twins.plain_peak
    assert _warned(twins, 2, images=4)[0] == []


def test_raise_raises_and_plan_always_does() -> None:
    twins, step = Twins(_convnet, "30%", race=True), _step()
    twins.step(step)
    message = r"made outside of the blocks, by stem .*blocks=\[.*'stem'"
    with pytest.raises(actckpt.errors.PlanInfeasibleError, match=message):
        twins.step(step)
    with pytest.raises(actckpt.errors.PlanInfeasibleError, match=message):
        actckpt.plan(lambda: step(twins.plain), model=twins.plain, activation_budget="30%")


@pytest.mark.parametrize("wrong", ["ignore", "Raise", None, True])
def test_other_values_of_on_infeasible_are_refused(wrong: Any) -> None:
    model = _convnet()
    with pytest.raises(ValueError, match=rf"^apply: on_infeasible={wrong!r}\. Pass 'warn' or 'raise'\."):
        actckpt.apply(model, activation_budget="50%", on_infeasible=wrong)
    with pytest.raises(ValueError, match="on_infeasible"):
        actckpt.apply(model, "recompute", on_infeasible="raise")
