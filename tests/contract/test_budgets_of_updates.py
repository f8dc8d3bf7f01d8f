"""Steps that run their optimizer, and draw from generators of modules, measured by `plan` and `compare`."""

from __future__ import annotations

from collections.abc import Callable

import on_device
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
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.generators = [torch.Generator().manual_seed(1)]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generators[0])
        return x + self.down(nn.functional.gelu(self.up(x))) * noise


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block() for _ in range(5)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(512, 64)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        drawn = [block.generators[0].get_state() for block in self.model]
        return [*(parameter.detach().clone() for parameter in self.model.parameters()), *drawn]


def _penalty_first(training: Training) -> None:
    """A step that makes gradients before the forward."""
    training.optimizer.zero_grad()
    sum(parameter.square().sum() for parameter in training.model.parameters()).mul(1e-3).backward()
    training.model(training.x).square().mean().backward()
    training.optimizer.step()


def _update_first(training: Training) -> None:
    """A step that updates by the gradients of the one before it."""
    training.optimizer.step()
    training.backward()


def _fills_a_cache(training: Training) -> None:
    """A step that makes what it needs in the first step, and keeps it."""
    if "noise" not in vars(training):
        training.noise = torch.randn(training.x.shape[0], 1024).mean(1, keepdim=True) + torch.zeros(1, 64)
        training.unused = torch.zeros(training.x.shape[0], 2048)
    training.optimizer.zero_grad()
    training.model(training.x + training.noise).square().mean().backward()
    training.optimizer.step()


def _loads_a_batch(training: Training) -> None:
    """A step that makes a batch, four times as large as the input of the model, and frees it."""
    training.optimizer.zero_grad()
    batch = torch.randn(len(training.x), 4 * 64)
    training.model(batch[:, :64]).square().mean().backward()
    training.optimizer.step()


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize(
    ("step", "share"),
    [
        *((Training.step, share) for share in (0.7, 0.85, 1.0)),
        *((step, 0.8) for step in (_penalty_first, _update_first, _fills_a_cache, _loads_a_batch)),
    ],
)
def test_a_plan_predicts_the_peak_of_later_steps(step: Callable[[Training], None], share: float, total: bool) -> None:
    """What the optimizer makes is in budgets of all memory alone; the step of a plan may be the first to make it."""

    def peak(training: Training) -> int:
        held = [*training.model.parameters()]  # gradients are made again
        held += [value for state in training.optimizer.state.values() for value in state.values()]
        with counted(training.model, total=total, held=held) as found:
            step(training)
        return found.peak_bytes

    def made() -> Training:
        training = Training()
        if step is not Training.step:
            training.backward()
        return training

    training = made()
    step(training)
    budget = int(share * peak(training))
    del training  # on a device, all that is allocated counts
    training = made()
    before = training.state()
    plan = actckpt.plan(
        lambda: step(training),
        model=training.model,
        blocks=Block,
        optimizer=training.optimizer,
        race=False,
        **{"budget" if total else "activation_budget": budget},
    )
    assert_equal(training.state(), before)
    assert takes_time(plan, share < 1.0)
    actckpt.apply(training.model, policy=plan)
    step(training)
    found = peak(training)
    assert found <= 1.001 * budget
    # On a device, gradients from before the plan are there twice: it sets them aside.
    assert found == pytest.approx(plan.peak_bytes, rel=0.1 if total and on_device.device_type != "cpu" else 0.02)


def test_compare_puts_generators_of_modules_back_and_finds_equal_gradients() -> None:
    training = Training()
    before = training.state()
    policies = {"recompute": "recompute", "matmuls": "matmuls"}
    found = actckpt.compare(
        training.step, model=training.model, blocks=Block, policies=policies, optimizer=training.optimizer, rounds=2
    )
    assert_equal(training.state(), before)
    assert "DIFFER" not in str(found)
