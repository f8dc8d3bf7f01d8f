"""Plans are made again where copies are slower than measured, and where other memory is free than before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt import Action
from actckpt._budget import links, pace, sizes, stalls

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


@pytest.fixture
def _disk(tmp_path: Path) -> Iterator[None]:
    actckpt.configure(spill_dir=tmp_path)
    yield
    actckpt.configure(spill_dir=None, max_inflight="auto")


def _num_offloaded(plan: actckpt.Plan) -> int:
    return sum(action is Action.OFFLOAD for actions in plan.actions for action in actions.values())


_TOO_FAST = 1e13


@pytest.fixture
def _measured_too_fast(_disk: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(links, "_spilled", lambda _: (_TOO_FAST, _TOO_FAST))
    links._links.cache_clear()
    yield
    links._links.cache_clear()


@pytest.mark.usefixtures("_measured_too_fast")
def test_copies_that_are_slower_than_measured_are_planned_as_slow_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    actckpt.configure(max_inflight="1MiB")  # each write is waited for
    monkeypatch.setattr(stalls, "_SHARE", 0.01)
    training = Training()
    expected = training.step()
    actckpt.apply(training.model, blocks=Block, activation_budget="70%", race=False)
    for _ in range(2):
        assert_equal(training.step(), expected)
    first = training.plan
    assert first.costs.d2h_bytes_per_s == _TOO_FAST and _num_offloaded(first) > 0
    for _ in range(stalls._FIRST_STEPS + stalls._NUM_STEPS + 1):
        assert_equal(training.step(), expected)
    second = training.plan
    assert second.costs.d2h_bytes_per_s == second.costs.h2d_bytes_per_s < _TOO_FAST
    assert second.budget_bytes == first.budget_bytes


@pytest.mark.usefixtures("_measured_too_fast")
@pytest.mark.parametrize(("waited_s", "is_made_again"), [(0.0, False), (1.0, True)])
def test_plans_are_made_again_for_stalls_once_in_so_many_steps(
    waited_s: float, is_made_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(number * waited_s for number in range(10_000))
    monkeypatch.setattr(stalls.Stalls, "_stall_seconds", lambda _: next(clock))
    monkeypatch.setattr(stalls, "_NUM_STEPS", 2)
    monkeypatch.setattr(pace, "STEPS_BETWEEN", 10)
    training = Training()
    actckpt.apply(training.model, blocks=Block, activation_budget="70%", race=False)
    plans = []
    for number in range(20):
        training.step()
        plans.append(training.plan if number else None)
    made = [number for number in range(2, 20) if plans[number] is not plans[number - 1]]
    # Two steps that do not count, two that do; the next time ten steps after that.
    assert made == ([5, 15] if is_made_again else [])
    # Each time copies are found to be slower, by as much as is tried.
    halvings = stalls._MOST_HALVINGS * len(made)
    assert training.plan.costs.d2h_bytes_per_s == _TOO_FAST / 2**halvings


def test_a_budget_of_what_is_free_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "STEPS_BETWEEN", 30)
    training = Training()
    expected = training.step()
    # In units of 256 KiB: plain training needs about 70 of them.
    free = [65] * 10 + [60] * 20 + [57] * 20 + [100] * 40
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
    assert made[1] - made[0] >= 16, "once in so many steps"
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
    with pytest.warns(UserWarning, match="or less of it is free, and with that no plan fits"):
        for _ in range(20):
            assert_equal(training.step(), expected)
    assert training.plan.peak_bytes < 65 * MIB // 4
    assert_equal(training.step(), expected)
