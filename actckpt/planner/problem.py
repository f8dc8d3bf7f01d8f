"""A cost table with a budget and pins, laid out for the solver: one entry per block of the stack."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable
from actckpt.planner.pins import Pins, checked_pins, names_nothing

__all__ = ["Actions", "Array", "Choice", "Footprint", "Pins", "Problem", "droppable", "footprint", "recomputed"]

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
#: What becomes of each value of a block, in the order of its class.
Actions = tuple[Action, ...]


class Footprint(NamedTuple):
    """What the actions of one block come to."""

    kept_bytes: float
    offloaded_bytes: float
    #: Seconds to get back what was dropped, to record what is needed for that, and to hand over what is offloaded.
    recompute_s: float
    #: Beyond the working set of the block, while it runs backward.
    recompute_bytes: float
    #: Whether that is by running the whole block again.
    rerun: bool


class Choice(NamedTuple):
    """Actions of one block and what they come to."""

    actions: Actions
    footprint: Footprint


def recomputed(block: BlockClass, actions: Actions) -> frozenset[str] | None:
    """Return the values that replay computes again so that backward has all that it needs; None if it cannot."""
    return _replayed(block, actions, [value.name for value in block.values if value.needed])


def _replayed(block: BlockClass, actions: Actions, wanted: list[str]) -> frozenset[str] | None:
    by_name = {value.name: (value, action) for value, action in zip(block.values, actions, strict=True)}
    found: set[str] = set()
    while wanted:
        value, action = by_name[wanted.pop()]
        if action is not Action.RECOMPUTE or value.name in found:
            continue
        if not value.replayable:
            return None
        found.add(value.name)
        wanted.extend(value.inputs)
    return frozenset(found)


def footprint(block: BlockClass, actions: Actions, allowed: tuple[Actions, ...]) -> Footprint | None:
    """Return what actions come to, by replay or by a rerun; None where neither can do it.

    A rerun makes all again, so what is held beside it is held in vain: it is the way where nothing is that need not be,
    and it takes less memory or less time.

    Args:
        allowed: the actions that each value may have.
    """
    pairs = list(zip(block.values, actions, strict=True))
    offload_s = sum(value.offload_s for value, action in pairs if action is Action.OFFLOAD)
    is_recorded = block.is_recorded(actions)
    replay_s, rerun_s = _replay_seconds(block, actions), _rerun_seconds(block, actions)
    if rerun_s is None:
        rerun = False
    elif replay_s is None:
        rerun = True
    else:
        is_better = block.rerun_bytes < block.recompute_bytes or rerun_s < replay_s
        is_any = any(v.needed and v.name != BLOCK_INPUT and a is Action.RECOMPUTE for v, a in pairs)
        rerun = is_better and is_any and all(actions[at] is Action.RECOMPUTE for at in droppable(block, allowed))
    seconds, nbytes = (rerun_s, block.rerun_bytes) if rerun else (replay_s, block.recompute_bytes * is_recorded)
    if seconds is None:
        return None
    held = dict.fromkeys(Action, 0.0)
    for value, action in pairs:
        held[action] += value.nbytes
    return Footprint(held[Action.KEEP], held[Action.OFFLOAD], offload_s + seconds, nbytes, rerun)


def droppable(block: BlockClass, allowed: tuple[Actions, ...]) -> list[int]:
    """Return the positions of what a block holds or drops: what something reads, that may be dropped, but its input."""
    read = {name for value in block.values for name in value.inputs}
    return [
        position
        for position, (value, may) in enumerate(zip(block.values, allowed, strict=True))
        if value.name != BLOCK_INPUT and Action.RECOMPUTE in may and (value.needed or value.name in read)
    ]


def _replay_seconds(block: BlockClass, actions: Actions) -> float | None:
    replay = recomputed(block, actions)
    if replay is None:
        return None
    return (block.recording_s if block.is_recorded(actions) else 0.0) + _seconds(block, replay)


def _rerun_seconds(block: BlockClass, actions: Actions) -> float | None:
    has_input = any(value.name == BLOCK_INPUT for value in block.values)
    replay = _replayed(block, actions, [BLOCK_INPUT] * has_input) if block.rerun else None
    return None if replay is None else block.rerun_seconds + _seconds(block, replay)


def _seconds(block: BlockClass, replayed: frozenset[str]) -> float:
    """Add up in the order of the block: sums must not depend on that of a set, nor plans on sums."""
    return sum(value.recompute_s for value in block.values if value.name in replayed)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the solver works on. Arrays have an entry per block."""

    costs: CostTable
    budget_bytes: float
    blocks: tuple[BlockClass, ...]
    #: Per block and value, the actions that it may have.
    allowed: tuple[tuple[Actions, ...], ...]
    #: Most bytes there are while a block runs.
    forward_capacity: Array
    backward_capacity: Array
    #: Bytes of them that no action changes: fixed bytes, the block's working set, gradients made so far.
    forward_base: Array
    backward_base: Array
    _footprints: dict[tuple[int, Actions], Footprint | None] = dataclasses.field(default_factory=dict, repr=False)
    _others: dict[tuple[int, Actions], list[Choice]] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        costs: CostTable,
        budget_bytes: float,
        pins: Pins | None = None,
        blocks: tuple[BlockClass, ...] | None = None,
    ) -> Problem:
        """Lay out a cost table.

        Args:
            blocks: of the stack, in place of those of the table (NOTE [ Shared inputs ]).
        Raises:
            ValueError: a pin names nothing, cannot be, or contradicts another.
        """
        blocks = costs.blocks if blocks is None else blocks
        working = numpy.array([block.working_set_bytes for block in blocks], float) + costs.fixed_bytes
        gradients = numpy.array([block.gradient_bytes for block in blocks], float)
        unlimited = numpy.full(len(blocks), numpy.inf)
        found = cls(
            costs=costs,
            budget_bytes=budget_bytes,
            blocks=blocks,
            allowed=_allowed(costs, blocks, checked_pins(pins)),
            forward_capacity=unlimited,
            backward_capacity=unlimited,
            forward_base=working,
            backward_base=working + numpy.cumsum(gradients[::-1])[::-1],
        )
        return found.with_budget(budget_bytes)

    def with_budget(self, budget_bytes: float) -> Problem:
        """Return the same with another budget."""
        limits = self.costs.capacity_bytes
        forward, backward = (limits.forward, limits.backward) if limits else (numpy.inf, numpy.inf)
        full = numpy.full(len(self.blocks), float(budget_bytes))
        return dataclasses.replace(
            self,
            budget_bytes=budget_bytes,
            forward_capacity=numpy.minimum(full, forward),
            backward_capacity=numpy.minimum(full, backward),
        )

    @functools.cached_property
    def scale_s(self) -> float:
        """Seconds of the order of a step's, to tell times from rounding."""
        recompute_s = sum(value.recompute_s for block in self.blocks for value in block.values)
        return self.costs.plain_seconds or recompute_s or 1.0

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """Per block, the first one that costs the same with the same actions allowed."""
        keys = list(zip(self.blocks, self.allowed, strict=True))
        first: dict[Any, int] = {}
        return tuple(first.setdefault(key, index) for index, key in enumerate(keys))

    def footprint(self, index: int, actions: Actions) -> Footprint | None:
        """Return what actions of one block come to, None where they leave out what backward needs."""
        key = self.kinds[index], actions
        if key not in self._footprints:
            self._footprints[key] = footprint(self.blocks[index], actions, self.allowed[index])
        return self._footprints[key]

    def others(self, index: int, actions: Actions) -> list[Choice]:
        """Return what differs from actions of a block in one value, and what treats all of the block alike."""
        key = self.kinds[index], actions
        if key not in self._others:
            found = ((other, self.footprint(index, other)) for other in self._changes(index, actions))
            self._others[key] = [Choice(other, come_to) for other, come_to in found if come_to is not None]
        return self._others[key]

    def _changes(self, index: int, actions: Actions) -> Iterator[Actions]:
        block, allowed = self.blocks[index], self.allowed[index]
        for position, may in enumerate(allowed):
            for action in may:
                if action is not actions[position]:
                    yield (*actions[:position], action, *actions[position + 1 :])
        if block.rerun or block.recording_s:
            yield self.plain[index]
        if block.rerun:
            for held in (Action.KEEP, Action.OFFLOAD):
                wanted = [held if value.name == BLOCK_INPUT else Action.RECOMPUTE for value in block.values]
                yield tuple(_first(want, may) for want, may in zip(wanted, allowed, strict=True))

    @property
    def all_held(self) -> tuple[Actions, ...]:
        """The actions that leave nothing to be computed again, as far as pins allow."""
        return tuple(tuple(_first(Action.KEEP, may) for may in allowed) for allowed in self.allowed)

    @functools.cached_property
    def plain(self) -> tuple[Actions, ...]:
        """The actions with the least to do: all that backward needs is kept, as far as pins allow."""
        return tuple(
            tuple(
                _first(Action.KEEP if value.needed else Action.RECOMPUTE, may)
                for value, may in zip(block.values, allowed, strict=True)
            )
            for block, allowed in zip(self.blocks, self.allowed, strict=True)
        )


