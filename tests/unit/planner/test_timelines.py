"""Cycles of several forwards and backwards in any order, against every plan of them, tried."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest

from actckpt import Action
from actckpt.planner import (
    BlockClass,
    CostTable,
    Plan,
    PlanInfeasibleError,
    Segment,
    Value,
    simulate,
    solve,
)
from actckpt.planner.simulation import needs


def _random_costs(seed: int, *, links: bool) -> CostTable:
    """Return a cycle of two forwards of two entries each, whose backwards come in one of three orders."""
    rng = random.Random(seed)
    values = (
        Value("x0", rng.randint(0, 3), replayable=False),
        Value("v", rng.randint(1, 9), rng.choice([0.25, 1.0]), ("x0",)),
        Value("w", rng.randint(1, 9), rng.choice([0.5, 2.0]), ("v",), needed=rng.random() < 0.8),
    )
    block = BlockClass(1.0, 2.0, 0.0, values=values, rerun=rng.random() < 0.6, recording_s=rng.choice([0.0, 0.25]))
    forwards = [(index, True) for index in range(4)]
    orders = {
        "LIFO": [*forwards, *((index, False) for index in (3, 2, 1, 0))],
        "FIFO": [*forwards, *((index, False) for index in (1, 0, 3, 2))],
        "1F1B": [*forwards[:2], *((index, False) for index in (1, 0)), *forwards[2:], (3, False), (2, False)],
    }
    segments: list[Segment] = []
    alive: list[int] = []
    for index, is_forward in orders[rng.choice(list(orders))]:
        alive = [each for each in alive if each != index]
        plain = rng.randint(5, 14)
        replay, rerun = (plain + rng.randint(-3, 3) * (not is_forward) for _ in range(2))
        segments.append(
            Segment(
                running=index,
                is_forward=is_forward,
                alive=tuple(alive),
                plain_bytes=plain,
                replay_bytes=replay,
                rerun_bytes=rerun,
                kept_limit_bytes=rng.choice([0, 4, math.inf]),
            )
        )
        alive += [index] * is_forward
        if rng.random() < 0.5:
            segments.append(Segment(alive=tuple(alive), plain_bytes=rng.randint(3, 12), seconds=1.0))
    rate = rng.choice([2.0, 8.0]) * links
    return CostTable({"a": block}, ("a",) * 4, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, segments=tuple(segments))


def _ways(block: BlockClass) -> list[tuple[tuple[Action, ...], bool, float, float, int]]:
    """Return what may be done with a block, without copies: actions, rerun, seconds, kept bytes, and its mode."""
    found = []
    for actions in itertools.product((Action.KEEP, Action.RECOMPUTE), repeat=3):
        kept = dict(zip((value.name for value in block.values), actions, strict=True))
        bytes_kept = sum(value.nbytes for value in block.values if kept[value.name] is Action.KEEP)
        if kept["x0"] is not Action.KEEP:
            continue
        wanted = {value.name for value in block.values if value.needed and kept[value.name] is not Action.KEEP}
        again = wanted | ({"v"} if "w" in wanted and kept["v"] is not Action.KEEP else set())
        seconds = sum(value.recompute_s for value in block.values if value.name in again)
        found.append((actions, False, seconds + block.recording_s * bool(wanted), bytes_kept, int(bool(wanted))))
        if block.rerun:
            found.append((actions, True, block.forward_s, bytes_kept, 2))
    return found


def _all_plans(costs: CostTable) -> list[tuple[float, float]]:
    """Return the seconds and the peak of every plan without copies."""
    plans = []
    for chosen in itertools.product(_ways(costs.blocks[0]), repeat=4):
        most = -math.inf
        for segment in costs.timeline:
            nbytes = sum(chosen[index][3] for index in segment.alive)
            mode = chosen[segment.running][4] if segment.running >= 0 else 0
            nbytes += (segment.plain_bytes, segment.replay_bytes, segment.rerun_bytes)[mode] or 0
            if segment.is_forward:
                nbytes += min(chosen[segment.running][3], segment.kept_limit_bytes)
            most = max(most, nbytes)
        plans.append((sum(each[2] for each in chosen), most))
    return plans


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_a_cycle_is_faster(seed: int) -> None:
    costs = _random_costs(seed, links=False)
    plans = _all_plans(costs)
    least, plain = min(peak for _, peak in plans), max(peak for _, peak in plans)
    for budget in (least, *(least + (plain - least) * share // 4 for share in (1, 2, 3)), plain):
        plan = solve(costs, budget=budget)
        assert plan.overhead_seconds == pytest.approx(min(seconds for seconds, peak in plans if peak <= budget))
        assert plan.bound_seconds == pytest.approx(plan.overhead_seconds)
        step = simulate(costs, plan)
        assert step.fits and max(needs(costs, plan)) == step.peak_bytes == plan.peak_bytes <= budget
    with pytest.raises(PlanInfeasibleError) as caught:
        solve(costs, budget=least - 1)
    assert caught.value.smallest_bytes == least


@pytest.mark.parametrize("seed", range(12))
def test_offloading_in_a_cycle_never_costs_time_and_fits(seed: int) -> None:
    without, costs = (_random_costs(seed, links=links) for links in (False, True))
    for share in (2, 3):
        least = min(peak for _, peak in _all_plans(without))
        plain = solve(without, budget=10**6)
        budget = least + (plain.peak_bytes - least) * share // 4
        plan = solve(costs, budget=budget)
        step = simulate(costs, plan)
        assert step.fits and step.peak_bytes <= budget
        assert step.overhead_seconds == pytest.approx(plan.overhead_seconds)
        assert (
            plan.bound_seconds - 1e-6 <= plan.overhead_seconds <= solve(without, budget=budget).overhead_seconds + 1e-6
        )
    try:
        smallest = solve(costs, budget=0).peak_bytes
    except PlanInfeasibleError as error:
        assert error.smallest_bytes is not None
        smallest = error.smallest_bytes
    assert smallest <= least
    assert solve(costs, budget=smallest).peak_bytes <= smallest


def test_all_is_out_before_a_backward_and_what_comes_back_was_out() -> None:
    value = Value("x0", 10, replayable=False)
    block = BlockClass(1.0, 1.0, 0.0, values=(value,))
    one = lambda index: [((index, True), ()), ((-1, False), (index,)), ((index, False), ())]  # noqa: E731
    runs = [*one(0), *one(1)]
    segments = tuple(
        Segment(running=index, is_forward=forward, alive=alive, plain_bytes=5, kept_limit_bytes=0, seconds=1.0)
        for (index, forward), alive in runs
    )
    costs = CostTable({"a": block}, ("a",) * 2, d2h_bytes_per_s=5, h2d_bytes_per_s=5, segments=segments)
    plan = solve(costs, budget=5)
    assert [actions["x0"] for actions in plan.actions] == [Action.OFFLOAD] * 2
    # Each waits a second for the other half of its copy out, and two for its copy back.
    assert plan.write_wait_seconds == pytest.approx(2.0) and plan.read_wait_seconds == pytest.approx(4.0)
    assert plan.bound_seconds == pytest.approx(6.0)
    assert needs(costs, plan) == pytest.approx([5] * 6)


def test_a_timeline_goes_through_a_file() -> None:
    costs = _random_costs(1, links=True)
    assert CostTable.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    plan = solve(costs, budget=10**6)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.explain() and plan.table()
    assert dataclasses.replace(costs, segments=None).timeline[0].is_forward
