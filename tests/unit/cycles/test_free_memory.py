"""Plans are made again where other memory is free than before."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt._budget import sizes

MIB = 2**20


class Block(nn.Module):
    """Saves 2 MiB, which takes a disk longer than making them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.scale


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(Block() for _ in range(8)))
        self.x = torch.linspace(-1, 1, 1 << 18)

    def step(self) -> list[Tensor]:
        self.model.zero_grad()
        self.model(self.x).square().mean().backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    @property
    def plan(self) -> actckpt.Plan:
        plan = actckpt.report(self.model).plan
        assert plan is not None
        return plan


def test_a_budget_of_what_is_free_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    expected = training.step()
    # In units of 256 KiB: plain training needs about 70 of them.
    free = [65] * 20 + [60] * 40 + [57] * 40 + [100] * 40
    number = 0
    monkeypatch.setattr(sizes, "available_host_bytes", lambda: free[number] * MIB // 4)
    actckpt.apply(training.model, blocks=Block, budget="auto", race=False)
    budgets = []
    for number in range(len(free)):
        assert_equal(training.step(), expected)
        budgets.append(training.plan.budget_bytes if number else 0.0)
    made = [number for number in range(2, len(free)) if budgets[number] != pytest.approx(budgets[number - 1], rel=0.01)]
    # 60 is less by no more than a tenth.
    assert [budgets[number] / budgets[1] for number in made] == pytest.approx([57 / 65, 100 / 65], rel=0.01)
    assert training.plan.overhead_seconds == 0.0  # plain training fits


def test_where_too_little_is_free_the_plan_runs_that_needs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    expected = training.step()
    free = 65
    monkeypatch.setattr(sizes, "available_host_bytes", lambda: free * MIB // 4)
    actckpt.apply(training.model, blocks=Block, budget="auto", race=False)
    for _ in range(5):
        assert_equal(training.step(), expected)
    free = 4
    with pytest.warns(UserWarning, match="No plan fits"):
        for _ in range(20):
            assert_equal(training.step(), expected)
    assert training.plan.peak_bytes < 65 * MIB // 4
    assert_equal(training.step(), expected)
