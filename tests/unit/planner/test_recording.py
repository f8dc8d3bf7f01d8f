"""Blocks of which something is dropped are recorded, which takes time once per block."""

from typing import Any

import pytest

from actckpt import Action
from actckpt.planner import simulate, solve


def _table(recording_s: float, **changes: Any) -> dict[str, Any]:
    values = [
        {"name": "x0", "bytes": 1, "offloadable": False},
        {"name": "up", "bytes": 10, "recompute_s": 1, "inputs": ["x0"]},
        {"name": "gelu", "bytes": 10, "recompute_s": 1, "inputs": ["up"]},
    ]
    block = {
        "forward_s": 4,
        "backward_s": 8,
        "working_set_bytes": 21,
        "recording_s": recording_s,
        "values": values,
        **changes,
    }
    return {"version": 1, "classes": {"block": block}, "stack": ["block"] * 5}


def _dropping(recording_s: float, **changes: Any) -> tuple[float, list[int]]:
    """Return the overhead of the plan that must drop twenty bytes, and how many values each block drops."""
    table = _table(recording_s, **changes)
    plan = solve(table, budget=5 * 21 - 20)
    played = simulate(table, plan)
    assert played.recompute_seconds == plan.overhead_seconds == pytest.approx(plan.bound_seconds)
    assert played.peak_bytes == plan.peak_bytes
    return plan.overhead_seconds, [sum(a is Action.RECOMPUTE for a in each.values()) for each in plan.actions]


def test_few_blocks_are_recorded_where_that_takes_long() -> None:
    overhead, dropped = _dropping(0)
    assert overhead == 2.0 and sum(dropped) == 2
    overhead, dropped = _dropping(5)
    assert overhead == 7.0 and sorted(dropped) == [0, 0, 0, 0, 2]


def test_a_block_that_is_run_again_as_a_whole_is_not_recorded() -> None:
    assert _dropping(5, rerun=True)[0] == 4.0
    assert _dropping(1, rerun=True)[0] == 3.0


def test_explain_says_what_recording_takes() -> None:
    table = _table(5)
    text = solve(table, budget=5 * 21 - 20).explain()
    assert "Recorded, so that not all of it is kept: 1 blocks 'block': 5.00 s." in text
    assert "Recorded" not in solve(table, budget=5 * 21).explain()


def test_recording_takes_no_time_below_zero() -> None:
    with pytest.raises(ValueError, match="recording_s"):
        solve(_table(-1), budget=100)
