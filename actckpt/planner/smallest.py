"""The smallest budget for which there is a plan, and what holds memory in a segment."""

from __future__ import annotations

import dataclasses
import math

from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes
from actckpt.action import Action
from actckpt.planner.plans import Plan
from actckpt.planner.problem import Problem
from actckpt.planner.program import Program
from actckpt.planner.simulation import needs

__all__ = ["base_parts", "infeasible", "kept_bytes", "least_needs", "smallest"]

_TIME_LIMIT_S = 10.0


def smallest(problem: Problem) -> Plan | None:
    """Return the plan that needs least, None where none fits, whatever the budget."""
    unlimited = problem.with_budget(math.inf)
    program = Program(unlimited, minimise="budget")
    choices = program.choice(program.solve(time_limit_s=_TIME_LIMIT_S, gap=0.0)), problem.dropped()
    plans = [plan for choice in choices if choice and (plan := unlimited.plan(choice))]
    return min(plans, key=lambda plan: max(least_needs(plan)), default=None)


def least_needs(plan: Plan) -> list[float]:
    """Return the bytes that must be there in each segment, after all waits: nothing is on its way."""
    return needs(plan.costs, dataclasses.replace(plan, max_inflight=0))


def infeasible(problem: Problem) -> PlanInfeasibleError:
    """Word that no plan fits, with the smallest budget and what holds it."""
    plan = smallest(problem)
    if plan is None:
        return PlanInfeasibleError(f"No plan fits, whatever the budget: {_beyond_budget(problem)}.", None)
    smallest_bytes = math.ceil(max(least_needs(plan)))
    holds = _holds(problem, plan)
    return PlanInfeasibleError(
        f"No plan fits into {format_bytes(problem.budget_bytes)}: the smallest budget is "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes). {holds}. Pass that budget or a larger one, or make "
        "the batch smaller.",
        smallest_bytes,
        holds,
    )


def base_parts(plan: Plan, number: int) -> list[tuple[float, str]]:
    """Return what is there in a segment whatever other entries keep: bytes, and what they are in words."""
    costs, segment = plan.costs, plan.costs.timeline[number]
    index, again = segment.running, 0.0
    if index >= 0:
        mode = costs.blocks[index].mode(plan.actions[index], rerun=plan.rerun[index])
        again = segment.bases[mode] - segment.plain_bytes
    if costs.segments is not None:
        if again <= 0:
            return [(segment.plain_bytes + again, "where no block keeps anything")]
        return [(segment.plain_bytes, "where no block keeps anything"), (again, "for what is computed again")]
    working = costs.blocks[index].working_set_bytes
    return [
        (working, "its working set"),
        (again, "for what is computed again"),
        (costs.fixed_bytes, "fixed"),
        (segment.plain_bytes - working - costs.fixed_bytes, "gradients made by then"),
    ]


def kept_bytes(plan: Plan, number: int) -> float:
    """Return the bytes that entries keep which are between their forward and their backward in a segment."""
    blocks, segment = plan.costs.blocks, plan.costs.timeline[number]
    counts_cached = not segment.holds_casts
    return sum(blocks[j].bytes_of(plan.actions[j], Action.KEEP, counts_cached=counts_cached) for j in segment.alive)


def _holds(problem: Problem, plan: Plan) -> str:
    """Say what fills memory at the worst moment of a plan."""
    needed = least_needs(plan)
    worst = needed.index(max(needed))
    segment, stack = plan.costs.timeline[worst], plan.costs.stack
    why = f"kept by the blocks before it ({_kept_names(problem, plan, segment.alive)})"
    parts = [*base_parts(plan, worst), (kept_bytes(plan, worst), why)]
    held = ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in parts if nbytes)
    index = segment.running
    if index < 0:
        return f"What holds it, where no block runs: {held}"
    number = f", number {stack[: index + 1].count(stack[index])} of {stack.count(stack[index])}"
    of = f"{stack[index]!r}{number if stack.count(stack[index]) > 1 else ''}"
    return f"What holds it, in {'forward' if segment.is_forward else 'backward'} of {of}: {held}"


def _kept_names(problem: Problem, plan: Plan, alive: tuple[int, ...]) -> str:
    """Say which values are kept, and why."""
    names: dict[str, str] = {}
    for index in alive:
        for value in plan.costs.blocks[index].values:
            if plan.actions[index][value.name] is Action.KEEP and value.nbytes:
                is_fixed = len(problem.allowed[index][value.name]) == 1
                names.setdefault(value.name, "can only be kept" if is_fixed else "kept for want of host memory")
    return ", ".join(f"{name.strip('()')} {why}" for name, why in names.items())


def _beyond_budget(problem: Problem) -> str:
    """Say which other limit cannot be met."""
    entries = zip(problem.costs.blocks, problem.kept().actions, strict=True)
    if any(block.lost(actions) for block, actions in entries):
        return "pins drop what backward needs, and what it could be computed from"
    return f"pinned values need more host memory than there is ({format_bytes(problem.costs.host_bytes or 0)})"
