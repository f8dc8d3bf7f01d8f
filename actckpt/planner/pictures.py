"""A plan as a picture: what other budgets would cost, and how its step uses memory, compute and links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from actckpt._error_base import PlanInfeasibleError
from actckpt._show.plot import COLOURS, new_figure, save_figure
from actckpt._text.sizes import unit_of
from actckpt.action import Action
from actckpt.planner.costs import CostTable
from actckpt.planner.cycle import moments
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import Span, simulate
from actckpt.planner.smallest import base_parts, least_needs
from actckpt.planner.solving import solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_frontier", "draw_segments", "frontier", "plot_plan"]

_NUM_BUDGETS = 9


def frontier(costs: CostTable, *, num_budgets: int = _NUM_BUDGETS) -> tuple[Plan, ...]:
    """Return plans for budgets in even steps, from the smallest that is possible to what needs no action.

    Cost: solves the problem once per budget.
    """
    most = solve(costs, budget=2**62).peak_bytes
    try:
        least = solve(costs, budget=0).peak_bytes
    except PlanInfeasibleError as error:
        least = error.smallest_bytes or most
    return tuple(solve(costs, budget=float(budget)) for budget in numpy.linspace(least, most, num_budgets))


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


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw time against memory, and the timeline of the plan's step, as a PNG or SVG file."""
    figure = new_figure(width=12)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    draw_frontier(left, plan)
    top, bottom = right.get_subplotspec().subgridspec(2, 1, height_ratios=(3, 2)).subplots(sharex=True)
    right.remove()
    _draw_memory(top, plan)
    _draw_spans(bottom, plan)
    save_figure(figure, path)


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


def _draw_memory(axes: Axes, plan: Plan) -> None:
    memory = simulate(plan.costs, plan).memory
    unit, size = unit_of(max(nbytes for _, nbytes in memory))
    axes.plot([1e3 * moment for moment, _ in memory], [nbytes / size for _, nbytes in memory], color=COLOURS[2])
    axes.axhline(plan.budget_bytes / size, color=COLOURS[5], linestyle=(0, (4, 2)), linewidth=1)
    axes.set(ylabel=f"Memory ({unit})", title="The step of this plan, as simulated")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_spans(axes: Axes, plan: Plan) -> None:
    step = simulate(plan.costs, plan)
    colours = {"forward": COLOURS[2], "backward": COLOURS[3], "recompute": COLOURS[1], "wait": COLOURS[5]}
    rows: list[tuple[str, Sequence[Span]]] = [("compute", step.compute), ("to host", step.d2h), ("from host", step.h2d)]
    rows += [(name, spans) for name, spans in (("to disk", step.disk_write), ("from disk", step.disk_read)) if spans]
    for height, (_, spans) in enumerate(rows):
        bars = [(1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)) for span in spans]
        axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=[colours.get(span.what, COLOURS[6]) for span in spans])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="Time in the step (ms)")
    for what, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=6, label=what)
    axes.legend(frameon=False, ncols=len(colours), loc="upper center", bbox_to_anchor=(0.5, -0.3))


#: What is in memory in a segment, in the order in which it is stacked.
_PARTS = {
    "where no block keeps anything": COLOURS[2],
    "fixed": COLOURS[0],
    "its working set": COLOURS[2],
    "gradients made by then": COLOURS[3],
    "kept by blocks": COLOURS[1],
    "for what is computed again": COLOURS[4],
    "still to be written out": COLOURS[7],
    "read back ahead": COLOURS[6],
}


def segment_parts(plan: Plan) -> dict[str, list[float]]:
    """Return what is in memory at the worst moment of each segment, by what it is; without what never is."""
    most, least, cycle = simulate(plan.costs, plan).segment_bytes, least_needs(plan), moments(plan.costs)
    parts = {what: [0.0] * len(cycle) for what in _PARTS}
    for number, moment in enumerate(cycle):
        base = base_parts(plan, number)
        for nbytes, what in base:
            parts[what][number] += nbytes
        parts["kept by blocks"][number] = least[number] - sum(nbytes for nbytes, _ in base)
        way = "read back ahead" if moment.is_backward else "still to be written out"
        parts[way][number] = max(most[number] - least[number], 0.0)
    return {what: nbytes for what, nbytes in parts.items() if any(nbytes)}


def draw_segments(axes: Axes, plan: Plan) -> None:
    """Draw the most memory in each segment of the step, stacked by what it is, and the budget."""
    parts, cycle = segment_parts(plan), moments(plan.costs)
    unit, size = unit_of(max(plan.budget_bytes, plan.peak_bytes))
    below, edges = numpy.zeros(len(cycle)), numpy.arange(len(cycle) + 1)
    for what, nbytes in parts.items():
        above = below + numpy.array(nbytes) / size
        axes.stairs(
            above,
            edges,
            baseline=below,
            fill=True,
            facecolor=_PARTS[what],
            edgecolor="none",
            label=what.removeprefix("its "),
        )
        below = above
    axes.axhline(plan.budget_bytes / size, color=COLOURS[5], linestyle=(0, (4, 2)), label="budget")
    turn = next((number for number, moment in enumerate(cycle) if moment.is_backward), None)
    if turn is not None:
        axes.axvline(turn, color=COLOURS[0], linewidth=1, linestyle=":", label="backward begins")
    axes.set(xlabel="Segments of the step, in the order of time", ylabel=f"Most memory ({unit})")
    axes.set_xlim(0, len(cycle))
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
