"""`configure(replay_order=...)`: any order of the steps gives the same gradients, and what is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf

import actckpt

pytestmark = pytest.mark.usefixtures("no_audit")


def _gradient(order: Callable[[actckpt.ReplayGraph], Any] | None) -> torch.Tensor:
    torch.manual_seed(3)
    x = leaf(5)
    actckpt.configure(replay_order=order)
    with actckpt.region():
        y = ((x * 2).sin() + (x * 3).cos()).exp().tanh()
    y = y * 1.5
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


@pytest.mark.parametrize(
    "order",
    [
        lambda graph: range(len(graph.operators)),
        lambda graph: tuple(range(len(graph.operators))),
        lambda graph: iter(range(len(graph.operators))),
        lambda graph: torch.arange(len(graph.operators)),
        lambda graph: sorted(
            range(len(graph.operators)), key=lambda step: (graph.operators[step] != "aten.mul.Tensor", step)
        ),
    ],
    ids=["range", "tuple", "iterator", "tensor", "products first"],
)
def test_orders_in_any_container_give_the_same_gradients(order: Any) -> None:
    asked: list[actckpt.ReplayGraph] = []

    def noting(graph: actckpt.ReplayGraph) -> Any:
        asked.append(graph)
        return order(graph)

    assert_equal(_gradient(noting), _gradient(None))
    assert max(len(graph.operators) for graph in asked) >= 5


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda graph: None, r"returned None, a NoneType\. Return the numbers of the \d+ steps"),
        (lambda graph: 3, "returned 3, a int"),
        (lambda graph: graph.operators, r"returned \('aten\.mul\.Tensor', .*a tuple"),
        (lambda graph: [float(step) for step in range(len(graph.operators))], r"returned \[0\.0, .*a list"),
        (lambda graph: [-1], "-1 is not one of the"),
        (lambda graph: range(len(graph.operators) + 1), r"(\d+) is not one of the \1 steps"),
        (lambda graph: [0, *range(len(graph.operators))], r"step 0 \(aten\.mul\.Tensor\) is there twice"),
        (lambda graph: range(len(graph.operators))[::-1], "which comes later or never"),
        (lambda graph: range(1, len(graph.operators)), "which comes later or never"),
        (lambda graph: range(len(graph.operators) - 1), "which makes the target, is missing"),
        (lambda graph: [], "is missing among the 0 steps"),
    ],
    ids=range(11),
)
def test_what_is_no_order_is_refused_in_one_line(order: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^replay_order: .*{message}[^\n]*$"):
        _gradient(order)
