"""Budgets over kinds of programs: gradients are plain ones, peaks are within the budget, the smallest one is met."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from budget_programs import PROGRAMS, Program
from oracle import assert_equal
from torch import Tensor

import actckpt
from actckpt.memory import LiveStorages

#: In the first cycles audits compute checksums, in pieces of 2**15 elements.
_AUDIT_BYTES = 16 * 2**15
_CYCLES = 5


def _steps(program: Program, num: int) -> Iterator[tuple[list[Tensor], int]]:
    """Yield gradients and peak activation bytes of each step."""
    model, step = program
    for _ in range(num):
        torch.manual_seed(1)
        model.zero_grad()
        with LiveStorages(parameters=model.parameters()) as live:
            step()
        yield [p.grad.clone() for p in model.parameters() if p.grad is not None], live.peak_bytes


def _made(name: str) -> Program:
    torch.manual_seed(0)
    return PROGRAMS[name]()


def _smallest(name: str) -> float:
    """Return the smallest budget that the errors name. A step may hold several kinds of cycles, each with its own."""
    smallest = 2.0**12
    while True:
        program = _made(name)
        actckpt.apply(program[0], activation_budget=int(smallest), on_infeasible="raise", race=False)
        try:
            list(_steps(program, 4))
        except actckpt.errors.PlanInfeasibleError as error:
            assert error.smallest_bytes is not None and error.smallest_bytes > smallest
            smallest = error.smallest_bytes
        else:
            return smallest


@pytest.mark.parametrize("name", PROGRAMS)
def test_budgets_are_met_with_plain_gradients(name: str) -> None:
    ((expected, plain_bytes),) = _steps(_made(name), 1)
    smallest = _smallest(name)
    assert smallest <= 1.01 * plain_bytes + 2**12  # what errors add for differences between cycles
    for share in (0.0, 0.3, 0.7):
        budget = int(smallest + share * (plain_bytes - smallest)) + 1
        program = _made(name)
        actckpt.apply(program[0], activation_budget=budget, on_infeasible="raise", race=False)
        for number, (gradients, peak) in enumerate(_steps(program, _CYCLES)):
            assert_equal(gradients, expected)
            if number == 1:
                assert peak <= 1.02 * budget + _AUDIT_BYTES
            if number >= 3:
                assert peak <= budget
        plan = actckpt.report(program[0]).plan
        assert plan is not None
        assert plan.peak_bytes <= budget
        if name != "micro-batches in one autocast":  # whose step has two kinds of cycles: the plan is of the last one
            assert 0.9 * peak <= plan.peak_bytes
