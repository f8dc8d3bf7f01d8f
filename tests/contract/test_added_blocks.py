"""Under a budget, large modules outside of the repeated blocks become blocks after the first step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from budget_programs import chain
from peaks import Step, Twins, bounds, measured
from residual_mlp import Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actckpt


class Stem(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


class OnlyOnce(Stem):
    """It cannot run a second time in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Iterator[float] = iter([])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.scales)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> OnlyOnce:
        return self


class Checkpointed(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, stem: Callable[[], nn.Module] = Stem) -> None:
        super().__init__()
        self.first, self.stem = nn.Linear(64, 64), stem()
        self.blocks, self.head = nn.ModuleList(Mlp(64) for _ in range(4)), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(chain(self, self.stem(self.first(x))))  # type: ignore[no-any-return]


def _step(rows: int = 128) -> Step:
    def step(model: nn.Module) -> None:
        x = torch.randn(rows, 64)
        if isinstance(stem := getattr(model, "stem", None), OnlyOnce):
            stem.scales = iter([2.0])
        model(x).square().mean().backward()

    return step


_BLOCKS = tuple(f"blocks.{i}" for i in range(4))


def test_a_large_stem_becomes_a_block_and_a_smaller_budget_fits() -> None:
    budget = int(0.95 * bounds(Model, _step())[0])  # less than the blocks alone can reach
    twins = Twins(Model)
    assert actckpt.apply(twins.model, activation_budget=budget, race=False) == _BLOCKS
    assert twins.step(_step(), 6) <= budget < twins.plain_peak
    assert actckpt.report(twins.model).blocks_ran == actckpt.remove(twins.model) == ("stem", *_BLOCKS)
    assert twins.step(_step()) == twins.plain_peak


def test_plan_adds_it_too() -> None:
    twins, step = Twins(Model), _step()
    run = lambda: measured(twins.model, lambda: step(twins.model))  # noqa: E731
    plan = actckpt.plan(run, model=twins.model, activation_budget="62%", race=False)
    assert plan.blocks is not None and plan.blocks[0] == "stem"
    assert "forward" not in vars(twins.model.stem)
    actckpt.apply(twins.model, plan)
    assert twins.step(step, 2) <= 0.63 * twins.plain_peak


def _scripted() -> nn.Module:
    with warnings.catch_warnings():  # deprecated
        warnings.simplefilter("ignore")
        return torch.jit.script(Stem())  # type: ignore[no-any-return]


class OnInputs(Model):
    """Its stem gets what the program made, and may overwrite before backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(chain(self, self.stem(x)))  # type: ignore[no-any-return]


class Around(Model):
    """Its stem runs in a module that runs blocks, too; later, once in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.stem, *self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)))  # type: ignore[no-any-return]


def _with_hook() -> nn.Module:
    stem = Stem()
    stem[1].register_forward_hook(lambda *_: None)
    return stem


@pytest.mark.parametrize(
    ("made", "budget", "blocks"),
    [
        (Model, "70%", "blocks.*"),  # named blocks are the only ones
        (partial(Model, lambda: nn.Sequential(nn.Linear(64, 4), nn.GELU(), nn.Linear(4, 64))), "70%", None),  # small
        *((partial(Model, stem), "82%", None) for stem in (OnlyOnce, Checkpointed, _scripted)),
        *((model, "85%", None) for model in (OnInputs, Around, partial(Model, _with_hook))),
    ],
)
def test_one_that_is_small_or_cannot_be_a_block_or_that_a_second_run_might_disturb_is_not_added(
    made: Callable[[], Model], budget: str, blocks: str | None
) -> None:
    twins = Twins(made)
    actckpt.apply(twins.model, activation_budget=budget, blocks=blocks, race=False)
    twins.step(_step(), 5)
    assert twins.plan is not None and "stem" not in actckpt.remove(twins.model)


@pytest.mark.parametrize("where", ["in a block", "around a block"])
def test_one_that_later_runs_with_a_block_is_no_block_any_more(where: str) -> None:
    twins: Any = Twins(Model, "80%")
    twins.step(_step(), 4)
    model = twins.model
    assert "forward" in vars(model.stem)
    for each in (model, twins.plain):
        inner, outer = (each.stem, each.blocks[0].up) if where == "in a block" else (each.blocks[3], each.stem[0])
        outer.register_forward_pre_hook(lambda _, args, inner=inner: (inner(args[0]),))
    twins.step(_step(160), 4)
    assert "forward" not in vars(model.stem)


def test_a_later_larger_batch_adds_it() -> None:
    budget = int(0.62 * bounds(Model, _step())[1])
    twins = Twins(Model, budget, on_infeasible="warn")
    for rows in (2, 128, 2):
        assert twins.step(_step(rows), 4) <= budget


def test_a_copy_of_a_model_with_an_added_block_trains_under_the_budget() -> None:
    twins = Twins(Model, "60%", on_infeasible="warn")
    twins.step(_step(), 3)
    original, twins.model = twins.model, copy.deepcopy(twins.model)
    assert twins.step(_step(), 4) <= 0.6 * twins.plain_peak
    assert actckpt.remove(twins.model)[0] == "stem"
    twins.model = original
    assert twins.step(_step(), 2) <= 0.6 * twins.plain_peak
