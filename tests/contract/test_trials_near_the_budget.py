"""Trials of a simple policy that fits by measurement, although its predicted peak exceeds the budget."""

from __future__ import annotations

import functools

import on_device
import pytest
import torch
from oracle import assert_equal
from peaks import measured, plan_of
from torch import Tensor, nn
from torch.nn import functional

import actckpt


class Block(nn.Module):
    """Where matmuls are kept, backward replays one of four parts at a time; else all of them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, linear in zip(self.norms, self.linears, strict=True):
            y = linear(functional.silu(norm(y)).sin().cos())
        return x + y


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def test_a_simple_policy_that_fits_by_measurement_is_tried() -> None:
    model, x = nn.Sequential(*(Block() for _ in range(8))), torch.randn(512, 32)
    step = functools.partial(_step, model, x)
    expected, _ = measured(model, step)
    bytes_of = {}
    for policy in ("matmuls", "recompute"):
        actckpt.apply(model, policy=policy)
        bytes_of[policy] = max(measured(model, step)[1] for _ in range(2))
        actckpt.remove(model)
    budget_bytes = int(1.03 * max(bytes_of.values()))
    actckpt.apply(model, activation_budget=budget_bytes, on_infeasible="raise")
    for number in range(60):
        gradients, peak_bytes = measured(model, step)
        assert_equal(gradients, expected)
        assert peak_bytes <= budget_bytes or number < 2  # where values can be offloaded, the second measures the link
        plan = actckpt.report(model).plan
        if plan is not None and plan.race:
            break
    plan = plan_of(model)
    if on_device.device_type != "cpu" and not plan.race:
        pytest.skip("replays take no time on the simulated device, so the plan needs no trials")
    rows = {row.name: row for row in plan.race}
    assert rows["keep matmuls"].fits and rows["keep matmuls"].seconds is not None, rows
    assert rows["keep matmuls"].peak_bytes <= budget_bytes and not rows["keep everything"].fits
