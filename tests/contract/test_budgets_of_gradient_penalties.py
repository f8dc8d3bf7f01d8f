"""Budgets of steps that train through gradients, and drop the outputs of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from test_budgets import takes_time
from torch import Tensor, nn

import actckpt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(5))), nn.Linear(16, 1))


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    mixed = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def _alone(model: nn.Module, x: Tensor) -> Tensor:
    return _penalty(model, x)


def _first(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a critic, its penalty first."""
    return 10 * _penalty(model, x) + model(x.cos()).mean() - model(x).mean()


def _last(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.cos()).mean() - model(x).mean() + 10 * _penalty(model, x)


def _before_another_backward(model: nn.Module, x: Tensor) -> Tensor:
    _penalty(model, x).backward()
    return model(x).mean()


@pytest.mark.parametrize(
    ("loss", "share"), [(_alone, 0.9), (_first, 0.6), (_first, 0.8), (_last, 0.7), (_before_another_backward, 0.9)]
)
@pytest.mark.parametrize("race", [False, True])
def test_penalties_on_gradients_fit_the_budget_with_equal_gradients(
    loss: Callable[[nn.Module, Tensor], Tensor], share: float, race: bool
) -> None:
    x = torch.randn(64, 16)

    def step(model: nn.Module) -> tuple[int, list[Tensor]]:
        model.zero_grad()
        with counted(model, total=False) as found:
            loss(model, x).backward()
        return found.peak_bytes, [each.grad for each in model.parameters() if each.grad is not None]

    plain, model = _critic(), _critic()
    step(plain)
    peak_bytes, expected = step(plain)
    budget = int(share * peak_bytes)
    actckpt.apply(model, blocks=Block, activation_budget=budget, race=race, on_infeasible="raise")
    for number in range(30 if race else 8):
        peak_bytes, gradients = step(model)
        assert_equal(gradients, expected)
        assert peak_bytes <= 1.001 * budget or number < 2
    plan = actckpt.report(model).plan
    assert plan is not None and takes_time(plan, loss is not _before_another_backward)  # whose last cycle is plain
