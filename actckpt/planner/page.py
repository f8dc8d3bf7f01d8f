"""A plan as a page: `Plan.to_html`."""

from __future__ import annotations

from collections.abc import Sequence

from actckpt._report_page.content import Cell, Chart, Page, Table, bytes_cell, seconds_cell
from actckpt._text.sizes import format_bytes, format_seconds
from actckpt.action import Action
from actckpt.planner.folding import Row, listed_entries, rows
from actckpt.planner.pictures import draw_frontier, draw_segments
from actckpt.planner.plans import Plan

__all__ = ["CHARTS", "plan_page", "values_table"]

#: Titles of the charts, for pages that have none of them.
CHARTS = "Memory over a step", "Time against memory"
_COLUMNS = ("keep", "recompute", "offload", "rerun")
_NOTE = (
    "The columns keep, recompute, offload and rerun list blocks. Brackets around a value: it cannot be computed again."
)


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


def values_table(plan: Plan) -> Table:
    """Return a row for each value of blocks that are called alike, by module and operator, the largest first."""
    ranked = sorted(rows(plan), key=lambda row: -row.value.nbytes * len(row.entries))
    columns = ("blocks", "module", "operator", "value", "each", "in all", *_COLUMNS, "recomputing")
    lines = [_line(plan, row) for row in ranked if plan.block_names is None or row.value.nbytes]
    return Table("Values by module and operator", columns, lines, _NOTE)


def _line(plan: Plan, row: Row) -> Sequence[str | Cell]:
    value = row.value
    module, _, operator = value.name.removeprefix("(").removesuffix(")").rpartition("::")
    recomputed = row.chosen(plan, Action.RECOMPUTE)
    reruns = [index for index in row.entries if plan.rerun[index]]
    chosen = (row.chosen(plan, Action.KEEP), recomputed, row.chosen(plan, Action.OFFLOAD), reruns)
    where = [listed_entries(plan, entries) for entries in chosen]
    if recomputed and not value.needed:
        where[1] = "not needed"
    return (
        row.of,
        module,
        operator.partition("#")[0] if "#" in operator else "",
        value.name,
        bytes_cell(value.nbytes),
        bytes_cell(len(row.entries) * value.nbytes),
        *where,
        seconds_cell(row.seconds(plan, recomputed, "recompute_s") if value.needed else 0.0),
    )


def _trials(plan: Plan) -> list[Table]:
    """Return the table of the trials; no table if there were no trials."""
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
    columns = ("trial", "peak", "fits", "step", "step, over that of the plan")
    note = f"Measured, within a budget of {format_bytes(plan.budget_bytes)}."
    return [Table("Trials", columns, lines, note)] if lines else []
