"""One training step under a plan, played through as it happens: `simulate`.

Shares with the solver only how a cost table is read, so that each checks the other: where the solver takes a step
segment by segment, from formulas, here compute and both links run side by side, from one event to the next.
Copies move bytes one value after the other and free them as they go: out in the order in which blocks end, back in the
order of backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from actckpt.action import Action
from actckpt.planner.costs import BlockClass, CostTable, Segment, as_cost_table
from actckpt.planner.plans import Plan

__all__ = ["InFlight", "Simulation", "needs", "simulate"]

#: Bytes that differ by less than this share of all are the same.
_ROUNDING, _ROUNDING_OF_SUMS = 1e-12, 1e-15
#: A wait that ends this share of memory too late or too early, as moments are rounded, ends in time.
_LATE = 1e-9


class InFlight(NamedTuple):
    """Most bytes of other blocks on their way while a block runs."""

    #: Of blocks before it, on their way out when its forward ends.
    out_bytes: float
    #: Of blocks before it, brought back ahead while it runs backward.
    ahead_bytes: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a step came to. Times are in seconds, sizes in bytes."""

    #: Of the whole step.
    seconds: float
    #: Over a step in which everything is kept: computing again, with what recording and offloading take, and waiting
    #: for copies out and back.
    overhead_seconds: float
    recompute_seconds: float
    write_wait_seconds: float
    read_wait_seconds: float
    peak_bytes: float
    #: Bytes beyond the plan's budget and host memory, at the worst moment; 0: it fits.
    excess_bytes: float
    host_peak_bytes: float
    #: For each block of the stack.
    inflight: tuple[InFlight, ...]
    #: The most in each segment of the table's timeline.
    segment_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether no limit was exceeded."""
        return self.excess_bytes == 0.0


def simulate(costs: CostTable | Mapping[str, Any], plan: Plan) -> Simulation:
    """Play through one step of a plan.

    A block waits where there would be no room at its end, or where values that it needs are not back; copies back begin
    as early as the room up to their use allows, and no more than `plan.max_inflight` bytes ahead.

    Args:
        costs: a cost table, or plain data for `CostTable.from_dict`; it may be another one than the plan was made of.
    Raises:
        ValueError: the plan is one of another stack, or leaves out what backward needs.
    """
    table = as_cost_table(costs)
    step = _Step(table, plan)
    step.run()
    return step.result()


def needs(costs: CostTable | Mapping[str, Any], plan: Plan) -> list[float]:
    """Return the most bytes in memory in each segment of the timeline of a cost table, under a plan."""
    return list(simulate(costs, plan).segment_bytes)


class _Link:
    """Bytes that go over a link one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        #: Bytes that it may have moved by now, and those that it has.
        self.limit = self.moved = 0.0

    def run(self, seconds: float) -> None:
        """Move bytes for some time."""
        self.moved = max(self.moved, min(self.moved + self.bytes_per_s * seconds, self.limit))

    def wait(self, target: float, rounding: float) -> float:
        """Move bytes until a number of them is moved; return how long that takes."""
        if self.moved >= target - rounding:
            return 0.0
        seconds, self.moved = (target - self.moved) / self.bytes_per_s, target
        return seconds


class _Block:
    """What a plan does in one block of the stack."""

    def __init__(self, index: int, block: BlockClass, plan: Plan) -> None:
        actions, rerun, where = plan.actions[index], plan.rerun[index], f"Block {index} of the plan"
        names = [value.name for value in block.values]
        if set(actions) != set(names):
            other = sorted(set(actions) ^ set(names))[0]
            side = "the cost table does not know" if other in actions else "the plan leaves out"
            raise ValueError(f"{where} is of another model: {side} its value {other!r}. Make a plan for this table.")
        if rerun and not block.rerun:
            raise ValueError(f"{where} is run again as a whole, which its class does not allow (rerun).")
        if lost := block.lost(actions, rerun=rerun):
            raise ValueError(f"{where} drops {lost!r}, which backward needs and nothing can compute again.")
        self.index = index
        self.kept, self.gone = (block.bytes_of(actions, action) for action in (Action.KEEP, Action.OFFLOAD))
        self.kept_beside_casts = block.bytes_of(actions, Action.KEEP, counts_cached=False)
        self.added_s = block.added_seconds(actions, rerun=rerun)
        self.mode = block.mode(actions, rerun=rerun)


