"""Training with ours is plain training of TransformerEngine's code, bit for bit: outputs, gradients, FP8 state."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import actckpt
from actckpt.errors import CheckpointError
from te_on_cpu import training
from te_on_cpu.methods import METHODS, How
from te_on_cpu.training import DTYPES, RECIPES, SCHEDULES, TRACKERS, Setting, differing, train

Expected = Callable[[Setting], dict[str, Any]]


def _settings() -> list[Any]:
    """Return every method with every recipe; schedules, trackers and dtypes take turns, unless all are wanted."""
    found = []
    others = list(itertools.product(SCHEDULES, TRACKERS, DTYPES))
    for number, (recipe, name) in enumerate(itertools.product(RECIPES, METHODS)):
        few = [others[(11 * number + 7 * turn) % len(others)] for turn in range(2)]
        for schedule, tracker, dtype in others if os.environ.get("ACTCKPT_TE_ALL") else few:
            setting = Setting(recipe, dtype, tracker, schedule)
            found.append(pytest.param(setting, METHODS[name], id=f"{name}-{recipe}-{dtype}-{tracker}-{schedule}"))
    return found


@pytest.mark.parametrize(("setting", "how"), _settings())
def test_training_is_bit_equal_to_plain_training(te: Any, expected: Expected, setting: Setting, how: How) -> None:
    assert differing(train(te, setting, how.method, prepare=how.prepare), expected(setting)) == []


@pytest.mark.parametrize(("kind", "wraps"), [("generators", False), ("unknown bytes", False), ("unknown bytes", True)])
def test_a_tracker_that_is_given_is_restored(te: Any, expected: Expected, kind: str, wraps: bool) -> None:
    trackers: list[Any] = []

    def method_of(get_tracker: Any) -> Any:
        trackers.append(get_tracker)
        return training.plain if wraps else partial(actckpt.te.checkpoint, get_rng_state_tracker=get_tracker)

    def prepare(model: Any) -> None:
        if wraps:
            actckpt.te.wrap(model, get_rng_state_tracker=trackers[0])

    setting = Setting("delayed", tracker=kind)
    assert differing(train(te, setting, method_of=method_of, prepare=prepare), expected(setting)) == []


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", ["Linear", "TransformerLayer"])
@pytest.mark.parametrize("name", METHODS)
def test_training_of_quantized_parameters(te: Any, expected: Expected, name: str, kind: str, recipe: str) -> None:
    """An optimizer changes them in place."""
    setting = Setting(recipe, kinds=(kind,), schedules=((1, -1),) * 4, is_quantized=True)
    how = METHODS[name]
    assert differing(train(te, setting, how.method, prepare=how.prepare), expected(setting)) == []


def test_a_step_between_forward_and_backward_raises(te: Any) -> None:
    recipe_ = training.make_recipe("current")
    with training.quantized_parameters(te, recipe_):
        layer = training.make_layer(te, "Linear")
    with te.autocast(True, recipe=recipe_):
        y = actckpt.checkpoint(layer, training.make_input(torch.float32, 1))
    with torch.no_grad():
        layer.weight.mul_(0.5)
    with pytest.raises(CheckpointError):
        y.sum().backward()
