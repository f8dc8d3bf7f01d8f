"""Block calls of a measured cycle, with what is alive of them when backward reaches the first block."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from actckpt._budget.block_bytes import BlockPeaks
from actckpt._budget.profiled_block import ProfiledBlock
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, Value

__all__ = ["SettledBlock", "settled"]

#: Name of a block's input for replays, if a rerun holds more arguments than that.
_REPLAY_INPUT = "(input of replays)"


@dataclasses.dataclass(frozen=True)
class SettledBlock:
    """One block call. Its costs count bytes in addition to those of a call that drops all that it can.

    Args:
        always_kept_bytes: bytes that the metered call kept for its backward because nothing can recompute them.
        droppable_input_bytes: bytes of its input, if only replays and reruns hold that.
    """

    costs: BlockClass
    places: dict[str, str]
    peaks: BlockPeaks
    always_kept_bytes: float
    droppable_input_bytes: float


def settled(blocks: Sequence[ProfiledBlock], returned: Collection[int] = ()) -> list[SettledBlock]:
    """Return profiled calls in their state when a backward first reaches an output.

    A dropped value that is alive then (a result that the next block holds, a cast in autocast's cache) is free to keep.
    An argument that is not alive is held by a rerun only.

    Args:
        returned: `id` of the weak references to storages that the model returned: the program may hold them.
    """
    # While a storage is alive, its weak reference is unique.
    num_given = Counter(id(storage) for block in blocks for storage, _ in block.arguments)
    needed = {id(storage) for block in blocks for storage in block.returned.values()}
    made_by_blocks = {id(storage) for block in blocks for storage in block.results} - needed - set(returned)
    may_drop = {key for key in made_by_blocks if num_given[key] == 1}
    return [_settled(block, may_drop_input=id(block.input) in may_drop) for block in blocks]


def _settled(block: ProfiledBlock, *, may_drop_input: bool) -> SettledBlock:
    # Casts that autocast's cache does not hold any more are values again.
    released = {cast.name: cast.nbytes for cast in block.casts if cast.storage() is None}
    alive = {name for name, storage in block.made.items() if storage() is not None}
    results = set(map(id, block.results))
    returned = {name for name, storage in block.made.items() if id(storage) in results}
    always_kept = [
        value.nbytes
        for value in block.costs.values
        if value.name in alive and not value.replayable and value.name not in returned
    ]
    block_input, *values = block.costs.values
    assert block_input.name == BLOCK_INPUT
    is_held = block.input is not None and block.input() is not None  # not if replays start from kept values
    can_leave = may_drop_input and is_held and (block_input.offloadable or not block_input.needed)
    droppable = block_input.nbytes if can_leave else 0.0
    # The input of a block without trained parameters has no bytes: nothing reruns the block.
    rerun_held = sum(nbytes for storage, nbytes in block.arguments if storage() is None) if block_input.nbytes else 0
    needed, can_move = (flag and droppable > 0 for flag in (block_input.needed, block_input.offloadable))
    block_input = dataclasses.replace(block_input, nbytes=droppable + rerun_held, needed=needed, offloadable=can_move)

    def counted(value: Value) -> Value:
        # A value that backward does not read is not free to keep: the recorder may keep a result instead of its inputs.
        is_free = value.name in alive and ((value.replayable and value.needed) or value.name in returned)
        nbytes = 0.0 if is_free else released.get(value.name, value.nbytes)
        can_move = value.offloadable and nbytes > 0
        return dataclasses.replace(value, nbytes=nbytes, offloadable=can_move, cached=value.name in released)

    values = [counted(value) for value in values]
    if rerun_held:  # replays need only the input, reruns all arguments
        values = [_reading(value, _REPLAY_INPUT) for value in values]
        values.insert(0, Value(_REPLAY_INPUT, droppable, needed=False, offloadable=False, replayable=False))
    costs = dataclasses.replace(block.costs, values=(block_input, *values), input_bytes=float(block.input_bytes))
    return SettledBlock(costs, block.places, block.peaks, sum(always_kept), droppable)


def _reading(value: Value, name: str) -> Value:
    inputs = tuple(name if source == BLOCK_INPUT else source for source in value.inputs)
    return dataclasses.replace(value, inputs=inputs)
