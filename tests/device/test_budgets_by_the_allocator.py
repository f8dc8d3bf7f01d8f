"""Budgets hold by the peak that the allocator of a device tells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from demo_training import Training, start_peak
from oracle import assert_equal
from peaks import smallest_budget

import actckpt

_LAYERS, _NUM_BUDGETS = 4, 15


def _training() -> Training:
    return Training(layers=_LAYERS)


@pytest.fixture(scope="module")
def plainly() -> tuple[list[torch.Tensor], int]:
    """Gradients and peak of plain training."""
    training = _training()
    return training.gradients(), training.peak()


def _budgets(smallest: float, plain: float) -> Iterator[int]:
    for number in range(_NUM_BUDGETS):
        yield int(smallest + number / (_NUM_BUDGETS - 1) * (plain - smallest)) + 1


def _train(training: Training, budget: int) -> None:
    actckpt.apply(training.model, budget=budget, race=False, on_infeasible="raise")
    for _ in range(6):  # metered steps start the peak of the allocator again
        training.peak()


def _plan(training: Training, budget: int) -> actckpt.Plan:
    return actckpt.plan(training.step, model=training.model, budget=budget, race=False)


def _peak_in_training(budget: int, expected: list[torch.Tensor]) -> int:
    training = _training()
    _train(training, budget)
    found = training.peak()
    assert found == training.peak() <= budget
    assert_equal(training.gradients(), expected)
    return found


#: Every seventh budget, and for `make soak` all 15.
_every = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])


@_every
def test_in_training(every: int, plainly: tuple[list[torch.Tensor], int]) -> None:
    expected, plain = plainly
    budgets = list(_budgets(smallest_budget(lambda: _train(_training(), 3 << 20)), 1.03 * plain))[::every]
    peaks = [_peak_in_training(budget, expected) for budget in budgets]
    assert peaks == sorted(peaks) and peaks[-1] == plain and peaks[0] < 0.5 * plain


def _peak_of_a_plan(budget: int, expected: list[torch.Tensor]) -> int:
    training = _training()
    before = start_peak()
    plan = _plan(training, budget)
    assert start_peak() == before, "originals of audits that were on their way to the store are released"
    actckpt.apply(training.model, policy=plan)
    assert_equal(training.gradients(), expected)
    found = training.peak()
    assert found <= budget and found == pytest.approx(plan.peak_bytes, rel=0.01)
    return found


@_every
def test_with_a_step_to_try(every: int, plainly: tuple[list[torch.Tensor], int]) -> None:
    expected, plain = plainly
    budgets = list(_budgets(smallest_budget(lambda: _plan(_training(), 3 << 20)), 1.03 * plain))[::every]
    peaks = [_peak_of_a_plan(budget, expected) for budget in budgets]
    assert peaks == sorted(peaks) and peaks[-1] == plain and peaks[0] < 0.5 * plain
