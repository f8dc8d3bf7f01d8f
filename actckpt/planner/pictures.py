"""A plan as pictures and as a page: what other budgets would cost, and how its step uses memory, compute and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from actckpt._error_base import PlanInfeasibleError
from actckpt._report_page.content import Cell, Chart, Page, Table, bytes_cell
from actckpt._show.plot import COLOURS, new_figure, save_figure
from actckpt._text.sizes import format_bytes, format_seconds, unit_of
from actckpt.planner.costs import CostTable
from actckpt.planner.explanation import values_table
from actckpt.planner.memory_parts import memory_parts
from actckpt.planner.plans import Plan
from actckpt.planner.solving import solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CHARTS", "draw_frontier", "draw_segments", "frontier", "plan_page", "plot_plan"]

#: Titles of the charts, for pages that have none of them.
CHARTS = "Memory over a step", "Time against memory"
_NUM_BUDGETS = 9


def plan_page(plan: Plan) -> Page:
    """Return the page of a plan. Its charts solve the problem again when they are drawn."""
    over_step, frontier = CHARTS
    return Page(
        title="Plan for a memory budget",
        lines=plan.explain().splitlines(),
        charts=(
            Chart(over_step, lambda axes: draw_segments(axes, plan)),
            Chart(frontier, lambda axes: draw_frontier(axes, plan)),
        ),
        left_out=() if plan.race else ("Trials: left out. This plan was made without trials.",),
        tables=[values_table(plan), *_trials(plan)],
    )


def _trials(plan: Plan) -> Iterator[Table]:
    """Yield the table of the trials, if there were any."""
    lines = [
        (
            f"{raced.name} (chosen)" if raced.name == plan.chosen else raced.name,
            bytes_cell(raced.peak_bytes),
            "yes" if raced.fits else "no",
            Cell("not timed", None) if raced.seconds is None else Cell(format_seconds(raced.seconds), raced.seconds),
            Cell("", None) if raced.ratio is None else Cell(f"{raced.ratio:.3f}", raced.ratio),
        )
        for raced in plan.race
    ]
    if lines:
        columns = ("trial", "peak", "fits", "step", "step, over that of the plan")
        yield Table("Trials", columns, lines, f"Measured, within a budget of {format_bytes(plan.budget_bytes)}.")


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw time against memory, and memory over the plan's step, as a PNG or SVG file."""
    figure = new_figure(width=12)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    draw_frontier(left, plan)
    draw_segments(right, plan)
    save_figure(figure, path)


def frontier(costs: CostTable) -> tuple[Plan, ...]:
    """Return plans for budgets in even steps, from the smallest that is possible to what needs no action.

    Cost: solves the problem once per budget.
    """
    most = solve(costs, budget=2**62).peak_bytes
    try:
        least = solve(costs, budget=0).peak_bytes
    except PlanInfeasibleError as error:
        least = error.smallest_bytes or most
    return tuple(solve(costs, budget=float(budget)) for budget in numpy.linspace(least, most, _NUM_BUDGETS))


def draw_frontier(axes: Axes, plan: Plan) -> None:
    """Draw time against memory: the best for each budget, and the plan."""
    plans = frontier(plan.costs)
    unit, size = unit_of(max(each.peak_bytes for each in plans))
    axes.plot(*_points(plans, size), color=COLOURS[0], marker=".", label="best for each budget")
    label = f"this plan: {_ratio(plan):.2f}"
    axes.plot(*_points([plan], size), color=COLOURS[5], marker="*", markersize=14, linestyle="", label=label)
    axes.set(xlabel=f"Peak ({unit})", ylabel="Predicted step time, everything kept = 1")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _ratio(plan: Plan) -> float:
    return plan.step_seconds / plan.plain_seconds if plan.plain_seconds else 1.0


def _points(plans: Sequence[Plan], size: int) -> tuple[list[float], list[float]]:
    return [plan.peak_bytes / size for plan in plans], [_ratio(plan) for plan in plans]


def draw_segments(axes: Axes, plan: Plan) -> None:
    """Draw the most memory in each segment of the step, stacked by what it is, and the budget."""
    segments, cycle = memory_parts(plan), plan.costs.moments
    unit, size = unit_of(max(plan.budget_bytes, plan.peak_bytes))
    below, edges = numpy.zeros(len(cycle)), numpy.arange(len(cycle) + 1)
    for number, what in zip((2, 2, 4, 1, 0, 3, 7, 6), segments[0], strict=True):
        nbytes = numpy.array([parts[what] for parts in segments])
        if nbytes.any():
            above, label = below + nbytes / size, what.removeprefix("its ")
            axes.stairs(above, edges, baseline=below, fill=True, fc=COLOURS[number], ec="none", label=label)
            below = above
    axes.axhline(plan.budget_bytes / size, color=COLOURS[5], linestyle=(0, (4, 2)), label="budget")
    turn = next((number for number, moment in enumerate(cycle) if moment.is_backward), None)
    if turn is not None:
        axes.axvline(turn, color=COLOURS[0], linewidth=1, linestyle=":", label="backward begins")
    axes.set(xlabel="Segments of the step, in the order of time", ylabel=f"Most memory ({unit})")
    axes.set_xlim(0, len(cycle))
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
