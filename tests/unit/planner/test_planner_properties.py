"""What must hold of any stack: tried on random small ones, for which plans are optimal."""

import copy
import math
from collections.abc import Callable
from typing import Any

import brute_force
import pytest
from brute_force import Table
from hypothesis import given, settings, strategies as st

from actckpt.planner import PlanInfeasibleError, simulate, solve

_CLOSE = 1e-6
_tables = st.integers(0, 100_000).map(brute_force.random_table)
_budgets = st.integers(8, 60)
_quick = settings(max_examples=25, deadline=None)


def _overhead(table: Table, budget: float, **pins: Any) -> float:
    try:
        return solve(table, budget=budget, **pins).overhead_seconds
    except PlanInfeasibleError:
        return math.inf


def _classes(table: Table, change: Callable[[Table], None]) -> Table:
    table = copy.deepcopy(table)
    for block in table["classes"].values():
        change(block)
    return table


@_quick
@given(_tables, _budgets, st.sampled_from([1e-3, 0.5, 3.0, 1e3]))
def test_scaled_seconds_give_scaled_overhead(table: Table, budget: int, factor: float) -> None:
    def change(block: Table) -> None:
        for key in ("forward_s", "backward_s", *({"recording_s", "rerun_s"} & block.keys())):
            block[key] *= factor
        for value in block.get("values", []):
            for key in {"recompute_s", "offload_s"} & value.keys():
                value[key] *= factor

    scaled = _classes(table, change)
    for key in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
        scaled[key] = table[key] / factor
    assert _overhead(scaled, budget) == pytest.approx(factor * _overhead(table, budget), rel=1e-6, abs=_CLOSE * factor)


@_quick
@given(_tables, _budgets, st.sampled_from([3, 2**20, 10**9]))
def test_scaled_bytes_change_nothing(table: Table, budget: int, factor: int) -> None:
    def change(block: Table) -> None:
        block["working_set_bytes"] *= factor
        for key in {"gradient_bytes", "recompute_bytes", "rerun_bytes"} & block.keys():
            block[key] *= factor
        for value in block.get("values", []):
            value["bytes"] *= factor

    scaled = _classes(table, change)
    for key in [key for key in table if "bytes" in key]:
        scaled[key] = table[key] * factor
    assert _overhead(scaled, budget * factor) == pytest.approx(_overhead(table, budget), abs=_CLOSE)


@_quick
@given(_tables, _budgets, st.randoms(use_true_random=False))
def test_names_mean_nothing(table: Table, budget: int, random: Any) -> None:
    names = [f"n{number}" for number in range(20)]
    random.shuffle(names)
    new = {f"v{number}": names[number] for number in range(10)}

    def change(block: Table) -> None:
        for value in block.get("values", []):
            value["name"] = new.get(value["name"], value["name"])
            value["inputs"] = [new.get(name, name) for name in value["inputs"]]

    renamed = _classes(table, change)
    classes = dict(zip(table["classes"], random.sample(["z", "a", "m", "b"], len(table["classes"])), strict=True))
    renamed["classes"] = {classes[name]: block for name, block in renamed["classes"].items()}
    renamed["stack"] = [classes[name] for name in table["stack"]]
    assert _overhead(renamed, budget) == pytest.approx(_overhead(table, budget), abs=_CLOSE)


@_quick
@given(_tables, _budgets, st.randoms(use_true_random=False))
def test_pins_are_respected_and_the_rest_is_still_the_best(table: Table, budget: int, random: Any) -> None:
    pins: dict[Any, str] = {}
    for index, name in enumerate(table["stack"]):
        for value in table["classes"][name].get("values", []):
            can = ["keep"]
            if value["offloadable"] and index < len(table["stack"]) - 1:
                can.append("offload")
            if value["replayable"] or not value["needed"]:
                can.append("recompute")
            if random.random() < 0.4:
                pins[index, value["name"]] = random.choice(can)
    best = brute_force.best_overhead(table, budget, {key: action[0] for key, action in pins.items()})
    try:
        plan = solve(table, budget=budget, pins=pins)
    except PlanInfeasibleError as error:
        assert error.smallest_bytes is None or error.smallest_bytes > budget
        assert math.isinf(best)
        return
    assert {key: plan.actions[key[0]][key[1]].value for key in pins} == pins
    assert plan.overhead_seconds == pytest.approx(best, abs=_CLOSE)
    step = simulate(table, plan)
    assert step.fits and step.overhead_seconds == pytest.approx(plan.overhead_seconds, abs=1e-9)


def test_a_block_runs_again_where_only_offloading_needs_recording() -> None:
    """A rerun takes less time than recording does, although nothing of the block can be dropped."""
    table = brute_force.random_table(3156)
    pins: dict[Any, str] = {(0, "x0"): "keep", (0, "v1"): "offload"}
    pins |= {(1, "v1"): "keep", (1, "v2"): "keep", (2, "v1"): "keep"}
    best = brute_force.best_overhead(table, 34, {key: action[0] for key, action in pins.items()})
    assert _overhead(table, 34, pins=pins) == pytest.approx(best, abs=_CLOSE)
