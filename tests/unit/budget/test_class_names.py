"""Plans of a model name its blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from budget_programs import Net

import actckpt
from actckpt import planner
from actckpt._cycles.cycle_model import class_names
from actckpt.planner.costs import BlockClass


def _block(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Linear(width, 16))


def _model() -> torch.nn.Module:
    """Return six blocks, in turns of two widths, between others."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.first(x)
        for block in net.blocks:
            x = block(x)
        return net.last(x)  # type: ignore[no-any-return]

    return Net(run, map(_block, (32, 64) * 3), first=torch.nn.Linear(8, 16), last=torch.nn.Linear(16, 2))


@pytest.fixture(name="plan", scope="module")
def _plan() -> Iterator[actckpt.Plan]:
    model, x = _model(), torch.randn(256, 8)
    yield actckpt.plan(lambda: model(x).sum().backward(), model=model, activation_budget="60%", race=False)


def test_classes_and_columns_have_the_names_of_blocks(plan: actckpt.Plan) -> None:
    assert plan.costs.stack == ("blocks.0, 2, 4", "blocks.1, 3, 5") * 3
    _, *lines = plan.table().splitlines()
    rows = [line for line in lines if line.partition("blocks.")[1]]
    assert "block 0" not in plan.table() and "count from 0" not in plan.table() and "(other)" not in plan.table()
    for name, blocks in (("blocks.0, 2, 4", {0, 2, 4}), ("blocks.1, 3, 5", {1, 3, 5})):
        mine = [line.partition(name)[2] for line in rows if name in line]
        assert len(mine) == 2, "its values; what the block before it made has no bytes of its own"
        for line in mine:
            assert {int(c) for part in line.split("blocks.")[1:] for c in _numbers(part)} == blocks
    assert "x0: the input of a block." in plan.table()


def _numbers(text: str) -> Iterator[int]:
    for part in text.replace(",", " ").split():
        first, _, last = part.partition("-")
        if not first.isdigit():
            return
        yield from range(int(first), int(last or first) + 1)


def test_the_explanation_has_the_names_of_blocks(plan: actckpt.Plan) -> None:
    text = plan.explain()
    assert "Run again as a whole: blocks." in text or " in blocks." in text
    assert " of block " not in text and "blocks '" not in text
    no_model = dataclasses.replace(plan, blocks=None, places=None)
    assert " of block " in no_model.explain() and "count from 0" in no_model.table()


def test_an_error_names_the_blocks() -> None:
    model, x = _model(), torch.randn(256, 8)
    with pytest.raises(planner.PlanInfeasibleError, match=r"backward of (block \d of \d \()?'(blocks\.|\(after)"):
        actckpt.apply(model, activation_budget="1%", on_infeasible="raise")
        for _ in range(2):
            model(x).sum().backward()


def test_names_that_would_fall_together_are_numbers() -> None:
    block = BlockClass(1.0, 1.0, 1.0)
    other = dataclasses.replace(block, forward_s=2.0)
    blocks = [block, block, other]
    assert class_names(blocks, ["x.0", "x.1", "y"]) == {block: "x.0-1", other: "y"}
    assert class_names(blocks, ["x.0", "x.1", "x.0-1"]) == {block: "class 0", other: "class 1"}
