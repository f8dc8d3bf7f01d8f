"""What holds memory while a plan's step runs, and the smallest budget for which there is a plan."""

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

__all__ = ["infeasible", "memory_parts", "say_peak", "smallest"]

_TIME_LIMIT_S, _MOST_ROUNDS = 10.0, 50
_KEPT = "kept by blocks"
#: Bytes that differ by less than this share are the same.
_ROUNDING = 1e-6


def memory_parts(plan: Plan) -> list[dict[str, float]]:
    """Return the bytes in memory at the worst moment of each segment, by what they are in words."""
    costs, parts = plan.costs, []
    least = needs(costs, _without_copies(plan))
    for moment, most_bytes, least_bytes in zip(costs.moments, needs(costs, plan), least, strict=True):
        segment, moving_bytes = moment.segment, most_bytes - least_bytes
        block, base = costs.blocks[segment.running], segment.plain_bytes
        if segment.running >= 0:
            mode = block.mode(plan.actions[segment.running], rerun=plan.rerun[segment.running])
            base = segment.bases[mode]
        plain = min(segment.plain_bytes, base)
        working, fixed = (block.working_set_bytes, costs.fixed_bytes) if costs.segments is None else (0.0, 0.0)
        parts.append(
            {
                "where no block keeps anything": plain if costs.segments is not None else 0.0,
                "its working set": working,
                "for what is computed again": base - plain,
                _KEPT: least_bytes - base,
                "fixed": fixed,
                "gradients made by then": plain - working - fixed if costs.segments is None else 0.0,
                "still to be written out": moving_bytes * (not moment.is_backward),
                "read back ahead": moving_bytes * moment.is_backward,
            }
        )
    return parts


def say_peak(plan: Plan, *, why_kept: str = "") -> str:
    """Say when the peak is, in a backward if in several, and what is in memory then.

    Args:
        why_kept: is added to what blocks keep.
    """
    segments, timeline = memory_parts(plan), plan.costs.timeline
    totals = [sum(parts.values()) for parts in segments]
    peaks = [number for number, nbytes in enumerate(totals) if nbytes >= max(totals) * (1 - _ROUNDING)]
    number = next((each for each in peaks if plan.costs.moments[each].is_backward), peaks[0])
    held = ", ".join(
        f"{format_bytes(nbytes)} {what}{why_kept if what == _KEPT else ''}"
        for what, nbytes in segments[number].items()
        if nbytes > totals[number] * _ROUNDING
    )
    index = timeline[number].running
    if index < 0:
        return f"where no block runs: {held}"
    name = f"block {index} of {len(plan.costs.stack)} ({plan.costs.stack[index]!r})"
    where = name if plan.block_names is None else plan.block_names[index]
    return f"in {'forward' if timeline[number].is_forward else 'backward'} of {where}: {held}"


def smallest(problem: Problem) -> Plan | None:
    """Return the plan that needs least, after all waits; None where none fits, whatever the budget."""
    limited, best = dataclasses.replace(problem, budget_bytes=math.inf), None
    program = Program(limited, minimise="budget")
    for _ in range(_MOST_ROUNDS):
        choice, _ = program.solve(time_limit_s=_TIME_LIMIT_S, gap=0.0)
        plan = None if choice is None else limited.plan(choice)
        if plan is not None:
            best = _without_copies(plan)
            if not program.is_small:
                break
            # Another one may need less by less than HiGHS can tell.
            limited = dataclasses.replace(problem, budget_bytes=math.ceil(max(needs(best.costs, best))) - 1)
            program = Program(limited, minimise="budget")
        elif choice is None or not program.exclude():
            break
    return best


def _without_copies(plan: Plan) -> Plan:
    """Return a plan that waits until nothing is on its way."""
    return dataclasses.replace(plan, max_inflight=0)


def infeasible(problem: Problem, plan: Plan | None) -> PlanInfeasibleError:
    """Word that no plan fits, with the smallest budget and what holds it.

    Args:
        plan: the one that needs least; None: none fits, whatever the budget.
    """
    if plan is None:
        return PlanInfeasibleError(f"No plan fits, whatever the budget: {_beyond_budget(problem)}.", None)
    smallest_bytes = math.ceil(max(needs(plan.costs, plan)))
    holds = f"What holds it, {say_peak(plan, why_kept=_why_kept(problem, plan))}"
    return PlanInfeasibleError(
        f"No plan fits into {format_bytes(problem.budget_bytes)}: the smallest budget is "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes). {holds}. Pass that budget or a larger one, or make "
        "the batch smaller.",
        smallest_bytes,
        holds,
    )


def _why_kept(problem: Problem, plan: Plan) -> str:
    """Say which values are kept, and why."""
    names: dict[str, str] = {}
    for block, actions, allowed in zip(plan.costs.blocks, plan.actions, problem.allowed, strict=True):
        for value in block.values:
            if actions[value.name] is Action.KEEP and value.nbytes:
                is_fixed = len(allowed[value.name]) == 1
                names.setdefault(value.name, "can only be kept" if is_fixed else "kept for want of host memory")
    said = ", ".join(f"{name.strip('()')} {why}" for name, why in names.items())
    return f" ({said})" if said else ""


def _beyond_budget(problem: Problem) -> str:
    """Say which other limit cannot be met."""
    entries = zip(problem.costs.blocks, problem.kept().actions, strict=True)
    if any(block.lost(actions) for block, actions in entries):
        return "pins drop what backward needs, and what it could be computed from"
    return f"pinned values need more host memory than there is ({format_bytes(problem.costs.host_bytes or 0)})"
