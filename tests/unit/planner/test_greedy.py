"""Greedy plans, which `solve` falls back to when the search is cut off."""

import itertools
from typing import Any

import brute_force
import pytest

from actckpt.action import Action
from actckpt.planner import CostTable, ladders, solve
from actckpt.planner.costs import BlockClass


def _num_passes(num_values: int, num_blocks: int, patch: pytest.MonkeyPatch) -> int:
    """Return how often the values of a class are walked for a greedy plan that keeps half of a chain."""
    values: list[dict[str, Any]] = [{"name": "x0", "bytes": 10}]
    for number in range(num_values):
        inputs = [values[-1]["name"]]
        values.append({"name": f"v{number}", "bytes": 10, "recompute_s": 1.0, "inputs": inputs})
    block = {"forward_s": 100.0, "backward_s": 200.0, "working_set_bytes": 0, "values": values}
    passes, own = 0, BlockClass.recomputed

    def recomputed(*args: Any, **keywords: Any) -> Any:
        nonlocal passes
        passes += 1
        return own(*args, **keywords)

    with patch.context() as patched:
        patched.setattr(BlockClass, "recomputed", recomputed)
        table = {"version": 1, "classes": {"block": block}, "stack": ["block"] * num_blocks}
        plan = solve(table, budget=10 * num_blocks * (num_values // 2), time_limit_s=0)
    assert plan.overhead_seconds > 0
    return passes


def test_passes_over_a_block_grow_less_than_with_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (_num_passes(num, 2, monkeypatch) for num in (40, 320))
    assert large < 8 * small


def test_blocks_of_one_class_share_a_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[BlockClass] = []
    own = ladders.ladder
    monkeypatch.setattr("actckpt.planner.solving.ladder", lambda block, may: built.append(block) or own(block, may))
    _num_passes(10, 20, monkeypatch)
    assert len(built) == 1


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_steps_save_what_adding_up_all_seconds_says(first: int) -> None:
    for seed in range(first, first + 50):
        for block in CostTable.from_dict(brute_force.random_table(seed)).classes.values():
            may = {value.name: (Action.KEEP, *[Action.RECOMPUTE] * value.replayable) for value in block.values}
            _check_ladder(block, may)


def _check_ladder(block: BlockClass, may: dict[str, tuple[Action, ...]]) -> None:
    """Each way keeps the value that saves most seconds per byte beside those of the way before."""

    def held_bytes(actions: Any) -> float:
        return sum(value.nbytes for value in block.values if actions[value.name] is Action.KEEP)

    ways = ladders.all_ways(block, may, rerun=False)
    for below, above in itertools.pairwise(ways):
        slopes = []
        for name, actions in may.items():
            if Action.RECOMPUTE in actions and below.actions[name] is Action.RECOMPUTE:
                kept = {**below.actions, name: Action.KEEP}
                way = ladders.Way(held_bytes(kept), block.added_seconds(kept, rerun=False), kept, False)
                slopes.append(ladders.slope(below, way))
        assert ladders.slope(below, above) == pytest.approx(min(slopes), abs=1e-9)
