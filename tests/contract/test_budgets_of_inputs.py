"""Inputs of blocks: they count where plain training holds them, or a plan computes from them again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt
from actckpt.memory import LiveStorages

_WIDTH, _DEPTH = 32, 6


class _Casts(nn.Module):
    """Begins with a cast, as norms in half precision do: autograd saves what that makes, and not the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def first(self, x: Tensor) -> Tensor:
        h = x.double()
        return (h * h.square().mean(-1, keepdim=True).add(1e-5).rsqrt()).float()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.first(x))))


class _Reads(_Casts):
    """Autograd saves its input."""

    def first(self, x: Tensor) -> Tensor:
        return x.sin()


class _Kept(torch.autograd.Function):
    """Holds its input in its context, of which hooks of saved tensors know nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 + 0 * ctx.x


class _Holds(_Casts):
    def first(self, x: Tensor) -> Tensor:
        return _Kept.apply(x)


class _Remembers(_Casts):
    """Holds its input in an attribute until its next forward."""

    def first(self, x: Tensor) -> Tensor:
        self.last = x
        return super().first(x)


class _Training:
    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(kind() for _ in range(_DEPTH)), nn.Linear(_WIDTH, 4))
        self.x = torch.randn(256, _WIDTH)

    def step(self) -> list[Tensor]:
        self.model.zero_grad()
        self.model(self.x).square().mean().backward()
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def peak(self) -> int:
        with LiveStorages(parameters=self.model.parameters()) as live:
            self.step()
        return live.peak_bytes


@pytest.mark.parametrize("kind", [_Casts, _Reads, _Holds, _Remembers])
def test_what_plain_training_holds_is_predicted(kind: type[nn.Module]) -> None:
    training = _Training(kind)
    training.step()
    plain = training.peak()
    plan = actckpt.plan(training.step, model=training.model, blocks=kind, activation_budget="100%", race=False)
    assert plan.budget_bytes == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("kind", [_Casts, _Reads])
@pytest.mark.parametrize("share", [40, 60, 80])
def test_budgets_are_shares_of_what_plain_training_holds(kind: type[nn.Module], share: int) -> None:
    plainly, training = _Training(kind), _Training(kind)
    plainly.step()
    plain = plainly.peak()
    actckpt.apply(training.model, blocks=kind, activation_budget=f"{share}%", race=False)
    for _ in range(3):
        assert_equal(training.step(), plainly.step())
    plan = actckpt.report(training.model).plan
    assert plan is not None
    assert plan.budget_bytes == pytest.approx(share / 100 * plain, rel=0.03)
    assert training.peak() <= plan.budget_bytes


@pytest.mark.parametrize("share", [50, 75, 100])
def test_what_a_step_makes_before_the_forward_counts_in_its_plan(share: int) -> None:
    """A batch that the step loads, four times as large as what a block makes of it."""
    training = _Training(_Reads)

    def step() -> None:
        batch = torch.randn(256, 4, _WIDTH)
        training.model(batch[:, 0]).square().mean().backward()

    def peak() -> int:
        with LiveStorages(parameters=training.model.parameters()) as live:
            step()
        return live.peak_bytes

    step()
    plain = peak()
    plan = actckpt.plan(step, model=training.model, blocks=_Reads, activation_budget=f"{share}%", race=False)
    assert plan.budget_bytes == pytest.approx(share / 100 * plain, rel=0.03)
    actckpt.apply(training.model, policy=plan)
    assert peak() <= plan.budget_bytes


def test_a_step_that_trains_in_a_thread_leaves_no_mode_behind() -> None:
    training = _Training(_Reads)

    def step() -> None:
        training.x = torch.randn(256, _WIDTH)
        thread = threading.Thread(target=training.step)
        thread.start()
        thread.join()

    plan = actckpt.plan(step, model=training.model, blocks=_Reads, activation_budget="60%", race=False)
    assert plan.peak_bytes <= plan.budget_bytes
    assert torch._C._len_torch_dispatch_stack() == 0
