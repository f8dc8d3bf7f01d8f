"""A device that is too small for plain training."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from demo_training import METHODS, Training
from oracle import assert_equal
from sim import device

import actckpt

#: Bytes of the device. Plainly the step needs 25.0 MiB, with everything recomputed 6.7 MiB.
_CAPACITY = 9 << 20


@pytest.fixture
def small(expected: list[torch.Tensor]) -> Iterator[None]:
    """A device with that capacity."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()  # from `expected`
    with device.capacity(0, _CAPACITY):
        yield


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Gradients of plain training on a large device."""
    return Training().gradients()


def test_plain_training_runs_out_of_memory(small: None) -> None:
    training = Training()
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
        training.step()
    assert torch.accelerator.max_memory_allocated() <= _CAPACITY


@pytest.mark.parametrize("eagerness", [0.0, 0.3])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "plain"])
def test_each_method_trains_with_the_gradients_of_a_large_device(
    method: str, eagerness: float, small: None, expected: list[torch.Tensor]
) -> None:
    device.set_adversary(3, eagerness)
    training = Training(METHODS[method])
    for _ in range(4):
        assert_equal(training.gradients(), expected)
    assert torch.accelerator.max_memory_allocated() <= _CAPACITY


# Audits of the first cycles take 512 KiB beyond a budget.
@pytest.mark.parametrize("budget", ["auto", 0.94])
def test_a_budget_of_the_device_trains_with_the_gradients_of_a_large_one(
    budget: float | str, small: None, expected: list[torch.Tensor]
) -> None:
    training = Training()
    actckpt.apply(training.model, budget=budget)
    for _ in range(5):
        assert_equal(training.gradients(), expected)
    assert 0.85 * _CAPACITY < training.plan.budget_bytes <= _CAPACITY
    assert any(action is not actckpt.Action.KEEP for block in training.plan.actions for action in block.values())


@pytest.mark.parametrize("capacity", [10 << 20, 13 << 20, 18 << 20])
def test_auto_follows_the_capacity(capacity: int, expected: list[torch.Tensor]) -> None:
    with device.capacity(0, capacity):
        training = Training()
        actckpt.apply(training.model, budget="auto", race=False)
        peaks = [training.peak() for _ in range(7)]  # the meter of the first cycles starts the peak again
        assert_equal(training.gradients(), expected)
    assert 0.8 * 0.95 * capacity <= peaks[-1] <= 0.95 * capacity


def test_without_room_to_measure_a_block_the_error_is_of_memory() -> None:
    with device.capacity(0, 5 << 20), pytest.raises(torch.OutOfMemoryError):
        training = Training()
        actckpt.apply(training.model, budget=5 << 20)
        training.gradients()


def test_after_a_forward_ran_out_of_memory_plans_need_less(expected: list[torch.Tensor]) -> None:
    training = Training()
    actckpt.apply(training.model, budget=20 << 20, race=False)
    for _ in range(4):
        training.gradients()
    before_bytes = training.plan.peak_bytes
    with device.failing_allocation(40), pytest.warns(actckpt.ActckptWarning, match="ran out of memory"):
        assert_equal(training.gradients(), expected)
    for _ in range(4):
        assert_equal(training.gradients(), expected)
    assert actckpt.stats().rescued_forwards == 1
    assert training.plan.peak_bytes < 0.92 * before_bytes


def test_a_plan_is_found_on_a_device_that_is_too_small_for_the_plain_step(expected: list[torch.Tensor]) -> None:
    capacity = 9 << 20  # `plan` runs steps and blocks to measure them: checksums of the first ones need room as well
    with device.capacity(0, capacity):
        training = Training()
        plan = actckpt.plan(training.step, model=training.model, budget="auto", race=False)
        actckpt.apply(training.model, policy=plan)
        assert_equal(training.gradients(), expected)
        assert training.peak() <= plan.budget_bytes <= capacity


def _gradients(training: Training, length: int) -> list[torch.Tensor]:
    everything = training.tokens
    training.tokens = everything[:, :length]
    try:
        return training.gradients()
    finally:
        training.tokens = everything


def test_no_allocation_fails_whatever_the_lengths() -> None:
    lengths = random.Random(0).choices(range(16, 129), k=60)  # most new ones are among the first
    plain = Training()
    expected = {length: _gradients(plain, length) for length in lengths[::10]}
    del plain
    torch.accelerator.empty_cache()
    with device.capacity(0, 12 << 20):
        training = Training()
        actckpt.apply(training.model, budget="auto")
        for number, length in enumerate(lengths):
            gradients = _gradients(training, length)
            if number % 10 == 0:
                assert_equal(gradients, expected[length])
