"""Offloading a value takes time beside its copies: many small ones cost more than one large one."""

from typing import Any

import pytest

from actckpt import Action
from actckpt.planner import CostTable, simulate, solve


def _table(offload_s: float, **changes: Any) -> dict[str, Any]:
    """Return a stack that must let go of thirty bytes: of three small values, or of one large one."""
    small = [{"name": f"small{i}", "bytes": 10, "replayable": False, "offload_s": offload_s} for i in range(3)]
    large = {"name": "large", "bytes": 30, "replayable": False, "offload_s": 1.5}
    block = {"forward_s": 10, "backward_s": 20, "working_set_bytes": 60, "values": [*small, large], **changes}
    head = {"forward_s": 10, "backward_s": 20, "working_set_bytes": 60}
    rates = {"d2h_bytes_per_s": 100.0, "h2d_bytes_per_s": 100.0}
    return {"version": 1, "classes": {"block": block, "head": head}, "stack": ["block", "head"], **rates}


def _offloaded(table: dict[str, Any]) -> tuple[float, set[str]]:
    plan = solve(table, budget=90)
    played = simulate(table, plan)
    assert played.recompute_seconds == plan.recompute_seconds
    assert played.overhead_seconds == pytest.approx(plan.overhead_seconds)
    return plan.overhead_seconds, {name for name, action in plan.actions[0].items() if action is Action.OFFLOAD}


def test_what_is_offloaded_is_what_takes_least_in_all() -> None:
    overhead, offloaded = _offloaded(_table(0.25))
    assert offloaded == {"small0", "small1", "small2"} and overhead == pytest.approx(0.75 + 0.3)
    overhead, offloaded = _offloaded(_table(0.75))
    assert offloaded == {"large"} and overhead == pytest.approx(1.5 + 0.3)


@pytest.mark.parametrize(("offload_s", "wait_s"), [(0.0, 0.6), (0.1, 0.5), (1.5, 0.3)])
def test_copies_go_on_in_that_time(offload_s: float, wait_s: float) -> None:
    """What comes back for the first block is read while the second one takes longer."""
    table = _table(0.0, backward_s=0)
    table["stack"], table["classes"]["head"]["backward_s"] = ["block", "block", "head"], 0
    table["classes"]["block"]["values"][-1]["offload_s"] = offload_s
    plan = solve(table, budget=150, pins={("block", "large"): "offload"})
    assert plan.read_wait_seconds == pytest.approx(wait_s)
    assert simulate(table, plan).read_wait_seconds == pytest.approx(wait_s)


def test_a_block_that_runs_again_offloads_its_input_at_the_same_cost() -> None:
    values = [
        {"name": "x0", "bytes": 30, "offload_s": 2.0},
        {"name": "up", "bytes": 60, "replayable": False, "offload_s": 50.0},
    ]
    table = _table(0.0, values=values, rerun=True, rerun_s=5.0, working_set_bytes=90)
    table["classes"]["head"]["working_set_bytes"] = 90
    plan = solve(table, budget=90)
    assert plan.rerun[0] and plan.actions[0]["x0"] is Action.OFFLOAD
    assert plan.recompute_seconds == simulate(table, plan).recompute_seconds == 7.0


def test_explain_says_what_offloading_takes() -> None:
    text = solve(_table(0.25), budget=90).explain()
    assert "750.00 ms computing again and offloading" in text
    assert "Offloaded: small0 of 'block' in 1 of 1 blocks (10 B out and back, 250.00 ms beside the copies)" in text
    assert "beside the copies" not in solve(_table(0.0), budget=90).explain()


def test_tables_say_it() -> None:
    table = _table(0.25)
    assert CostTable.from_dict(CostTable.from_dict(table).to_dict()) == CostTable.from_dict(table)
    with pytest.raises(ValueError, match=r"values\[0\]\.offload_s"):
        solve(_table(-1.0), budget=90)
