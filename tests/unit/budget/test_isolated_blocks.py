"""Which blocks of a model are profiled apart, and whether a forward leaves something that holds its input."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import actckpt
from actckpt._budget import block_calls
from actckpt._budget.isolated_block import holds_input
from actckpt._budget.timing import Times


class _Product(nn.Module):
    def __init__(self, *, begins_with_sin: bool) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(32)), nn.Parameter(torch.randn(32, 32))
        self._begins_with_sin = begins_with_sin

    def forward(self, x: Tensor) -> Tensor:
        return ((x.sin() if self._begins_with_sin else x) * self.scale) @ self.weight


@pytest.mark.parametrize(
    ("is_frozen", "begins_with_sin", "num_profiled"),
    [(lambda _: False, True, 2), (lambda _: False, False, 1), (lambda number: number < 2, True, 3)],
    ids=["backward is longer in later blocks", "none", "two"],
)
def test_blocks_of_which_other_gradients_are_computed_are_profiled_apart(
    is_frozen: Callable[[int], bool], begins_with_sin: bool, num_profiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing that backward needs tells them apart: no gradient flows to the input of the first block, and both weights
    # need the input of their layer for the other one's.
    num_calls = itertools.count(1)

    def times(*_: Any, **__: Any) -> Times:
        return Times(next(num_calls), 2.0, 1.0, 2.0, None)

    monkeypatch.setattr(block_calls, "fastest", times)
    model = nn.Sequential(nn.Identity(), *(_Product(begins_with_sin=begins_with_sin) for _ in range(5)))
    for number, block in enumerate(model[1:]):
        block.scale.requires_grad_(not is_frozen(number))
    actckpt.apply(model, blocks=["1", "2", "3", "4", "5"], activation_budget="90%", race=False)
    for _ in range(3):
        model(torch.randn(8, 32)).sum().backward()
    plan = actckpt.report(model).plan
    assert plan is not None
    named = zip(plan.costs.blocks, plan.blocks or (), strict=True)
    assert len({block.forward_s for block, name in named if name is not None}) == num_profiled
    assert next(num_calls) == 1 + num_profiled


_remembered: list[Tensor] = []


def _remembers(x: Tensor) -> Tensor:
    _remembered[:] = [x]
    return x + 1


@pytest.mark.parametrize(
    ("forward", "is_held"),
    [
        (lambda x: x + 1, False),
        (lambda x: x.double().sin(), False),
        (lambda x: x.view(-1).relu(), False),
        (lambda x: x.sin(), True),
        (lambda x: x[:1].exp().sum() + x[1:].sin().sum(), True),
        (_remembers, True),
    ],
)
def test_what_autograd_saves_or_somebody_keeps_is_held(forward: Callable[[Tensor], Tensor], is_held: bool) -> None:
    for requires_grad in (False, True):
        x = torch.ones(4, 4, requires_grad=requires_grad)
        assert holds_input(forward, (x,), {}) == is_held
    _remembered.clear()


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_input_is_found_wherever_it_is_given(is_saved: bool) -> None:
    x, other = torch.ones(4, requires_grad=True), torch.zeros(4)
    compute = torch.sin if is_saved else (lambda given: given + 1)
    assert holds_input(lambda x: compute(x), (), {"x": x}) == is_saved
    assert (
        holds_input(lambda inputs, number: compute(inputs["x"]) + number, ({"other": other, "x": x}, 3), {}) == is_saved
    )
    assert holds_input(lambda inputs: compute(inputs[1][0]), (), {"inputs": [other, (x,)]}) == is_saved


def test_tensors_that_are_made_of_others_are_taken_to_be_held() -> None:
    x = TwoTensor(torch.ones(4), torch.ones(4)).requires_grad_()
    assert holds_input(lambda x: x + 1, (x,), {})
