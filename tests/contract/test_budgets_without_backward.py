"""Forwards with gradients of a model with a budget that no backward reads."""

from __future__ import annotations

import gc
import warnings
import weakref

import on_device
import pytest
import torch
from torch import Tensor, nn

import actckpt

_MOST_DROPPED = 16


def _model(budget: str = "60%") -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
    actckpt.apply(model, activation_budget=budget, race=False)
    return model


def _x() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8)


def _told(found: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [each for each in found if "no backward reached" in str(each.message)]


def test_evaluation_without_no_grad_is_told_once_at_the_line_that_calls() -> None:
    model = _model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(_MOST_DROPPED):
            model(_x()).sum()
        assert not _told(found)
        for _ in range(2 * _MOST_DROPPED):
            model(_x()).sum()
    (told,) = _told(found)
    assert str(told.message).startswith(f"apply: {_MOST_DROPPED} forwards in a row of a Sequential with a budget ran")
    assert "torch.no_grad()" in str(told.message) and told.filename == __file__


@pytest.mark.parametrize("num", [_MOST_DROPPED - 1, _MOST_DROPPED + 1])
def test_it_is_told_in_training_as_well_where_no_backward_came_in_between(num: int) -> None:
    model = _model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(_x()).sum().backward()
            for size in range(num):
                model.eval()
                model(_x()[: size % 3 + 1]).sum()
            model.train()
    assert len(_told(found)) == (num > _MOST_DROPPED)


def test_a_backward_that_does_not_come_to_what_the_model_returned_is_not_denied() -> None:
    model, seen = _model(), list[Tensor]()
    model[1].register_forward_hook(lambda _, __, result: seen.append(result))
    with pytest.warns(UserWarning, match="no backward reached what they returned"):
        for _ in range(_MOST_DROPPED + 1):
            model(_x())
            seen.pop().sum().backward()


def test_losses_of_micro_batches_that_wait_for_one_backward_are_not_told() -> None:
    model = _model("100%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            torch.stack([model(_x()).sum() for _ in range(3 * _MOST_DROPPED)]).sum().backward()
            for _ in range(2 * _MOST_DROPPED):
                with torch.no_grad():
                    model(_x())


def test_forwards_are_not_held_for_it() -> None:
    model = _model()
    for _ in range(3):
        gone = weakref.ref(model(_x()))
        gc.collect()
        assert gone() is None
    gone = weakref.ref(model)  # type: ignore[assignment]
    del model
    gc.collect()
    assert gone() is None


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
        self.head = nn.Linear(8, 2)
        self.is_trained = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.is_trained):
            x = self.blocks(x)
        result: Tensor = self.head(x)
        return result


def test_blocks_that_run_with_gradients_later_get_a_plan() -> None:
    """A backbone that is frozen at first: nothing can be measured, which a warning says."""
    model = _Backbone()
    actckpt.apply(model, blocks="blocks.*", activation_budget="100%", race=False)
    with pytest.warns(UserWarning, match="stay checkpointed until one runs with gradients") as found:
        for _ in range(3):
            model(_x()).sum().backward()
    assert len(found) == 1 and actckpt.report(model).plan is None
    model.is_trained = True
    for _ in range(3):  # the first one shows that blocks run, the second one is measured
        model(_x()).sum().backward()
    assert actckpt.report(model).plan is not None


def test_blocks_that_run_with_gradients_in_every_other_step_get_a_plan() -> None:
    if on_device.device_type != "cpu":
        pytest.skip("devices are not planned from metered cycles yet, and make no plan here")
    model = _Backbone()
    actckpt.apply(model, blocks="blocks.*", activation_budget="100%", race=False)
    with pytest.warns(UserWarning, match="no plan"):
        for step in range(8):
            model.is_trained = bool(step % 2)
            model(_x()).sum().backward()
    assert actckpt.report(model).plan is not None
