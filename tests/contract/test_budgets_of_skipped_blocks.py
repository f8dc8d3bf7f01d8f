"""Budgets of models that skip blocks at random (layer dropout), or run them more often than in the first step."""

from __future__ import annotations

import random
import warnings
from typing import Any

import on_device
import pytest
import torch
from budget_programs import Configured, Net
from peaks import Step, Twins, apply_budget, measured, seeded, smallest_budget
from torch import Tensor, nn

import actckpt

_NUM_BLOCKS = 10
_ALL = list(range(_NUM_BLOCKS))


def _run(net: Any, x: Tensor, runs: list[int]) -> Tensor:
    for number in runs:
        x = net.blocks[number](x)
    return x[:, :1]


def _model() -> nn.Module:
    return Net(_run, [Configured(32) for _ in _ALL])


def _step(runs: list[int]) -> Step:
    x = torch.ones(128, 32)
    return lambda model: model(x, runs).square().mean().backward()


def _draws() -> list[list[int]]:
    draw = random.Random(1)
    runs = [[number for number in _ALL if draw.random() > 0.15] for _ in range(12)]
    return [[number for number in _ALL if number not in (0, 6, 7)], *runs, _ALL]


def _loops() -> list[list[int]]:
    return [[0, 1] * 2, [0, 1] * 2, *([0, 1] * num for num in (4, 4, 3, 2, 4))]


pytestmark = pytest.mark.filterwarnings("ignore:apply. . of 10 blocks did not run:UserWarning")


@pytest.mark.parametrize("kind", ["layer dropout", "longer loops"])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_a_plan_holds_from_the_step_after_that_in_which_other_blocks_first_ran(kind: str, share: float) -> None:
    steps = _draws() if kind == "layer dropout" else _loops()
    most = max(steps, key=len)
    twins = Twins(_model)
    twins.step(_step(most))
    apply_budget(twins.model, share * twins.plain_peak)
    excess, plans = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for runs in steps:
            peak = twins.step(_step(runs))
            plan = actckpt.report(twins.model).plan
            if plan is not None:
                excess.append(peak - plan.budget_bytes)
                plans.append(plan)
    first = next(number for number, plan in enumerate(plans) if plan is not plans[0])
    # Where a block first runs under a plan, checksums are taken, in pieces of 2**15 elements: of what it computes again
    # while it keeps other values, which all blocks of this plan do in its first step, and of what a device moves.
    checksum_bytes = 16 * 2**15
    later_bytes = 0 if on_device.device_type == "cpu" else checksum_bytes
    assert excess[first] <= checksum_bytes
    assert max(excess[first + 1 :]) <= later_bytes
    assert twins.step(_step(most), 3) <= twins.plan.budget_bytes + later_bytes
    assert sum(name is not None for name in twins.plan.blocks or ()) == len(most)
    (text,) = [str(each.message) for each in told if "when the plan was made" in str(each.message)]
    assert "plans from the next step on include it" in text


def test_where_no_plan_has_room_for_what_ran_the_smallest_one_runs() -> None:
    model, runs = seeded(_model), _step([0, 1, 2])
    apply_budget(model, 1000)
    smallest = smallest_budget(lambda: [measured(model, lambda: runs(model)) for _ in range(2)])
    twins = Twins(_model, smallest + 1)
    twins.step(runs, 2)
    with pytest.warns(UserWarning, match="when the plan was made"):
        twins.step(_step(_ALL))
    with pytest.warns(UserWarning, match="From now on the plan with the smallest peak runs"):
        twins.step(_step(_ALL), 2)


def test_with_pins_the_plan_stays_as_it_was() -> None:
    """They name calls by their number, and classes of blocks by their names: more calls would change both."""
    twins = Twins(_model, "100%", pins={(6, "::aten.gelu.default#0.0"): "recompute"}, race=True)
    twins.step(_step([number for number in _ALL if number != 1]), 2)
    plan = twins.plan
    with pytest.warns(UserWarning, match="steps in which it runs may need more than the budget"):
        twins.step(_step(_ALL))
    twins.step(_step(_ALL))
    assert twins.plan is plan
