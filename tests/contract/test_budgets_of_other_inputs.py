"""Budgets of models whose blocks are given more than their hidden states: masks, biases, what an encoder made."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt import Action
from actckpt.memory import LiveStorages

_WIDTH, _NUM_BLOCKS = 32, 5


class Block(nn.Module):
    """Saves what it is given beside its hidden states, and gives it back where `is_handed_on`."""

    def __init__(self, *, is_handed_on: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.is_handed_on = is_handed_on

    def forward(self, x: Tensor, other: Tensor) -> Any:
        y = x + self.down(torch.nn.functional.gelu(self.up(x)) * other)
        return (y, other) if self.is_handed_on else y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.bias = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH)
        self.blocks = nn.ModuleList(Block(is_handed_on=kind == "handed on") for _ in range(_NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        other = self.bias(x)
        if self.kind == "mask":
            other = (other > 0).float()
        x = self.stem(x)
        for block in self.blocks:
            if self.kind == "per block":
                other = other.sigmoid()  # saved by itself
            result = block(x, other)
            x, other = result if isinstance(result, tuple) else (result, other)
        return x.square().mean()


_KINDS = ("mask", "bias", "handed on", "per block")
#: Of the tensor beside the hidden states.
_OTHER_BYTES = 64 * 4 * _WIDTH * 4


def _made(kind: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(kind), torch.randn(64, _WIDTH)


def _step(model: Model, x: Tensor) -> tuple[list[Tensor], int]:
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        model(x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], live.peak_bytes


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_they_are_counted_once(kind: str, share: float) -> None:
    model, x = _made(kind)
    expected, plain = _step(model, x)
    actckpt.apply(model, activation_budget=f"{100 * share:.0f}%", race=False)
    for _ in range(3):
        gradients, peak = _step(model, x)
        assert_equal(gradients, expected)
    plan = actckpt.report(model).plan
    assert plan is not None
    assert plan.budget_bytes / share == pytest.approx(plain, abs=0.5 * _OTHER_BYTES)
    assert peak <= plan.budget_bytes / 0.98 + 0.5 * _OTHER_BYTES


@pytest.mark.usefixtures("small_tensors_on_disk")
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("others", ["keep", "recompute"])
def test_they_stay_where_the_inputs_of_blocks_are_offloaded(kind: str, others: str) -> None:
    model, x = _made(kind)
    expected, _ = _step(model, x)
    pins: dict[Any, str] = {(1 + block, "x0"): "offload" for block in range(_NUM_BLOCKS - 1)}
    pins |= {"::aten.mul.Tensor#0.0": others}
    plan = actckpt.plan(
        lambda: _step(model, x), model=model, blocks=Block, activation_budget="95%", pins=pins, race=False
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
    plan = actckpt.plan(lambda: _step(model, x), model=model, blocks=Block, activation_budget="60%", race=False)
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


class Pyramid(Model):
    """Calls its blocks with few rows, then with all."""

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for rows in (len(x) // 4, len(x)):
            part = x[:rows].clone()
            loss = loss + super().forward(part)
        return loss


def test_a_plan_is_made_for_the_call_of_a_block_that_is_given_most() -> None:
    model, x = Pyramid("mask"), torch.randn(64, _WIDTH)
    plan = actckpt.plan(lambda: _step(model, x), model=model, blocks=Block, activation_budget="80%", race=False)
    actckpt.apply(model, policy=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, x)
    with pytest.warns(UserWarning, match=r"'blocks.0' is given 16.00 KiB .* made for 8.00 KiB"):
        _step(model, torch.cat([x, x]))
