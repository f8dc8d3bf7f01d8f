"""A checkpoint around a model with a plan, or around a part of it: torch's and actckpt's, which run code again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from oracle import assert_equal
from test_budgets import Block, Model, Training
from torch import Tensor, nn

import actckpt

_torch_checkpoint = torch.utils.checkpoint.checkpoint
_Call = Callable[[nn.Module, Tensor], Tensor]


def _reentrant(model: nn.Module, tokens: Tensor) -> Tensor:
    tracked = torch.ones((), requires_grad=True)
    return _torch_checkpoint(lambda x, _: model(x), tokens, tracked, use_reentrant=True)


_RERUNNING: dict[str, _Call] = {
    "torch": lambda model, tokens: _torch_checkpoint(model, tokens, use_reentrant=False),
    "actckpt": lambda model, tokens: actckpt.checkpoint(model, tokens),
    "actckpt, a function": lambda model, tokens: actckpt.checkpoint(lambda x: 2 * model(x), tokens) / 2,
}
_OTHERS: dict[str, _Call] = {
    "torch, reentrant": _reentrant,
    "a region": lambda model, tokens: actckpt.checkpoint(model, tokens, policy=[]),
    "offload": lambda model, tokens: actckpt.checkpoint(model, tokens, policy="offload"),
}


def _step(model: nn.Module, tokens: Tensor, call: _Call) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    call(model, tokens).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _plainly(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens)
    return found


@pytest.mark.parametrize("share", ["40%", "70%", "100%"])
@pytest.mark.parametrize("around", [*_RERUNNING, *_OTHERS])
def test_a_plan_that_is_made_works_inside_of_any(around: str, share: str) -> None:
    training = Training()
    model, tokens, call = training.model, training.tokens, {**_RERUNNING, **_OTHERS}[around]
    expected = _step(model, tokens, _plainly)
    plan = actckpt.plan(
        lambda: _step(model, tokens, _plainly) and None, model=model, activation_budget=share, race=False
    )
    actckpt.apply(model, policy=plan)
    for _ in range(2):
        assert_equal(_step(model, tokens, call), expected)


@pytest.mark.parametrize("around", _RERUNNING)
def test_a_budget_inside_of_a_rerun_is_one_clear_error_before_anything_ran(around: str) -> None:
    training = Training()
    model, tokens = training.model, training.tokens
    expected = _step(model, tokens, _plainly)
    actckpt.apply(model, activation_budget="60%")
    for _ in range(2):
        with pytest.raises(actckpt.errors.BlocksError, match=r"inside a checkpoint.*Leave out that.*policy=plan"):
            _step(model, tokens, _RERUNNING[around])
        for _ in range(2):
            assert_equal(_step(model, tokens, _plainly), expected)
    plan = actckpt.report(model).plan
    assert plan is not None
    actckpt.remove(model)
    actckpt.apply(model, policy=plan)  # what the error says
    assert_equal(_step(model, tokens, _RERUNNING[around]), expected)


@pytest.mark.parametrize("around", _OTHERS)
def test_a_budget_works_inside_of_what_runs_no_step_again(around: str) -> None:
    training = Training()
    model, tokens = training.model, training.tokens
    expected = _step(model, tokens, _plainly)
    actckpt.apply(model, activation_budget="80%")
    for _ in range(4):
        assert_equal(_step(model, tokens, _OTHERS[around]), expected)
    assert actckpt.report(model).plan is not None


class Partly(Model):
    """Checkpoints two of its blocks itself."""

    checkpoint: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            call = self.checkpoint if number in (2, 3) and self.checkpoint is not None else None
            x = block(x) if call is None else call(block, x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("around", _RERUNNING)
def test_blocks_that_the_model_checkpoints_itself_are_one_clear_error(around: str) -> None:
    model, tokens = Partly(), torch.randint(16, (8, 32))
    expected = _step(model, tokens, _plainly)
    model.checkpoint = _RERUNNING[around]
    message = r"block 'blocks\.2' runs inside of a checkpoint.*Leave out that checkpoint.*other blocks="
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        actckpt.plan(lambda: _step(model, tokens, _plainly), model=model, blocks=Block, activation_budget="60%")
    actckpt.apply(model, blocks=Block, activation_budget="60%")
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        _step(model, tokens, _plainly)
    actckpt.remove(model)
    actckpt.apply(model, blocks=["blocks.0", "blocks.1", "blocks.4", "blocks.5"], activation_budget="80%")
    for _ in range(3):
        assert_equal(_step(model, tokens, _plainly), expected)
    assert actckpt.report(model).plan is not None
    actckpt.remove(model)
    model.checkpoint = None
    plan = actckpt.plan(
        lambda: _step(model, tokens, _plainly) and None, model=model, blocks=Block, activation_budget="60%", race=False
    )
    model.checkpoint = _RERUNNING[around]
    actckpt.apply(model, policy=plan)
    for _ in range(2):
        assert_equal(_step(model, tokens, _plainly), expected)
