"""Budgets of models whose blocks are given more than their hidden states: masks, biases, what an encoder made."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from budget_programs import BESIDE, beside
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt import Action
from actckpt.memory import LiveStorages

_WIDTH, _NUM_BLOCKS = 32, 5


def _made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return beside(kind), torch.randn(64, _WIDTH)


def _step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        model(x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], live.peak_bytes


@pytest.mark.usefixtures("small_tensors_on_disk")
@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("others", ["keep", "recompute"])
def test_they_stay_where_the_inputs_of_blocks_are_offloaded(kind: str, others: str) -> None:
    model, x = _made(kind)
    expected, _ = _step(model, x)
    pins: dict[Any, str] = {(1 + block, "x0"): "offload" for block in range(_NUM_BLOCKS - 1)}
    pins |= {"::aten.mul.Tensor#0.0": others}
    plan = actckpt.plan(
        lambda: _step(model, x), model=model, blocks="blocks.*", activation_budget="95%", pins=pins, race=False
    )
    actckpt.apply(model, policy=plan)
    for _ in range(2):
        actckpt.reset_stats()
        assert_equal(_step(model, x)[0], expected)
    stack = zip(plan.costs.blocks, plan.actions, strict=True)
    planned = sum(v.nbytes for block, actions in stack for v in block.values if actions[v.name] is Action.OFFLOAD)
    assert actckpt.stats().offloaded_bytes == planned >= (_NUM_BLOCKS - 1) * 64 * _WIDTH * 4


@pytest.mark.parametrize("kind", ["mask", "handed on"])
def test_a_plan_says_where_it_is_given_more_than_it_was_made_for(kind: str) -> None:
    model, x = _made(kind)
    plan = actckpt.plan(lambda: _step(model, x), model=model, blocks="blocks.*", activation_budget="60%", race=False)
    actckpt.apply(model, policy=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (64, 32):
            assert _step(model, x[:rows].clone())[1] <= plan.budget_bytes
        with torch.no_grad():  # which the budget does not hold for
            model(torch.cat([x, x]))
    larger = torch.cat([x, x])
    with pytest.warns(UserWarning, match=r"'blocks.0' is given 16.00 KiB .* made for 8.00 KiB: .* largest batch"):
        gradients, peak = _step(model, larger)
    assert peak > plan.budget_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        assert_equal(_step(model, larger)[0], gradients)
    actckpt.remove(model)
    assert_equal(_step(model, larger)[0], gradients)


class Pyramid(nn.Module):
    """Calls its blocks with few rows, then with all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = beside("mask")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[: len(x) // 4].clone()) + self.net(x.clone())


def test_a_plan_is_made_for_the_call_of_a_block_that_is_given_most() -> None:
    model, x = Pyramid(), torch.randn(64, _WIDTH)
    plan = actckpt.plan(
        lambda: _step(model, x), model=model, blocks="net.blocks.*", activation_budget="80%", race=False
    )
    actckpt.apply(model, policy=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, x)
    with pytest.warns(UserWarning, match=r"'net.blocks.0' is given 16.00 KiB .* made for 8.00 KiB"):
        _step(model, torch.cat([x, x]))
