"""Work grows in proportion to a program: twice as many operators take about twice as many calls of functions."""

from __future__ import annotations

import sys
import time
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


def test_many_small_values_of_a_large_one_are_decided_in_linear_time() -> None:
    def steps_to(large: torch.Tensor, count: int) -> float:
        weight = torch.rand((), requires_grad=True)
        start = time.process_time()
        with actckpt.region():
            y, total = large.mean(), torch.zeros(())
            for _ in range(count):
                y = y.sin() * 1.01
                total = total + y * weight
        return time.process_time() - start

    large = torch.rand(1000) * 1
    steps_to(large, 100)
    # Ten times as many take ten times as long, where quadratic time would be a hundred times.
    assert min(steps_to(large, 4000) for _ in range(3)) < 40 * min(steps_to(large, 400) for _ in range(5))
