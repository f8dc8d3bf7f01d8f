"""The smallest budget for which there is a plan, and what holds it."""

from __future__ import annotations

import math

from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes
from actckpt.action import Action
from actckpt.planner.problem import Choice, Problem
from actckpt.planner.program import Program

__all__ = ["infeasible", "smallest"]

_TIME_LIMIT_S = 10.0


def smallest(problem: Problem) -> Choice | None:
    """Return the choice that needs least, None where none fits, whatever the budget."""
    unlimited = problem.with_budget(math.inf)
    program = Program(unlimited, minimise="budget")
    found = program.choice(program.solve(time_limit_s=_TIME_LIMIT_S, gap=0.0)), problem.dropped()
    possible = [
        each for each in found if each and problem.seconds(each) is not None and not unlimited.excess_bytes(each)
    ]
    return min(possible, key=lambda each: float(problem.needs(each).max()), default=None)


def infeasible(problem: Problem) -> PlanInfeasibleError:
    """Word that no plan fits, with the smallest budget and what holds it."""
    found = smallest(problem)
    if found is None:
        return PlanInfeasibleError(f"No plan fits, whatever the budget: {_beyond_budget(problem)}.", None)
    smallest_bytes = math.ceil(problem.needs(found).max())
    holds = _holds(problem, found)
    return PlanInfeasibleError(
        f"No plan fits into {format_bytes(problem.budget_bytes)}: the smallest budget is "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes). {holds}. Pass that budget or a larger one, or make "
        "the batch smaller.",
        smallest_bytes,
        holds,
    )


def _holds(problem: Problem, choice: Choice) -> str:
    """Say what fills memory at the worst moment of a choice."""
    worst = int(problem.needs(choice).argmax())
    segment, stack = problem.moments[worst].segment, problem.costs.stack
    kept_bytes = problem.kept_bytes(choice)
    kept = float(kept_bytes[list(segment.alive)].sum())
    why = f"kept by the blocks before it ({_kept_names(problem, choice, segment.alive)})"
    parts = [*problem.base_parts(choice, worst), (kept, why)]
    held = ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in parts if nbytes)
    index = segment.running
    if index < 0:
        return f"What holds it, where no block runs: {held}"
    number = f", number {stack[: index + 1].count(stack[index])} of {stack.count(stack[index])}"
    of = f"{stack[index]!r}{number if stack.count(stack[index]) > 1 else ''}"
    return f"What holds it, in {'forward' if segment.is_forward else 'backward'} of {of}: {held}"


def _kept_names(problem: Problem, choice: Choice, alive: tuple[int, ...]) -> str:
    """Say which values are kept, and why."""
    names: dict[str, str] = {}
    for index in alive:
        block = problem.costs.blocks[index]
        for value, action, allowed in zip(block.values, choice.actions[index], problem.allowed[index], strict=True):
            if action is Action.KEEP and value.nbytes:
                why = "can only be kept" if len(allowed) == 1 else "kept for want of host memory"
                names.setdefault(value.name, why)
    return ", ".join(f"{name.strip('()')} {why}" for name, why in names.items())


def _beyond_budget(problem: Problem) -> str:
    """Say which other limit cannot be met."""
    costs = problem.costs
    if problem.seconds(problem.kept(unneeded=True)) is None:
        return "pins drop what backward needs, and what it could be computed from"
    return f"pinned values need more host memory than there is ({format_bytes(costs.host_bytes or 0)})"
