"""Budgets of models whose parts the program calls, and never the model: methods, or rows of blocks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

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
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1)


class Coder(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Autoencoder(nn.Module):
    """As those of Diffusers, with methods that call its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(3), Coder(4)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        return h, h.tanh()

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)


def _autoencoder(model: nn.Module, x: Tensor) -> Tensor:
    mean, log_variance = model.encode(x)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    return (model.decode(z) - x).square().mean() + 0.1 * mean.square().mean()


def _encoder_alone(model: nn.Module, x: Tensor) -> Tensor:
    return model.encode(x)[0].square().mean()


def _decoder_twice(model: nn.Module, x: Tensor) -> Tensor:
    h, _ = model.encode(x)
    return model.decode(h).square().mean() + model.decode(h.sin()).abs().mean()


def _blocks_in_a_loop(model: nn.Module, x: Tensor) -> Tensor:
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        x = block(x)
    return x.square().mean()


def _two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    h, _ = model.encode(x)
    h.square().mean().backward()
    return model.decode(h.detach()).square().mean()


LOSSES: list[Callable[[nn.Module, Tensor], Tensor]] = [
    _autoencoder,
    _encoder_alone,
    _decoder_twice,
    _blocks_in_a_loop,
    _two_backwards,
]
IDLE = pytest.mark.filterwarnings("ignore:apply. 4 of 7 blocks did not run in a step that called backward")


def _model() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder()


def _steps(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], count: int) -> Iterator[list[Tensor]]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    for number in range(count):
        torch.manual_seed(number)
        model.zero_grad()
        loss(model, x).backward()
        yield [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _plain_peak(loss: Callable[[nn.Module, Tensor], Tensor]) -> int:
    model = _model()
    list(_steps(model, loss, 1))
    with counted(model, total=False) as found:
        list(_steps(model, loss, 1))
    return found.peak_bytes


@IDLE
@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_that_call_parts_fit_the_budget_with_equal_gradients(
    loss: Callable[[nn.Module, Tensor], Tensor], share: float
) -> None:
    expected = list(_steps(_model(), loss, 6))
    budget = int(share * _plain_peak(loss))
    model = _model()
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    steps = _steps(model, loss, 6)
    for number, gradients in enumerate(expected):
        with counted(model, total=False) if number > 2 else contextlib.nullcontext() as found:
            assert_equal(next(steps), gradients)
        assert found is None or found.peak_bytes <= 1.001 * budget
    plan = actckpt.report(model).plan
    assert plan is not None and takes_time(plan, True)


def test_a_copy_of_a_model_whose_parts_are_called_is_planned_anew() -> None:
    model = _model()
    actckpt.apply(model, activation_budget="60%", race=False)
    list(_steps(model, _autoencoder, 3))
    other = copy.deepcopy(model)
    assert actckpt.report(other).plan is None
    list(_steps(other, _autoencoder, 3))
    assert actckpt.report(other).plan is not None
    actckpt.remove(model)
    actckpt.remove(other)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in other.modules())
    expected = list(_steps(_model(), _autoencoder, 1))
    assert_equal(list(_steps(model, _autoencoder, 1)), expected)


def test_a_plan_is_made_of_a_step_that_calls_parts() -> None:
    model = _model()
    budget = int(0.7 * _plain_peak(_autoencoder))
    plan = actckpt.plan(lambda: list(_steps(model, _autoencoder, 1)), model=model, activation_budget=budget, race=False)
    assert takes_time(plan, True)
    actckpt.apply(model, policy=plan)
    with counted(model, total=False) as found:
        actual = list(_steps(model, _autoencoder, 1))
    assert found.peak_bytes <= 1.001 * budget
    assert_equal(actual, list(_steps(_model(), _autoencoder, 1)))
