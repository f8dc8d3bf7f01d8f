"""Cost tables read and written, and what cannot be."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import brute_force
import numpy
import pytest

import actckpt
from actckpt.planner import CostTable, CostTableError, Segment, Value, simulate, solve

Table = dict[str, Any]
_PAGE = (Path(__file__).parents[3] / "docs/planning.md").read_text()


def test_a_table_survives_the_way_through_json(table: Table, tmp_path: Path) -> None:
    costs = CostTable.from_dict(table)
    costs.to_json(tmp_path / "costs.json")
    assert CostTable.from_json(tmp_path / "costs.json") == costs == CostTable.from_dict(costs.to_dict())
    assert json.loads((tmp_path / "costs.json").read_text())["version"] == 1
    for drawn in map(CostTable.from_dict, map(brute_force.random_table, range(20))):  # fields that `table` lacks
        assert CostTable.from_dict(drawn.to_dict()) == drawn


def test_fields_are_read_as_they_are_written(table: Table) -> None:
    costs = CostTable.from_dict(table)
    assert costs.stack == ("attention", "attention", "head")
    assert costs.blocks[0].values[1] == Value("qkv", 30, 0.5, ("x0",), needed=False, offloadable=False)
    assert (costs.fixed_bytes, costs.d2h_bytes_per_s, costs.h2d_bytes_per_s, costs.host_bytes) == (7, 4.0, 5.0, 15)
    assert costs.plain_seconds == 8.0


def test_defaults_offload_nothing_and_recompute_no_input() -> None:
    block = {"forward_s": 1, "backward_s": 1, "working_set_bytes": 1, "values": [{"name": "x0", "bytes": 1}]}
    costs = CostTable.from_dict({"version": 1, "classes": {"a": block}, "stack": ["a"]})
    assert costs.d2h_bytes_per_s == costs.h2d_bytes_per_s == costs.fixed_bytes == 0
    assert costs.host_bytes is None
    assert costs.blocks[0].gradient_bytes == 0 and not costs.blocks[0].rerun
    assert costs.blocks[0].values == (Value("x0", 1, replayable=False),)


def test_reruns_take_a_forward_unless_a_table_says_otherwise(table: Table) -> None:
    block = table["classes"]["attention"]
    costs = CostTable.from_dict(table)
    assert costs.blocks[0].rerun_s is None and costs.blocks[0].rerun_seconds == block["forward_s"]
    assert (
        CostTable.from_dict({**table, "classes": {**table["classes"], "attention": {**block, "rerun_s": None}}})
        == costs
    )
    assert "rerun_s" not in costs.to_dict()["classes"]["attention"]
    block["rerun_s"] = 0.5
    costs = CostTable.from_dict(table)
    assert costs.blocks[0].rerun_seconds == 0.5
    assert CostTable.from_dict(costs.to_dict()) == costs


def test_why_there_is_no_rerun_ends_a_sentence_of_explanations(table: Table) -> None:
    block = {**table["classes"]["attention"], "rerun": False, "no_rerun": "it writes to its input"}
    explained = CostTable.from_dict({**table, "classes": {**table["classes"], "attention": block}})
    assert CostTable.from_dict(explained.to_dict()) == explained
    line = "Never run again as a whole: 2 blocks 'attention': it writes to its input."
    least = solve(explained, budget=1e6).peak_bytes
    for budget, is_said in ((least - 1, True), (least, False)):
        plan = solve(explained, budget=budget)
        assert (plan.overhead_seconds > 0) == is_said == (line in plan.explain().splitlines())
    assert "Never run" not in solve(table, budget=least - 1).explain()


def test_a_table_of_before_that_has_no_disk_is_read(table: Table) -> None:
    disk = ("disk_bytes", "disk_write_bytes_per_s", "disk_read_bytes_per_s")
    assert CostTable.from_dict({**table, **dict.fromkeys(disk, 0.0)}) == CostTable.from_dict(table)
    with pytest.raises(CostTableError, match="unknown field 'disk_bytes'"):
        CostTable.from_dict({**table, "disk_bytes": 1})


def test_numbers_of_numpy_are_numbers(table: Table) -> None:
    table["fixed_bytes"], table["d2h_bytes_per_s"] = numpy.int64(7), numpy.float32(4)
    assert CostTable.from_dict(table).to_dict() == CostTable.from_dict({**table, "fixed_bytes": 7}).to_dict()


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostTableError, match="cost table is a list"):
        CostTable.from_dict([])  # type: ignore[arg-type]
    (tmp_path / "costs.json").write_text('{"version": 1,')
    with pytest.raises(CostTableError, match=r"costs\.json is no JSON: .*line 1"):
        CostTable.from_json(tmp_path / "costs.json")
    with pytest.raises(FileNotFoundError):
        CostTable.from_json(tmp_path / "nothing.json")


def test_reading_leaves_the_data_alone(table: Table) -> None:
    before = copy.deepcopy(table)
    plan = solve(table, budget=60)
    assert simulate(table, plan) == simulate(CostTable.from_dict(table), plan)
    assert table == before


def test_the_page_describes_every_field(table: Table) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:required|false|true|none|no limit|the budget|0|-1)", _PAGE, re.MULTILINE)
    costs = CostTable.from_dict(table).to_dict()
    attention = costs["classes"]["attention"]
    segment = {field.name for field in dataclasses.fields(Segment)}
    known = {*costs, *attention, *attention["values"][0], "no_rerun", "input_bytes", "segments", *segment}
    assert set(rows) == known


_A = "classes.attention"
_V = f"{_A}.values"
_VALUES = f"cost table.{_V}"
_GONE = object()
#: A place in a table, what is put there, and what is said of it.
_BAD: list[tuple[str, Any, str]] = [
    ("h2d_bytes_per_s", 0, "d2h_bytes_per_s is 4.0, but h2d_bytes_per_s is 0: nothing could go there and come back"),
    ("d2h_bytes_per_s", 0, "h2d_bytes_per_s is 5.0, but d2h_bytes_per_s is 0"),
    (f"{_V}.1.inputs", ["out"], f"{_VALUES}[1] ('qkv') reads 'out', which does not come before it. Put values in"),
    (f"{_V}.0.inputs", ["other"], f"{_VALUES}[0].inputs[0] is 'other', which is not there"),
    (f"{_V}.2.inputs", ["qvk"], f"{_VALUES}[2].inputs[0] is 'qvk', which is not there. Did you mean 'qkv'?"),
    (f"{_V}.2.name", "x0", f"{_VALUES} has two values named 'x0'"),
    (f"{_V}.0.name", "", f"{_VALUES}[0].name is ''. It must be a text that is not empty."),
    (f"{_V}.0.bytes", -1, f"{_VALUES}[0].bytes is -1. It must be a number of bytes from 0 on."),
    (f"{_V}.0.bytes", 10**400, f"{_VALUES}[0].bytes is 1000"),
    (f"{_V}.0.bytes", "10 MiB", f"{_VALUES}[0].bytes is '10 MiB'. It must be a number of bytes."),
    (f"{_V}.0.needed", 1, f"{_VALUES}[0].needed is 1. It must be true or false."),
    (f"{_V}.1.recompute_s", math.nan, f"{_VALUES}[1].recompute_s is nan. It must be a number of seconds"),
    (f"{_V}.1.recompute_s", _GONE, "[1] has no field 'recompute_s'"),
    (f"{_V}.1.recompute_ms", 3, f"{_VALUES}[1] has an unknown field 'recompute_ms'. Known: name,"),
    (f"{_A}.values", 3, "attention.values is 3. It must be a list."),
    (f"{_A}.values", ["x0"], "attention.values[0] is a str. It must be a table of named fields."),
    (f"{_A}.forward_s", 1e11, "attention.forward_s is 100000000000.0, more than 8.64e+04 seconds. Is it in"),
    (f"{_A}.working_set_bytes", math.inf, "attention.working_set_bytes is inf, more than 1.13e+15 bytes"),
    (f"{_A}.no_rerun", "it counts", "attention.no_rerun says why there is no rerun, and rerun is true. Leave out one"),
    (f"{_A}.no_rerun", "", "attention.no_rerun is ''. It must be a text that is not empty."),
    (f"{_A}.rerun_s", -2, "attention.rerun_s is -2. It must be a number of seconds from 0 on."),
    ("d2h_bytes_per_s", math.inf, "cost table.d2h_bytes_per_s is inf, more than"),
    ("fixed_bytes", True, "cost table.fixed_bytes is True. It must be a number of bytes."),
    ("stack", _GONE, "cost table has no field 'stack'"),
    ("stack", [], "cost table.stack is empty"),
    ("stack", ["attentoin"], "cost table.stack[0] is 'attentoin', which is not there. Did you mean 'att"),
    ("stack", [1], "cost table.stack[0] is 1. It must be a text"),
    ("classes", [], "cost table.classes is a list. It must be a table of named fields."),
    ("version", _GONE, "cost table has no field 'version'"),
    ("version", 2, "cost table.version is 2. This actckpt reads version 1."),
]


@pytest.mark.parametrize(("place", "content", "message"), _BAD, ids=lambda part: part if isinstance(part, str) else "")
def test_what_cannot_be_is_named_in_one_line(table: Table, place: str, content: Any, message: str) -> None:
    *parents, name = place.split(".")
    inside: Any = table
    for parent in parents:
        inside = inside[int(parent) if parent.isdigit() else parent]
    inside[name] = content
    if content is _GONE:
        del inside[name]
    with pytest.raises(CostTableError) as caught:
        CostTable.from_dict(table)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, actckpt.errors.ActckptError)
