"""A plan as a table: what becomes of each value, blocks of one class together."""

from __future__ import annotations

from collections.abc import Sequence

from actckpt._text.listed import listed
from actckpt._text.sizes import format_bytes, format_seconds
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, Value
from actckpt.planner.plans import Plan

__all__ = ["plan_table"]

_NUMBERS = " Numbers of blocks count from 0."
_VALUES = (
    f"\n{BLOCK_INPUT}: the input of a block. 1::aten.gelu.default#0.0: what its module '1' made by this operator. In "
    "brackets: what nothing can bring back. Values without bytes are left out."
)


def plan_table(plan: Plan) -> str:
    """Return a line for each value of each class, largest first: in which blocks it is kept, recomputed, offloaded."""
    lines: list[tuple[str, ...]] = [
        ("value", "of", "each", "in all", "keep", "recompute", "offload", "rerun", "recomputing")
    ]
    rows = [(name, value) for name, block in plan.costs.classes.items() for value in block.values]
    blocks = {name: [i for i, each in enumerate(plan.costs.stack) if each == name] for name in plan.costs.classes}
    shown = rows if plan.block_names is None else [row for row in rows if row[1].nbytes]
    for name, value in sorted(shown, key=lambda row: -row[1].nbytes * len(blocks[row[0]])):
        if blocks[name]:
            lines.append(_line(plan, name, value, blocks[name]))
    budget = f"Budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)}"
    step = f"step {format_seconds(plan.step_seconds)}, of that {format_seconds(plan.overhead_seconds)} for the plan"
    names = _NUMBERS if plan.block_names is None else _VALUES
    return f"{aligned(lines, left=2)}\n{budget}; {step}.{names}"


def _line(plan: Plan, name: str, value: Value, blocks: Sequence[int]) -> tuple[str, ...]:
    names = plan.block_names or tuple(map(str, range(len(plan.rerun))))
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
        *(listed(names[index] for index in found) for found in (*by_action.values(), reruns)),
        format_seconds(seconds) if seconds else "",
    )
