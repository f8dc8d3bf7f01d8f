"""Values that are the input of the next block as well count once: against every plan of small stacks, tried."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import brute_force
import numpy
import pytest
from brute_force import Table

from actckpt import planner


def _random_table(seed: int) -> Table:
    """A small stack of blocks of which the last value may be the input of the next one, of the same size."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9) for _ in range(4)]
    blocks = []
    for index in range(3):
        block = brute_force._random_class(rng, 3)
        block["values"][0].update(bytes=sizes[index], inputs=[])
        block["values"][-1].update(bytes=sizes[index + 1], next_input=rng.random() < 0.8)
        blocks.append(block)
    classes = {f"c{index}": block for index, block in enumerate(blocks)}
    table: Table = {"version": 1, "classes": classes, "stack": list(classes)}
    if rng.random() < 0.5:  # between two blocks, and after them
        classes["outside"] = {"forward_s": 1.0, "backward_s": 1.0, "working_set_bytes": rng.randint(1, 12)}
        table["stack"].insert(rng.randint(1, 3), "outside")
    rates = {"d2h_bytes_per_s": rng.choice([0.5, 1.0, 2.0, 4.0]), "h2d_bytes_per_s": rng.choice([0.5, 1.0, 2.0, 4.0])}
    return table | rates


def _coupled(table: Table) -> Any:
    """Return every plan, as an array (block, plan, 4): what is the next input has no bytes where that stays."""
    blocks = [table["classes"][name] for name in table["stack"]]
    ways: list[list[tuple[dict[str, str], brute_force.Footprint]]] = []
    for index, block in enumerate(blocks):
        names = [value["name"] for value in block.get("values", [])]
        found = []
        for letters in itertools.product("kor", repeat=len(names)):
            pins = dict(zip(names, letters, strict=True))
            last = index == len(blocks) - 1
            for footprint in brute_force.footprints(block, last=last, pins=pins):
                found.append((pins, footprint))
        ways.append(found)
    plans = []
    for chosen in itertools.product(*ways):
        kept = [footprint[0] for _, footprint in chosen]
        for index, block in enumerate(blocks):
            following = next((pins["x0"] for pins, _ in chosen[index + 1 :] if "x0" in pins), None)
            for value in block.get("values", []):
                if value.get("next_input") and following == "k" and chosen[index][0][value["name"]] == "k":
                    kept[index] -= value["bytes"]
        plans.append([(nbytes, *footprint[1:]) for nbytes, (_, footprint) in zip(kept, chosen, strict=True)])
    return numpy.array(plans, float).transpose(1, 0, 2) if plans else numpy.empty((len(blocks), 0, 4))


def _doubled(table: Table) -> Table:
    """The same where both have their bytes, always."""
    plain = json.loads(json.dumps(table))
    for block in plain["classes"].values():
        for value in block.get("values", []):
            value.pop("next_input", None)
    return dict(plain)


def test_plans_are_right_and_nearly_always_the_best() -> None:
    num, num_best, num_better, num_shared = 0, 0, 0, 0
    for seed in range(60):
        table = _random_table(seed)
        plans = _coupled(table)
        most = planner.solve(table, budget=2**40).peak_bytes
        for share in (0.5, 0.7, 0.9, 1.0):
            budget = float(int(share * most))
            best = float(brute_force.overheads(table, budget, plans).min(initial=numpy.inf))
            try:
                plan = planner.solve(table, budget=budget)
            except planner.PlanInfeasibleError as error:
                assert best == numpy.inf or error.smallest_bytes > budget
                num += best < numpy.inf
                continue
            assert best <= plan.overhead_seconds + 1e-6 and plan.bound_seconds <= best + 1e-6
            step = planner.simulate(table, plan)
            assert step.fits and step.peak_bytes == pytest.approx(plan.peak_bytes)
            assert step.overhead_seconds == pytest.approx(plan.overhead_seconds, abs=1e-9)
            num, num_best = num + 1, num_best + (plan.overhead_seconds <= best + 1e-6)
            num_shared += bool(plan.costs.next_inputs)
            try:
                doubled = planner.solve(_doubled(table), budget=budget).overhead_seconds
            except planner.PlanInfeasibleError:
                doubled = numpy.inf
            assert plan.overhead_seconds <= doubled + 1e-6
            num_better += plan.overhead_seconds < doubled - 1e-6
    assert num_shared > 150 and num_better > 50
    assert num_best >= 0.98 * num


