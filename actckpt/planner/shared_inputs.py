"""Values that are the input of the next block as well: their bytes count once.

NOTE [ Shared inputs ]

Rule 1. What a block returns may be saved by it, and be the input of the next block: the result of a ReLU at its end. It
        is gone only where both let go of it. The input has its bytes; where that stays, the value has none.
Rule 2. What the solver chooses for one block does not depend on its choice for another one. So it is told which inputs
        stay, and solves for them: for all of them, and for none, where a value that stays beside its input counts
        twice. The plan says which inputs may as well stay: with these it solves again, until none is new. No table of
        these needs less than the step does, and the last one needs the same.
Rule 3. No plan can beat the one for a table in which all of these values have no bytes, and their inputs may go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, Value

__all__ = ["freed", "inputs_that_stay", "pairs", "where_staying"]


def pairs(costs: CostTable) -> list[tuple[int, int]]:
    """Return blocks with a value that is the input of a later one, each with that one, as numbers in the stack."""
    found: list[tuple[int, int]] = []
    following = None
    for index, block in reversed(list(enumerate(costs.blocks))):
        if following is not None and any(value.next_input for value in block.values):
            found.append((index, following))
        if any(value.name == BLOCK_INPUT for value in block.values):
            following = index
    return found[::-1]


def where_staying(costs: CostTable, staying: Collection[int]) -> tuple[BlockClass, ...]:
    """Return the blocks of a stack in which the inputs of these stay (Rule 2)."""
    return _changed(costs, [pair for pair in pairs(costs) if pair[1] in staying], _stays)


def freed(costs: CostTable) -> tuple[BlockClass, ...]:
    """Return the blocks of a stack in which inputs of the next block have no bytes (Rule 3)."""
    return _changed(costs, pairs(costs), lambda value: value)


def inputs_that_stay(costs: CostTable, actions: Sequence[Mapping[str, Action]]) -> frozenset[int]:
    """Return the blocks whose inputs stay as the same tensor does in the block before, by the actions of all blocks."""
    return frozenset(
        following
        for index, following in pairs(costs)
        if actions[following][BLOCK_INPUT] is Action.KEEP
        and all(actions[index][each.name] is Action.KEEP for each in costs.blocks[index].values if each.next_input)
    )


def _changed(
    costs: CostTable, shared: list[tuple[int, int]], given: Callable[[Value], Value]
) -> tuple[BlockClass, ...]:
    blocks = list(costs.blocks)
    for index, following in shared:
        blocks[index] = _with(blocks[index], lambda value: _free(value) if value.next_input else value)
        blocks[following] = _with(blocks[following], lambda value: given(value) if value.name == BLOCK_INPUT else value)
    return tuple(blocks)


def _with(block: BlockClass, change: Callable[[Value], Value]) -> BlockClass:
    return dataclasses.replace(block, values=tuple(map(change, block.values)))


def _free(value: Value) -> Value:
    return dataclasses.replace(value, nbytes=0.0, offloadable=False)


def _stays(value: Value) -> Value:
    return dataclasses.replace(value, needed=True, offloadable=False, replayable=False)
