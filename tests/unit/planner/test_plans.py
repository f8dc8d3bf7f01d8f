"""Plans written, read and put into words."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actckpt import Action, __version__, cli
from actckpt.errors import CostTableError
from actckpt.planner import CostTable, Plan, PlanInfeasibleError, simulate, solve
from actckpt.planner.plans import Raced


def test_a_plan_survives_the_way_through_its_file(table: dict[str, Any], tmp_path: Path) -> None:
    plan = solve(table, budget=60, pins={("attention", "out"): "recompute", (1, "x0"): "keep", "qkv": "recompute"})
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.version == __version__
    assert loaded.actions[0]["out"] is Action.RECOMPUTE
    assert simulate(loaded.costs, loaded) == simulate(table, plan)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["overhead_seconds"] == plan.overhead_seconds and written["plan_version"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": [{"x0": "kep"}]}, "'kep' is not a valid Action"),
        ({"actions": 3}, "plan.actions is 3. It must be a list"),
        ({"actions": [{}]}, "it has 1 entries in 'actions', and its costs have a stack of 3"),
        ({"actions": [{"x": "keep"}] * 3}, "of block 0 'costs' know 'out' alone"),
        ({"blocks": ["a"]}, "it has 1 entries in 'blocks'"),
        ({"blocks": [1, 2, 3]}, "plan.blocks[0] is 1. It must be a text"),
        ({"rerun": 1}, "plan.rerun is 1. It must be a list"),
        ({"rerun": [0] * 3}, "plan.rerun[0] is 0. It must be true or false"),
        ({"places": ["ab"]}, "plan.places[0] is a str. It must be a table"),
        ({"windows": [[1]]}, "plan.windows[0] has 1 entries. It must have 3"),
        ({"windows": [[-1, 0, 0]] * 3}, "plan.windows[0][0] is -1. It must be a number from 0 on"),
        ({"race": [{"nam": 1}]}, "plan.race[0] has an unknown field 'nam'. Known: name"),
        ({"race": [{"name": "plan", "peak_bytes": "1", "fits": True}]}, "plan.race[0].peak_bytes is '1'. It must be"),
        ({"pins": [1]}, "plan.pins[0] is 1. It must be a list"),
        ({"budget_bytes": "24GiB"}, "plan.budget_bytes is '24GiB'. It must be a number of bytes"),
        ({"budget_bytes": float("nan")}, "plan.budget_bytes is nan. It must be a number of bytes from 0 on"),
        ({"peak_bytes": -1}, "plan.peak_bytes is -1. It must be a number of bytes from 0 on"),
        ({"max_inflight": [1]}, "plan.max_inflight is [1]. It must be a whole number"),
        ({"model": -1}, "plan.model is a int. It must be a table"),
        ({"model": {"type": 3}}, "plan.model.type is 3. It must be a text"),
        ({"model": {"type": "M", "torch": "2", "blocks": {"a": 3}}}, "plan.model.blocks.a is 3. It must be a list"),
        (
            {"model": {"type": "M", "torch": "2", "parameters": {"a": [[-1], "float32", True]}}},
            "plan.model.parameters.a[0][0] is -1",
        ),
        ({"chosen": 3}, "plan.chosen is 3. It must be a text"),
        ({"version": 3}, "plan.version is 3. It must be a text"),
        ({"costs": {}}, "cost table has no field 'version'"),
    ],
)
def test_a_plan_that_was_changed_says_where(
    table: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    written = {**solve(table, budget=60).to_dict(), **change}
    message = f"This plan makes no sense: {re.escape(message)}.*Make the plan again"
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(written)
    (tmp_path / "plan.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=rf"plan\.json: {message}"):
        Plan.load(tmp_path / "plan.json")


def test_what_is_no_plan_is_refused(table: dict[str, Any], tmp_path: Path) -> None:
    written = solve(table, budget=60).to_dict()
    old = r"This plan is of version 7, made by actckpt .*; actckpt .* reads version 2\. Make it again\."
    for content, message in (
        ({**written, "plan_version": 7}, old),
        ({key: written[key] for key in written.keys() - {"plan_version"}}, "This is no plan: it has no plan_version"),
        ({key: written[key] for key in written.keys() - {"actions"}}, "no sense: plan has no field 'actions'"),
        (table, r"It is a table of costs: actckpt\.planner\.solve\(costs, budget=\.\.\.\)"),
        ([], "This is no plan"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan.from_dict(content)  # type: ignore[arg-type]
    for path, words in (({}, r"a dict is no path\. .*: Plan\.from_dict\(\.\.\.\)\.$"), (None, "a NoneType is no path")):
        with pytest.raises(TypeError, match=rf"^Plan\.load: {words}"):
            Plan.load(path)  # type: ignore[arg-type]
    (tmp_path / "plan.json").write_text("plan")
    with pytest.raises(ValueError, match=r"plan\.json is no JSON: .* Pass a file that `Plan\.save` wrote\."):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("content", ["DEEP", '{"plan_version": 2, "blocks": DEEP}', '{"classes": {"a": DEEP}}'])
def test_a_file_that_is_nested_too_deep_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.json"
    path.write_text(content.replace("DEEP", "[" * 100_000 + "]" * 100_000))
    with pytest.raises(ValueError, match=r"deep\.json is no plan: it is nested too deep\. Pass a file"):
        Plan.load(path)
    with pytest.raises(CostTableError, match=r"deep\.json is no cost table: it is nested too deep\. See"):
        CostTable.from_json(path)
    for command in ("plan", "explain"):
        with pytest.raises(SystemExit):
            cli.main([command, str(path)])
        assert "it is nested too deep" in capsys.readouterr().err


def test_explain_says_what_sets_the_peak_and_what_more_would_buy(llama: SimpleNamespace) -> None:
    table = {**llama.shape_8b(), "fixed_bytes": 3 * 2**30}
    plan = solve(table, budget=12 * 2**30)
    lines = plan.explain().splitlines()
    assert lines[0].startswith("Budget 12.00 GiB: forward and backward are predicted to take ")
    assert "computing again" in lines[0]
    assert f"No plan for this budget is predicted to add less than {1000 * plan.bound_seconds:.2f} ms (" in lines[0]
    assert "leaves" not in lines[0]
    assert lines[1].startswith("Peak 12.00 GiB, in backward of block 31 of 32 ('block'): 1.28 GiB its working set")
    assert "3.00 GiB fixed" in lines[1] and "kept by blocks" in lines[1]
    offloaded = [sum(action is Action.OFFLOAD for action in actions.values()) for actions in plan.actions]
    where = f"{sum(offloaded)} values in {sum(map(bool, offloaded))} blocks 'block' ("
    assert lines[2].startswith(f"Offloaded: {where}") and len(lines) == 6
    assert lines[3].startswith("Recomputed: ")
    more, less = (solve(table, budget=(12 + change) * 2**30) for change in (1, -1))
    saved, lost = plan.overhead_seconds - more.overhead_seconds, less.overhead_seconds - plan.overhead_seconds
    assert lines[-2].startswith(f"1.00 GiB more would save {1000 * saved:.2f} ms (")
    assert lines[-2].endswith("): that plan has a peak of 13.00 GiB.")
    assert lines[-1].startswith(f"1.00 GiB less would cost {1000 * lost:.2f} ms (")


def test_explain_where_nothing_is_dropped_and_at_the_smallest_budget(llama: SimpleNamespace) -> None:
    table = llama.shape_8b()
    lines = solve(table, budget=10**12).explain().splitlines()
    assert lines[0].endswith("no longer than with everything kept.")
    assert len(lines) == 3 and lines[2] == "1.00 GiB less would cost no time."
    text = solve(table, budget=table["classes"]["block"]["working_set_bytes"]).explain()
    assert "computing again" in text and "waiting for copies back" in text
    assert text.endswith("131.30 MiB less would not do: the smallest budget is 1.28 GiB.")


def test_explain_says_what_is_left_of_a_budget_and_that_none_that_uses_it_is_faster() -> None:
    values = [{"name": "x0", "bytes": 10}, {"name": "a", "bytes": 30, "recompute_s": 0.5, "inputs": ["x0"]}]
    block = {"forward_s": 1.0, "backward_s": 2.0, "working_set_bytes": 50, "values": values}
    plan = solve({"version": 1, "classes": {"block": block}, "stack": ["block"] * 4}, budget=100)
    assert plan.overhead_seconds == plan.bound_seconds > 0.0 and plan.peak_bytes == 80
    lines = plan.explain().splitlines()
    assert lines[0].endswith("No plan for this budget is predicted to be faster, even one that uses the 20 B left.")
    assert lines[-2:] == [
        "10 B more would save 500.00 ms (4.17 %): that plan has a peak of 110 B.",
        "10 B less would cost no time.",
    ]
    lines = dataclasses.replace(plan, budget_bytes=90.0).explain().splitlines()
    assert lines[-2] == "9 B more would save no time."


def _blocks(num_blocks: int, **changes: Any) -> dict[str, Any]:
    """Return blocks that keep 21 bytes and can make 20 of them again in two seconds."""
    values = [
        {"name": "x0", "bytes": 1, "offloadable": False},
        {"name": "up", "bytes": 10, "recompute_s": 1, "inputs": ["x0"]},
        {"name": "gelu", "bytes": 10, "recompute_s": 1, "inputs": ["up"]},
    ]
    block = {"forward_s": 4, "backward_s": 8, "working_set_bytes": 21, "values": values, **changes}
    return {"version": 1, "classes": {"block": block}, "stack": ["block"] * num_blocks}


def _offloaded(offload_s: float) -> dict[str, Any]:
    values = [{"name": f"v{i}", "bytes": 10, "replayable": False, "offload_s": offload_s} for i in range(3)]
    links = {"d2h_bytes_per_s": 100.0, "h2d_bytes_per_s": 100.0}
    return _blocks(2, working_set_bytes=30, values=values) | links


@pytest.mark.parametrize(
    ("costs", "budget", "texts"),
    [
        (_blocks(5, recording_s=5), 85, ["Recorded, to keep some values: 1 blocks 'block': 5.00 s."]),
        (_blocks(3, recompute_bytes=6), 28, ["6 B for what is computed again"]),
        (_blocks(3, gradient_bytes=1) | {"fixed_bytes": 7}, 50, ["gradients made by then", "7 B fixed"]),
        (_offloaded(0.0), 30, ["Offloaded: 3 values in 1 blocks 'block' (30 B out and back)."]),
        (
            _offloaded(0.25),
            30,
            ["750.00 ms computing again and offloading", "(30 B out and back, 750.00 ms beside the copies)."],
        ),
    ],
)
def test_explain_has_what_costs_time_and_memory_and_nothing_of_it_where_all_fits(
    costs: dict[str, Any], budget: float, texts: list[str]
) -> None:
    tight, loose = (solve(costs, budget=each).explain() for each in (budget, 1000))
    assert all(text in tight for text in texts), tight
    assert not any(word in loose for word in ("Recorded", "computed again", "Offloaded", "computing again"))


def test_an_error_has_what_is_needed_to_compute_again() -> None:
    with pytest.raises(PlanInfeasibleError, match="21 B its working set, 6 B for what is computed again, 1 B kept by"):
        solve(_blocks(3, recompute_bytes=6), budget=20)


def test_explain_of_a_plan_that_won_its_trials_does_not_compare_it_with_predictions() -> None:
    plan = solve(_blocks(5), budget=5 * 21 - 20)
    race = (Raced("plan", 1, fits=True, seconds=64.0), Raced("keep a", 1, fits=True, seconds=63.0, ratio=0.98))
    won = dataclasses.replace(plan, race=race, chosen="keep a", bound_seconds=0.0, peak_bytes=plan.peak_bytes - 3)
    assert re.fullmatch(
        r"Budget 85 B: .* take 62\.00 s \(in trials 63\.00 s\), 2\.00 s \(3\.33 %\) more .* Trials chose it\.\n"
        rf"Peak {won.peak_bytes:.0f} B measured; predicted {plan.peak_bytes:.0f} B, in .*\n"
        r"Recomputed: 2 values in 2 blocks 'block' \(20 B, 2\.00 s\)\.\nRaced, .* Fastest: keep a\.",
        won.explain(),
    )


def test_what_a_race_showed_is_printed_in_short() -> None:
    race = (Raced("plan", 2**20, fits=True, seconds=0.002, ratio=1.0), Raced("keep everything", 2**21, fits=False))
    assert (
        repr(race)
        == "(<plan: peak 1.00 MiB, 2.00 ms, 1.00 x the plan>, <keep everything: peak 2.00 MiB, does not fit>)"
    )
