"""The simulator against steps worked out by hand."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from actckpt import Action
from actckpt.planner import CostTable, Plan, Simulation, simulate, solve

_K, _R, _O = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD


def _table(num_blocks: int = 3, **changes: Any) -> dict[str, Any]:
    """Return blocks of one value of 10 bytes, 1 s forward, 2 s backward, over links of 5 bytes per second."""
    value = {"name": "x", "bytes": 10, "recompute_s": 4}
    block = {"forward_s": 1, "backward_s": 2, "working_set_bytes": 10, "values": [value]}
    rates = {"d2h_bytes_per_s": 5, "h2d_bytes_per_s": 5}
    return {"version": 1, "classes": {"a": block}, "stack": ["a"] * num_blocks, **rates, **changes}


def _simulate(
    table: dict[str, Any], actions: str, budget: float, *, rerun: str = "", window: int = 10**9
) -> Simulation:
    """Play a plan through: per block `k`, `r` or `o` for each of its values."""
    costs = CostTable.from_dict(table)
    by_letter = {"k": _K, "r": _R, "o": _O}
    letters = [by_letter[letter] for letter in actions]
    found = []
    for block in costs.blocks:
        found.append({value.name: letters.pop(0) for value in block.values})
    assert not letters
    names = ("plain_seconds", "recompute_seconds", "write_wait_seconds", "read_wait_seconds", "bound_seconds")
    plan = Plan(
        budget_bytes=budget,
        actions=tuple(found),
        rerun=tuple(letter == "y" for letter in rerun.ljust(len(found), "n")),
        max_inflight=window,
        costs=costs,
        **dict.fromkeys((*names, "peak_bytes"), 0.0),
    )
    return simulate(costs, plan)


def test_copies_that_hide_behind_compute_cost_nothing() -> None:
    step = _simulate(_table(), "okk", budget=20)
    assert step.seconds == 9.0 and step.overhead_seconds == 0.0 and step.fits
    # The first block's copy leaves from its end on; it comes back not beside the last block, which leaves no room.
    assert step.segment_bytes == (10, 15, 20, 20, 20, 10)
    assert step.peak_bytes == 20 == step.segment_bytes[2]
    assert step.host_peak_bytes == 10


def test_what_may_be_on_its_way_is_what_each_block_has_room_for() -> None:
    step = _simulate(_table(), "ook", budget=15)
    assert [each.out_bytes for each in step.inflight] == [0, 5, 0], "everything has left when backward begins"
    assert [each.ahead_bytes for each in step.inflight] == [5, 5, 5]
    assert [each.ahead_bytes for each in _simulate(_table(), "ook", budget=15, window=3).inflight] == [3, 3, 3]
    assert [each.out_bytes for each in _simulate(_table(), "ook", budget=10).inflight] == [0, 0, 0]


def test_a_window_holds_back_copies_in_both_directions() -> None:
    free = _simulate(_table(), "ook", budget=1000)
    assert (free.write_wait_seconds, free.read_wait_seconds) == (2.0, 0.0)
    step = _simulate(_table(), "ook", budget=1000, window=5)
    assert (step.write_wait_seconds, step.read_wait_seconds) == (2.0, 2.0), "5 bytes ahead of each of two blocks"
    assert max(step.segment_bytes) == step.peak_bytes == 15


def test_a_block_that_is_run_again_needs_its_input() -> None:
    table = _table(2)
    block = table["classes"]["a"]
    block["rerun"] = True
    block["values"] = [
        {"name": "x0", "bytes": 3, "recompute_s": 7, "replayable": True},
        {"name": "y", "bytes": 5, "replayable": False},
    ]
    assert _simulate(table, "krkk", budget=100, rerun="yn").recompute_seconds == 1.0
    assert _simulate(table, "rrkk", budget=100, rerun="yn").recompute_seconds == 8.0
    block["values"][0]["replayable"] = False
    with pytest.raises(
        ValueError, match="Block 0 of the plan drops 'x0', which backward needs and nothing can compute again"
    ):
        _simulate(table, "rrkk", budget=100, rerun="yn")


def test_a_plan_of_another_model_is_refused_and_named(llama: SimpleNamespace) -> None:
    plan = solve(llama.shape_8b(4), budget=10**12)
    with pytest.raises(ValueError, match=r"The plan has 4 blocks, the cost table 5: it is of another model\."):
        simulate(llama.shape_8b(5), plan)
    with pytest.raises(ValueError, match=r"Block 0 of the plan is of another model: .*its value"):
        simulate(_table(4), plan)
    missing = dataclasses.replace(plan, actions=({}, *plan.actions[1:]))
    with pytest.raises(
        ValueError, match="Block 0 of the plan is of another model: the plan leaves out its value 'attention'"
    ):
        simulate(llama.shape_8b(4), missing)


def test_a_plan_that_does_not_fit_is_played_through_all_the_same() -> None:
    step = _simulate(_table(host_bytes=6), "okk", budget=1000)
    assert step.excess_bytes == 4 and not step.fits
    step = _simulate(_table(), "kkk", budget=25)
    assert step.excess_bytes == 5 and step.peak_bytes == 30 and step.overhead_seconds == 0.0


@pytest.mark.parametrize(
    ("changes", "actions", "rerun", "message"),
    [
        ({}, "kkk", "nyn", "Block 1 of the plan is run again as a whole, which its class does not allow"),
        ({"d2h_bytes_per_s": 0, "h2d_bytes_per_s": 0}, "okk", "", "offloads values, but the cost table has no d2h_byt"),
    ],
)
def test_a_plan_that_does_what_the_table_does_not_allow_is_refused(
    changes: dict[str, Any], actions: str, rerun: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _simulate(_table(**changes), actions, budget=100, rerun=rerun)
