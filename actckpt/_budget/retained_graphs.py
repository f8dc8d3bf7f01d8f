"""Steps whose backward retains its graph, for another one: what blocks keep stays while all of them run backward."""

from __future__ import annotations

import dataclasses
import itertools

from actckpt._budget.class_names import AFTER
from actckpt._budget.measuring import MeasuredStep

__all__ = ["retaining"]


def retaining(measured: MeasuredStep) -> tuple[MeasuredStep, float]:
    """Return what a step costs whose backward releases nothing, and how much counts twice in plain training.

    Each block runs backward beside all that is kept, not what the blocks before it keep: as much as there is when
    backward begins, in the head. So that is taken to need what the block needs that needs most then, with the gradients
    that are there by then, and what head and loss save, which stays. Blocks count their own values twice, which is more
    than they need.
    """
    costs, (*others, head) = measured.costs, measured.costs.blocks
    gradients = itertools.accumulate(block.gradient_bytes for block in reversed(costs.blocks))
    next(gradients)
    working = [block.working_set_bytes + made for block, made in zip(reversed(others), gradients, strict=True)]
    more = [max(block.recompute_bytes, block.rerun_bytes) for block in reversed(others)]
    own = [sum(value.nbytes for value in block.values if value.needed) for block in reversed(others)]
    alone = head.working_set_bytes + head.gradient_bytes
    saved = measured.saved_after_blocks_bytes
    needed = max(alone, *(nbytes + extra + saved for nbytes, extra in zip(working, more, strict=True)))
    in_plain = max(alone, *(max(nbytes - kept, 0) + saved for nbytes, kept in zip(working, own, strict=True)))
    classes = {**costs.classes, AFTER: dataclasses.replace(head, working_set_bytes=needed - head.gradient_bytes)}
    costs = dataclasses.replace(costs, classes=classes)
    return dataclasses.replace(measured, costs=costs), needed - in_plain