def _chain() -> Table:
    """Four blocks that end in a ReLU, and a head."""
    values: list[Table] = [
        {"name": "x0", "bytes": 100},
        {"name": "conv", "bytes": 100, "recompute_s": 3.0, "inputs": ["x0"]},
        {"name": "relu", "bytes": 100, "recompute_s": 0.5, "inputs": ["conv"], "next_input": True},
    ]
    block = {"forward_s": 4.0, "backward_s": 8.0, "working_set_bytes": 400, "values": values}
    head = {"forward_s": 1.0, "backward_s": 1.0, "working_set_bytes": 100}
    return {"version": 1, "classes": {"block": block, "head": head}, "stack": ["block"] * 4 + ["head"]}


def test_what_stays_beside_its_input_is_counted_once() -> None:
    table = _chain()
    links = {"d2h_bytes_per_s": 10.0, "h2d_bytes_per_s": 10.0}
    for costs in (table, table | links):
        plan = planner.solve(costs, budget=2**20)
        # Three blocks keep an input and a convolution, and the fourth one runs backward; the last result has no reader.
        assert plan.overhead_seconds == 0.0 and plan.peak_bytes == planner.simulate(costs, plan).peak_bytes == 1000
        assert "Peak 1000 B, in backward of block 4 of 5 ('head')" in plan.explain()
        assert "900 B kept by the blocks before it" in plan.explain()
        assert planner.solve(costs, budget=1000).overhead_seconds == 0.0
    assert planner.solve(_doubled(table), budget=2**20).peak_bytes == 1300


def test_a_value_counts_where_the_input_that_it_is_goes() -> None:
    table = _chain() | {"d2h_bytes_per_s": 1e6, "h2d_bytes_per_s": 1e6}
    pins: dict[Any, str] = {(index, name): "keep" for index in range(4) for name in ("x0", "conv", "relu")}
    for more, nbytes in (
        ({}, 1000),
        ({(2, "x0"): "offload"}, 1000),
        ({(2, "x0"): "offload", (1, "relu"): "offload"}, 900),
    ):
        plan = planner.solve(table, budget=nbytes, pins={**pins, **more})
        assert plan.peak_bytes == pytest.approx(nbytes)
        assert planner.simulate(table, plan).peak_bytes == pytest.approx(nbytes)
        with pytest.raises(planner.PlanInfeasibleError):
            planner.solve(table, budget=nbytes - 1, pins={**pins, **more})


def test_the_next_input_may_come_after_other_entries_and_must_be_there() -> None:
    table = _chain()
    table["classes"]["between"] = {"forward_s": 0.0, "backward_s": 0.0, "working_set_bytes": 0}
    table["stack"] = ["block", "between", "block", "head", "block", "head"]
    assert planner.CostTable.from_dict(table).next_inputs == {0: 2, 2: 4}
    assert planner.CostTable.from_dict({**table, "stack": ["head", "block"]}).next_inputs == {}


def test_the_field_is_kept_in_files_and_checked() -> None:
    table = planner.CostTable.from_dict(_chain())
    assert planner.CostTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    wrong = _chain()
    wrong["classes"]["block"]["values"][2]["next_input"] = 1
    with pytest.raises(planner.CostTableError, match=r"next_input is 1\. It must be true or false"):
        planner.CostTable.from_dict(wrong)


def test_one_value_is_the_next_input() -> None:
    wrong = _chain()
    wrong["classes"]["block"]["values"][1]["next_input"] = True
    with pytest.raises(planner.CostTableError, match=r"'conv' and 'relu', both of which say next_input: one tensor is"):
        planner.CostTable.from_dict(wrong)
