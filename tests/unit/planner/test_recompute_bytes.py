"""Blocks need more while something of them is computed again: by replays, and by another amount by reruns."""

from typing import Any

import pytest

from actckpt.errors import PlanInfeasibleError
from actckpt.planner import Plan, simulate, solve


def _table(**changes: Any) -> dict[str, Any]:
    values = [
        {"name": "x0", "bytes": 1, "offloadable": False},
        {"name": "up", "bytes": 10, "recompute_s": 1, "inputs": ["x0"]},
        {"name": "gelu", "bytes": 10, "recompute_s": 1, "inputs": ["up"]},
    ]
    block = {"forward_s": 4, "backward_s": 8, "working_set_bytes": 21, "values": values, **changes}
    return {"version": 1, "classes": {"block": block}, "stack": ["block"] * 3}


def _solved(budget: int, **changes: Any) -> Plan:
    table = _table(**changes)
    plan = solve(table, budget=budget)
    played = simulate(table, plan)
    assert played.peak_bytes == plan.peak_bytes <= budget and played.fits
    assert played.overhead_seconds == plan.overhead_seconds == pytest.approx(plan.bound_seconds)
    return plan


def test_what_replays_need_counts_in_the_blocks_that_replay() -> None:
    # Before the third block, which keeps all, two others may hold 22 of their 42 bytes: the first one drops twenty,
    # since the second one would need 21 + 20 beside what the first one holds.
    plan = _solved(21 + 22, recompute_bytes=20)
    assert plan.overhead_seconds == 2.0
    assert [action.value for action in plan.actions[0].values()] == ["keep", "recompute", "recompute"]
    assert set(plan.actions[1].values()) == set(plan.actions[2].values()) == {plan.actions[0]["x0"]}


def test_what_is_kept_needs_no_more() -> None:
    assert _solved(3 * 21, recompute_bytes=1000, rerun_bytes=1000, rerun=True).overhead_seconds == 0.0


def test_the_smallest_budget_has_what_is_computed_again() -> None:
    with pytest.raises(PlanInfeasibleError) as raised:
        solve(_table(recompute_bytes=6), budget=20)
    # All but the last one drop everything: the second one runs beside one byte of the first one.
    assert raised.value.smallest_bytes == 1 + 21 + 6
    assert "21 B its working set, 6 B for what is computed again, 1 B kept by the blocks before it" in str(raised.value)
    plan = _solved(28, recompute_bytes=6)
    assert "6 B for what is computed again" in plan.explain()
    assert solve(_table(), budget=23).peak_bytes == 23


def test_a_rerun_that_needs_less_is_taken_where_replays_do_not_fit() -> None:
    changes = {"recompute_bytes": 6, "rerun_bytes": 2, "rerun": True}
    plan = _solved(1 + 21 + 2, **changes)
    assert plan.rerun == (True, True, False) and plan.overhead_seconds == 8.0
    plan = _solved(21 + 2 + 10, **changes)
    # Where a block holds something, replays get back the rest: then it needs what these do.
    assert plan.peak_bytes <= 33 and plan.overhead_seconds < 8.0


def test_a_block_is_rerun_where_replays_need_too_much_or_take_longer() -> None:
    changes = {"recompute_bytes": 6, "rerun_bytes": 2, "rerun": True}
    assert _solved(1 + 21 + 2, **changes, rerun_s=3).rerun[1]
    assert not any(_solved(1 + 21 + 6, **changes, rerun_s=3).rerun)
    assert any(_solved(1 + 21 + 6, **changes, rerun_s=1).rerun)


@pytest.mark.parametrize("field", ["recompute_bytes", "rerun_bytes"])
def test_these_bytes_are_none_below_zero(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        solve(_table(**{field: -1}), budget=100)
