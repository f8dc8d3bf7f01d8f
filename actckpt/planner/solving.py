"""The fastest plan that fits: `solve`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actckpt._text.sizes import parse_bytes
from actckpt.action import Action
from actckpt.planner.costs import CostTable, as_cost_table
from actckpt.planner.ladders import Way, ladder, slope
from actckpt.planner.memory_parts import infeasible, smallest
from actckpt.planner.pins import Pins, checked_pins
from actckpt.planner.plans import Plan
from actckpt.planner.problem import Choice, Problem, played
from actckpt.planner.program import Program

__all__ = ["solve"]

#: The search ends once its plan may be worse than the best one by this share of the step; in small programs, it goes on
#: to the optimum. A plan that is worse than the bound by the last one was cut off.
_GAP, _CUT_OFF = 5e-3, 1e-2
#: A difference below this share of the step is rounding.
_ROUNDING = 1e-9
_WINDOW_ROUNDS = 24
#: Number of choices that exceed the budget by less than HiGHS can tell, before the plan is a greedy one.
_MOST_ROUNDS = 50


def solve(
    costs: CostTable | Mapping[str, Any],
    *,
    budget: float | str,
    pins: Pins | None = None,
    time_limit_s: float = 2.0,
) -> Plan:
    """Choose what becomes of each value of each block so that the step is fastest within a budget.

    Args:
        costs: a cost table, or plain data for `CostTable.from_dict`.
        budget: most bytes in memory at any time, all of it: a number of bytes, or a text with a unit like `"24GiB"`.
        pins: actions (`Action`, or `"keep"`, `"recompute"`, `"offload"`) that are given: of all values with a name, of
            those of one class `(class, name)`, or of one block of the stack `(block, name)`.
        time_limit_s: seconds that the search may take. If it is cut off, the plan may be a greedy one.
    Returns:
        The plan with the least predicted seconds that was found; `plan.bound_seconds` says what none can beat.
    Raises:
        PlanInfeasibleError: no plan fits. Its `smallest_bytes` is the smallest budget for which there is one.
        CostTableError: the cost table makes no sense.
        ValueError: the budget or the time limit is none, or a pin cannot be.
    Cost: 0.3 s for a hundred blocks of fifteen values in the median, and `time_limit_s` and a second at most.
    Source: the program of NOTE [ Formulation ].
    """
    if not isinstance(time_limit_s, numbers.Real) or not time_limit_s >= 0:
        raise ValueError(f"time_limit_s={time_limit_s!r} is no time. Pass a number of seconds from 0 on.")
    problem = Problem.of(as_cost_table(costs), _budget(budget), pins)
    best, bound_s = problem.plan(problem.kept()), 0.0
    if best is None or best.overhead_seconds:
        best, bound_s = _search(problem, time_limit_s)
    best, pinned = _with_window(problem, best), tuple(checked_pins(pins).items())
    return dataclasses.replace(best, bound_seconds=max(0.0, min(best.overhead_seconds, bound_s)), pins=pinned)


def _budget(budget: object) -> float:
    if isinstance(budget, str) and not budget.strip()[-1:].isdigit():
        return parse_bytes(budget, what="budget")
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        nbytes = int(budget) if isinstance(budget, numbers.Integral) else float(budget)
        if 1 <= nbytes < math.inf or nbytes == 0:
            return nbytes
    raise ValueError(f"budget={budget!r} is no size. Pass a number of bytes, or a text with a unit like '24GiB'.")


def _search(problem: Problem, time_limit_s: float) -> tuple[Plan, float]:
    """Return the best plan found, and seconds that no plan can beat."""
    program, end_s = Program(problem), time.monotonic() + time_limit_s
    gap = _ROUNDING if program.is_small else _GAP
    for _ in range(_MOST_ROUNDS):
        choice, bound_s = program.solve(time_limit_s=max(end_s - time.monotonic(), 0.0), gap=gap)
        best = None if choice is None else problem.plan(choice)
        if choice is None or best is not None or not program.exclude():
            break
    is_near = best is not None and best.overhead_seconds - bound_s <= _CUT_OFF * best.step_seconds
    if bound_s < math.inf and not is_near:  # the search was cut off
        best = _fastest((best, _greedy(problem)))
    if best is None:
        least = smallest(problem)
        best = None if least is None else problem.plan(Choice(least.actions, least.rerun))
        if best is None:
            raise infeasible(problem, least)
    return best, bound_s


def _with_window(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with the smallest window with which its step takes no longer."""
    least, best = -1, plan
    for _ in range(_WINDOW_ROUNDS if plan.max_inflight else 0):
        if best.max_inflight - least <= 1:
            break
        window = (least + best.max_inflight) // 2
        tried = played(dataclasses.replace(plan, max_inflight=window))
        if tried and tried.overhead_seconds <= plan.overhead_seconds + _ROUNDING * problem.scale_s:
            best = tried
        else:
            least = window
    return best


