"""Budgets where cycles of one kind differ: random depth inside of blocks, sizes that are new in most steps, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt.memory import LiveStorages

_WIDTH = 32
#: In audited cycles checksums take memory, in pieces of 2**15 elements.
_AUDIT_BYTES = 16 * 2**15


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if self.drop and torch.rand(()) < self.drop:
            return x
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, drop: float = 0.0, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _run(model: nn.Module, make: Callable[[int], Tensor], num: int) -> list[tuple[list[Tensor | None], int]]:
    """Train steps without updates; return gradients and peak activation bytes of each."""
    found = []
    for number in range(num):
        torch.manual_seed(number)
        x = make(number)
        model.zero_grad()
        with LiveStorages(parameters=model.parameters()) as live:
            model(x).square().mean().backward()
        found.append(([None if p.grad is None else p.grad.clone() for p in model.parameters()], live.peak_bytes))
    return found


def _compare(model: Callable[[], nn.Module], make: Callable[[int], Tensor], num: int, budget: float) -> list[int]:
    torch.manual_seed(0)
    expected = _run(model(), make, num)
    torch.manual_seed(0)
    applied = model()
    actckpt.apply(applied, blocks="blocks.*", activation_budget=budget)
    found = _run(applied, make, num)
    for (gradients, _), (plain, _) in zip(found, expected, strict=True):
        assert_equal(gradients, plain)
    return [peak for _, peak in found]


def _bounds(make: Callable[[int], Tensor], number: int) -> tuple[int, int]:
    """Return the peaks of a step with all blocks checkpointed, and of a plain one."""
    torch.manual_seed(0)
    model = Model()
    plain = _run(model, lambda _: make(number), 1)[0][1]
    actckpt.apply(model, blocks="blocks.*")
    return _run(model, lambda _: make(number), 2)[1][1], plain


def test_blocks_that_return_early_at_random_stay_within_the_budget() -> None:
    def make(_: int) -> Tensor:
        return torch.randn(256, _WIDTH)

    checkpointed, plain = _bounds(make, 0)
    budget = int(checkpointed + 0.4 * (plain - checkpointed))
    peaks = _compare(lambda: Model(drop=0.4), make, 30, budget)
    assert max(peaks[2:]) <= 1.02 * budget + _AUDIT_BYTES
    assert sum(peak > budget for peak in peaks[2:]) <= 2


def test_sizes_that_are_new_in_most_steps_stay_within_the_budget() -> None:
    rows = [64 * (1 + (7 * number) % 13) for number in range(26)]
    largest = max(rows)
    checkpointed, plain = _bounds(lambda _: torch.randn(largest, _WIDTH), 0)
    budget = int(checkpointed + 0.3 * (plain - checkpointed))
    peaks = _compare(Model, lambda number: torch.randn(rows[number], _WIDTH), len(rows), budget)
    assert max(peaks) <= 1.02 * budget + _AUDIT_BYTES


@pytest.mark.parametrize("num_threads", [8])
def test_threads_that_train_a_model_each_have_meters_of_their_own(num_threads: int) -> None:
    x = torch.randn(256, _WIDTH)
    checkpointed, plain = _bounds(lambda _: x, 0)
    budget = int(checkpointed + 0.3 * (plain - checkpointed))
    torch.manual_seed(0)
    models = [Model() for _ in range(num_threads)]
    expected = []
    for model in models:
        model(x).square().mean().backward()
        expected.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        actckpt.apply(model, blocks="blocks.*", activation_budget=budget, on_infeasible="raise")
    errors: list[BaseException] = []

    def train(model: nn.Module, gradients: list[Tensor]) -> None:
        try:
            for _ in range(6):
                model.zero_grad()
                model(x).square().mean().backward()
                assert_equal([p.grad for p in model.parameters()], gradients)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=pair) for pair in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model in models:
        plan = actckpt.report(model).plan
        assert plan is not None and plan.peak_bytes <= budget
