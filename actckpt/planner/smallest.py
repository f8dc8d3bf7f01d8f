"""The smallest budget for which there is a plan, and what holds it."""

from __future__ import annotations

import math

import numpy

from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes
from actckpt.action import Action
from actckpt.planner.improvement import Candidate, candidate, improved
from actckpt.planner.problem import Array, Problem
from actckpt.planner.program import Program

__all__ = ["infeasible", "smallest"]

_TIME_LIMIT_S = 10.0
#: Budgets closer than this share of them are one.
_ROUNDING = 1e-11


def smallest(problem: Problem) -> tuple[float, Candidate] | None:
    """Return the smallest budget and actions that fit into it; None where no budget is large enough."""
    unlimited = problem.with_budget(math.inf)
    actions = Program(unlimited, minimise="budget").solve(time_limit_s=_TIME_LIMIT_S, gap=0.0).actions()
    best = None if actions is None else candidate(unlimited, actions)
    if best is None:
        return None
    if best.excess_bytes > 0.0:  # HiGHS may let a limit be exceeded by some bytes
        best = improved(unlimited, best)
    while best.excess_bytes == 0.0:  # nor does it tell budgets apart that differ by some bytes
        budget = _needed(problem, best).max()
        less = problem.with_budget(budget - max(float(budget % 1 == 0), _ROUNDING * budget))
        start = candidate(less, best.actions)
        assert start is not None
        lower = improved(less, start)
        if lower.excess_bytes > 0.0:
            return float(budget), best
        best = lower
    return None


def infeasible(problem: Problem) -> PlanInfeasibleError:
    """Word that no plan fits, with the smallest budget and what holds it."""
    given = format_bytes(problem.budget_bytes)
    found = smallest(problem)
    if found is None:
        return PlanInfeasibleError(f"No plan fits, whatever the budget: {_beyond_budget(problem)}.", None)
    smallest_bytes, best = math.ceil(found[0]), found[1]
    holds = _holds(problem, best)
    return PlanInfeasibleError(
        f"No plan fits into {given}: the smallest budget is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes). "
        f"{holds}. Pass that budget or a larger one, or make the batch smaller.",
        smallest_bytes,
        holds,
    )


def _needed(problem: Problem, best: Candidate) -> Array:
    """Return the bytes that must be there while each block runs, after all waits."""
    kept_before = numpy.cumsum(best.footprints[:, 0]) - best.footprints[:, 0]
    backward = problem.backward_base + best.footprints[:, 3]
    needed: Array = numpy.maximum(problem.forward_base, backward) + kept_before
    return needed


def _holds(problem: Problem, best: Candidate) -> str:
    """Say what fills memory at the worst moment of a plan for the smallest budget."""
    worst = int(_needed(problem, best).argmax())
    block, stack = problem.blocks[worst], problem.costs.stack
    gradients = float(problem.backward_base[worst] - problem.forward_base[worst])
    kept, again = float(best.footprints[:worst, 0].sum()), float(best.footprints[worst, 3])
    parts = [
        (block.working_set_bytes, "its working set"),
        (again, "for what is computed again"),
        (problem.costs.fixed_bytes, "fixed"),
        (gradients, "gradients made by then"),
        (kept, f"kept by the blocks before it ({_kept_names(problem, best, worst)})"),
    ]
    held = ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in parts if nbytes)
    when = "backward" if gradients or again else "forward and backward"
    number = f", number {stack[: worst + 1].count(stack[worst])} of {stack.count(stack[worst])}"
    return f"What holds it, in {when} of {stack[worst]!r}{number if stack.count(stack[worst]) > 1 else ''}: {held}"


def _kept_names(problem: Problem, best: Candidate, worst: int) -> str:
    """Say which values are kept there, and why."""
    names: dict[str, str] = {}
    for index in range(worst):
        block = problem.blocks[index]
        for value, action, allowed in zip(block.values, best.actions[index], problem.allowed[index], strict=True):
            if action is Action.KEEP and value.nbytes:
                names.setdefault(
                    value.name, "can only be kept" if len(allowed) == 1 else "kept for want of host memory"
                )
    return ", ".join(f"{name.strip('()')} {why}" for name, why in names.items())


def _beyond_budget(problem: Problem) -> str:
    """Say which other limit cannot be met."""
    costs = problem.costs
    if candidate(problem, problem.all_held) is None:
        return "pins drop what backward needs, and what it could be computed from"
    if costs.capacity_bytes is not None:
        return "capacity_bytes leaves less than the plan with the least memory needs"
    return f"pinned values need more host memory than there is ({format_bytes(costs.host_bytes or 0)})"