def _greedy(problem: Problem) -> Plan | None:
    """Return a plan that holds the values whose bytes save most seconds; None if no plan like that fits.

    Entries go up step by step from what holds least to what takes least time. Steps that save most seconds per byte
    come first, and of equal ones those of the last entries. Bisection finds how many of them pay: each plan is
    simulated. Of the held values, it offloads as many as the links move during compute, or all.
    """
    ladders = _ladders(problem)
    steps = [(-slope(*pair), index) for index, ways in enumerate(ladders) for pair in itertools.pairwise(ways)]
    order = [index for _, index in sorted(steps, reverse=True)]

    @functools.cache
    def plan(num_steps: int, offloads_all: bool) -> Plan | None:
        levels = [0] * len(ladders)
        for index in order[:num_steps]:
            levels[index] += 1
        ways = [of_entry[level] for of_entry, level in zip(ladders, levels, strict=True)]
        return problem.plan(_offloading(problem, ways, offloads_all))

    best = None
    for offloads_all in (False, True)[: 1 + (problem.costs.d2h_bytes_per_s > 0)] if all(ladders) else ():
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            more = plan(middle + 1, offloads_all)
            is_better = more is not None and _fastest((more, plan(middle, offloads_all))) is more
            low, high = (middle + 1, high) if is_better else (low, middle)
        best = _fastest((best, plan(low, offloads_all)))
    return best


def _ladders(problem: Problem) -> list[list[Way]]:
    """Return the ladder of each entry of the stack; entries of one class with the same pins share one."""
    known: dict[Any, list[Way]] = {}
    ladders = []
    for name, block, allowed in zip(problem.costs.stack, problem.costs.blocks, problem.allowed, strict=True):
        key = name, *allowed.values()
        if key not in known:
            known[key] = ladder(block, allowed)
        ladders.append(known[key])
    return ladders


def _fastest(plans: Iterable[Plan | None]) -> Plan | None:
    """Return the fastest of the plans that there are, the first of equal ones."""
    return min(filter(None, plans), key=lambda plan: plan.overhead_seconds, default=None)


def _offloading(problem: Problem, ways: Sequence[Way], offloads_all: bool) -> Choice:
    """Return a choice that offloads all that may go, or what links move beside compute, large values first."""
    costs, room_bytes, actions = problem.costs, 0.0, []
    for block, allowed, way in zip(costs.blocks, problem.allowed, ways, strict=True):
        out_bytes = costs.d2h_bytes_per_s * block.forward_s
        room_bytes += min(out_bytes, costs.h2d_bytes_per_s * (block.backward_s + way.seconds))
        chosen = dict(way.actions)
        for value in sorted(block.values, key=lambda value: -value.nbytes):
            may_go = chosen[value.name] is Action.KEEP and Action.OFFLOAD in allowed[value.name]
            if may_go and (offloads_all or value.nbytes <= room_bytes):
                chosen[value.name] = Action.OFFLOAD
                room_bytes -= value.nbytes
        actions.append(chosen)
    return Choice(tuple(actions), tuple(way.rerun for way in ways))
