"""A forward that is interrupted where `apply` begins a cycle, before so many lines of it ran."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt._cycles import kinds, loop


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def step(self) -> list[Tensor]:
        self.zero_grad()
        torch.manual_seed(1)
        self(torch.ones(8, 16)).backward()
        return [parameter.grad.clone() for parameter in self.parameters()]


def _applied(num_steps: int) -> Model:
    model = Model()
    actckpt.apply(model, blocks="blocks.*", activation_budget="90%", race=False)
    for _ in range(num_steps):
        model.step()
    return model


def _budget(model: Model) -> float:
    plan = actckpt.report(model).plan
    assert plan is not None
    return plan.budget_bytes


class _Interrupt:
    """Interrupts what `apply` does where a forward of a model begins, before so many lines of it ran."""

    def __init__(self, num_lines: int) -> None:
        self._left = num_lines

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: types.FrameType, *_: object) -> Any:
        return self._traced if frame.f_code.co_filename in _FILES else None

    def _traced(self, _: types.FrameType, event: str, __: object) -> Any:
        self._left -= event == "line"
        if not self._left:
            raise KeyboardInterrupt
        return self._traced


_FILES = {module.__file__ for module in (loop, kinds)}


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_forward_that_is_interrupted_where_it_begins_is_alive_no_more(num_steps: int) -> None:
    plain, expected = Model().step(), _budget(_applied(3))
    for num_lines in range(1, 130, 5):
        model = _applied(num_steps)
        with _Interrupt(num_lines), pytest.raises(KeyboardInterrupt):
            model.step()
        for _ in range(3):
            assert_equal(model.step(), plain)
        assert _budget(model) == expected
