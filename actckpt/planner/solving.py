"""The fastest plan that fits: `solve`."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import parse_bytes
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, as_cost_table
from actckpt.planner.improvement import Candidate, candidate, improved, simplified
from actckpt.planner.plans import Plan
from actckpt.planner.problem import Actions, Pins, Problem, recomputed
from actckpt.planner.program import Program, Solution
from actckpt.planner.rounding import rounded
from actckpt.planner.schedule import Schedule, evaluate
from actckpt.planner.shared_inputs import freed, inputs_that_stay, pairs, where_staying
from actckpt.planner.smallest import infeasible, smallest

__all__ = ["solve"]

#: Stacks with fewer blocks are given to the exact program alone: there, rounding can lose a lot.
_EXACT_BLOCKS = 16
#: A plan that is this close to the bound, as a share of the step, is not searched further.
_GOOD = 1e-3
#: The exact program ends at this share of the step. Where there are few values it goes on to the optimum.
_GAP, _FEW_VALUES = 1e-4, 64
#: A difference below this share of the step is rounding.
_ROUNDING = 1e-9
_INPUTS = (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD)
#: The smallest window is searched for in so many steps, each between so many.
_WINDOW_ROUNDS, _WINDOWS = 3, 64
#: So often is a table solved in which values are inputs of the next block.
_MOST_TRIED = 4


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
        time_limit_s: seconds that the search for an optimum may take, where rounding leaves something to be gained.
    Returns:
        The plan with the least predicted seconds that was found; `plan.bound_seconds` says what none can beat.
    Raises:
        PlanInfeasibleError: no plan fits. Its `smallest_bytes` is the smallest budget for which there is one.
        CostTableError: the cost table makes no sense.
        ValueError: the budget or the time limit is none, or a pin cannot be.
    Cost: below a second for a hundred blocks of fifteen values; up to `time_limit_s` more below 16 blocks.
    Source: the linear program over blocks of NOTE [ Formulation ], rounded, and improved value by value.
    """
    if not isinstance(time_limit_s, numbers.Real) or not time_limit_s >= 0:
        raise ValueError(f"time_limit_s={time_limit_s!r} is no time. Pass a number of seconds from 0 on.")
    problem = Problem.of(as_cost_table(costs), _budget(budget), pins)
    if not pairs(problem.costs):
        return _solved(problem, pins or {}, time_limit_s)
    return _solved_sharing(problem, pins or {}, time_limit_s)


def _solved(problem: Problem, pins: Pins, time_limit_s: float) -> Plan:
    best, bound_s = candidate(problem, problem.plain), 0.0
    if best is None or best.rank > (0.0, 0.0):
        best, bound_s = _search(problem, time_limit_s)
    best = improved(problem, simplified(problem, best))
    return _plan(problem, best, min(bound_s, best.overhead_s), pins)


def _solved_sharing(problem: Problem, pins: Pins, time_limit_s: float) -> Plan:
    """Return the best plan that was found where values are inputs of the next block (NOTE [ Shared inputs ])."""
    costs, budget = problem.costs, problem.budget_bytes
    may_stay, must_stay = _inputs_that_stay(problem)
    left, tried = [may_stay, must_stay], set[frozenset[int]]()
    plans: list[Plan] = []
    errors: list[PlanInfeasibleError] = []
    while left and len(tried) < _MOST_TRIED and not (plans and plans[-1].overhead_seconds == 0.0):
        staying = left.pop(0)
        if staying in tried:
            continue
        tried.add(staying)
        laid_out = Problem.of(costs, budget, pins, where_staying(costs, staying))
        try:
            plans.append(_solved(laid_out, pins, time_limit_s / _MOST_TRIED))
        except PlanInfeasibleError as error:
            errors.append(error.with_traceback(None))
        else:
            left.append(may_stay & inputs_that_stay(costs, plans[-1].actions))
    if not plans:
        raise min(errors, key=lambda error: math.inf if error.smallest_bytes is None else error.smallest_bytes)
    return _as_it_is(problem, pins, min(plans, key=lambda plan: plan.overhead_seconds), is_bound=may_stay == must_stay)


def _as_it_is(problem: Problem, pins: Pins, plan: Plan, *, is_bound: bool) -> Plan:
    """Return a plan with what it needs, as some values that stay beside their inputs may be counted twice in it.

    Args:
        is_bound: whether no other plan can beat its bound, also where other inputs stay.
    """
    costs, budget = problem.costs, problem.budget_bytes
    laid_out = Problem.of(costs, budget, pins, where_staying(costs, inputs_that_stay(costs, plan.actions)))
    actions = zip(laid_out.blocks, plan.actions, strict=True)
    best = candidate(laid_out, [tuple(each[value.name] for value in block.values) for block, each in actions])
    assert best is not None
    bound_s = plan.bound_seconds
    if not is_bound and best.overhead_s > 0.0:
        bound_s = Program(Problem.of(costs, budget, pins, freed(costs))).relax().bound
    return _plan(laid_out, best, min(bound_s, best.overhead_s), pins)


def _inputs_that_stay(problem: Problem) -> tuple[frozenset[int], frozenset[int]]:
    """Return the blocks whose inputs may stay as the same tensor does in the block before, and those whose must."""
    may: set[int] = set()
    must: set[int] = set()
    for index, following in pairs(problem.costs):
        values = zip(problem.blocks[index].values, problem.allowed[index], strict=True)
        given = zip(problem.blocks[following].values, problem.allowed[following], strict=True)
        allowed_input = next(allowed for value, allowed in given if value.name == BLOCK_INPUT)
        can_stay = all(Action.KEEP in allowed for value, allowed in values if value.next_input)
        if can_stay and Action.KEEP in allowed_input:
            may.add(following)
            must |= {following} if len(allowed_input) == 1 else set()
    return frozenset(may), frozenset(must)


