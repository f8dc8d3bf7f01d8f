"""From which outputs of a model a program computes something, and what that counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actckpt._budget import loss as module
from actckpt._budget.class_names import AFTER, BEFORE
from actckpt._budget.loss import Loss
from actckpt._budget.measuring import MeasuredStep
from actckpt.planner.costs import BlockClass, CostTable

#: Elements of the two outputs, of which the second is the model's own loss.
SIZE = 100
HELD, HEAD = 1000.0, 1200.0


def _measured(head_bytes: float = HEAD) -> MeasuredStep:
    needed = {BEFORE: 0.0, AFTER: head_bytes}
    classes = {name: BlockClass(0.0, 0.0, nbytes, 0.0, ()) for name, nbytes in needed.items()}
    return MeasuredStep(CostTable(classes=classes, stack=(BEFORE, AFTER)), (None, None), ({}, {}), (), ((), ()))


def _needed_bytes(backward: Callable[[Tensor, Tensor], Any], *, is_disturbed: bool = False) -> float:
    """Return what the head of a model needs whose outputs go through a backward."""
    x = torch.randn(SIZE, requires_grad=True)
    outputs = x * 2
    own = outputs.sum()
    found = Loss([outputs, own], HELD)
    is_first = iter((True,))
    for each in (outputs, own):
        each.register_hook(lambda _: found.backward_begins() if next(is_first, False) else None)
    if is_disturbed:
        found.disturb()
    backward(outputs, own)
    return found.added(_measured()).costs.classes[AFTER].working_set_bytes


BYTES, OWN = 4 * SIZE, 4
ALL = HELD + 4 * BYTES + 4 * OWN


def test_outputs_that_nothing_is_computed_from_count_once() -> None:
    assert _needed_bytes(lambda outputs, own: own.backward()) == HELD + BYTES + OWN
    assert _needed_bytes(lambda outputs, own: outputs.backward(torch.ones(SIZE))) == HELD + BYTES + OWN


def test_outputs_that_something_is_computed_from_count_as_the_graph_shows() -> None:
    # The gradients that `square` takes and gives, two tensors that it makes on the way, and the loss.
    assert _needed_bytes(lambda outputs, own: outputs.square().mean().backward()) == HELD + 4 * BYTES + OWN + 4
    # The gradients that `neg` takes and gives, and the loss.
    assert _needed_bytes(lambda outputs, own: (-outputs).sum().backward()) == HELD + 2 * BYTES + OWN + 4


def test_a_graph_that_leads_to_no_output_is_not_the_one_of_the_loss() -> None:
    def other(outputs: Tensor, _: Tensor) -> None:
        # So a thread of the engine may find it, where its own backward was begun by none that Python knows.
        x = torch.ones(SIZE, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: found.backward_begins())
        found = Loss([outputs], HELD)
        y.exp().sum().backward()  # type: ignore[no-untyped-call]
        needed.append(found.added(_measured()).costs.classes[AFTER].working_set_bytes)

    needed: list[float] = []
    other(torch.randn(SIZE, requires_grad=True) * 2, torch.ones(()))
    assert needed == [HELD + 4 * BYTES]


def test_a_loss_of_the_model_that_is_scaled_is_what_something_is_computed_from() -> None:
    found = _needed_bytes(lambda outputs, own: (own / 4).backward())
    assert HELD + BYTES < found <= HELD + BYTES + 6 * OWN


def test_what_the_program_holds_is_there_while_the_model_runs_backward() -> None:
    def backward(outputs: Tensor, own: Tensor) -> None:
        held = outputs.view(10, 10).neg()
        view = held[1:]
        del held
        view.sum().backward()

    x = torch.randn(SIZE, requires_grad=True)
    outputs = x * 2
    found = Loss([outputs], HELD)
    outputs.register_hook(lambda _: found.backward_begins())
    backward(outputs, outputs)
    assert found.held_bytes == BYTES
    assert found.added(_measured(10.0**6)).costs.classes[AFTER].working_set_bytes == 10.0**6 + BYTES


def test_what_is_returned_by_grad_counts_like_what_backward_leaves() -> None:
    def grad(outputs: Tensor, own: Tensor) -> None:
        torch.autograd.grad(own, outputs)

    assert _needed_bytes(grad) == HELD + BYTES + OWN


def test_all_outputs_count_four_times_where_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _needed_bytes(lambda outputs, own: own.backward(), is_disturbed=True) == ALL
    assert _needed_bytes(lambda outputs, own: own.backward(retain_graph=True)) == ALL
    assert _needed_bytes(lambda outputs, own: None) == ALL
    monkeypatch.setattr(module, "MOST_NODES", 3)
    assert _needed_bytes(lambda outputs, own: own.sin().sin().sin().backward()) < ALL - 2 * BYTES
    assert _needed_bytes(lambda outputs, own: own.sin().sin().sin().sin().backward()) == ALL
