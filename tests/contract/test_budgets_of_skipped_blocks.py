"""Budgets of models that skip blocks at random (layer dropout), or run them more often than in the first step."""

from __future__ import annotations

import random
import warnings

import on_device
import pytest
import torch
from oracle import assert_equal
from peaks import apply_budget, measured, smallest_budget
from torch import Tensor, nn

import actckpt

_NUM_BLOCKS = 10


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(_NUM_BLOCKS))

    def forward(self, x: Tensor, runs: list[int]) -> Tensor:
        for number in runs:
            x = self.blocks[number](x)
        return x[:, :1]

    def step(self, runs: list[int]) -> tuple[list[Tensor], int]:
        """Return gradients and peak."""
        x = torch.ones(128, 32)
        return measured(self, lambda: self(x, runs).square().mean().backward())


def _draws() -> list[list[int]]:
    draw = random.Random(1)
    runs = [[number for number in range(_NUM_BLOCKS) if draw.random() > 0.15] for _ in range(12)]
    return [[number for number in range(_NUM_BLOCKS) if number not in (0, 6, 7)], *runs, list(range(_NUM_BLOCKS))]


def _loops() -> list[list[int]]:
    return [[0, 1] * 2, [0, 1] * 2, *([0, 1] * num for num in (4, 4, 3, 2, 4))]


@pytest.mark.filterwarnings("ignore:apply. . of 10 blocks did not run:UserWarning")
@pytest.mark.parametrize("kind", ["layer dropout", "longer loops"])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_a_plan_holds_from_the_step_after_that_in_which_other_blocks_first_ran(kind: str, share: float) -> None:
    plain, model = _Model(), _Model()
    steps = _draws() if kind == "layer dropout" else _loops()
    _, most = plain.step(max(steps, key=len))
    apply_budget(model, share * most)
    excess, plans = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for runs in steps:
            gradients, peak = model.step(runs)
            expected, _ = plain.step(runs)
            assert_equal(gradients, expected)
            plan = actckpt.report(model).plan
            if plan is not None:
                excess.append(peak - plan.budget_bytes)
                plans.append(plan)
    first = next(number for number, plan in enumerate(plans) if plan is not plans[0])
    # Where a block first runs under a plan, checksums are taken, in pieces of 2**15 elements: of what it computes again
    # while it keeps other values, which all blocks of this plan do in its first step, and of what a device moves.
    checksum_bytes = 16 * 2**15
    assert excess[first] <= checksum_bytes
    assert max(excess[first + 1 :]) <= (0 if on_device.device_type == "cpu" else checksum_bytes)
    peak = [model.step(max(steps, key=len))[1] for _ in range(3)][-1]
    plan = actckpt.report(model).plan
    assert plan is not None and plan.blocks is not None
    assert peak <= plan.budget_bytes + (0 if on_device.device_type == "cpu" else checksum_bytes)
    assert sum(name is not None for name in plan.blocks) == len(max(steps, key=len))
    texts = [str(each.message) for each in told if "when the plan was made" in str(each.message)]
    assert len(texts) == 1
    assert "plans from the next step on include it" in texts[0]


@pytest.mark.filterwarnings("ignore:apply. . of 10 blocks did not run:UserWarning")
def test_where_no_plan_has_room_for_what_ran_the_smallest_one_runs() -> None:
    model, runs = _Model(), [0, 1, 2]
    apply_budget(model, 1000)
    model.step(runs)
    smallest = smallest_budget(lambda: model.step(runs))
    actckpt.remove(model)
    apply_budget(model, smallest + 1)
    for _ in range(2):
        model.step(runs)
    everything = list(range(_NUM_BLOCKS))
    with pytest.warns(UserWarning, match="when the plan was made"):
        model.step(everything)
    with pytest.warns(UserWarning, match="From now on the plan with the smallest peak runs"):
        for _ in range(2):
            gradients, _ = model.step(everything)
    assert_equal(gradients, _Model().step(everything)[0])


@pytest.mark.filterwarnings("ignore:apply. . of 10 blocks did not run:UserWarning")
def test_with_pins_the_plan_stays_as_it_was() -> None:
    """They name calls by their number, and classes of blocks by their names: more calls would change both."""
    model, without = _Model(), [number for number in range(_NUM_BLOCKS) if number != 1]
    apply_budget(model, "100%", pins={(6, "f.2::aten.gelu.default#0.0"): "recompute"}, race=True)
    for _ in range(2):
        model.step(without)
    plan = actckpt.report(model).plan
    with pytest.warns(UserWarning, match="steps in which it runs may need more than the budget"):
        model.step(list(range(_NUM_BLOCKS)))
    gradients, _ = model.step(list(range(_NUM_BLOCKS)))
    assert actckpt.report(model).plan is plan
    assert_equal(gradients, _Model().step(list(range(_NUM_BLOCKS)))[0])
