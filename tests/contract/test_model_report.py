"""`actckpt.report(model)`: what it says of a step is so, by bytes counted apart, and it changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from oracle import assert_equal, gradients
from torch import Tensor, nn
from transformer_block import Block

import actckpt
from actckpt.memory import LiveStorages

WIDTH = 32


#: Checksums are a few bytes that are no values.
pytestmark = pytest.mark.usefixtures("no_audit")


class Model(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _held(model: nn.Module, batch: int = 2) -> int:
    """Run a step; return what is alive at the end of the forward, without its result."""
    with LiveStorages(parameters=model.parameters()) as live:
        y = model(torch.randn(batch, 16, WIDTH, generator=torch.Generator().manual_seed(1)))
        held = live.live_bytes - y.nbytes
    y.square().sum().backward()
    return held


#: Of each block, what its attention's last matmul makes: others are replayed from it, and autograd does not save it.
_READ = 4 * 2 * 16 * WIDTH * 4


@pytest.mark.parametrize(
    ("policy", "read"),
    [
        (None, 0),
        ("recompute", 0),
        ("matmuls", _READ),
        ("attention", 0),
        ([], 0),
        ({"layers.*.up": "keep", "**.norm1": "keep"}, 0),
    ],
    ids=str,
)
def test_it_has_the_bytes_that_are_held_and_those_of_plain_training(policy: Any, read: int) -> None:
    model = Model()
    plain = _held(model)
    expected = gradients(model)
    model.zero_grad()
    actckpt.apply(model, policy=policy)
    held = _held(model)
    assert_equal(gradients(model), expected)
    found = actckpt.report(model)
    assert (found.kept_bytes, found.plain_bytes, found.offloaded_bytes) == (held, plain, 0)
    assert found.recomputed_bytes == plain - held + read
    assert sum(row.kept_bytes for row in found.rows) == held
    assert sum(row.nbytes for row in found.rows) == plain + read
    assert sum(row.share for row in found.rows) == pytest.approx((plain + read) / plain)
    for _ in range(2):
        model.zero_grad()
        assert _held(model) == held
        assert_equal(gradients(model), expected)
        assert actckpt.report(model).rows == found.rows


def test_offload_that_moves_nothing_says_why_and_what_to_do() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)))
    x = torch.randn(4, 8)

    def said(**options: Any) -> str:
        actckpt.apply(model, policy="offload", **options)
        model(x).sum().backward()
        found = actckpt.report(model)
        actckpt.remove(model)
        assert found.note in str(found)
        return found.note

    nothing = (  # the inputs of each GELU and of two Linears: the program has the first one
        "Nothing was offloaded: all 5 tensors of 640 B in all are smaller than min_bytes=1.00 MiB. They have 128 B on "
        "average; pass less than that: actckpt.apply(model, policy='offload', min_bytes=...)."
    )
    assert said().splitlines()[0] == nothing
    assert "min_bytes" not in said(min_bytes=128)
    assert "smaller than min_bytes=129 B." in said(min_bytes=129)


def test_small_tensors_of_blocks_that_offload_are_told_and_count_once() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(8, 64), torch.nn.Linear(8, 64), torch.nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            return self.c(self.a(x) + self.b(x)).sum(-1, keepdim=True).expand(-1, 8)  # type: ignore[no-any-return]

    model = torch.nn.Sequential(Block(), Block())
    actckpt.apply(model, policy="offload", min_bytes=512)
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    found = actckpt.report(model)
    assert (found.offloaded_bytes, found.kept_bytes) == (2 * 4 * 64 * 4, 2 * 4 * 8 * 4), "both Linears save one input"
    assert found.note.startswith("2 tensors of 256 B in all are smaller than min_bytes=512 B, and stay.\nRecorded")


def test_what_is_offloaded_is_told() -> None:
    model = Model()

    def found(**options: Any) -> actckpt.ModelReport:
        actckpt.apply(model, **options)
        _held(model)
        report = actckpt.report(model)
        actckpt.remove(model)
        return report

    report = found(policy={"**::aten.addmm": "offload"})
    (row,) = [row for row in report.rows if row.name == "aten.addmm.default"]
    assert report.offloaded_bytes == row.offloaded_bytes > 0 == row.kept_bytes
    assert report.kept_bytes < report.plain_bytes
    report = found(policy="offload", min_bytes=8192)
    assert [row.name for row in report.rows] == ["(offload)"]
    assert report.offloaded_bytes > 0 and report.kept_bytes > 0
    report = found(offload_inputs=True)
    assert report.kept_bytes == 0 and report.offloaded_bytes == 4 * 2 * 16 * WIDTH * 4


def test_rows_are_by_operator_module_or_type_with_identical_blocks_as_one_and_the_largest_first() -> None:
    model = Model()
    actckpt.apply(model, policy="matmuls")
    _held(model)
    reports = {kind: actckpt.report(model, group_by=kind) for kind in ("operator", "module", "type")}  # type: ignore[arg-type]
    names = {kind: [row.name for row in found.rows] for kind, found in reports.items()}
    assert {"aten.addmm.default", "aten.gelu.default", "(input)"} < set(names["operator"])
    assert {"layers.0-3", "layers.0-3.up", "layers.0-3.norm1"} < set(names["module"])
    assert set(names["type"]) == {"Linear", "Block", "LayerNorm"}
    for found in reports.values():
        sizes = [row.nbytes for row in found.rows]
        assert sizes == sorted(sizes, reverse=True) and sum(sizes) == found.plain_bytes + _READ
        assert {row.num_blocks for row in found.rows} == {4}
    by_name = {row.name: row for row in reports["operator"].rows}
    assert by_name["aten.gelu.default"].num_replays == by_name["aten.gelu.default"].num_values == 4
    assert by_name["aten.addmm.default"].num_replays == 0
    top = actckpt.report(model, top=2).rows
    assert top[:2] == reports["operator"].rows[:2]
    assert top[2].name == f"({len(names['operator']) - 2} more)"
    assert sum(row.nbytes for row in top) == reports["operator"].plain_bytes + _READ
    text = str(reports["module"])
    assert "4 of 4 blocks ran" in text and "held at the end of the forward: " in text and "layers.0-3.up" in text
    assert reports["module"].as_dict()["rows"][0]["name"] == names["module"][0]


def _modules(model: nn.Module) -> set[str]:
    return {row.name for row in actckpt.report(model, group_by="module").rows}


@pytest.mark.filterwarnings("ignore:apply. 3 of 4 blocks did not run:UserWarning")
def test_names_are_those_of_the_model_by_blocks_that_are_alike_however_it_is_called() -> None:
    def names_of(run: nn.Module) -> set[str]:
        run(x).sum().backward()
        return {row.name for row in actckpt.report(model, group_by="module").rows}

    model, x = Model(), torch.randn(2, 16, WIDTH)
    actckpt.apply(model, policy="matmuls")
    assert {"layers.2", "layers.2.up"} < names_of(model.layers[2])  # a block by itself
    assert {"layers.0-3", "layers.0-3.up"} < names_of(nn.Sequential(nn.Identity(), model))
    actckpt.remove(model)
    model.layers[1].up, model.layers[1].down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
    actckpt.apply(model, policy="matmuls")
    assert {"layers.1.up", "layers.{0, 2-3}.up"} < names_of(model)


def test_where_nothing_was_recorded_the_report_says_why_and_has_no_share() -> None:
    model = Model()
    actckpt.apply(model, policy="keep")
    before = actckpt.report(model)
    assert before.kept_share is None and before.as_dict()["kept_share"] is None
    assert "no block has run yet. Run a step" in str(before)
    _held(model)
    found = actckpt.report(model)
    assert found.kept_share is None and "policy 'keep' leaves everything to autograd" in str(found)
    actckpt.remove(model)
    actckpt.apply(model)
    _held(model)
    found = actckpt.report(model)
    assert found.kept_share == found.kept_bytes / found.plain_bytes
    assert f"{100 * found.kept_share:.0f} % of the" in str(found)


def test_a_block_by_itself_goes_by_the_name_of_its_type() -> None:
    model = Model()
    actckpt.apply(model)
    _held(model)
    block = model.layers[1]
    name = type(block).__name__
    found = actckpt.report(block, group_by="module")
    assert found.blocks_patched == found.blocks_ran == (name,)
    assert name in {row.name for row in found.rows} and all(row.name for row in found.rows)
    assert actckpt.remove(block) == (name,)
    assert len(actckpt.remove(model)) == len(model.layers) - 1


def test_the_first_step_is_recorded_and_the_one_after_each_report() -> None:
    model = Model()
    actckpt.apply(model)
    assert "Nothing was recorded" in str(actckpt.report(copy.deepcopy(model)))
    small, _, large = _held(model), _held(model, batch=6), _held(model, batch=4)
    found = actckpt.report(model)
    assert found.kept_bytes == small and "the first step" in found.note
    _held(model, batch=4)
    _held(model, batch=6)
    found = actckpt.report(model)
    assert found.kept_bytes == large and "the step after the report before" in found.note
    assert actckpt.report(model).rows == found.rows


def test_all_forwards_of_a_step_count_and_those_whose_graph_is_gone_do_not() -> None:
    model = Model()
    actckpt.apply(model)
    x = torch.randn(2, 16, WIDTH)
    for _ in range(3):
        model(x)  # evaluation in grad mode, say
    with torch.no_grad():
        model(x)
    (model(x) + model(x + 1)).sum().backward()
    assert actckpt.report(model).kept_bytes == (1 + 2 * 3 + 1) * x.nbytes
    shared = nn.Sequential(model.layers[0], model.layers[0])
    shared(x).sum().backward()
    assert actckpt.report(model).kept_bytes == 2 * x.nbytes


def test_a_report_keeps_no_bytes_and_a_copy_begins_anew() -> None:
    model = Model()
    actckpt.apply(model, policy="matmuls")
    with LiveStorages(parameters=model.parameters()) as live:
        model(torch.randn(2, 16, WIDTH)).sum().backward()
        assert live.live_bytes == 0
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert actckpt.report(copied).rows == ()
        held = _held(copied)
        assert actckpt.report(copied).kept_bytes == held
    assert actckpt.report(model).rows


def test_a_block_that_raises_leaves_nothing_behind() -> None:
    model = Model()
    actckpt.apply(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 16, WIDTH + 1))
    held = _held(model)
    assert actckpt.report(model).kept_bytes == held


def test_keep_can_be_recorded_and_holds_what_plain_training_does() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"record=True does not go with policy='offload'"):
        actckpt.region("offload", record=True)
    with actckpt.region(record=True) as region:
        y = torch.ones(8, requires_grad=True).exp().sin()
    assert region.report().recomputed_bytes == y.nbytes

    def run(record: bool | None) -> tuple[int, int, Any]:
        x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        with LiveStorages(parameters=model.parameters()) as live:
            if record is None:
                y = model(x)
            else:
                with actckpt.region("keep", record=record) as region:
                    y = model(x)
            held = live.live_bytes - y.nbytes
            y.square().sum().backward()
        return held, live.peak_bytes, region.report() if record is not None else None

    plain, plain_peak, _ = run(None)
    expected = gradients(model)
    held, peak, report = run(True)
    assert (held, peak) == (plain, plain_peak)
    assert_equal(gradients(model), expected)
    assert report.kept_bytes == plain + 2 * 16 * WIDTH * 4  # and its input, which was there before
    assert report.recomputed_bytes == report.offloaded_bytes == 0
    assert {"aten.gelu.default", "aten.addmm.default"} < {row.operator for row in report.rows}
    assert "record=True" in str(run(False)[2])


def _blocks_of(name: str) -> set[str]:
    """Return the blocks that a row stands for: "0", "0-2", "{0, 2-3}"."""
    ends = [part.partition("-") for part in name.strip("{}").split(", ")]
    return {str(block) for first, _, last in ends for block in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("group_by", ["operator", "module", "type"])
def test_blocks_that_a_plan_keeps_are_in_the_report(group_by: str) -> None:
    model, x = _budgeted()
    model(x).sum().backward()
    found = actckpt.report(model)  # blocks are measured: what a few of them save then is nothing to show
    assert found.rows == () and found.plain_bytes == 0 and "No plan for the budget is made yet" in str(found)
    model(x).sum().backward()
    found = actckpt.report(model, group_by=group_by)
    calls = zip(found.plan.blocks, found.plan.costs.blocks, found.plan.actions, found.plan.rerun, strict=True)
    kept = {
        name: sum(value.nbytes for value in block.values if value.needed)
        for name, block, actions, is_rerun in calls
        if name is not None and not is_rerun
        if {actions[value.name] for value in block.values if value.needed} == {actckpt.Action.KEEP}
    }
    assert 0 < len(kept) < 6
    # Times decide which blocks are kept, and of those the first one, whose input is given, has a row of its own.
    is_of_kept = {
        "operator": lambda name: name == "(as it is)",
        "module": lambda name: "." not in name and _blocks_of(name) <= kept.keys(),
        "type": lambda name: name == "Sequential",
    }[group_by]
    rows = [row for row in found.rows if is_of_kept(row.name)]
    assert sum(row.kept_bytes for row in rows) >= sum(kept.values())
    assert sum(row.num_blocks for row in rows) >= len(kept)
    assert found.kept_bytes >= sum(kept.values()) and found.plain_bytes > 0


def _budgeted(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(6)))
    actckpt.apply(model, **(options or {"activation_budget": "60%", "race": False}))
    return model, torch.randn(128, 64)


def test_a_budget_that_no_plan_fits_is_in_the_report() -> None:
    model, x = _budgeted(activation_budget=70, on_infeasible="raise")
    model(x).sum().backward()
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        model(x)
    said = (
        r"\(activation_budget=70, which is bytes; a share is '70%'\): the smallest .*Pass that budget or a larger one"
    )
    assert re.search(said, str(raised.value)) and raised.value.smallest_bytes is not None
    assert raised.value.holds.startswith("What holds it, in ") and raised.value.holds in str(raised.value)
    found = actckpt.report(model)
    assert found.plan is None and str(raised.value) in str(found) and found.race_steps_left is None


def test_a_report_has_a_step_of_the_plan_that_it_shows() -> None:
    model, x = _budgeted()
    for rows in (128, 128, 128, 32, 32, 32):
        model(x[:rows]).sum().backward()
    of_small = actckpt.report(model)
    assert "a step of the plan" in of_small.note
    for _ in range(2):
        model(x).sum().backward()
        model(x[:32]).sum().backward()
    again = actckpt.report(model)  # the step after that report ran under the plan for the larger ones
    assert again.plan == of_small.plan and again.note == of_small.note and again.kept_bytes == of_small.kept_bytes
    model(x).sum().backward()
    assert actckpt.report(model).kept_bytes > 2 * of_small.kept_bytes


@pytest.mark.parametrize("group_by", ["operator", "module", "type"])
@pytest.mark.parametrize("options", [{"policy": "matmuls"}, {"activation_budget": "60%", "race": False}])
def test_the_last_report_stays_after_remove(options: dict[str, Any], group_by: Any) -> None:
    model, x = _budgeted(**options)
    for _ in range(2):
        model(x).sum().backward()
    before = actckpt.report(model, group_by=group_by, top=1)
    actckpt.remove(model)
    after = actckpt.report(model, group_by=group_by, top=1)
    assert before.rows and dataclasses.replace(after, heading="") == before
    assert str(after).startswith("The last report before actckpt.remove: ")
    actckpt.apply(model)
    assert not actckpt.report(model).heading and actckpt.report(model).policy == "policy='recompute'"


def test_the_last_report_holds_neither_the_model_nor_a_tensor() -> None:
    model, x = _budgeted()
    for _ in range(2):
        model(x).sum().backward()
    actckpt.remove(model)
    found = actckpt.report(model)
    gone = [weakref.ref(model), weakref.ref(model[0]), *(weakref.ref(each) for each in model.parameters())]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in gone) and found.rows
    with pytest.raises(actckpt.errors.BlocksError, match="none of"):
        actckpt.report(nn.Linear(2, 2))


def test_a_printed_report_is_short_with_the_plan_first_and_shows_the_rest_on_request() -> None:
    model, x = _budgeted()
    for _ in range(3):
        model(x).sum().backward()
    found = actckpt.report(model, group_by="module")
    lines, everything = str(found).splitlines(), found.table()
    assert len(lines) <= 15 < len(everything.splitlines())
    assert lines[:2] == found.plan.explain().splitlines()[:2]
    header = next(number for number, line in enumerate(lines) if line.startswith("module "))
    shown = lines[header + 1 : -1]
    assert shown and [line.split()[0] for line in shown] == [row.name.split()[0] for row in found.rows[: len(shown)]]
    assert lines[-1] == "Everything: print(report.table())"
    assert all(f"\n{row.name} " in everything for row in found.rows)
    assert found.plan.explain() in everything and found.plan.table() in everything
    many = actckpt.report(model, group_by="module", top=100)
    assert all(f"\n{row.name} " in str(many) for row in many.rows) and many.rows
