"""The budget that an error names is one that there is a plan for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from actckpt._budget import fitting
from actckpt._budget.turns import entries_of
from actckpt.errors import PlanInfeasibleError
from actckpt.planner import CostTable, Plan

_VALUES = [
    {"name": "x0", "bytes": 10},
    {"name": "a", "bytes": 10, "recompute_s": 0.5, "inputs": ["x0"]},
    {"name": "b", "bytes": 10, "recompute_s": 0.5, "inputs": ["x0"]},
]
_BLOCK = {"forward_s": 1.0, "backward_s": 2.0, "working_set_bytes": 50, "values": _VALUES}
_COSTS = CostTable.from_dict({"version": 1, "classes": {"block": _BLOCK}, "stack": ["block"] * 3})


def _num_dropped(plan: Plan) -> int:
    return sum(action.name == "RECOMPUTE" for each in plan.actions for action in each.values())


def test_the_peak_of_the_smallest_plan_is_a_budget_though_changed_working_sets_lead_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the plan of changed working sets drops fewer values; in programs it may be any that is predicted alike."""
    smallest_plan, seen = fitting.smallest_plan, []

    def smallest(costs: CostTable, budget_bytes: float, pins: Any) -> Plan:
        plan = smallest_plan(costs, budget_bytes, pins)
        if costs.classes["block"].working_set_bytes == 50:
            seen.append(plan)
            return plan
        return fitting.solve(costs, budget=budget_bytes + 100, pins=pins)

    def peak_of(plan: Plan) -> float:
        return 120.0 if _num_dropped(plan) == max(map(_num_dropped, seen), default=-1) else 150.0

    monkeypatch.setattr(fitting, "smallest_plan", smallest)
    with pytest.raises(PlanInfeasibleError) as caught:
        fitting.fitted(_COSTS, 1.0, None, peak_of, [])
    keeps_all = fitting.solve(_COSTS, budget=1000.0)
    plan = fitting.fitted(_COSTS, 120.0, None, peak_of, [keeps_all])
    assert plan.peak_bytes == caught.value.smallest_bytes == 120.0


def test_the_bound_of_a_plan_is_one_for_its_own_costs() -> None:
    """Plans that drop less are predicted to fit by what the one that fits showed, and do not."""
    least = fitting.solve(_COSTS, budget=90.0)

    def peak_of(plan: Plan) -> float:
        return plan.peak_bytes - 30.0 if _num_dropped(plan) >= _num_dropped(least) else 1000.0

    plan = fitting.fitted(_COSTS, 90.0, None, peak_of, [])
    better = fitting.solve(plan.costs, budget=90.0)
    assert plan.actions == least.actions and plan.peak_bytes <= 60.0
    assert plan.bound_seconds == better.bound_seconds < plan.overhead_seconds
    assert " is predicted to add less than " in plan.explain()


def test_plans_that_race_have_the_bound_of_all() -> None:
    values = [{**value, "recompute_s": 0.01} if "inputs" in value else value for value in _VALUES]
    table = {"version": 1, "classes": {"block": {**_BLOCK, "values": values}}, "stack": ["block"] * 3}
    plan = dataclasses.replace(fitting.solve(table, budget=90.0), blocks=("a", "b", "c"), places=({}, {}, {}))
    entries = [each for _, each in entries_of(plan, 100.0, torch.device("cpu"))]
    assert len(entries) > 1 and plan.bound_seconds > 0.0
    assert all(each.bound_seconds == plan.bound_seconds for each in entries if each.overhead_seconds)
