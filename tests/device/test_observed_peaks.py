"""Where a step needs more than was predicted, the allocator of the device tells, and the plan is made again."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from demo_training import Training
from oracle import assert_equal
from torch import Tensor

import actckpt
from actckpt._budget import pace

_LAYERS = 4
#: The model takes 5.4 MiB of it with everything recomputed, and what follows it 8 MiB.
_BUDGET = 21 << 19


def _long_loss(logits: Tensor, length: int = 12) -> Tensor:
    """Compute something of outputs that needs many times their bytes; they are taken to need three."""
    for _ in range(length):
        logits = logits.sin()
    return logits


def _short_loss(logits: Tensor) -> Tensor:
    return logits


def _training(budget: int | None = None, outputs: object = _long_loss) -> Training:
    training = Training(layers=_LAYERS)
    training.outputs = outputs
    if budget is not None:
        actckpt.apply(training.model, budget=budget)
    return training


def _surprised(budget: int = _BUDGET) -> Training:
    """Return a model whose first step was measured with a short loss, and that has a long one from then on."""
    training = _training(budget, _short_loss)
    training.peak()
    training.outputs = _long_loss
    return training


def _plan(training: Training) -> actckpt.Plan:
    plan = actckpt.report(training.model).plan
    assert plan is not None
    return plan


def test_a_loss_that_needs_more_is_seen_and_planned_for() -> None:
    expected = _training().gradients()
    training = _surprised()
    assert training.peak() > _BUDGET, "nothing to be corrected"
    first = _plan(training)
    for _ in range(3):
        assert training.peak() <= _BUDGET
        assert_equal(training.gradients(), expected)
    second = _plan(training)
    assert second.peak_bytes <= _BUDGET
    assert second.overhead_seconds > first.overhead_seconds
    changed = {name for name, block in second.costs.classes.items() if block != first.costs.classes.get(name)}
    assert changed == {"(after the blocks)"}, "only what needed more"


def test_nothing_is_planned_again_where_predictions_hold() -> None:
    training = _training(_BUDGET, _short_loss)
    training.peak()
    training.peak()  # the last in which it may be seen that the head needs less than it might
    plans = []
    for _ in range(4):
        assert training.peak() <= _BUDGET
        plans.append(_plan(training))
    assert all(plan is plans[0] for plan in plans)


def test_steps_neither_wait_for_the_device_nor_start_its_peak_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("called")

    training = _surprised()
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", fail)
    training.gradients()
    high = torch.accelerator.max_memory_allocated()
    first = _plan(training)
    training.gradients()
    assert torch.accelerator.max_memory_allocated() >= high
    assert _plan(training) is not first


def test_a_peak_below_an_older_one_tells_nothing() -> None:
    training = _surprised()
    torch.empty(1 << 26, device="sim")
    training.gradients()
    first = _plan(training)
    training.gradients()
    assert _plan(training) is first
    torch.accelerator.reset_peak_memory_stats()
    training.gradients()
    training.gradients()
    assert _plan(training) is not first


def test_blocks_that_need_a_little_more_are_left_to_the_reserve_where_the_head_needs_less() -> None:
    training = _training(_BUDGET, _short_loss)
    training.peak()
    planned: list[actckpt.Plan] = []

    def need_more(_: Tensor) -> None:
        planned.append(_plan(training))
        nbytes = int(planned[0].peak_bytes + 0.01 * _BUDGET) - torch.accelerator.memory_allocated()
        torch.empty(nbytes, dtype=torch.uint8, device="sim")

    hook = training.model.blocks[0].attention_norm.weight.register_hook(need_more)
    peak = training.peak()
    assert planned[0].peak_bytes < peak <= _BUDGET
    hook.remove()
    training.peak()
    first, second = planned[0].costs.classes, _plan(training).costs.classes
    assert {name for name, block in second.items() if block != first.get(name)} == {"(after the blocks)"}


def test_plans_are_made_again_once_in_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "STEPS_BETWEEN", 5)
    training = _training(14 << 20, _short_loss)
    plans = []
    for number in range(12):
        if number in (3, 4):
            training.outputs = lambda logits, length=(8, 14)[number - 3]: _long_loss(logits, length)
        training.peak()
        plans.append(_plan(training) if number else None)
    # In the second step it is seen what the head really needs: that is no exception.
    assert [number for number in range(2, 12) if plans[number] is not plans[number - 1]] == [2, 4, 9]
    assert training.peak() <= 14 << 20


def test_what_no_plan_can_help_is_said_and_training_goes_on() -> None:
    expected = _training().gradients()
    training = _surprised(int(6.5 * 2**20))
    assert training.peak() > 6.5 * 2**20
    with pytest.warns(UserWarning, match="no plan fits. From now on the plan runs that needs least"):
        found = training.gradients()
    assert_equal(found, expected)
    assert_equal(training.gradients(), expected)
