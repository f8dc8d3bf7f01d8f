"""Work grows in proportion to a program: twice as many operators take about twice as many calls of functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actckpt

KEEP_WRITES = actckpt.policies.PerOp({"aten.copy_": "keep"})


pytestmark = pytest.mark.usefixtures("no_audit")


def _num_calls(run: Callable[[], Any]) -> int:
    """Return how many functions and generators were entered from Python."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def _filled(factory: Callable[..., torch.Tensor], policy: Any) -> Callable[[int], Any]:
    def program(size: int) -> None:
        h = torch.randn(4, requires_grad=True)
        with actckpt.region(policy):
            buffer = factory(size, 4)
            for row in range(size):
                h = h.sin()
                buffer[row] = h
            loss = (buffer * buffer).sum()
        loss.backward()

    return program


def _after_a_loss(size: int) -> None:
    x, other = torch.randn(4, requires_grad=True), torch.randn(4)
    with actckpt.region():
        other * 1
        other.mul_(2)  # what is made from the bytes before cannot be brought back
        h = x
        for _ in range(size):
            h = h.sin()
    h.sum().backward()


def _many_inputs(size: int) -> None:
    w = torch.randn(4, requires_grad=True)
    inputs = [torch.randn(4) for _ in range(size)]
    with actckpt.region():
        h = w
        for x in inputs:
            h = (h + x * 2).sin()
        for x in inputs:
            x.mul_(3)
    h.sum().backward()


def _branches(size: int) -> None:
    h = torch.randn(4, requires_grad=True)
    total = torch.zeros(())
    with actckpt.region():
        for _ in range(size):
            h = h.sin()
            total = total + (h * 2 + 1).sin().sum()
    total.backward()


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_filled(torch.zeros, "recompute"), id="writes to zeros"),
        pytest.param(_filled(torch.empty, "recompute"), id="writes to empty memory"),
        pytest.param(_filled(torch.zeros, KEEP_WRITES), id="writes that are kept"),
        pytest.param(_after_a_loss, id="after a loss"),
        pytest.param(_many_inputs, id="inputs overwritten"),
        pytest.param(_branches, id="branches"),
    ],
)
def test_twice_the_operators_take_twice_the_calls(program: Callable[[int], None]) -> None:
    program(10)
    small, large = (_num_calls(lambda size=size: program(size)) for size in (150, 300))  # type: ignore[misc]
    assert small > 150
    assert large <= 2.3 * small
