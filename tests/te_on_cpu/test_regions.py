"""Training with ours is plain training of TransformerEngine's code, bit for bit: outputs, gradients, FP8 state."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

import actckpt
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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention"])
@pytest.mark.parametrize("name", ["checkpoint", "wrap, retain_graph"])
def test_each_module_alone(te: Any, expected: Expected, name: str, kind: str, recipe: str) -> None:
    setting, how = Setting(recipe, schedule="reverse", kind=kind), METHODS[name]
    assert differing(train(te, setting, how.method, prepare=how.prepare), expected(setting)) == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["checkpoint", "nested", "offload", "wrap, retain_graph"])
def test_casts_of_weights_that_are_kept_between_microbatches(
    te: Any, expected: Expected, name: str, recipe: str
) -> None:
    setting, how = Setting(recipe, schedule="reverse", caches_weights=True), METHODS[name]
    assert differing(train(te, setting, how.method, prepare=how.prepare), expected(setting)) == []


@pytest.mark.parametrize("kind", ["generators", "unknown bytes"])
def test_a_tracker_that_is_given_is_restored(te: Any, expected: Expected, kind: str) -> None:
    def method_of(get_tracker: Any) -> Any:
        return lambda layer, x: actckpt.te.checkpoint(layer, x, get_rng_state_tracker=get_tracker)

    setting = Setting("delayed", tracker=kind)
    assert differing(train(te, setting, method_of=method_of), expected(setting)) == []
