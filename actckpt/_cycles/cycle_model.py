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

__all__ = ["KEPT", "CycleModel", "Mode", "class_names"]

#: How a block runs: all kept, replayed, or rerun; empty if no block runs.
Mode = str
KEPT, _REPLAYED, _RERUN = "kept", "replayed", "rerun"


#: The order in which forwards and backwards ran (`Cycle.order`).
_Order = tuple[tuple[int, int, bool], ...]
_Correction = tuple[_Order, SegmentKey, Mode]


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
        bases = {mode: base + self._correction(row, mode) for mode in (KEPT, _REPLAYED, _RERUN)}
        limit = float("inf")
        if segment.running >= 0:
            block = blocks[segment.running]
            peaks, kept = block.peaks, block.always_kept_bytes
            if segment.is_forward:
                limit = max(segment.live_bytes + peaks.forward - segment.peak_bytes, 0.0) + kept
                bases = {mode: nbytes - kept for mode, nbytes in bases.items()}
            else:
                more = {KEPT: peaks.kept, _REPLAYED: peaks.replayed, _RERUN: peaks.rerun}
                bases = {mode: nbytes + more[mode] - peaks.replayed for mode, nbytes in bases.items()}
        return planner_costs.Segment(
            running=segment.running,
            is_forward=segment.is_forward,
            alive=tuple(sorted(segment.alive)),
            plain_bytes=bases[KEPT],
            replay_bytes=bases[_REPLAYED],
            rerun_bytes=bases[_RERUN],
            kept_limit_bytes=limit,
            holds_casts=segment.holds_casts,
            seconds=segment.seconds if segment.running < 0 else 0.0,
        )

    def _correction(self, row: _Row, mode: Mode) -> float:
        key = row.order, row.segment.key, mode if row.segment.running >= 0 else ""
        return self._corrections.get(key, 0.0)

    def observe(self, cycle: Cycle, plan: Plan, predicted: Sequence[float]) -> None:
        """Correct the model by a metered cycle that ran under a plan.

        Args:
            predicted: peak bytes of each segment under the plan.
        """
        for row, error in zip(self._rows, self._errors(cycle, predicted), strict=True):
            segment = row.segment
            mode = "" if segment.running < 0 else self._mode(plan, segment.running)
            if error == 0 or (error < 0 and mode == _REPLAYED):  # another plan may replay other values
                continue
            key = row.order, segment.key, mode
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

    def modes(self, plan: Plan) -> tuple[Mode, ...]:
        return tuple(self._mode(plan, call) for call in range(len(self.calls)))

    def _mode(self, plan: Plan, call: int) -> Mode:
        if plan.rerun[call]:
            return _RERUN
        return _REPLAYED if self._costs[call].is_recorded(plan.actions[call]) else KEPT

    def forget_corrections(self) -> None:
        self._corrections = {}

    @property
    def places(self) -> tuple[dict[str, str], ...]:
        """For each block call, the place of each value by its name in the cost table."""
        return tuple(block.places for block in self.blocks)
