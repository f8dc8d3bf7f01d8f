"""Plans that may offload: solved with and without the links, with the windows that their peaks need.

A simulated block waits for copies out when its forward ends. A real block needs the memory earlier. When its forward
starts, no more may be in flight than the link moves while it runs, so that many bytes are added to its need. A plan
that offloads nothing does not need them. So both are solved, and the faster plan counts.

The limit of in-flight bytes while each block runs follows from the simulation, and is part of the plan. Trials and the
final plan run within the same windows (NOTE [ Windows of a plan ]).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from actckpt._budget.bandwidth import Pins, pins_offload
from actckpt._error_base import PlanInfeasibleError
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, Segment
from actckpt.planner.plans import BlockWindows, Plan
from actckpt.planner.simulation import simulate
from actckpt.planner.solving import solve

__all__ = ["offloaded_bytes", "solved", "with_drained", "with_windows"]

_RECOMPUTED = (Action.RECOMPUTE, Action.RECOMPUTE.value)


def _drained_bytes(block: BlockClass, costs: CostTable) -> float:
    """Return the bytes that are copied out while a block runs forward, at most those of one block."""
    most = max(sum(value.nbytes for value in other.values if value.offloadable) for other in costs.classes.values())
    return min(block.forward_s * costs.d2h_bytes_per_s, most)


def solved(costs: CostTable, budget: float, pins: Pins | None) -> Plan:
    """Return the fastest plan that fits a budget, with or without the links of a cost table.

    Raises:
        PlanInfeasibleError: neither fits. Its `smallest_bytes` is the smaller one of both.
        ValueError: as `solve` does.
    """
    costs = _with_pinned_stay(costs, pins)
    plans: list[Plan] = []
    error: PlanInfeasibleError | None = None
    for each in _with_and_without(costs, pins):
        try:
            plan = solve(each, budget=budget, pins=pins)
            plans.append(plan if each.d2h_bytes_per_s else dataclasses.replace(plan, costs=costs))
        except PlanInfeasibleError as failure:
            # Breaks the cycle between this frame and the error, which would hold tensors of outer frames: now, and when
            # raised.
            failure.__traceback__ = None
            error = min(error or failure, failure, key=lambda each: each.smallest_bytes or math.inf)
    if not plans:
        assert error is not None
        try:
            raise error
        finally:
            del error
    return with_windows(min(plans, key=lambda plan: plan.overhead_seconds))


def _with_pinned_stay(costs: CostTable, pins: Pins | None) -> CostTable:
    """Return a cost table without reruns of blocks that have a value pinned to keep or offload.

    A rerun recomputes all values of a block, whatever their actions.
    """
    held = {
        key[-1] if isinstance(key, tuple) else key for key, action in (pins or {}).items() if action not in _RECOMPUTED
    }
    classes = {
        name: block
        if held.isdisjoint(_names_made(block))
        else dataclasses.replace(block, rerun=False, no_rerun=block.no_rerun or "what is pinned in it stays")
        for name, block in costs.classes.items()
    }
    return dataclasses.replace(costs, classes=classes) if held else costs


def _names_made(block: BlockClass) -> set[str]:
    return {value.name for value in block.values if value.needed and value.name != BLOCK_INPUT}


def _with_and_without(costs: CostTable, pins: Pins | None) -> Iterator[CostTable]:
    if not costs.d2h_bytes_per_s:
        yield costs
        return
    if not pins_offload(pins):
        yield dataclasses.replace(costs, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0, host_bytes=None)
    yield with_drained(costs)


def with_drained(costs: CostTable) -> CostTable:
    """Return a cost table for plans that offload: with the bytes that are copied out while blocks run forward."""
    return dataclasses.replace(costs, segments=tuple(_with_drained(segment, costs) for segment in costs.timeline))


def _with_drained(segment: Segment, costs: CostTable) -> Segment:
    """Return a segment with the bytes that are copied out while a block runs forward."""
    if not segment.is_forward or segment.running < 0:
        return segment
    plain, replay, rerun = (base + _drained_bytes(costs.blocks[segment.running], costs) for base in segment.bases)
    return dataclasses.replace(segment, plain_bytes=plain, replay_bytes=replay, rerun_bytes=rerun)


def offloaded_bytes(plan: Plan) -> list[float]:
    """Return the bytes that each block offloads."""
    return [
        sum(value.nbytes for value in block.values if actions[value.name] is Action.OFFLOAD)
        for block, actions in zip(plan.costs.blocks, plan.actions, strict=True)
    ]


def with_windows(plan: Plan) -> Plan:
    """Return a plan with its windows; unchanged if it offloads nothing."""
    blocks, costs, own = plan.costs.blocks, plan.costs, offloaded_bytes(plan)
    if not any(own):
        return plan
    inflight = simulate(costs, plan).inflight
    out = [moving.out_bytes + _drained_bytes(block, costs) for moving, block in zip(inflight, blocks, strict=True)]
    windows = [
        BlockWindows(math.ceil(out[i] + own[i]), math.ceil(left), math.ceil(inflight[i].ahead_bytes + own[i]))
        for i, left in enumerate([*out[1:], 0.0])
    ]
    return dataclasses.replace(plan, windows=tuple(windows))
