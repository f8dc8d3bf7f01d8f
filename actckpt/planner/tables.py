"""A plan as a table: what becomes of each value, blocks of one class together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actckpt._text.sizes import format_bytes, format_seconds
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.planner.costs import Value
from actckpt.planner.plans import Plan

__all__ = ["plan_table"]


def plan_table(plan: Plan) -> str:
    """Return a line for each value of each class, largest first: in which blocks it is kept, recomputed, offloaded."""
    lines: list[tuple[str, ...]] = [
        ("value", "of", "each", "in all", "keep", "recompute", "offload", "rerun", "recomputing")
    ]
    rows = [(name, value) for name, block in plan.costs.classes.items() for value in block.values]
    blocks = {name: [i for i, each in enumerate(plan.costs.stack) if each == name] for name in plan.costs.classes}
    for name, value in sorted(rows, key=lambda row: -row[1].nbytes * len(blocks[row[0]])):
        if blocks[name]:
            lines.append(_line(plan, name, value, blocks[name]))
    budget = f"Budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)}"
    step = f"step {format_seconds(plan.step_seconds)}, of that {format_seconds(plan.overhead_seconds)} for the plan"
    return f"{aligned(lines, left=2)}\n{budget}; {step}. Numbers of blocks count from 0."


def _line(plan: Plan, name: str, value: Value, blocks: Sequence[int]) -> tuple[str, ...]:
    reruns = [index for index in blocks if plan.rerun[index]]
    by_action = {
        action: [i for i in blocks if not plan.rerun[i] and plan.actions[i][value.name] is action]
        for action in (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD)
    }
    seconds = len(by_action[Action.RECOMPUTE]) * value.recompute_s if value.needed else 0.0
    return (
        value.name,
        name,
        format_bytes(value.nbytes),
        format_bytes(len(blocks) * value.nbytes),
        *(_ranges(found) for found in (*by_action.values(), reruns)),
        format_seconds(seconds) if seconds else "",
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, rows of them together: `0-3, 7`."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and rows[-1][-1] == number - 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return ", ".join(str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows)
