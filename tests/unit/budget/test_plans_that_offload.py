"""Plans with and without the links of a cost table: which one counts, and the windows of one that offloads."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import pytest
from oracle import no_collector

from actckpt import Action
from actckpt._budget.offloading import solved, with_windows
from actckpt.errors import PlanInfeasibleError
from actckpt.planner import CostTable, simulate, solve

_NUM_BLOCKS = 8


def _costs(rate: float, **changes: Any) -> CostTable:
    """Return blocks of 100 bytes that take 1 s to make again and to run forward, and a head."""
    value = {"name": "x", "bytes": 100, "recompute_s": 1.0}
    block = {"forward_s": 1, "backward_s": 2, "working_set_bytes": 150, "values": [value], **changes}
    head = {"forward_s": 1, "backward_s": 2, "working_set_bytes": 50}
    rates = {"d2h_bytes_per_s": rate, "h2d_bytes_per_s": rate} if rate else {}
    stack = ["block"] * _NUM_BLOCKS + ["head"]
    return CostTable.from_dict({"version": 1, "classes": {"block": block, "head": head}, "stack": stack, **rates})


def test_a_link_that_keeps_up_is_used_and_the_plan_has_its_windows() -> None:
    plan = solved(_costs(50.0), 600.0, None)
    assert plan.overhead_seconds < solve(_costs(0.0), budget=600.0).overhead_seconds
    moved = [actions["x"] is Action.OFFLOAD for actions in plan.actions if actions]
    assert any(moved)
    assert plan.windows is not None and len(plan.windows) == _NUM_BLOCKS + 1
    for index, each in enumerate(simulate(plan.costs, plan).inflight[:-1]):
        own = 100 * moved[index]
        leaves_meanwhile = 50  # in 1 s
        assert plan.windows[index].out_bytes == pytest.approx(each.out_bytes + leaves_meanwhile + own, abs=1)
        assert plan.windows[index].back_bytes == pytest.approx(each.ahead_bytes + own, abs=1)
        if index:
            assert plan.windows[index - 1].left_bytes == pytest.approx(each.out_bytes + leaves_meanwhile, abs=1)


def test_the_windows_leave_the_room_that_each_block_needs() -> None:
    plan = solved(_costs(50.0), 600.0, None)
    assert plan.windows is not None
    kept = 0.0
    for index, actions in enumerate(plan.actions[:-1]):
        if index:
            assert kept + 150 + plan.windows[index - 1].left_bytes <= 600 + 1, "when its forward begins"
        kept += 100 * (actions["x"] is Action.KEEP)


def test_a_link_that_does_not_pay_is_left_alone_and_stays_known() -> None:
    plan = solved(_costs(0.01), 600.0, None)
    assert plan.windows is None and plan.overhead_seconds == solve(_costs(0.0), budget=600.0).overhead_seconds
    assert plan.costs == _costs(0.01)
    assert with_windows(plan) is plan


def test_what_is_pinned_to_stay_is_not_made_again_by_a_rerun() -> None:
    costs = _costs(0.0, rerun=True, values=[{"name": "x", "bytes": 100, "replayable": False}])
    assert any(solved(costs, 600.0, None).rerun)
    pinned = solved(costs, 2000.0, {"x": "keep"})
    assert not any(pinned.rerun)
    with pytest.raises(PlanInfeasibleError):
        solved(costs, 600.0, {"x": "keep"})


class _Held:
    """Stands for an object that the caller holds while the error is raised."""


def test_the_error_says_the_smaller_budget() -> None:
    with pytest.raises(PlanInfeasibleError) as raised:
        solved(_costs(50.0), 10.0, None)
    smallest = raised.value.smallest_bytes
    assert smallest is not None
    solved(_costs(50.0), smallest, None)
    with pytest.raises(PlanInfeasibleError):
        solved(_costs(50.0), smallest - 1, None)


@pytest.mark.parametrize(
    ("budget", "changes"),
    [(10.0, {}), (600.0, {"values": [{"name": "x", "bytes": 100, "replayable": False}]})],
    ids=["nothing fits", "a plan fits with the link only"],
)
def test_errors_hold_no_frame(budget: float, changes: dict[str, Any]) -> None:
    """Else they would hold the frames of the model."""
    with pytest.raises(PlanInfeasibleError):
        solve(_costs(0.0, **changes), budget=budget)

    def ask() -> weakref.ref[_Held]:
        held = _Held()
        with suppress(PlanInfeasibleError):
            solved(_costs(50.0, **changes), budget, None)
        return weakref.ref(held)

    with no_collector():
        assert ask()() is None
