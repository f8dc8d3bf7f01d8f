"""A cost table with a budget and pins, laid out for the solver: what may be chosen, and what a choice needs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, Segment
from actckpt.planner.pins import Pins, checked_pins, names_nothing

__all__ = ["Actions", "Array", "Choice", "Moment", "Pins", "Problem", "droppable", "moments", "recomputed"]

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
#: What becomes of each value of a block, in the order of its class.
Actions = tuple[Action, ...]
#: Bytes that differ by less than this share of all are the same.
_ROUNDING = 1e-12


class Choice(NamedTuple):
    """What becomes of the values of each entry of the stack, and whether it is run again as a whole."""

    actions: tuple[Actions, ...]
    rerun: tuple[bool, ...]

    def changed(self, index: int, actions: Actions, rerun: bool) -> Choice:
        """Return the same with another choice for one entry."""
        return Choice(
            (*self.actions[:index], actions, *self.actions[index + 1 :]),
            (*self.rerun[:index], rerun, *self.rerun[index + 1 :]),
        )


class Moment(NamedTuple):
    """A segment of the cycle, and what changes when it begins."""

    segment: Segment
    seconds: float
    #: Values come back in it, and none go: a backward runs, or ran last.
    is_backward: bool
    #: Entries whose forward has ended since the segment before, and whose backward begins.
    handed: tuple[int, ...]
    consumed: tuple[int, ...]


def moments(costs: CostTable) -> tuple[Moment, ...]:
    """Return the segments of a cycle; an entry takes its seconds in the first of its own in each direction."""
    last = {s.running: number for number, s in enumerate(costs.timeline) if s.is_forward and s.running >= 0}
    found: list[Moment] = []
    begun: set[tuple[int, bool]] = set()
    is_backward = False
    for number, segment in enumerate(costs.timeline):
        index, seconds = segment.running, segment.seconds
        consumed: tuple[int, ...] = ()
        if index >= 0:
            is_backward, seconds = not segment.is_forward, 0.0
            if (index, is_backward) not in begun:
                begun.add((index, is_backward))
                block = costs.blocks[index]
                seconds = block.backward_s if is_backward else block.forward_s
                consumed = (index,) if is_backward else ()
        handed = tuple(entry for entry, end in last.items() if end == number - 1)
        found.append(Moment(segment, seconds, is_backward, handed, consumed))
    return tuple(found)


def recomputed(block: BlockClass, actions: Actions, *, rerun: bool = False) -> frozenset[str] | None:
    """Return the values that are computed again one by one so that backward has all that it needs; None if it cannot.

    Args:
        rerun: the block is run again as a whole, which needs its input alone.
    """
    by_name = {value.name: (value, action) for value, action in zip(block.values, actions, strict=True)}
    found: set[str] = set()
    wanted = [value.name for value in block.values if (value.name == BLOCK_INPUT if rerun else value.needed)]
    while wanted:
        value, action = by_name[wanted.pop()]
        if action is not Action.RECOMPUTE or value.name in found:
            continue
        if not value.replayable:
            return None
        found.add(value.name)
        wanted.extend(value.inputs)
    return frozenset(found)


def droppable(block: BlockClass, allowed: tuple[Actions, ...]) -> list[int]:
    """Return the positions of what a rerun makes again: what may be dropped, but the input."""
    return [
        position
        for position, (value, may) in enumerate(zip(block.values, allowed, strict=True))
        if value.name != BLOCK_INPUT and Action.RECOMPUTE in may
    ]


def seconds_of(block: BlockClass, actions: Actions, rerun: bool) -> float | None:
    """Return the seconds over plain training, without waits, that a choice for one block takes; None: it cannot be."""
    again = recomputed(block, actions, rerun=rerun)
    if again is None or (rerun and not block.rerun):
        return None
    pairs = zip(block.values, actions, strict=True)
    seconds = sum(value.offload_s for value, action in pairs if action is Action.OFFLOAD)
    seconds += sum(value.recompute_s for value in block.values if value.name in again)
    return seconds + (block.rerun_seconds if rerun else block.recording_s * block.is_recorded(actions))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the solver works on."""

    costs: CostTable
    budget_bytes: float
    #: Per entry of the stack and value, the actions that it may have.
    allowed: tuple[tuple[Actions, ...], ...]

    @classmethod
    def of(cls, costs: CostTable, budget_bytes: float, pins: Pins | None = None) -> Problem:
        """Lay out a cost table.

        Raises:
            ValueError: a pin names nothing, cannot be, or contradicts another.
        """
        return cls(costs, budget_bytes, _allowed(costs, costs.blocks, checked_pins(pins)))

    def with_budget(self, budget_bytes: float) -> Problem:
        """Return the same with another budget."""
        return dataclasses.replace(self, budget_bytes=budget_bytes)

    @functools.cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The cycle."""
        return moments(self.costs)

    @functools.cached_property
    def scale_s(self) -> float:
        """Seconds of the order of a step's, to tell times from rounding."""
        recompute_s = sum(value.recompute_s for block in self.costs.blocks for value in block.values)
        return self.costs.plain_seconds or recompute_s or 1.0

    @functools.cached_property
    def _alive(self) -> Array:
        found = numpy.zeros((len(self.moments), len(self.costs.stack)))
        for number, moment in enumerate(self.moments):
            found[number, list(moment.segment.alive)] = 1.0
        return found

    def needs(self, choice: Choice) -> Array:
        """Return the bytes that must be there in each segment, after all waits."""
        kept = self.kept_bytes(choice)
        found: Array = self._alive @ kept
        for number, moment in enumerate(self.moments):
            segment = moment.segment
            index = segment.running
            found[number] += segment.bases[self._mode(choice, index)]
            if index >= 0 and segment.is_forward:
                gone = self._bytes(choice, index, Action.OFFLOAD)
                found[number] += min(kept[index] + gone, segment.kept_limit_bytes)
        return found

    def kept_bytes(self, choice: Choice) -> Array:
        """Return the bytes of kept values per entry."""
        return numpy.array([self._bytes(choice, index, Action.KEEP) for index in range(len(self.costs.stack))])

    def _bytes(self, choice: Choice, index: int, which: Action) -> float:
        pairs = zip(self.costs.blocks[index].values, choice.actions[index], strict=True)
        return sum(value.nbytes for value, action in pairs if action is which)

    def excess_bytes(self, choice: Choice) -> float:
        """Return the bytes beyond what there is, on the device, the host and the disk; 0: it fits."""
        needs, costs = self.needs(choice), self.costs
        over = needs - self.budget_bytes
        over[over <= _ROUNDING * numpy.abs(needs)] = 0.0
        gone = sum(self._bytes(choice, index, Action.OFFLOAD) for index in range(len(costs.stack)))
        has_disk = min(costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s) > 0
        stored = math.inf if costs.host_bytes is None else costs.host_bytes + costs.disk_bytes * has_disk
        lost = gone - stored if gone > stored * (1 + _ROUNDING) else 0.0
        return max(float(over.max(initial=0.0)), 0.0) + lost

    def seconds(self, choice: Choice) -> float | None:
        """Return the seconds over plain training, without waits; None where backward lacks something."""
        entries = zip(self.costs.blocks, choice.actions, choice.rerun, strict=True)
        found = [seconds_of(block, actions, rerun) for block, actions, rerun in entries]
        return None if None in found else sum(each for each in found if each is not None)

    def base_parts(self, choice: Choice, number: int) -> list[tuple[float, str]]:
        """Return what is there in a segment whatever other entries keep: bytes, and what they are in words."""
        segment, costs = self.moments[number].segment, self.costs
        index = segment.running
        again = segment.bases[self._mode(choice, index)] - segment.plain_bytes
        if costs.segments is not None:
            if again <= 0:
                return [(segment.plain_bytes + again, "where no block keeps anything")]
            return [(segment.plain_bytes, "where no block keeps anything"), (again, "for what is computed again")]
        working = costs.blocks[index].working_set_bytes
        gradients = segment.plain_bytes - working - costs.fixed_bytes
        return [
            (working, "its working set"),
            (again, "for what is computed again"),
            (costs.fixed_bytes, "fixed"),
            (gradients, "gradients made by then"),
        ]

    def _mode(self, choice: Choice, index: int) -> int:
        """Return which base of a segment holds, where an entry runs in it."""
        if index < 0:
            return 0
        return 2 if choice.rerun[index] else int(self.costs.blocks[index].is_recorded(choice.actions[index]))

    def kept(self, *, unneeded: bool) -> Choice:
        """Return the choice that keeps all that backward needs, as far as pins allow, and what it does not need."""
        found = tuple(
            tuple(
                _first(Action.KEEP if value.needed or unneeded else Action.RECOMPUTE, may)
                for value, may in zip(block.values, allowed, strict=True)
            )
            for block, allowed in zip(self.costs.blocks, self.allowed, strict=True)
        )
        return Choice(found, (False,) * len(found))

    def dropped(self) -> Choice:
        """Return the choice that keeps inputs alone where blocks can run again, and else what cannot be replayed."""
        actions = []
        for block, allowed in zip(self.costs.blocks, self.allowed, strict=True):
            again = {value.name for value in block.values if value.replayable or block.rerun} - {BLOCK_INPUT}
            rows = zip(block.values, allowed, strict=True)
            actions.append(tuple(_first(Action.RECOMPUTE if v.name in again else Action.KEEP, may) for v, may in rows))
        entries = zip(self.costs.blocks, self.allowed, strict=True)
        gains = [block.rerun and any(block.values[at].needed for at in droppable(block, may)) for block, may in entries]
        return Choice(tuple(actions), tuple(gains))


