"""A checkpoint around a model with a plan, or around a part of it: torch's and actckpt's, which run code again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from peaks import Step, Twins, measured
from test_budgets import Block, Model
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


def _step(call: _Call = lambda model, tokens: model(tokens)) -> Step:
    tokens = torch.randint(16, (8, 32), generator=torch.Generator().manual_seed(0))
    return lambda model: call(model, tokens).square().mean().backward()


def _plan(model: nn.Module, share: str, **options: Any) -> actckpt.Plan:
    step = _step()
    run = lambda: measured(model, lambda: step(model))  # noqa: E731
    return actckpt.plan(run, model=model, activation_budget=share, race=False, **options)


@pytest.mark.parametrize("share", ["40%", "70%", "100%"])
@pytest.mark.parametrize("around", [*_RERUNNING, *_OTHERS])
def test_a_plan_that_is_made_works_inside_of_any(around: str, share: str) -> None:
    twins = Twins(Model)
    actckpt.apply(twins.model, policy=_plan(twins.model, share))
    _step_inside(twins, around, 2)


def _step_inside(twins: Twins, around: str, num: int = 1) -> None:
    """Run steps of the model inside of a checkpoint, and plain ones."""
    inside, plain = _step({**_RERUNNING, **_OTHERS}[around]), _step()
    twins.step(lambda model: (inside if model is twins.model else plain)(model), num)


@pytest.mark.parametrize("around", _RERUNNING)
def test_a_budget_inside_of_a_rerun_is_one_clear_error_before_anything_ran(around: str) -> None:
    twins = Twins(Model, "60%", on_infeasible="warn", race=True)
    for _ in range(2):
        with pytest.raises(actckpt.errors.BlocksError, match=r"inside a checkpoint.*Leave out that.*policy=plan"):
            _step_inside(twins, around)
        twins.step(_step(), 2)
    plan = twins.plan
    actckpt.remove(twins.model)
    actckpt.apply(twins.model, policy=plan)  # what the error says
    _step_inside(twins, around)


@pytest.mark.parametrize("around", _OTHERS)
def test_a_budget_works_inside_of_what_runs_no_step_again(around: str) -> None:
    twins = Twins(Model, "80%", on_infeasible="warn", race=True)
    _step_inside(twins, around, 4)
    assert twins.plan is not None


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
    twins: Any = Twins(Partly)
    model = twins.model
    plan = _plan(model, "60%", blocks=Block)
    model.checkpoint = _RERUNNING[around]
    message = r"block 'blocks\.2' runs inside of a checkpoint.*Leave out that checkpoint.*other blocks="
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        _plan(model, "60%", blocks=Block)
    actckpt.apply(model, blocks=Block, activation_budget="60%")
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        twins.step(_step())
    actckpt.remove(model)
    actckpt.apply(model, blocks=["blocks.0", "blocks.1", "blocks.4", "blocks.5"], activation_budget="80%")
    twins.step(_step(), 3)
    assert twins.plan is not None
    actckpt.remove(model)
    actckpt.apply(model, policy=plan)
    twins.step(_step(), 2)
