"""Plans as tables and pictures, `actckpt plan` of tables of costs, and `actckpt explain`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import actckpt
from actckpt import cli, planner
from actckpt._text.listed import listed
from actckpt._text.sizes import format_seconds
from actckpt._text.tables import aligned
from actckpt.planner import explanation, memory_parts, pictures
from actckpt.planner.pictures import frontier

GIB, MIB = 2**30, 2**20


def _costs() -> dict[str, Any]:
    values = [
        {"name": "x0", "bytes": 64 * MIB},
        {"name": "norm", "bytes": 64 * MIB, "recompute_s": 1e-4, "inputs": ["x0"]},
        {"name": "up", "bytes": 192 * MIB, "recompute_s": 2e-3, "inputs": ["norm"]},
        {"name": "gelu", "bytes": 192 * MIB, "recompute_s": 2e-4, "inputs": ["up"]},
    ]
    block = {"forward_s": 6e-3, "backward_s": 13e-3, "working_set_bytes": 512 * MIB, "values": values}
    head = {"forward_s": 2e-3, "backward_s": 4e-3, "working_set_bytes": 300 * MIB}
    rates = {"d2h_bytes_per_s": 20e9, "h2d_bytes_per_s": 20e9}
    return {"version": 1, "classes": {"block": block, "head": head}, "stack": ["block"] * 8 + ["head"], **rates}


def test_a_table_has_each_value_once_and_every_block_in_one_column() -> None:
    plan = planner.solve(_costs(), budget="2GiB")
    rows = {row[0]: row for row in _columns(plan.table())[1:]}
    assert list(rows) == ["up", "gelu", "x0", "norm"], "largest first"
    for name, row in rows.items():
        assert sorted(number for cell in row[4:7] for number in _numbers(cell)) == list(range(8)), name
    for index in range(8):
        for name, action in plan.actions[index].items():
            column = {"keep": 4, "recompute": 5, "offload": 6}[action.value]
            assert index in _numbers(rows[name][column]), (index, name, action)
    assert "Budget 2.00 GiB" in plan.table()


def _columns(table: str) -> list[list[str]]:
    """Cut lines where the header's columns end: all but two are aligned to the right."""
    lines = table.splitlines()[:-1]
    ends = [0]
    for name in ("value", "of", "each", "in all", "keep", "recompute", "offload", "rerun", "recomputing"):
        ends.append(lines[0].index(name, ends[-1]) + len(name))
    ends[1], ends[2] = lines[0].index("of"), lines[0].index("of") + len("block") + 2
    return [[line[start:end].strip() for start, end in itertools.pairwise(ends)] for line in lines]


def _numbers(cell: str) -> list[int]:
    found = []
    for part in cell.replace(",", " ").split():
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found += range(int(first), int(last or first) + 1)
    return found


def test_blocks_that_run_again_as_a_whole_have_a_column() -> None:
    costs = _costs()
    costs["classes"]["block"]["rerun"] = True
    for value in costs["classes"]["block"]["values"]:
        value["replayable"] = False
    del costs["d2h_bytes_per_s"], costs["h2d_bytes_per_s"]
    plan = planner.solve(costs, budget="2GiB")
    reruns = [index for index, rerun in enumerate(plan.rerun) if rerun]
    assert reruns
    line = next(line for line in _columns(plan.table()) if line[0] == "up")
    assert _numbers(line[7]) == reruns


def test_cells_are_aligned() -> None:
    assert aligned([("a", "bb", "c"), ("aaa", "b", "cc")], left=1) == "a    bb   c\naaa   b  cc"


def test_the_frontier_falls_and_every_plan_fits() -> None:
    costs = planner.CostTable.from_dict(_costs())
    plans = frontier(costs)
    assert plans[-1].overhead_seconds == 0
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(more.overhead_seconds <= less.overhead_seconds for less, more in itertools.pairwise(plans))
    with pytest.raises(planner.PlanInfeasibleError):
        planner.solve(costs, budget=plans[0].budget_bytes - 1)


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    planner.solve(_costs(), budget="2GiB").plot(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert text.startswith("<?xml") and "path" in text


@pytest.mark.parametrize(("factor", "unit"), [(1.0, "GiB"), (2**-10, "MiB")])
def test_axes_are_in_the_unit_of_what_is_drawn(factor: float, unit: str) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    costs = _costs()
    for block in costs["classes"].values():
        block["working_set_bytes"] *= factor
        for value in block.get("values", ()):
            value["bytes"] *= factor
    plan = planner.solve(costs, budget=2 * 2**30 * factor)
    left, right = figure.subplots(1, 2)
    pictures.draw_frontier(left, plan)
    pictures.draw_segments(right, plan)
    assert (left.get_xlabel(), right.get_ylabel()) == (f"Peak ({unit})", f"Most memory ({unit})")
    assert 1.0 < left.get_xlim()[1] < 1024 and 1.0 < right.get_ylim()[1] < 1024


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(_costs()))
    return path


