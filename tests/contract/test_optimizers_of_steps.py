"""`optimizer=` of `plan`, `compare`, `estimate` and budgets: one, several, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt


class Training:
    """A model with one optimizer for matrices and one for the rest, and a step that runs both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))  # noqa: E731
        self.model = nn.Sequential(*(block() for _ in range(4)))
        self.x = torch.randn(8, 16)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() != 2]
        self.optimizers = [torch.optim.SGD(matrices, 0.01, momentum=0.9), torch.optim.AdamW(others)]

    def step(self) -> None:
        self.model.zero_grad()
        self.model(self.x).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[Tensor]:
        found = [parameter.detach().clone() for parameter in self.model.parameters()]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
        return found


def _plan(training: Training, optimizer: Any) -> object:
    return actckpt.plan(training.step, model=training.model, optimizer=optimizer, activation_budget="60%", race=False)


def _compare(training: Training, optimizer: Any) -> object:
    return actckpt.compare(training.step, model=training.model, optimizer=optimizer, rounds=1)


def _estimate(training: Training, optimizer: Any) -> object:
    return actckpt.estimate(training.step, model=training.model, optimizer=optimizer, target="h100")


def _apply(training: Training, optimizer: Any) -> object:
    return actckpt.apply(training.model, budget="1GiB", optimizer=optimizer)


@pytest.mark.parametrize("measure", [_plan, _compare, _estimate])
def test_the_state_of_several_optimizers_stays(measure: Callable[[Training, Any], object]) -> None:
    training = Training()
    training.step()
    before = training.state()
    measure(training, training.optimizers)
    assert_equal(training.state(), before)


@pytest.mark.parametrize("measure", [_plan, _compare, _estimate])
def test_one_of_several_that_was_left_out_is_named(measure: Callable[[Training, Any], object]) -> None:
    training = Training()
    training.step()
    before = training.state()
    with pytest.raises(ValueError, match=r"an optimizer .*AdamW.* that was not given|not given \(AdamW\)"):
        measure(training, training.optimizers[0])
    assert_equal(training.state(), before)


@pytest.mark.parametrize("measure", [_plan, _compare, _estimate, _apply])
@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda _: "adam", TypeError, r"optimizer is a str\. Pass the torch\.optim\.Optimizer"),
        (lambda _: torch.optim.AdamW, TypeError, r"optimizer is the class AdamW"),
        (lambda training: [training.optimizers[0], 3], TypeError, r"optimizer is a int"),
    ],
)
def test_what_is_no_optimizer_is_refused(
    measure: Callable[[Training, Any], object], optimizer: Callable[[Training], Any], error: type, message: str
) -> None:
    training = Training()
    with pytest.raises(error, match=message):
        measure(training, optimizer(training))


def test_budgets_count_the_state_of_all_optimizers() -> None:
    if on_device.device_type != "cpu":
        pytest.skip("everything that is allocated counts there")
    peaks = []
    for num in (0, 1, 2):
        training = Training()
        training.step()
        actckpt.apply(training.model, budget="1GiB", optimizer=training.optimizers[:num], race=False)
        for _ in range(2):
            training.step()
        peaks.append(actckpt.report(training.model).plan.peak_bytes)
    states = [
        sum(value.nbytes for state in each.state.values() for value in state.values()) for each in training.optimizers
    ]
    assert peaks[1] - peaks[0] == states[0] and peaks[2] - peaks[1] == states[1]


def test_an_update_without_an_optimizer_is_named() -> None:
    training = Training()

    def step() -> None:
        training.model.zero_grad()
        training.model(training.x).square().sum().backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter -= 0.01 * parameter.grad

    before = training.state()
    with pytest.raises(ValueError, match=r"plan: the step changed '0.0.weight', and no optimizer was given"):
        actckpt.plan(step, model=training.model, activation_budget="60%", race=False)
    assert_equal(training.state(), before)


@pytest.mark.parametrize("measure", [_plan, _compare, _apply])
def test_an_optimizer_that_trains_nothing_of_the_model_is_told(measure: Callable[[Training, Any], object]) -> None:
    """As one of master copies, which is right, or one of another model, which is not."""
    training = Training()
    copies = [parameter.detach().clone().requires_grad_() for parameter in training.model.parameters()]
    training.optimizers = []
    with pytest.warns(UserWarning, match="optimizer SGD trains no parameter of this Sequential"):
        measure(training, torch.optim.SGD(copies, 0.1))


@pytest.mark.parametrize("given", [slice(0, 1), slice(0, 2)])
@pytest.mark.parametrize("measure", [_plan, _compare])
def test_a_step_may_run_the_optimizer_of_another_model(
    measure: Callable[[Training, Any], object], given: slice
) -> None:
    """As that of a discriminator, given or not."""
    training = Training()
    other = nn.Linear(16, 1)
    training.optimizers = [torch.optim.SGD(training.model.parameters(), 0.01), torch.optim.SGD(other.parameters(), 0.1)]
    before = training.state()
    other.weight.grad = torch.ones_like(other.weight)
    measure(training, training.optimizers[given])
    assert_equal(training.state(), before)


class Wrapper:
    """Wraps an optimizer as accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


@pytest.mark.parametrize("measure", [_plan, _compare])
def test_wrapped_optimizers_are_those_inside(measure: Callable[[Training, Any], object]) -> None:
    training = Training()
    training.optimizers = [Wrapper(each) for each in training.optimizers]
    training.step()
    before = training.state()
    measure(training, training.optimizers)
    assert_equal(training.state(), before)
