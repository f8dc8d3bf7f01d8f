"""Simple hand-written policies as plans, as a baseline for solved plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from actckpt._budget.offloading import offloaded_bytes, with_drained, with_windows
from actckpt._text.presets import PRESETS
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, Value
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import needs, simulate
from actckpt.planner.solving import solve

__all__ = ["NOTHING", "plain_plan", "probe_of", "simple_plans"]

NOTHING = "keep everything"
#: More memory than any machine has: with this budget everything is kept.
_UNLIMITED = 2**62


def plain_plan(costs: CostTable) -> Plan:
    return solve(costs, budget=_UNLIMITED)


def simple_plans(costs: CostTable) -> Iterator[tuple[str, Plan]]:
    """Yield simple policies by name with their predicted costs, starting with the one that keeps everything."""
    plain = plain_plan(costs)
    yield NOTHING, plain
    can_rerun = any(block.rerun for block in costs.blocks)
    if can_rerun:
        yield "recompute", _rerun(plain, Action.KEEP)
    if costs.d2h_bytes_per_s:
        if can_rerun:
            yield "offload inputs", _rerun(plain, Action.OFFLOAD)
        yield "offload", _offloaded(plain)
    for preset in ("attention", "matmuls"):
        yield f"keep {preset}", _chosen(plain, frozenset(PRESETS[preset]))


def probe_of(plan: Plan) -> Plan | None:
    """Return a plan that fits and shows whether a simple policy does, which is predicted not to; None: there is none.

    The prediction assumes that a block replays everything, also where it replays less. The probe runs the blocks whose
    prediction exceeds the budget as the policy does. All others drop what they can.
    """
    costs, dropped = plan.costs, _chosen(plan, frozenset())
    segments = zip(costs.timeline, needs(costs, plan), strict=True)
    in_doubt = {segment.running for segment, nbytes in segments if nbytes > plan.budget_bytes}
    if -1 in in_doubt or any(offloaded_bytes(plan)) or any(plan.rerun):
        return None
    if not all(costs.blocks[block].is_recorded(plan.actions[block]) for block in in_doubt):
        return None
    actions = [dict((plan if block in in_doubt else dropped).actions[block]) for block in range(len(costs.stack))]
    probe = _predicted(plan, actions)
    return probe if probe.peak_bytes <= plan.budget_bytes else None


def _operator(place: str) -> str:
    """Return the operator of a place, without its overload."""
    return place.rpartition("::")[2].rpartition("#")[0].rpartition(".")[0]


def _chosen(plain: Plan, operators: frozenset[str]) -> Plan:
    """Keep the values of some operators, and recompute the others that can be recomputed."""

    def action(value: Value) -> Action:
        is_kept = _operator(value.name) in operators or not value.replayable
        return Action.KEEP if is_kept else Action.RECOMPUTE

    return _predicted(plain, [{value.name: action(value) for value in block.values} for block in plain.costs.blocks])


def _rerun(plain: Plan, inputs: Action) -> Plan:
    def action(block: BlockClass, value: Value) -> Action:
        if not block.rerun:
            return Action.KEEP
        if value.name != BLOCK_INPUT:
            return Action.RECOMPUTE
        return inputs if value.offloadable else Action.KEEP

    blocks = plain.costs.blocks
    actions = [{value.name: action(block, value) for value in block.values} for block in blocks]
    return _predicted(plain, actions, tuple(block.rerun for block in blocks))


def _offloaded(plain: Plan) -> Plan:
    def action(value: Value) -> Action:
        if not value.needed:
            return Action.RECOMPUTE
        return Action.OFFLOAD if value.offloadable else Action.KEEP

    return _predicted(plain, [{value.name: action(value) for value in block.values} for block in plain.costs.blocks])


def _predicted(plain: Plan, actions: list[dict[str, Action]], rerun: tuple[bool, ...] | None = None) -> Plan:
    plan = dataclasses.replace(plain, actions=tuple(actions), rerun=rerun or plain.rerun)
    costs, largest_bytes = plan.costs, max(offloaded_bytes(plan))
    plan = dataclasses.replace(plan, max_inflight=math.ceil(largest_bytes))  # backward reads one block ahead
    simulated = simulate(with_drained(costs) if largest_bytes else costs, plan)
    return with_windows(
        dataclasses.replace(
            plan,
            recompute_seconds=simulated.recompute_seconds,
            write_wait_seconds=simulated.write_wait_seconds,
            read_wait_seconds=simulated.read_wait_seconds,
            bound_seconds=0.0,
            peak_bytes=simulated.peak_bytes,
        )
    )
