"""Where a step needs more than when it was metered, the peak of the device's allocator tells, and the plan changes."""

from __future__ import annotations

import gc
from typing import NoReturn

import pytest
import torch
from demo_training import Training
from oracle import assert_equal
from torch import Tensor

import actckpt
from actckpt._core import checksums
from actckpt._cycles.meter import meter_of

_LAYERS = 4
#: The model takes 5.4 MiB of it with everything recomputed, and what follows it 8 MiB.
_BUDGET = 21 << 19
#: Cycles until nothing more is metered, without trials.
_SETTLING = 6


def _long_loss(logits: Tensor, length: int = 12) -> Tensor:
    """Compute something of outputs that needs many times their bytes."""
    for _ in range(length):
        logits = logits.sin()
    return logits


def _short_loss(logits: Tensor) -> Tensor:
    return logits


def _training(budget: int | None = None, outputs: object = _long_loss) -> Training:
    training = Training(layers=_LAYERS)
    training.outputs = outputs
    if budget is not None:
        actckpt.apply(training.model, budget=budget, race=False)
    return training


def _surprised(budget: int = _BUDGET) -> Training:
    """Return a model whose plan was made for a short loss, and that has a long one from then on."""
    training = _training(budget, _short_loss)
    for _ in range(_SETTLING):
        training.peak()
    training.outputs = _long_loss
    return training


def test_a_loss_that_needs_more_is_seen_and_planned_for() -> None:
    expected = _training().gradients()
    training = _surprised()
    first = training.plan
    assert training.peak() > _BUDGET, "nothing to be corrected"
    for _ in range(_SETTLING):
        assert_equal(training.gradients(), expected)
    assert 0.9 * _BUDGET <= training.peak() <= _BUDGET
    assert training.plan.overhead_seconds > first.overhead_seconds


def test_settled_steps_neither_plan_nor_wait_for_the_device_nor_start_its_peak_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("called")

    training = _training(_BUDGET, _short_loss)
    for _ in range(_SETTLING):
        training.peak()
    plan = training.plan
    for _ in range(4):
        assert training.peak() <= _BUDGET
        assert training.plan is plan
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", fail)
    high = torch.accelerator.max_memory_allocated()
    training.gradients()
    assert torch.accelerator.max_memory_allocated() >= high > 0


def test_a_peak_below_an_older_one_tells_nothing() -> None:
    training = _surprised()
    first = training.plan
    torch.empty(1 << 26, device="sim")
    training.gradients()
    training.gradients()
    assert training.plan is first
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        training.gradients()
    assert training.plan is not first


def test_bytes_that_come_and_go_between_steps_lead_to_one_plan() -> None:
    training = _training(_BUDGET, _short_loss)
    plans: list[actckpt.Plan] = []
    training.gradients()
    for number in range(_SETTLING + 8):
        held = torch.zeros(1 << 18 if number % 2 else 1, device="sim")  # 1 MiB, 5 % of the budget
        training.gradients()
        plans.append(training.plan)
        del held
    assert len({id(plan) for plan in plans[_SETTLING:]}) == 1


def _asked_bytes(tensors_in_a_cycle: bool) -> float:
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4))
    ).to("sim")
    x = torch.randn(64, 64, device="sim")

    def step() -> None:
        model(x).square().mean().backward()

    gc.collect()
    if tensors_in_a_cycle:
        garbage: list[object] = [torch.zeros(1 << 18, device="sim")]
        garbage.append(garbage)
    return actckpt.plan(step, model=model, activation_budget="80%", race=False).budget_bytes


def test_garbage_that_dies_in_the_measured_step_does_not_count() -> None:
    assert _asked_bytes(tensors_in_a_cycle=True) == _asked_bytes(tensors_in_a_cycle=False)


def test_an_audit_inside_of_what_is_not_metered_does_not_count() -> None:
    meter = meter_of(torch.device("sim", 0), [], parameters=[])
    with meter.muted():
        torch.zeros(1 << 18, device="sim")
        checksums.checksum(torch.ones(4, device="sim"))
        with meter.unmuted():
            torch.zeros(1 << 10, device="sim")
        torch.zeros(1 << 18, device="sim")
        checksums.checksum(torch.ones(4, device="sim"))
    _, peak_bytes = meter.take()
    meter.end()
    assert peak_bytes == 4 << 10
