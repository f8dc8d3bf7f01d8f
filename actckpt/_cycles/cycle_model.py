"""The memory model of one kind of cycle: a cost table from a metered cycle, corrected by later ones.

    peak(plan) = static + max over segments s of  P_s + correction_s + own_s(plan) + sum over alive calls j of K_j(plan)

P_s is the peak of a cycle in which every block drops all that it can. K_j is what block call j additionally keeps for
its backward. own_s is what the block that runs in s additionally needs in its mode (kept, replayed, rerun).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from actckpt._budget.simple import plain_plan
from actckpt._cycles.settled_block import SettledBlock
from actckpt._cycles.timeline import Cycle, Segment, SegmentKey
from actckpt._text.listed import calls_named, listed
from actckpt.planner import costs as planner_costs
from actckpt.planner.costs import BlockClass, CostTable
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import needs

__all__ = ["CycleModel", "class_names"]

#: The order in which forwards and backwards ran (`Cycle.order`).
_Order = tuple[tuple[int, int, bool], ...]
#: Of a segment, and the mode (`BlockClass.mode`) of the block that runs in it, -1: none.
_Correction = tuple[_Order, SegmentKey, int]


class _Row(NamedTuple):
    """A segment of a measured cycle, with the block calls of that cycle."""

    order: _Order
    segment: Segment
    blocks: tuple[SettledBlock, ...]


def class_names(blocks: Sequence[BlockClass], calls: Sequence[str]) -> dict[BlockClass, str]:
    """Return names of classes by the blocks that are called: `layers.0-5`."""
    alike: dict[BlockClass, list[str]] = {}
    for block, name in zip(blocks, calls_named(calls), strict=True):
        alike.setdefault(block, []).append(name or "")
    names = {block: listed(own) for block, own in alike.items()}
    if len(set(names.values())) < len(names):  # a block's name looks like a range
        names = {block: f"class {number}" for number, block in enumerate(alike)}
    return names


class CycleModel:
    """The memory of one kind of cycle under any plan.

    Args:
        cycle: metered, with every block recorded and everything dropped that can be recomputed.
        blocks: one per block call.
    """

    def __init__(self, cycle: Cycle, blocks: Sequence[SettledBlock]) -> None:
        self.calls = tuple(cycle.calls)
        self.blocks = tuple(blocks)
        self.made_outside = cycle.made_outside
        #: Calls that did nothing when they were measured.
        self.idle = cycle.idle_calls()
        self._rows: list[_Row] = []
        #: Differences between observed and predicted peaks, by segment and mode of its block.
        self._corrections: dict[_Correction, float] = {}
        self._costs = [block.costs for block in blocks]
        self.add(cycle, blocks)

    def add(self, cycle: Cycle, blocks: Sequence[SettledBlock]) -> None:
        """Add a cycle with the same calls but another order of backwards: plans must fit in each order."""
        self._rows += [_Row(tuple(cycle.order), segment, tuple(blocks)) for segment in cycle.segments()]

    @property
    def num_orders(self) -> int:
        """The number of measured orders of forwards and backwards."""
        return len({row.order for row in self._rows})

    def costs(self, static_bytes: float) -> CostTable:
        names = class_names(self._costs, [call.block for call in self.calls])
        classes, stack = {name: block for block, name in names.items()}, tuple(names[block] for block in self._costs)
        return CostTable(classes, stack, segments=tuple(self._segment(row, static_bytes) for row in self._rows))

    def plain_bytes(self, costs: CostTable) -> float:
        """Return the peak if everything is kept."""
        return float(max(needs(costs, plain_plan(costs))))

    def _segment(self, row: _Row, static_bytes: float) -> planner_costs.Segment:
        segment, blocks = row.segment, row.blocks
        counted = (blocks[j].always_kept_bytes + blocks[j].droppable_input_bytes for j in segment.alive)
        base = static_bytes + segment.peak_bytes - sum(counted)
        modes = range(3) if segment.running >= 0 else [-1] * 3
        bases = [base + self._corrections.get((row.order, segment.key, mode), 0.0) for mode in modes]
        limit = float("inf")
        if segment.running >= 0:
            block = blocks[segment.running]
            peaks, kept = block.peaks, block.always_kept_bytes
            if segment.is_forward:
                limit = max(segment.live_bytes + peaks.forward - segment.peak_bytes, 0.0) + kept
                bases = [nbytes - kept for nbytes in bases]
            else:
                own = peaks.kept, peaks.replayed, peaks.rerun
                bases = [nbytes + more - peaks.replayed for nbytes, more in zip(bases, own, strict=True)]
        return planner_costs.Segment(
            running=segment.running,
            is_forward=segment.is_forward,
            alive=tuple(sorted(segment.alive)),
            plain_bytes=bases[0],
            replay_bytes=bases[1],
            rerun_bytes=bases[2],
            kept_limit_bytes=limit,
            holds_casts=segment.holds_casts,
            seconds=segment.seconds if segment.running < 0 else 0.0,
        )

    def observe(self, cycle: Cycle, plan: Plan, predicted: Sequence[float]) -> None:
        """Correct the model by a metered cycle that ran under a plan.

        Args:
            predicted: peak bytes of each segment under the plan.
        """
        for row, error in zip(self._rows, self._errors(cycle, predicted), strict=True):
            call = row.segment.running
            mode = -1 if call < 0 else self._costs[call].mode(plan.actions[call], rerun=plan.rerun[call])
            if error == 0 or (error < 0 and mode == 1):  # another plan may replay other values
                continue
            key = row.order, row.segment.key, mode
            self._corrections[key] = self._corrections.get(key, 0.0) + error

    def _errors(self, cycle: Cycle, predicted: Sequence[float]) -> Iterator[float]:
        """Yield by how much a metered cycle exceeded the prediction in each segment; 0: it did not have it."""
        order = tuple(cycle.order)
        seen = {segment.key: segment.peak_bytes + cycle.static_bytes for segment in cycle.segments()}
        for row, need in zip(self._rows, predicted, strict=True):
            yield seen.get(row.segment.key, need) - need if row.order == order else 0.0

    def peak_by_probe(self, cycle: Cycle, costs: CostTable, probe: Plan, plan: Plan) -> float:
        """Return the peak of a plan, corrected by a metered cycle under another one, in blocks that both run alike."""
        is_alike: list[bool] = [*map(operator.eq, probe.actions, plan.actions), False]  # the last one: no block runs
        errors = self._errors(cycle, needs(costs, probe))
        rows = zip(self._rows, needs(costs, plan), errors, strict=True)
        return max([need + error * is_alike[row.segment.running] for row, need, error in rows])

    def forget_corrections(self) -> None:
        self._corrections = {}
