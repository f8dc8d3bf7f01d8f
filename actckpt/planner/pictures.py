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
from actckpt.action import Action
from actckpt.planner.costs import CostTable
from actckpt.planner.explanation import values_table
from actckpt.planner.memory_parts import memory_parts
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import Span, simulate
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
    """Draw time against memory, and memory, compute and copies of the plan's step, as a PNG or SVG file."""
    figure = new_figure(width=12)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    draw_frontier(left, plan)
    top, bottom = right.get_subplotspec().subgridspec(2, 1, height_ratios=(3, 2)).subplots()
    right.remove()
    draw_segments(top, plan)
    _draw_spans(bottom, plan)
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


def simple_plans(costs: CostTable) -> dict[str, Plan]:
    """Return what a user would try by hand: everything kept, recomputed, offloaded, as far as values can be."""
    plans = {"keep all": solve(costs, budget=2**62)}
    for name, action, can in (
        ("recompute all", Action.RECOMPUTE, "replayable"),
        ("offload all", Action.OFFLOAD, "offloadable"),
    ):
        pins = {
            (index, value.name): action
            for index, block in enumerate(costs.blocks)
            for value in block.values
            if getattr(value, can) and not (action is Action.OFFLOAD and index == len(costs.blocks) - 1)
        }
        if pins and (action is Action.RECOMPUTE or costs.d2h_bytes_per_s):
            plans[name] = solve(costs, budget=2**62, pins=pins)
    return plans


def draw_frontier(axes: Axes, plan: Plan) -> None:
    """Draw time against memory: the best for each budget, simple choices, and the plan."""
    plans = frontier(plan.costs)
    unit, size = unit_of(max(each.peak_bytes for each in plans))
    axes.plot(*_points(plans, size), color=COLOURS[0], marker=".", label="best for each budget")
    for colour, (name, simple) in zip(COLOURS[1:], simple_plans(plan.costs).items(), strict=False):
        axes.plot(
            *_points([simple], size), color=colour, marker="o", linestyle="", label=f"{name}: {_ratio(simple):.2f}"
        )
    label = f"this plan: {_ratio(plan):.2f}"
    axes.plot(*_points([plan], size), color=COLOURS[5], marker="*", markersize=14, linestyle="", label=label)
    # Choices that take many times as long would flatten the line that matters: their numbers stand in the legend.
    axes.set_ylim(top=1 + 2 * max(0.05, *(_ratio(each) - 1 for each in (plan, *plans))))
    axes.set(xlabel=f"Peak ({unit})", ylabel="Predicted step time, everything kept = 1")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _ratio(plan: Plan) -> float:
    return plan.step_seconds / plan.plain_seconds if plan.plain_seconds else 1.0


def _points(plans: Sequence[Plan], size: int) -> tuple[list[float], list[float]]:
    return [plan.peak_bytes / size for plan in plans], [_ratio(plan) for plan in plans]


def _draw_spans(axes: Axes, plan: Plan) -> None:
    step = simulate(plan.costs, plan)
    colours = {"forward": COLOURS[2], "backward": COLOURS[3], "recompute": COLOURS[1], "wait": COLOURS[5]}
    rows: list[tuple[str, Sequence[Span]]] = [("compute", step.compute), ("to host", step.d2h), ("from host", step.h2d)]
    for height, (_, spans) in enumerate(rows):
        bars = [(1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)) for span in spans]
        axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=[colours.get(span.what, COLOURS[6]) for span in spans])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="Time in the step, simulated (ms)")
    for what, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=6, label=what)
    axes.legend(frameon=False, ncols=len(colours), loc="upper center", bbox_to_anchor=(0.5, -0.3))


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