def _first(wanted: Action, allowed: Actions) -> Action:
    return wanted if wanted in allowed else allowed[0]


#: For values, by block and position: a pin's action, and the key that says so.
_Pinned = dict[tuple[int, int], tuple[Action, Any]]


def _allowed(
    costs: CostTable, blocks: tuple[BlockClass, ...], pins: Mapping[Any, Action]
) -> tuple[tuple[Actions, ...], ...]:
    linked = costs.d2h_bytes_per_s > 0 and costs.h2d_bytes_per_s > 0
    free: list[list[Actions]] = []
    away = _can_offload(costs)
    for index, block in enumerate(blocks):
        free.append([])
        for value in block.values:
            can_go = linked and value.offloadable and index in away
            can_be_dropped = not value.needed or value.replayable or (block.rerun and value.name != BLOCK_INPUT)
            free[-1].append((Action.KEEP, *[Action.RECOMPUTE] * can_be_dropped, *[Action.OFFLOAD] * can_go))
    pinned: _Pinned = {}
    for key, action in pins.items():
        _pin(costs, free, key, action, pinned)
    for (index, position), (action, _) in pinned.items():
        free[index][position] = (action,)
    return tuple(tuple(each) for each in free)


def _can_offload(costs: CostTable) -> frozenset[int]:
    """Return the entries between whose forward and backward values can leave: something else runs in between."""
    cycle = moments(costs)
    return frozenset(entry for moment in cycle if not moment.is_backward for entry in moment.handed)


def _pin(costs: CostTable, free: list[list[Actions]], key: Any, action: Action, pinned: _Pinned) -> None:
    places = list(_places(costs, key))
    if not places:
        raise names_nothing(key, (value.name for block in costs.classes.values() for value in block.values))
    one = isinstance(key, tuple) and _is_number(key[0])
    for index, position in places:
        if action not in free[index][position]:
            if action is Action.OFFLOAD and index not in _can_offload(costs) and not one:
                continue  # a pin of many values leaves out what offloads nothing
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
    if index not in _can_offload(costs):
        which = "the last block" if index == len(costs.stack) - 1 else "a block just before backward"
        return f"since {which} offloads nothing"
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
