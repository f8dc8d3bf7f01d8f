"""A plan as a table: what becomes of each value, blocks that are called alike together."""

from __future__ import annotations

from actckpt._text.sizes import format_bytes, format_seconds
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT
from actckpt.planner.folding import Row, listed_entries, rows
from actckpt.planner.plans import Plan

__all__ = ["plan_table"]

_NUMBERS = " Numbers of blocks count from 0."
_VALUES = (
    f"\n{BLOCK_INPUT}: the input of a block. 1::aten.gelu.default#0.0: what its module '1' made by this operator. In "
    "brackets: what nothing can bring back. Values without bytes are left out."
)


def plan_table(plan: Plan) -> str:
    """Return a line for each value of blocks that are called alike, largest first: in which of them it is kept,
    recomputed, offloaded.
    """
    lines: list[tuple[str, ...]] = [
        ("value", "of", "each", "in all", "keep", "recompute", "offload", "rerun", "recomputing")
    ]
    shown = [row for row in rows(plan) if plan.block_names is None or row.value.nbytes]
    lines += [_line(plan, row) for row in sorted(shown, key=lambda row: -row.value.nbytes * len(row.entries))]
    budget = f"Budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)}"
    step = f"step {format_seconds(plan.step_seconds)}, of that {format_seconds(plan.overhead_seconds)} for the plan"
    names = _NUMBERS if plan.block_names is None else _VALUES
    return f"{aligned(lines, left=2)}\n{budget}; {step}.{names}"


def _line(plan: Plan, row: Row) -> tuple[str, ...]:
    reruns = [index for index in row.entries if plan.rerun[index]]
    by_action = {action: row.chosen(plan, action) for action in (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD)}
    seconds = row.seconds(plan, by_action[Action.RECOMPUTE], "recompute_s") if row.value.needed else 0.0
    columns = [listed_entries(plan, found) for found in (*by_action.values(), reruns)]
    if not row.value.needed and columns[1]:
        columns[1] = "not needed"
    return (
        row.value.name,
        row.of,
        format_bytes(row.value.nbytes),
        format_bytes(len(row.entries) * row.value.nbytes),
        *columns,
        format_seconds(seconds) if seconds else "",
    )
