"""The fastest plan whose peak, as it is seen when the plan runs, fits into a budget.

NOTE [ Fitting a plan ]

The cost table takes for the working set of a block what the block needed with everything kept. A block that drops
values and gets them back one by one needs less; a block whose input something else holds needs more. How much depends
on the plan, so the plan is tried: its peak is measured, all working sets are changed by the difference between that and
what was predicted, and the problem is solved again. A plan that was tried before, or whose peak leaves less than a
hundredth of the budget, ends the search. Of all plans that fit, the one that adds least to the step is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from actckpt._budget.links import Pins
from actckpt._budget.offloading import solved
from actckpt._budget.shares import Bounds, Share
from actckpt._budget.simple import plain_plan, predicted
from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes
from actckpt.planner.costs import CostTable
from actckpt.planner.plans import Plan
from actckpt.planner.solving import solve

__all__ = ["bounds_of", "fitted", "plan_within", "smallest_plan"]

_MAX_TRIALS = 8
#: What nothing is saved of is taken to need so much more in plain training than at least: a part of it is something.
_LEAST_BETWEEN = 1.01
#: A plan that leaves less than this share of the budget is not tried to be improved.
_GOOD = 0.01


def fitted(
    costs: CostTable,
    budget_bytes: float,
    pins: Pins | None,
    peak_of: Callable[[Plan], float],
    others: Iterable[Plan],
) -> Plan:
    """Return the plan that adds least to a step among those whose measured peak fits into a budget.

    Args:
        peak_of: runs a plan and returns its peak, in bytes.
        others: tried where no plan that was solved for the budget fits.
    Returns:
        A plan whose cost table predicts the peak that was measured.
    Raises:
        PlanInfeasibleError: none fits.
    """
    search = _Search(costs, budget_bytes, pins, peak_of, list(others))
    for _ in range(_MAX_TRIALS):
        if search.is_done():
            break
        search.try_one()
    return search.result()


class _Search:
    """Plans for a budget, and how much their working sets were changed for them."""

    def __init__(
        self,
        costs: CostTable,
        budget_bytes: float,
        pins: Pins | None,
        peak_of: Callable[[Plan], float],
        others: list[Plan],
    ) -> None:
        self._costs, self._budget, self._pins, self._peak_of = costs, budget_bytes, pins, peak_of
        self._others = others
        #: Bytes that are taken off working sets: for the next trial, the most that gave a plan that fits, and the least
        #: that gave one that does not.
        self._less = 0.0
        self._fits: float | None = None
        self._exceeds: float | None = None
        self._best: Plan | None = None
        self._is_done = False
        self._tried: dict[tuple[Any, ...], float] = {}
        #: Of the plan that needs least: its peak, and what to take off so that it is predicted.
        self._smallest = (math.inf, 0.0)
        self._smallest_other = math.inf

    def is_done(self) -> bool:
        """Return whether there is nothing more to be gained."""
        return self._is_done

    def try_one(self) -> None:
        """Solve, run the plan, and decide how the next one is made."""
        less = self._less
        plan, is_smallest = self._solved(less)
        is_known = _key(plan) in self._tried
        peak = self._measured(plan)
        right = less + plan.peak_bytes - peak  # with it, the prediction would have been right
        if peak <= self._budget:
            self._note(dataclasses.replace(plan, costs=_with_less(self._costs, right)), peak)
            self._fits = less if self._fits is None else max(self._fits, less)
            self._is_done = plan.overhead_seconds == 0.0 or peak >= (1 - _GOOD) * self._budget
        else:
            self._exceeds = less if self._exceeds is None else min(self._exceeds, less)
            if is_smallest:
                self._smallest = min(self._smallest, (peak, right))
                if self._others:
                    self._less = self._try_others()
                    self._exceeds = None
                    return
                self._is_done = self._fits is None and right >= less
        self._is_done = self._is_done or (is_known and self._best is not None)
        self._less = self._between(right)

    def _measured(self, plan: Plan) -> float:
        """Return the peak of a plan, which is run once."""
        if _key(plan) not in self._tried:
            self._tried[_key(plan)] = self._peak_of(plan)
        return self._tried[_key(plan)]

    def _note(self, plan: Plan, peak: float) -> None:
        """Take down a plan that fits."""
        if self._best is None or plan.overhead_seconds < self._best.overhead_seconds:
            self._best = dataclasses.replace(plan, peak_bytes=peak, budget_bytes=self._budget)

    def _try_others(self) -> float:
        """Try the other plans; return the most that may be taken off working sets, as they show it."""
        less = 0.0
        for plan in (self._least(), *self._others):
            peak = self._measured(plan)
            self._smallest_other = min(self._smallest_other, peak)
            if peak <= self._budget:
                self._note(dataclasses.replace(plan, costs=_with_less(self._costs, plan.peak_bytes - peak)), peak)
                less = max(less, plan.peak_bytes - peak)
        self._others = []
        self._is_done = self._best is None
        return less

    def _least(self) -> Plan:
        """Return the plan that needs least by the table as it was measured.

        An error for a smaller budget names its peak as a budget to pass. Of plans that are predicted to need the same,
        the one for changed working sets may be another one, which needs more when it runs.
        """
        return _Search(self._costs, 0.0, self._pins, self._peak_of, [])._solved(0.0)[0]

    def _solved(self, less: float) -> tuple[Plan, bool]:
        """Return the plan for the budget, or the one that needs least, and whether it is that."""
        costs = _with_less(self._costs, less)
        try:
            return solved(costs, self._budget, self._pins), False
        except PlanInfeasibleError as error:
            if error.smallest_bytes is None:
                raise
            return smallest_plan(costs, error.smallest_bytes, self._pins), True

    def _between(self, wanted: float) -> float:
        """Return what to take off next: what is wanted, or the middle where that was tried already."""
        low, high = self._fits, self._exceeds
        if low is not None and high is not None and not low < wanted < high:
            return (low + high) / 2
        return wanted

    def result(self) -> Plan:
        """Return the best plan."""
        if self._best is None:
            raise self._infeasible()
        return self._with_bound(self._best)

    def _with_bound(self, plan: Plan) -> Plan:
        """Return a plan whose bound is one for its own costs, and not for those that it was solved with."""
        if plan.overhead_seconds == 0.0:
            return plan
        try:
            bound = solved(plan.costs, self._budget, self._pins).bound_seconds
        except PlanInfeasibleError:  # by rounding, where the plan needs all of the budget
            bound = plan.overhead_seconds
        return dataclasses.replace(plan, bound_seconds=min(bound, plan.overhead_seconds))

    def _infeasible(self) -> PlanInfeasibleError:
        smallest_bytes, less = self._smallest
        holds = ""
        try:
            solved(_with_less(self._costs, less), self._budget, self._pins)
        except PlanInfeasibleError as error:
            if smallest_bytes <= self._smallest_other:
                return error
            holds = error.holds
        smallest_bytes = math.ceil(min(smallest_bytes, self._smallest_other, *self._tried.values()))
        return PlanInfeasibleError(
            f"No plan that was tried fits into {format_bytes(self._budget)}: the smallest peak was "
            f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes).{f' {holds}.' if holds else ''} Pass that budget "
            "or a larger one, or make the batch smaller.",
            smallest_bytes,
            holds,
        )


def plan_within(
    tables: list[tuple[CostTable, Share]], pins: Pins | None, refuse: Callable[[PlanInfeasibleError], None]
) -> tuple[Plan, Share]:
    """Return the plan for the first table that has one within its share; where none has one, that which needs least.

    Args:
        refuse: is given the error in that case, and may raise it.
    Raises:
        PlanInfeasibleError: of `refuse`, or no plan is possible whatever the budget.
    """
    errors: list[PlanInfeasibleError] = []
    for costs, share in tables:
        try:
            return solved(costs, share.nbytes, pins), share
        except PlanInfeasibleError as error:
            errors.append(share.infeasible(error).with_traceback(None))
            smallest_bytes = error.smallest_bytes
    if smallest_bytes is None:
        raise errors.pop(0) from None
    refuse(errors.pop(0))
    return smallest_plan(costs, smallest_bytes, pins), share


def smallest_plan(costs: CostTable, budget_bytes: float, pins: Pins | None) -> Plan:
    """Return the plan that needs least. Measured times do not decide between several, so that it is always the same."""
    return solved(costs, budget_bytes, pins, _solved_by_bytes)


def _solved_by_bytes(costs: CostTable, budget_bytes: float, pins: Pins | None) -> Plan:
    classes = {
        name: dataclasses.replace(
            block,
            forward_s=1.0,
            backward_s=1.0,
            recording_s=0.0,
            rerun_s=None,
            values=tuple(dataclasses.replace(value, recompute_s=1.0, offload_s=0.0) for value in block.values),
        )
        for name, block in costs.classes.items()
    }
    plan = solve(dataclasses.replace(costs, classes=classes), budget=budget_bytes, pins=pins)
    return predicted(dataclasses.replace(plan, plain_seconds=costs.plain_seconds), costs)


def _with_less(costs: CostTable, less: float) -> CostTable:
    """Return a cost table with so many bytes taken off each working set."""
    classes = {
        name: dataclasses.replace(block, working_set_bytes=max(block.working_set_bytes - less, 0.0))
        for name, block in costs.classes.items()
    }
    return dataclasses.replace(costs, classes=classes)


def _key(plan: Plan) -> tuple[Any, ...]:
    return (*(tuple(each.items()) for each in plan.actions), plan.rerun)


def bounds_of(costs: CostTable, pins: Pins | None) -> Bounds:
    """Return the smallest budget for a cost table, and what plain training needs, both without what is fixed."""
    least = plain = plain_plan(costs).peak_bytes
    try:
        solved(costs, 1.0, pins)
    except PlanInfeasibleError as error:
        least = plain if error.smallest_bytes is None else error.smallest_bytes
    least, plain = least - costs.fixed_bytes, plain - costs.fixed_bytes
    return Bounds(least, max(plain, _LEAST_BETWEEN * least, least + 1.0))