class _Step:
    """The step as it goes."""

    def __init__(self, costs: CostTable, plan: Plan) -> None:
        if len(plan.actions) != len(costs.stack):
            raise ValueError(
                f"The plan has {len(plan.actions)} blocks, the cost table {len(costs.stack)}: it is of another model."
            )
        self.costs, self.plan, self.moments = costs, plan, costs.moments
        self.blocks = [_Block(index, block, plan) for index, block in enumerate(costs.blocks)]
        self.total = sum(block.gone for block in self.blocks)
        if self.total and not (costs.d2h_bytes_per_s and costs.h2d_bytes_per_s):
            raise ValueError("The plan offloads values, but the cost table has no d2h_bytes_per_s or h2d_bytes_per_s.")
        self.rounding = _ROUNDING * self.total
        self.seconds = self.write_wait_s = self.read_wait_s = 0.0
        self.segment_bytes = [-math.inf] * len(self.moments)
        self.out_bytes, self.ahead_bytes = ([0.0] * len(self.blocks) for _ in range(2))
        self.out, self.back = _Link(costs.d2h_bytes_per_s), _Link(costs.h2d_bytes_per_s)
        self.host_peak_bytes = 0.0
        beyond = self.total - (math.inf if costs.host_bytes is None else costs.host_bytes)
        self.excess = beyond if beyond > _ROUNDING_OF_SUMS * self.total else 0.0
        self._order()

    def _order(self) -> None:
        """Find out how many bytes were handed over and are needed back when each segment runs, and can be read back."""

        def gone(entries: Iterable[int]) -> float:
            return sum(self.blocks[index].gone for index in entries)

        self.handed = list(itertools.accumulate(gone(moment.handed) for moment in self.moments))
        self.needed = list(itertools.accumulate(gone(moment.consumed) for moment in self.moments))
        self.reach = [gone(moment.readable) for moment in self.moments]

    def run(self) -> None:
        """Run all segments, reading back ahead as far as this and every later moment has room."""
        bases = [self._base(moment.segment) for moment in self.moments]
        rooms = [self.plan.budget_bytes - base for base in bases]
        most, left = [0.0] * len(rooms), math.inf
        for number in reversed(range(len(rooms))):
            left = min(left, self.needed[number] + max(min(rooms[number], self.plan.max_inflight), 0.0))
            most[number] = left
        for number, (moment, base, room) in enumerate(zip(self.moments, bases, rooms, strict=True)):
            if moment.is_backward:
                self._backward(number, base, room, most[number])
            else:
                self._forward(number, base, room)

    def _base(self, segment: Segment) -> float:
        """Return what is in memory at the peak of a segment, but for what is on its way."""
        alive = [self.blocks[index] for index in segment.alive]
        nbytes = sum(block.kept_beside_casts if segment.holds_casts else block.kept for block in alive)
        if segment.running < 0:
            return nbytes + segment.plain_bytes
        block = self.blocks[segment.running]
        if segment.is_forward:
            nbytes += min(block.kept + block.gone, segment.kept_limit_bytes)
        return nbytes + segment.bases[block.mode]

    def _remember(self, number: int, nbytes: float, room: float) -> None:
        """Note what is in memory; `room` is what would be left with all copies at their best."""
        capacity = self.plan.budget_bytes
        if room < -_ROUNDING_OF_SUMS * abs(capacity - room):
            self.excess = max(self.excess, -room)
        elif capacity < nbytes < capacity * (1 + _LATE):
            nbytes = capacity
        self.segment_bytes[number] = max(self.segment_bytes[number], nbytes)

    def _forward(self, number: int, base: float, room: float) -> None:
        """Run a segment; then wait until there is room, and before backward until everything is out."""
        moment, gone = self.moments[number], self.handed[number]
        self.out.limit = gone
        self.out.run(moment.seconds)
        ahead = self.back.moved - self.needed[number]
        is_turn = number + 1 < len(self.moments) and self.moments[number + 1].is_backward
        target = gone if is_turn else min(max(gone - min(room - ahead, self.plan.max_inflight), 0.0), gone)
        if moment.segment.running >= 0:
            self.out_bytes[moment.segment.running] = gone - target
        wait_s = self.out.wait(target, self.rounding)
        self.write_wait_s += wait_s
        self.seconds += moment.seconds + wait_s
        self.host_peak_bytes = max(self.host_peak_bytes, self.out.moved - self.back.moved)
        self._remember(number, base + gone - self.out.moved + ahead, room)

    def _backward(self, number: int, base: float, room: float, most: float) -> None:
        """Wait until what an entry needs is back, and run it backward."""
        moment, needed = self.moments[number], self.needed[number]
        self.back.limit = min(most, self.reach[number], self.total)
        wait_s = self.back.wait(needed, self.rounding)
        self.read_wait_s += wait_s
        self._remember(number, base + max(self.back.moved - needed, 0.0), room)
        seconds = moment.seconds + sum(self.blocks[entry].added_s for entry in moment.consumed)
        self.back.run(seconds)
        self.seconds += wait_s + seconds
        if moment.segment.running >= 0:
            self.ahead_bytes[moment.segment.running] = most - needed
        self._remember(number, base + max(self.back.moved - needed, 0.0), room)

    def result(self) -> Simulation:
        """Return what the step came to."""
        recompute_s = sum(block.added_s for block in self.blocks)
        return Simulation(
            seconds=self.seconds,
            overhead_seconds=recompute_s + self.write_wait_s + self.read_wait_s,
            recompute_seconds=recompute_s,
            write_wait_seconds=self.write_wait_s,
            read_wait_seconds=self.read_wait_s,
            peak_bytes=max(self.segment_bytes),
            excess_bytes=self.excess,
            host_peak_bytes=self.host_peak_bytes,
            inflight=tuple(map(InFlight, self.out_bytes, self.ahead_bytes)),
            segment_bytes=tuple(self.segment_bytes),
        )