def test_the_command_plans_saves_and_shows_again(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = table.with_name("plan.json")
    assert cli.main(["plan", str(table), "--budget=2GiB", "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    plan = planner.solve(_costs(), budget="2GiB")
    assert plan.table() in shown and plan.explain() in shown
    assert cli.main(["explain", str(saved)]) == 0
    assert capsys.readouterr().out == shown
    assert cli.main(["explain", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.read_text())


def test_a_budget_that_is_too_small_exits_with_2_and_one_that_fits(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(table), "--budget=100MiB"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "smallest budget" in captured.err and captured.err.count("\n") == 1
    assert cli.main(["plan", str(table), *captured.err.rstrip(".\n").split()[-2:]]) == 0


def test_without_matplotlib_one_line_says_what_to_install(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"^A picture needs matplotlib, .* pip install 'actckpt\[plot\]' brings it\.$"
    ):
        planner.solve(_costs(), budget="2GiB").plot(table.with_name("plan.svg"))
    with pytest.raises(SystemExit):
        cli.main(["plan", str(table), "--budget=2GiB", "--plot", str(table.with_name("plan.svg"))])
    assert "pip install 'actckpt[plot]' brings it. See" in capsys.readouterr().err


def _of_a_loop() -> planner.Plan:
    """A plan for twelve calls of two cells, of which the first and the last of each are classes of their own."""
    costs = _costs()
    block = costs["classes"].pop("block")
    for number, kind in enumerate(("first", "inner", "last")):
        costs["classes"][kind] = {
            **block,
            "values": [dict(value) for value in block["values"]],
            "rerun": kind == "last",
        }
        costs["classes"][kind]["values"][2]["recompute_s"] = 2e-3 + number * 1e-4
        costs["classes"][kind]["values"][3]["recompute_s"] = 1e-1
    costs["stack"] = [*(["first"] * 2 + ["inner"] * 8 + ["last"] * 2), "head"]
    del costs["d2h_bytes_per_s"], costs["h2d_bytes_per_s"]
    plan = planner.solve(costs, budget="5GiB")
    return dataclasses.replace(plan, blocks=(*["cells.0", "cells.1"] * 6, None))


def test_all_calls_of_a_block_are_one_line() -> None:
    plan = _of_a_loop()
    names = plan.block_names
    assert names is not None and names[10:12] == ("cells.0@5", "cells.1@5")
    _, *lines = plan.table().splitlines()
    found = {line.split()[0]: line for line in lines}
    assert len(lines) == 4 + 2 and {"gelu", "norm", "up", "x0"} < set(found)
    assert all("cells.0-1, 12 calls" in found[name] for name in ("up", "gelu"))
    assert "192.00 MiB" in found["up"] and "2.25 GiB" in found["up"]
    cells = {}
    for name, action in itertools.product(("x0", "norm", "up", "gelu"), actckpt.Action):
        having = [i for i in range(12) if plan.actions[i][name] is action and not plan.rerun[i]]
        cells[name, action] = listed(names[i] for i in sorted(having, key=lambda i: i % 2))
        assert cells[name, action] in found[name]
    assert cells["up", actckpt.Action.RECOMPUTE] and cells["gelu", actckpt.Action.KEEP]
    recomputed = [i for i in range(12) if plan.actions[i]["up"] is actckpt.Action.RECOMPUTE and not plan.rerun[i]]
    seconds = sum(value.recompute_s for i in recomputed for value in plan.costs.blocks[i].values if value.name == "up")
    assert found["up"].endswith(format_seconds(seconds))
    dropped = [i for i in range(12) if any(a is actckpt.Action.RECOMPUTE for a in plan.actions[i].values())]
    where = ", ".join(listed(names[i] for i in dropped if i % 2 == side) for side in (0, 1))
    assert f"\nRecomputed: 15 values in {where} (" in plan.explain()


def test_reruns_of_all_calls_of_a_block_are_one_line() -> None:
    plan = _of_a_loop()
    reruns = (True,) * 4 + (False,) * 6 + (True,) * 2 + (False,)
    plan = dataclasses.replace(plan, rerun=reruns)
    seconds = sum(plan.costs.blocks[i].rerun_seconds for i in range(12) if reruns[i])
    cells = "cells.0, cells.0@1, 5, cells.1, cells.1@1, 5"
    assert f"Run again as a whole: {cells}: {format_seconds(seconds)}." in "\n".join(explanation._whole_blocks(plan))


def test_calls_of_other_modules_stay_apart() -> None:
    plan = dataclasses.replace(
        _of_a_loop(), blocks=("stem", "cells.1", *["cells.0", "cells.1"] * 4, "last.0", "last.1", None)
    )
    _, *lines = plan.table().splitlines()
    assert [line for line in lines if line.startswith("up ") and "cells.0-1, 8 calls" in line]
    assert len([line for line in lines if line.startswith("up ")]) == 3


@pytest.mark.parametrize("budget", ["1GiB", "2GiB", "8GiB"])
def test_the_parts_of_memory_add_up_to_what_is_simulated_in_each_segment(budget: str) -> None:
    plan = planner.solve(_costs(), budget=budget)
    most = planner.simulate(plan.costs, plan).segment_bytes
    parts = memory_parts.memory_parts(plan)
    assert [sum(each.values()) for each in parts] == pytest.approx(most)
    assert max(most) == pytest.approx(plan.peak_bytes)
    assert all(nbytes >= 0 for each in parts for nbytes in each.values())
    assert all(any(each[what] for each in parts) for what in ("kept by blocks", "its working set"))
