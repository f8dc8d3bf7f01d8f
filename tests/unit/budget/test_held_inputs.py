"""Whether a forward leaves something that holds its input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from actckpt._budget.isolated_block import holds_input

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
