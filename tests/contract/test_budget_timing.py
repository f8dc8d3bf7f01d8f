"""What cost tables say that blocks take: reruns end early, and what watches a step is not timed."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any, ClassVar

import pytest
import torch
from test_budget_profiling import Model
from test_budgets import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import actckpt
from actckpt._budget import timing


class SlowAtTheEnd(Block):
    """Computes for long after the last tensor that it saves."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        time.sleep(0.02)
        return result + 1


@pytest.mark.parametrize("is_applied", [False, True])
def test_reruns_take_what_forward_takes_until_its_last_saved_tensor(is_applied: bool) -> None:
    model = Model(SlowAtTheEnd)
    x = torch.randn(8, 16, 32)
    if is_applied:
        actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
        for _ in range(2):
            model(x).backward()
        plan = actckpt.report(model).plan
    else:
        step = functools.partial(_step, model, x)
        plan = actckpt.plan(step, model=model, blocks="blocks.*", activation_budget="80%", race=False)
    assert plan is not None
    classes = {id(block): block for block in plan.costs.blocks if block.rerun}
    assert classes
    for block in classes.values():
        assert block.forward_s > 0.02 > 2 * block.rerun_seconds > 0.0


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).backward()


_calls = itertools.count()


class OtherEachTime(Block):
    """Runs other operators each time, and no attribute tells."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return (result.exp().sigmoid() if next(_calls) % 2 else result.tanh()) + result


def test_blocks_of_which_a_rerun_fails_are_planned_without_one() -> None:
    model = Model(OtherEachTime)
    actckpt.apply(model, blocks="blocks.*", activation_budget="90%", race=False)
    for _ in range(4):
        model(torch.randn(8, 16, 32)).backward()
    plan = actckpt.report(model).plan
    assert plan is not None and not any(block.rerun for block in plan.costs.blocks)


class _Seen(TorchDispatchMode):
    """A mode of the program that only looks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NotesModes(Block):
    """Takes down which modes its calls run below."""

    found: ClassVar[list[tuple[str, ...]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(tuple(type(mode).__name__ for mode in _get_current_dispatch_mode_stack()))
        return super().forward(x)


@pytest.mark.parametrize("is_applied", [False, True])
def test_blocks_are_timed_below_the_modes_of_the_program_alone(
    is_applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, seconds = [], timing._seconds

    def noted(*args: Any) -> Any:
        NotesModes.found.clear()
        found = seconds(*args)
        timed.append(NotesModes.found[0])
        return found

    monkeypatch.setattr(timing, "_seconds", noted)
    model, x = Model(NotesModes), torch.randn(8, 16, 32)
    actckpt.configure(observers=[_Seen])
    with _Seen():
        if is_applied:
            actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
            model(x).backward()
        else:
            step = functools.partial(_step, model, x)
            actckpt.plan(step, model=model, blocks="blocks.*", activation_budget="80%", race=False)
        assert ("_Seen",) in timed, "as it is, and where it runs again"
        assert set(timed) == {("_Seen",), ("_Seen", "Recorder")}
