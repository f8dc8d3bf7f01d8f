"""Regions that lead to modules which they do not call: methods of a whole model, closures over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Checkpoint, CountOperators, assert_equal, gradients, leaf, ours, plain
from torch.nn.utils import parametrizations


class Stages(torch.nn.Module):
    """Two parts, each run in a region of its own; the second changes a buffer."""

    def __init__(self, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), second

    def run_first(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x).exp()


SECOND: dict[str, Callable[[Checkpoint, Stages, torch.Tensor], torch.Tensor]] = {
    "method": lambda checkpoint, model, x: checkpoint(model.run_second, x),
    "module": lambda checkpoint, model, x: checkpoint(model.second, x).exp(),
    "closure": lambda checkpoint, model, x: checkpoint(lambda h: model.second(h).exp(), x),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("call", SECOND)
def test_a_module_is_watched_until_a_region_calls_it(call: str, is_training: bool) -> None:
    def program(checkpoint: Checkpoint) -> Any:
        torch.manual_seed(0)
        model, found = Stages(parametrizations.spectral_norm(torch.nn.Linear(4, 4))), []
        model.train(is_training)
        for _ in range(3):
            x = leaf(2, 4)
            SECOND[call](checkpoint, model, checkpoint(model.run_first, x)).sum().backward()
            found += [x.grad, gradients(model), [buffer.clone() for buffer in model.buffers()]]
        return found

    assert_equal(program(ours), program(plain))


def test_a_module_that_no_region_calls_costs_no_operator_after_the_first_step() -> None:
    model = Stages(torch.nn.BatchNorm1d(4).eval())

    def operators() -> int:
        with CountOperators() as counted:
            y = ours(model.run_first, leaf(2, 4))
        y.sum().backward()
        return counted.total

    assert operators() == operators()


def test_statistics_of_a_batch_norm_that_no_region_calls_are_not_copied_in_reruns() -> None:
    model = Stages(torch.nn.BatchNorm1d(4))
    for method in (model.run_first, model.run_second):
        y = ours(method, leaf(2, 4))
        with CountOperators() as counted:
            y.sum().backward()
        assert ("aten.clone.default" in counted.counts) is (method == model.run_second)
