"""A plan holds for the model that it was made for: another one is told apart, in one clear line."""

from __future__ import annotations

import copy
import re
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import actckpt


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Other(Block):
    pass


class Unlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def _model(num: int = 4, block: type[nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(num)))


@cache
def _plan() -> actckpt.Plan:
    model, x = _model(), torch.randn(64, 16)
    return actckpt.plan(lambda: model(x).sum().backward(), model=model, activation_budget="75%", race=False)


def _frozen() -> nn.Module:
    model = _model()
    model[1].up.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: _model(2), r"one of another model: 2 of its 4 blocks are not in Sequential, the first is '2'"),
        (lambda: _model(6), r"another Sequential: 8 of 24 parameters are not in that one, the first is '4.up.weight'"),
        (lambda: _model(block=Unlike), r"another Sequential: block '0' is a Unlike here, and was a Block"),
        (
            lambda: nn.Sequential(*_model(3), Block(8)),
            r"'3.up.weight' has the shape \(8, 16\) here, and had \(16, 16\)",
        ),
        (lambda: _model().double(), r"'0.up.weight' is of float64 here, and was of float32"),
        (_frozen, r"parameter '1.up.weight' is frozen here, and was not"),
    ],
)
def test_another_model_is_refused(other, message: str) -> None:
    model = other()
    with pytest.raises(actckpt.errors.BlocksError, match=f"{message}.*Make the plan again"):
        actckpt.apply(model, policy=_plan())
    with pytest.raises(actckpt.errors.BlocksError, match="none of the"):
        actckpt.remove(model)  # nothing was applied


def test_a_plan_shows_itself_in_one_line() -> None:
    assert re.fullmatch(r"<plan for 4 block calls: [\d.]+ KiB of [\d.]+ KiB, steps take [\d.]+ % more>", repr(_plan()))


def test_types_that_derive_from_those_of_the_plan_hold() -> None:
    assert actckpt.apply(_model(block=Other), policy=_plan()) == ("0", "1", "2", "3")


def test_what_libraries_make_of_a_type_holds() -> None:
    """Torch puts a class of its own in the place of a module's class, as sharding does."""
    model, x = _model(), torch.randn(64, 16)
    for block in model:
        parametrizations.weight_norm(block.up)
    plan = actckpt.plan(lambda: model(x).sum().backward(), model=model, activation_budget="75%", race=False)
    assert actckpt.apply(copy.deepcopy(model), policy=plan) == ("0", "1", "2", "3")


def test_the_plan_of_a_training_holds_for_its_model_alone(tmp_path) -> None:
    model, x = _model(), torch.randn(64, 16)
    actckpt.apply(model, activation_budget="80%", race=False)
    for _ in range(2):
        model(x).sum().backward()
    plan = actckpt.report(model).plan
    plan.save(tmp_path / "plan.json")
    loaded = actckpt.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.model["torch"] == torch.__version__
    assert actckpt.apply(_model(), policy=loaded) == ("0", "1", "2", "3")
    with pytest.raises(actckpt.errors.BlocksError, match="8 of 24 parameters are not in that one"):
        actckpt.apply(_model(6), policy=loaded)


def test_a_plan_of_another_torch_is_told(recwarn: pytest.WarningsRecorder) -> None:
    import dataclasses

    actckpt.apply(_model(), policy=_plan())
    assert not recwarn
    older = dataclasses.replace(_plan(), model={**_plan().model, "torch": "2.3.1+cu121"})
    with pytest.warns(UserWarning, match=r"made with torch 2.3.1\+cu121, and this is"):
        actckpt.apply(_model(), policy=older)


def test_compiled_blocks_are_those_inside() -> None:
    model = _model()
    for number in range(4):
        model[number] = torch.compile(model[number], backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert actckpt.apply(model, policy=_plan()) == ("0", "1", "2", "3")


def test_a_larger_batch_is_told_also_where_the_program_holds_what_the_first_block_is_given() -> None:
    model = _model()
    actckpt.apply(model, policy=_plan())
    x = torch.randn(64, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    larger = torch.cat([x, x])
    with pytest.warns(UserWarning, match=r"block '0' is given 8\.00 KiB of hidden states, .* made for 4\.00 KiB"):
        model(larger).sum().backward()
