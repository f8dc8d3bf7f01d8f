"""The fastest plan that fits: `solve`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from actckpt._text.sizes import parse_bytes
from actckpt.planner.costs import CostTable, as_cost_table
from actckpt.planner.pins import Pins, checked_pins
from actckpt.planner.plans import Plan
from actckpt.planner.problem import Choice, Problem, played
from actckpt.planner.program import Program
from actckpt.planner.smallest import infeasible, smallest

__all__ = ["solve"]

#: With more decisions than these, a search ends once its plan may be worse than the best one by this share of the step,
#: and what the first search gives is good enough below the other share. With fewer, both go on to the optimum.
_FEW, _GAP, _GOOD = 150, 5e-4, 5e-3
#: A difference below this share of the step is rounding.
_ROUNDING = 1e-9
_WINDOW_ROUNDS = 24


def solve(
    costs: CostTable | Mapping[str, Any],
    *,
    budget: float | str,
    pins: Pins | None = None,
    time_limit_s: float = 1.0,
) -> Plan:
    """Choose what becomes of each value of each block so that the step is fastest within a budget.

    Args:
        costs: a cost table, or plain data for `CostTable.from_dict`.
        budget: most bytes in memory at any time, all of it: a number of bytes, or a text with a unit like `"24GiB"`.
        pins: actions (`Action`, or `"keep"`, `"recompute"`, `"offload"`) that are given: of all values with a name, of
            those of one class `(class, name)`, or of one block of the stack `(block, name)`.
        time_limit_s: seconds that each of two searches for whole actions may take.
    Returns:
        The plan with the least predicted seconds that was found; `plan.bound_seconds` says what none can beat.
    Raises:
        PlanInfeasibleError: no plan fits. Its `smallest_bytes` is the smallest budget for which there is one.
        CostTableError: the cost table makes no sense.
        ValueError: the budget or the time limit is none, or a pin cannot be.
    Cost: below a second for a hundred blocks of fifteen values, and up to `time_limit_s` more.
    Source: the program of NOTE [ Formulation ].
    """
    if not isinstance(time_limit_s, numbers.Real) or not time_limit_s >= 0:
        raise ValueError(f"time_limit_s={time_limit_s!r} is no time. Pass a number of seconds from 0 on.")
    problem = Problem.of(as_cost_table(costs), _budget(budget), pins)
    best, bound_s = problem.plan(problem.kept()), 0.0
    if best is None or best.overhead_seconds:
        best, bound_s = _search(problem, time_limit_s)
    best, pinned = _with_window(problem, best), tuple(checked_pins(pins).items())
    return dataclasses.replace(best, bound_seconds=max(min(bound_s, best.overhead_seconds), 0.0), pins=pinned)


def _budget(budget: object) -> float:
    if isinstance(budget, str) and not budget.strip()[-1:].isdigit():
        return parse_bytes(budget, what="budget")
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        nbytes = int(budget) if isinstance(budget, numbers.Integral) else float(budget)
        if 1 <= nbytes < math.inf or nbytes == 0:
            return nbytes
    raise ValueError(f"budget={budget!r} is no size. Pass a number of bytes, or a text with a unit like '24GiB'.")


def _search(problem: Problem, time_limit_s: float) -> tuple[Plan, float]:
    """Return the best plan found, and seconds that no plan can beat.

    Shares of actions come first. Entries that are whole there stay so in the first search for whole actions, which is
    quick, and of large stacks often all that ends in time; if that may leave something to be gained, all are free.
    """
    program = Program(problem)
    relaxed = program.relax()
    if relaxed.bound == math.inf:
        raise infeasible(problem)
    gap, good = (_ROUNDING, _ROUNDING) if program.num_whole <= _FEW else (_GAP, _GOOD)
    best, bound_s = None, relaxed.bound
    for near in (relaxed, None):
        found = program.solve(time_limit_s=time_limit_s, gap=gap, near=near)
        if near is None and found.bound < math.inf:
            bound_s = max(bound_s, found.bound)
        choice = program.choice(found)
        best = _fastest(best, None if choice is None else problem.plan(choice))
        if best is not None and best.overhead_seconds - relaxed.bound <= good * problem.scale_s:
            break
    best = best or _greedy(problem)
    if best is None:
        raise infeasible(problem)
    return best, bound_s


def _fastest(one: Plan | None, other: Plan | None) -> Plan | None:
    plans = [plan for plan in (one, other) if plan is not None]
    return min(plans, key=lambda plan: plan.overhead_seconds, default=None)


def _greedy(problem: Problem) -> Plan | None:
    """Return a plan for where no search ends: all is dropped, then entries are kept whole while they fit, last first.

    What the last ones keep is held for the shortest time.
    """
    best = problem.plan(problem.dropped())
    if best is None and (least := smallest(problem)) is not None:
        best = problem.plan(Choice(least.actions, least.rerun))
    kept = problem.kept().actions
    for index in reversed(range(len(kept))):
        if best is not None:
            actions = (*best.actions[:index], kept[index], *best.actions[index + 1 :])
            rerun = (*best.rerun[:index], False, *best.rerun[index + 1 :])
            best = _fastest(best, problem.plan(Choice(actions, rerun)))
    return best


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
