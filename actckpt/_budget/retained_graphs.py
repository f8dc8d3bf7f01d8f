"""Steps whose backward retains its graph, for another one: what blocks keep stays while all of them run backward."""

from __future__ import annotations

import dataclasses
import itertools

from actckpt._budget.class_names import AFTER
from actckpt._budget.measuring import MeasuredStep

__all__ = ["retaining"]


def retaining(measured: MeasuredStep) -> MeasuredStep:
    """Return what a step costs whose backward releases nothing.

    Each block runs backward beside all that is kept, not what the blocks before it keep: as much as there is when
    backward begins, in the head. So that is taken to need what the block needs that needs most then, with the gradients
    that are there by then. Blocks count their own values twice, which is more than they need.
    """
    costs = measured.costs
    blocks = costs.blocks
    gradients = itertools.accumulate(block.gradient_bytes for block in reversed(blocks))
    needed = max(
        block.working_set_bytes + max(block.recompute_bytes, block.rerun_bytes) + made
        for block, made in zip(reversed(blocks), gradients, strict=True)
    )
    head = costs.classes[AFTER]
    classes = {**costs.classes, AFTER: dataclasses.replace(head, working_set_bytes=needed - head.gradient_bytes)}
    return dataclasses.replace(measured, costs=dataclasses.replace(costs, classes=classes))