def _first(wanted: Action, allowed: Actions) -> Action:
    return wanted if wanted in allowed else allowed[0]


#: For values, by block and position: a pin's action, and the key that says so.
_Pinned = dict[tuple[int, int], tuple[Action, Any]]


def _allowed(
    costs: CostTable, blocks: tuple[BlockClass, ...], pins: Mapping[Any, Action]
) -> tuple[tuple[Actions, ...], ...]:
    linked = costs.d2h_bytes_per_s > 0 and costs.h2d_bytes_per_s > 0
    free: list[list[Actions]] = []
    for index, block in enumerate(blocks):
        free.append([])
        for value in block.values:
            can_go = linked and value.offloadable and index < len(blocks) - 1
            can_be_dropped = not value.needed or value.replayable or (block.rerun and value.name != BLOCK_INPUT)
            free[-1].append((Action.KEEP, *[Action.RECOMPUTE] * can_be_dropped, *[Action.OFFLOAD] * can_go))
    pinned: _Pinned = {}
    for key, action in pins.items():
        _pin(costs, free, key, action, pinned)
    for (index, position), (action, _) in pinned.items():
        free[index][position] = (action,)
    return tuple(tuple(each) for each in free)


def _pin(costs: CostTable, free: list[list[Actions]], key: Any, action: Action, pinned: _Pinned) -> None:
    places = list(_places(costs, key))
    if not places:
        raise names_nothing(key, (value.name for block in costs.classes.values() for value in block.values))
    one = isinstance(key, tuple) and _is_number(key[0])
    for index, position in places:
        if action not in free[index][position]:
            if action is Action.OFFLOAD and index == len(free) - 1 and not one:
                continue  # a pin of many values leaves out the last block, which offloads nothing
            can = ", ".join(each.value for each in free[index][position])
            why = _why_not(costs, index, position, action)
            raise ValueError(f"pins: {key!r} cannot be {action.value!r} in block {index}, {why}: it can be {can}.")
        other, other_key = pinned.setdefault((index, position), (action, key))
        if other is not action:
            raise ValueError(
                f"pins: {other_key!r} says {other.value!r} and {key!r} says {action.value!r}, both for block {index}. "
                "Leave out one."
            )


def _why_not(costs: CostTable, index: int, position: int, action: Action) -> str:
    value = costs.blocks[index].values[position]
    if action is Action.RECOMPUTE:
        return "since nothing computes it again"
    if index == len(costs.stack) - 1:
        return "since the last block offloads nothing"
    if not costs.d2h_bytes_per_s:
        return "since there is no link to host memory or a disk"
    return "since it may not be offloaded" if not value.offloadable else "since it is pinned otherwise"


def _is_number(where: object) -> bool:
    return isinstance(where, int) and not isinstance(where, bool)


def _places(costs: CostTable, key: Any) -> Iterator[tuple[int, int]]:
    where, name = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
    for index, class_name in enumerate(costs.stack):
        if where is None or where == class_name or (_is_number(where) and where == index):
            for position, value in enumerate(costs.classes[class_name].values):
                if value.name == name:
                    yield index, position