def _budget(budget: object) -> float:
    if isinstance(budget, str) and not budget.strip()[-1:].isdigit():
        return parse_bytes(budget, what="budget")
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        nbytes = int(budget) if isinstance(budget, numbers.Integral) else float(budget)
        if 1 <= nbytes < math.inf or nbytes == 0:
            return nbytes
    raise ValueError(f"budget={budget!r} is no size. Pass a number of bytes, or a text with a unit like '24GiB'.")


def _search(problem: Problem, time_limit_s: float) -> tuple[Candidate, float]:
    """Return the best candidate found, and seconds that no plan can beat."""
    program = Program(problem)
    relaxed = program.relax()
    if relaxed.bound == numpy.inf:
        raise infeasible(problem)
    best, bound_s = _rounded(problem, relaxed), relaxed.bound
    few_values = sum(len(block.values) for block in problem.blocks) <= _FEW_VALUES
    gap = _ROUNDING if few_values else _GAP
    enough = gap if len(problem.blocks) < _EXACT_BLOCKS else _GOOD
    if best.excess_bytes > 0.0 or best.overhead_s - bound_s > enough * problem.scale_s:
        exact = program.solve(time_limit_s=time_limit_s, gap=gap, plain=problem.costs.plain_seconds)
        start = candidate(problem, exact.actions() or problem.plain)
        if start is not None:
            best = min(best, improved(problem, start), key=_rank)
        bound_s = max(bound_s, exact.bound) if exact.bound < numpy.inf else bound_s
    if best.excess_bytes > 0.0:
        least = smallest(problem)
        if least is None or least[0] > problem.budget_bytes:
            raise infeasible(problem)
        start = candidate(problem, least[1].actions)
        assert start is not None
        best = improved(problem, start)
    return best, bound_s


def _rank(found: Candidate) -> tuple[float, float]:
    return found.rank


def _rounded(problem: Problem, relaxed: Solution) -> Candidate:
    """Return the best of what rounding gives, and of what treats all blocks alike, until one is good enough."""
    best = None
    for actions in _starts(problem, relaxed):
        start = candidate(problem, actions)
        if start is not None and (best is None or start.rank < best.rank):
            best = improved(problem, start)
        if best is not None and best.rank <= (0.0, relaxed.bound + 0.5 * _GOOD * problem.scale_s):
            break
    assert best is not None
    return best


def _starts(problem: Problem, relaxed: Solution) -> Iterator[tuple[Actions, ...]]:
    if relaxed.shares is not None:
        for over in (False, True):
            yield rounded(problem, relaxed.shares, over=over)
    yield from _alike(problem)


def _alike(problem: Problem) -> Iterator[tuple[Actions, ...]]:
    """Yield actions that treat all values alike, as far as they can be, but for the inputs of blocks."""
    yield problem.all_held
    yield problem.plain
    for inputs, others in itertools.product(_INPUTS, (Action.RECOMPUTE, Action.OFFLOAD)):
        yield tuple(
            tuple(
                wanted if (wanted := inputs if value.name == BLOCK_INPUT else others) in allowed else allowed[-1]
                for value, allowed in zip(block.values, block_allowed, strict=True)
            )
            for block, block_allowed in zip(problem.blocks, problem.allowed, strict=True)
        )


def _plan(problem: Problem, best: Candidate, bound_s: float, pins: Pins) -> Plan:
    """Return what was found as plain data, with the windows that it needs."""
    window, schedule = _windowed(problem, best)
    footprints = [problem.footprint(index, actions) for index, actions in enumerate(best.actions)]
    rerun = tuple(footprint is not None and footprint.rerun for footprint in footprints)
    blocks = list(zip(problem.costs.blocks, best.actions, rerun, strict=True))
    return Plan(
        budget_bytes=problem.budget_bytes,
        actions=tuple({v.name: a for v, a in zip(block.values, actions, strict=True)} for block, actions, _ in blocks),
        rerun=rerun,
        plain_seconds=problem.costs.plain_seconds,
        recompute_seconds=float(schedule.recompute_s.sum()),
        write_wait_seconds=float(schedule.write_wait_s.sum()),
        read_wait_seconds=float(schedule.read_wait_s.sum()),
        bound_seconds=bound_s,
        peak_bytes=float(schedule.peak_bytes[0]),
        max_inflight=window,
        replay_window=max(0 if again else _replayed_bytes(block, actions) for block, actions, again in blocks),
        costs=problem.costs,
        pins=tuple((key, Action(getattr(action, "value", action))) for key, action in pins.items()),
    )


def _replayed_bytes(block: BlockClass, actions: Actions) -> int:
    replayed = recomputed(block, actions) or frozenset()
    return math.ceil(sum(value.nbytes for value in block.values if value.name in replayed))


def _windowed(problem: Problem, best: Candidate) -> tuple[int, Schedule]:
    """Return the smallest window with which the step takes no longer, and what the step is like with it."""
    least, most = 0.0, float(best.footprints[:, 1].sum())
    for _ in range(_WINDOW_ROUNDS):
        windows = numpy.linspace(least, most, _WINDOWS)
        schedule = evaluate(problem, numpy.repeat(best.footprints[None], _WINDOWS, axis=0), windows)
        first = int((schedule.overhead_s <= best.overhead_s + _ROUNDING * problem.scale_s).argmax())
        most = float(windows[first])
        least = float(windows[max(first - 1, 0)])
    window = math.ceil(most)
    return window, evaluate(problem, best.footprints[None], numpy.array([window], float))
