"""A plan holds for the model and the inputs that it was made for: others raise or warn with one clear line."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from budget_programs import BESIDE, beside
from peaks import Step, Twins, measured
from residual_mlp import Mlp
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import actckpt
from actckpt import Action


class Other(Mlp):
    pass


def _model(num: int = 4, block: Callable[[int], nn.Module] = Mlp) -> Any:
    return nn.Sequential(*(block(16) for _ in range(num)))


def _unlike(dim: int) -> nn.Module:
    return nn.Sequential(OrderedDict(up=nn.Linear(dim, 2 * dim), down=nn.Linear(2 * dim, dim)))


@cache
def _plan() -> actckpt.Plan:
    model, x = _model(), torch.randn(64, 16)
    return actckpt.plan(lambda: model(x).sum().backward(), model=model, activation_budget="75%", race=False)


def _frozen(model: Any) -> Any:
    model[1].up.weight.requires_grad_(False)
    return model


def _narrow(model: Any) -> Any:
    model[3].up, model[3].down = nn.Linear(16, 8), nn.Linear(8, 16)
    return model


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: _model(2), r"one of another model: 2 of its 4 blocks are not in Sequential, the first is '2'"),
        (lambda: _model(6), r"another Sequential: 8 of 24 parameters are not in that one, the first is '4.up.weight'"),
        (lambda: _model(block=_unlike), r"another Sequential: block '0' is a Sequential here, and was a Mlp"),
        (lambda: _narrow(_model()), r"'3.up.weight' has the shape \(8, 16\) here, and had \(32, 16\)"),
        (lambda: _model().double(), r"'0.up.weight' is of float64 here, and was of float32"),
        (lambda: _frozen(_model()), r"parameter '1.up.weight' is frozen here, and was not"),
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


def test_what_libraries_make_of_a_type_holds() -> None:
    """Torch puts a class of its own in the place of a module's class, as sharding does."""
    model, x = _model(), torch.randn(64, 16)
    for block in model:
        parametrizations.weight_norm(block.up)
    plan = actckpt.plan(lambda: model(x).sum().backward(), model=model, activation_budget="75%", race=False)
    assert actckpt.apply(copy.deepcopy(model), policy=plan) == ("0", "1", "2", "3")


def test_blocks_of_the_type_module_have_plans() -> None:
    model = torch.nn.Sequential(*(torch.nn.Module() for _ in range(3)))
    for block in model:
        block.up, block.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        block.forward = lambda x, block=block: block.down(block.up(x).relu())
    x = torch.ones(4, 8)
    plan = actckpt.plan(
        lambda: model(x).sum().backward(), model=model, blocks="*", activation_budget="100%", race=False
    )
    assert actckpt.apply(model, policy=plan) == ("0", "1", "2")


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


def test_a_plan_of_another_torch_is_told() -> None:
    older = dataclasses.replace(_plan(), model={**_plan().model, "torch": "2.3.1+cu121"})
    with pytest.warns(UserWarning, match=r"made with torch 2.3.1\+cu121, and this is"):
        actckpt.apply(_model(), policy=older)


def _compiled() -> nn.Module:
    return nn.Sequential(*(torch.compile(block, backend="eager") for block in _model()))


@pytest.mark.parametrize("made", [_compiled, lambda: _model(block=Other)], ids=["compiled", "of a derived type"])
def test_compiled_blocks_are_those_inside_and_types_that_derive_from_those_of_the_plan_hold(
    made: Callable[[], nn.Module],
) -> None:
    model = made()
    assert actckpt.apply(model, policy=_plan()) == ("0", "1", "2", "3")


def test_a_larger_batch_is_told_also_where_the_program_holds_what_the_first_block_is_given() -> None:
    model = _model()
    actckpt.apply(model, policy=_plan())
    x = torch.randn(64, 16)
    model(x).sum().backward()  # without a warning
    larger = torch.cat([x, x])
    with pytest.warns(UserWarning, match=r"block '0' is given 8\.00 KiB of hidden states, .* made for 4\.00 KiB"):
        model(larger).sum().backward()


_WIDTH, _NUM_BLOCKS = 32, 5


def _step(x: Tensor) -> Step:
    return lambda model: model(x).backward()


def _planned(twins: Twins, x: Tensor, share: str, **options: Any) -> actckpt.Plan:
    """Make a plan of a step, and apply it."""
    run = lambda: measured(twins.model, lambda: twins.model(x).backward())  # noqa: E731
    plan = actckpt.plan(run, model=twins.model, blocks="**.blocks.*", activation_budget=share, race=False, **options)
    actckpt.apply(twins.model, policy=plan)
    return plan


@pytest.mark.usefixtures("small_tensors_on_disk")
@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("others", ["keep", "recompute"])
def test_they_stay_where_the_inputs_of_blocks_are_offloaded(kind: str, others: str) -> None:
    twins, x = Twins(lambda: beside(kind)), torch.randn(64, _WIDTH)
    pins: dict[Any, str] = {(1 + block, "x0"): "offload" for block in range(_NUM_BLOCKS - 1)}
    plan = _planned(twins, x, "95%", pins=pins | {"::aten.mul.Tensor#0.0": others})
    twins.step(_step(x))
    actckpt.reset_stats()
    twins.step(_step(x))
    stack = zip(plan.costs.blocks, plan.actions, strict=True)
    planned = sum(v.nbytes for block, actions in stack for v in block.values if actions[v.name] is Action.OFFLOAD)
    assert actckpt.stats().offloaded_bytes == planned >= (_NUM_BLOCKS - 1) * 64 * _WIDTH * 4


@pytest.mark.parametrize("kind", ["mask", "handed on"])
def test_a_plan_says_where_it_is_given_more_than_it_was_made_for(kind: str) -> None:
    twins, x = Twins(lambda: beside(kind)), torch.randn(64, _WIDTH)
    plan = _planned(twins, x, "60%")
    for rows in (64, 32):  # without a warning
        assert twins.step(_step(x[:rows].clone())) <= plan.budget_bytes
    larger = torch.cat([x, x])
    with torch.no_grad():  # which the budget does not hold for
        twins.model(larger)
    with pytest.warns(UserWarning, match=r"'blocks.0' is given 16.00 KiB .* made for 8.00 KiB: .* largest batch"):
        assert twins.step(_step(larger)) > plan.budget_bytes
    twins.step(_step(larger))  # it warns once


class Pyramid(nn.Module):
    """Calls its blocks with few rows, then with all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = beside("mask")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[: len(x) // 4].clone()) + self.net(x.clone())


def test_a_plan_is_made_for_the_call_of_a_block_that_is_given_most() -> None:
    twins, x = Twins(Pyramid), torch.randn(64, _WIDTH)
    _planned(twins, x, "80%")
    twins.step(_step(x))
    with pytest.warns(UserWarning, match=r"'net.blocks.0' is given 16.00 KiB .* made for 8.00 KiB"):
        twins.step(_step(torch.cat([x, x])))
